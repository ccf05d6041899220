"""SIGTERM as a request to stop at the next step's end. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

SAME_S = 2.0  # two signals within this time are one: launchers pass on what their ranks got as well


def end_process() -> None:
    """End this process as SIGTERM does where nobody handles it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """Whether this process was asked to stop.

    Args:
        first: what else to do when it is asked. again: what to do when it is asked once more, SAME_S later or more.
    """

    def __init__(
        self, first: Callable[[], None] = lambda: None, again: Callable[[], None] = end_process
    ) -> None:
        self._asked_at: float | None = None
        self._first, self._again = first, again

    @property
    def asked(self) -> bool:
        """Whether the signal has come."""
        return self._asked_at is not None

    def receive(self, number: int, frame: object) -> None:
        """Take a signal."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._first()
        elif now - self._asked_at > SAME_S:
            self._again()


@contextlib.contextmanager
def stop_on_sigterm(request: StopRequest, wanted: bool = True) -> Iterator[None]:
    """Take SIGTERM as a request inside, where this is the main thread, which alone can; afterwards as before.

    Args:
        wanted: False leaves SIGTERM as it is, and the request is never made.
    """
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, request.receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
