"""Two hosts on one machine: Linux namespaces of their own, joined by a link of limited speed.

    this process --- pipe --> first process of host 0: network, processes, mounts, name of its own
                                  | eth0, token bucket
                                  | eth0, token bucket
                 --- pipe --> first process of host 1: the same

A host lives as long as its first process, which waits for its pipe to close: that happens at the latest when this
process ends, however it ends. The kernel then kills whatever runs on the host and removes its namespaces and the link.
None of them has a name outside, so none can be left behind, and the machine's own network is never touched.

`python -m tests.distributed.hosts` says whether that works here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("ip", "tc", "nsenter", "unshare")
DEVICE = "eth0"
SET_UP_S = 10.0
# The first process of host $1 with table of names $2: `cat` ends when the pipe does.
FIRST = 'set -e; hostname "$1"; ip link set lo up; mount --bind "$2" /etc/hosts; echo up; exec cat >/dev/null'
# Debian gives a host's own name a loopback address: it does not tell where the host can be reached.
NAMES = "127.0.0.1 localhost\n127.0.1.1 lrmoe-host0 lrmoe-host1\n"


class HostsError(RuntimeError):
    """This machine cannot make hosts; says why."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host: its first process as numbered outside, its name and its address on the link."""

    pid: int
    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs `command` on this host, in its root directory."""
        return ["nsenter", "--target", str(self.pid), "--all", "--", *command]

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start `command` on this host with both outputs in `log`; it ends with the host if not before."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command(*command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
            )

    def sent_bytes(self) -> int:
        """Bytes that have passed this host's token bucket onto the link."""
        (bucket,) = json.loads(_output(self.command("tc", "-s", "-j", "qdisc", "show", "dev", DEVICE)))
        assert bucket["kind"] == "tbf", bucket
        return int(bucket["bytes"])


@contextlib.contextmanager
def two_hosts(folder: Path, *, rate: str = "200mbit") -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other over a link of `rate` each way, and nothing else.

    Args:
        folder: where their table of host names is written.
        rate: as `tc` reads it.

    Raises:
        HostsError: not root, a tool is missing, or the kernel refuses.
    """
    _check_tools()
    names = folder / "hosts"
    names.write_text(NAMES)
    with (
        _host("lrmoe-host0", "10.0.0.1", names) as first,
        _host("lrmoe-host1", "10.0.0.2", names) as second,
    ):
        # Made inside the first host: only its network namespace is entered, so that the second's number holds.
        link = ["link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(second.pid)]
        _output(["nsenter", "--target", str(first.pid), "--net", "--", "ip", *link])
        for host in (first, second):
            _output(host.command("ip", "address", "add", f"{host.address}/24", "dev", DEVICE))
            _output(host.command("ip", "link", "set", DEVICE, "up"))
            bucket = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
            _output(host.command("tc", "qdisc", "add", "dev", DEVICE, *bucket))
        yield first, second


def _check_tools() -> None:
    if os.geteuid() != 0:
        raise HostsError("not root")
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise HostsError(f"no {', '.join(missing)} here")


@contextlib.contextmanager
def _host(name: str, address: str, names: Path) -> Iterator[Host]:
    spaces = ["--net", "--pid", "--mount", "--uts", "--ipc", "--fork", "--mount-proc", "--kill-child"]
    process = subprocess.Popen(
        ["unshare", *spaces, "sh", "-c", FIRST, "sh", name, str(names)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        if process.stdout.readline() != b"up\n":
            process.kill()
            raise HostsError(_last_line(process.stderr.read()) or "unshare failed")
        yield Host(pid=_child(process.pid), name=name, address=address)
    finally:
        process.kill()  # --kill-child: the first process dies with it, and all others of the host with that
        process.communicate()


def _child(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
    except (OSError, ValueError) as error:
        raise HostsError(f"the first process cannot be found: {error}") from error


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, timeout=SET_UP_S, check=True)
    except subprocess.CalledProcessError as error:
        raise HostsError(f"{' '.join(command[4:])}: {_last_line(error.stderr)}") from error
    return done.stdout.decode()


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]


def why_not(folder: Path) -> str | None:
    """Why two hosts cannot be made here, found by trying; None where they can."""
    try:
        with two_hosts(folder):
            return None
    except HostsError as error:
        return f"needs root, iproute2 (ip, tc) and leave to make network namespaces: {error}"


def main() -> None:
    """Say in one line whether the test on two hosts will run."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        reason = why_not(Path(folder))
    print("test on two hosts: " + ("will run" if reason is None else f"will be skipped, it {reason}"))


if __name__ == "__main__":
    main()
