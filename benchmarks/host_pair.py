"""Two ranks on two hosts of this machine over a link whose speed is set: what benchmarks of real wall clocks run on.

The hosts are those of the tests (tests/distributed/hosts.py): network namespaces of their own, joined by a token
bucket, without a trace once this process has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the tests are no package that is installed

from tests.distributed.hosts import DEVICE, two_hosts  # noqa: E402  # after the path is set
from tests.distributed.hosts import Host as Host  # noqa: E402  # after the path is set
from tests.distributed.hosts import why_not as why_not_in  # noqa: E402  # after the path is set

RANKS, PORT = 2, 29500
LIMIT_S = 200.0
FREE = "40gbit"  # while the rate is not known yet: no limit in practice
BITS = 8


def rank_options(parser: argparse.ArgumentParser) -> None:
    """What a script is started with as one of the ranks: shown to nobody."""
    for name, kind in (("--call", Path), ("--address", str), ("--rank", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)


def why_not() -> str | None:
    """Why two hosts cannot be made here, found by trying; None where they can."""
    with tempfile.TemporaryDirectory() as folder:
        return why_not_in(Path(folder))


@contextmanager
def host_pair(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts over a link that is as good as free, and takes large packets as fast networks do.

    With small ones the kernel's work for them takes cores from the ranks.
    """
    with two_hosts(folder, rate=FREE) as hosts:
        for host in hosts:
            subprocess.run(host.command("ip", "link", "set", DEVICE, "mtu", "65000"), check=True, timeout=10)
        yield hosts


def limit(hosts: Sequence[Host], bytes_per_s: float) -> None:
    """Set the rate of the link each way."""
    rate = ["rate", f"{round(bytes_per_s * BITS)}bit", "burst", "1mb", "latency", "50ms"]
    for host in hosts:
        subprocess.run(
            host.command("tc", "qdisc", "change", "dev", DEVICE, "root", "tbf", *rate), check=True, timeout=10
        )


def run_pair(hosts: Sequence[Host], script: Path, folder: Path, name: str, arguments: dict[str, Any]) -> None:
    """Run `script --call FILE --address ADDRESS --rank RANK` as a rank on each host; FILE holds the arguments.

    Raises:
        RuntimeError: a rank failed, or time ran out.
    """
    call = folder / f"{name}.pt"
    torch.save(arguments, call)
    command = [sys.executable, str(script.resolve()), "--call", str(call), "--address", hosts[0].address]
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}
    logs = [folder / f"{name}-{rank}.log" for rank in range(RANKS)]
    started = [
        host.start([*command, "--rank", str(rank)], logs[rank], environment)
        for rank, host in enumerate(hosts)
    ]
    codes = _finish(started)
    if any(code != 0 for code in codes):
        tails = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)
        raise RuntimeError(f"the ranks ended with {codes}:\n{tails}")


def _finish(started: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes once all have ended or one has failed; None for one that still ran then."""
    deadline = time.monotonic() + LIMIT_S
    codes = [process.poll() for process in started]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.1)
        codes = [process.poll() for process in started]
    for process in started:
        process.kill()
        process.wait()
    return codes


@contextmanager
def rank_of_pair(rank: int, address: str, call: Path) -> Iterator[dict[str, Any]]:
    """In a rank: its process group, one thread, and what `run_pair` was given."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=RANKS)
    yield torch.load(call, weights_only=False)  # written by the parent, of its own types
    dist.barrier()
    dist.destroy_process_group()


def leave(code: int) -> None:
    """End the script: a rank at once, it has nothing to clean up."""
    sys.stdout.flush()
    os._exit(code) if "--call" in sys.argv else sys.exit(code)
