"""A headless Chromium driven over its debugging pipe: no dependency, no port, one browser for many pages.

Messages are JSON objects ended by a zero byte: what is written to the browser's descriptor 3 are commands, what it
writes to 4 are answers and events.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

EXECUTABLE = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
START_S, ANSWER_S = 60.0, 60.0  # a busy machine starts a browser slowly


class Browser:
    """One running browser. A context manager: the process ends with it."""

    def __init__(self, profile: Path) -> None:
        assert EXECUTABLE is not None, "no chromium on this machine"
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe --no-first-run"
        quiet = "--disable-background-networking --disable-component-update --disable-extensions --mute-audio"
        # The shell puts the pipes where the browser looks for them.
        script = f'exec "$0" {options} {quiet} "$@" 3<&{to_browser} 4>&{from_browser}'
        command = ["bash", "-c", script, EXECUTABLE, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number = b"", 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank", timeout=START_S)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility"):
            self.call(f"{domain}.enable")
        self.call("Page.bringToFront")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)  # keys reach the page

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, *, timeout: float = ANSWER_S, **values: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": values}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while True:
            answer = self._receive(deadline)
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            if "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            found: dict[str, Any] = answer["result"]
            return found

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._in], [], [], left)[0]
            block = os.read(self._in, 1 << 16) if ready else b""
            if not block:
                raise TimeoutError("the browser does not answer")
            self._buffer += block
        message, self._buffer = self._buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, *, width: int = 1280, height: int = 900, phone: bool = False) -> None:
        """Load a page in a window of a size, in CSS pixels, and wait until it has drawn its plots."""
        self.events.clear()
        self.resize(width=width, height=height, phone=phone)
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.documentElement?.dataset.drawn === 'yes'")

    def resize(self, *, width: int, height: int, phone: bool = False) -> None:
        """Give the window a size, in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=phone)

    def media(self, *, kind: str = "", dark: bool = False) -> None:
        """Emulate print ("print") or the screen, light or dark."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=kind, features=[scheme])

    def wait(self, condition: str, timeout: float = ANSWER_S) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true within {timeout} s: {condition}")
            time.sleep(0.05)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; waits for promises."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, "ArrowRight" say, on the element that has the focus."""
        code = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def complaints(self) -> list[str]:
        """Errors and warnings of the page since it was opened: exceptions, console calls, log entries."""
        found = []
        for event in self.events:
            about: Mapping[str, Any] = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(str(about["exceptionDetails"]))
            elif event.get("method") == "Runtime.consoleAPICalled":
                found.append(f"{about['type']}: {[value.get('value') for value in about['args']]}")
            elif event.get("method") == "Log.entryAdded":
                found.append(str(about["entry"]))
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, the page's own first."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path, *, whole: bool = True) -> Path:
        """Write the whole page, or what is in view, as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
        return path
