"""Training across two hosts: the same numbers as on one, with the traffic on the link between them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lrmoe.checkpoint import Manifest, folder_of
from lrmoe.training.config import TrainConfig
from lrmoe.training.process import Process
from lrmoe.training.run import train as train_here
from tests.distributed.hosts import DEVICE, Host, two_hosts, why_not
from tests.distributed.pool import Pool
from tests.training.tiny import CPU, SHAPE, tiny_config

RANKS = 4
LIMIT_S = 150.0  # of one run, which takes 15 where nothing else runs on two cores
STEPS = 6
WARMUP = 2
UNLIKE = ("ms", "tokens_per_s", "measured")  # in names of figures that differ from run to run


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    reason = why_not(tmp_path)
    if reason is not None:
        pytest.skip(reason)
    with two_hosts(tmp_path) as pair:
        yield pair


def train_on_one(config: TrainConfig) -> None:
    """Worker: the same training among processes of this host."""
    place = Process(
        group=dist.group.WORLD, device=CPU, rank=dist.get_rank(), world_size=dist.get_world_size()
    )
    train_here(config, place, show_progress=False)


def train(name: str, hosts: tuple[Host, ...], folder: Path, *, device: str) -> None:
    """Train with torchrun over `hosts`; every host's torchrun must succeed, and say so in time."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
    launch += ["--nproc-per-node", str(RANKS // len(hosts)), "--master-port", "29500"]
    command = ["-m", "lrmoe.cli", "train", "--config", str(folder / "run.toml"), "--name", name]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": device}
    logs = [folder / f"{name}-{rank}.log" for rank in range(len(hosts))]
    started = []
    for rank, host in enumerate(hosts):
        place = ["--node-rank", str(rank), "--master-addr", hosts[0].address]
        started.append(host.start([*launch, *place, *command], logs[rank], environment))
    codes = finish(started)
    assert codes == [0] * len(hosts), "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)


def finish(started: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit codes, once all have ended or one has failed; None for one that still ran then, or when time was up."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        codes = [process.poll() for process in started]
        if None not in codes or any(codes):
            break
        time.sleep(0.1)
    for process in started:  # what runs on the host ends with it
        process.kill()
        process.wait()
    return codes


def figures(folder: Path, name: str) -> list[dict[str, Any]]:
    """A run's metrics, step by step, without the times, and without measured memory, which knows what ran before."""
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not any(word in k for word in UNLIKE)} for line in lines]


def tensors(folder: Path, name: str) -> dict[str, str]:
    """Hashes of the files with weights and optimizer state at the end of a run."""
    manifest = Manifest.read(folder_of(folder / name / "checkpoints", STEPS))
    return {entry.name: entry.sha256 for entry in manifest.files if entry.keys}


POLICY = """
from dataclasses import replace
from lrmoe.planning.policies import INFO, get_policy

def plan(problem):
    return get_policy("lrmoe")(replace(problem, copy_rows=0.0))  # replicas would not pay at this size

INFO = replace(INFO["lrmoe"], drops=True)
"""


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_two_hosts_train_like_one(pool4: Pool, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(POLICY)
    config = tiny_config(
        tmp_path,
        model={"overrides": {**SHAPE, "hidden_size": 64, "num_experts": 8}},
        data={"seq_len": 64},
        train={"steps": STEPS, "checkpoint_every": STEPS, "trace": False},
        lrmoe={
            "policy": f"{tmp_path / 'policy.py'}:plan",
            "max_drop": 0.4,
            "warmup_steps": WARMUP,
            "replica_slots": 2,
        },
    )
    config.write(tmp_path / "run.toml")

    pool4.run(train_on_one, config.replace(train={"name": "one"}), limit_s=LIMIT_S)
    before = [host.sent_bytes() for host in hosts]
    train("two", hosts, tmp_path, device=DEVICE)
    crossed = [host.sent_bytes() - start for host, start in zip(hosts, before, strict=True)]

    one, two = figures(tmp_path, "one"), figures(tmp_path, "two")
    assert two == one
    assert tensors(tmp_path, "two") == tensors(tmp_path, "one")
    assert len(tensors(tmp_path, "one")) == 1 + RANKS
    assert [line["lrmoe/kept_share"] for line in one[:WARMUP]] == [1.0] * WARMUP
    assert all(line["lrmoe/kept_share"] < 0.61 for line in one[WARMUP:])
    assert all(line["lrmoe/bytes_replicas"] > 0 for line in one)
    assert one[-1]["loss"] < one[0]["loss"]
    # A rank sends to three others, two of them on the other host; dense gradients cross besides.
    assert min(crossed) > sum(line["wire_bytes"] for line in two) / 4


USE = """
import pathlib, sys, time
from tests.distributed.hosts import two_hosts
with two_hosts(pathlib.Path(sys.argv[1])) as hosts:
    for host in hosts:
        host.start(["sleep", "100"], pathlib.Path("/dev/null"), {})
    print(*(host.pid for host in hosts), flush=True)
    time.sleep(100)
"""


@pytest.mark.usefixtures("hosts")
def test_hosts_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    command = [sys.executable, "-c", USE, str(tmp_path)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as user:
        assert user.stdout is not None
        spaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in user.stdout.readline().split()}
        assert len(spaces) == 2
        assert len(living(spaces)) >= 4
        user.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while living(spaces) and time.monotonic() < end:
        time.sleep(0.05)
    assert not living(spaces)


def living(spaces: set[str]) -> list[str]:
    """Processes in any of these network namespaces."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "ns/net") in spaces:
                found.append(process.name)
        except OSError:  # it has just ended
            continue
    return found
