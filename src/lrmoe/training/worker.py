"""One worker of `launch.run_workers`: python -m lrmoe.training.worker FOLDER RANK.

It joins the group, calls the function that FOLDER/call.pickle names and leaves the result, or its error, in FOLDER. An
interrupt or SIGTERM unwinds it; so does the end of its standard input, which its parent holds open.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from lrmoe.errors import RankError
from lrmoe.training.launch import POLL_S, STOP_S

START_S = 600.0  # how long workers wait for each other to start
STOPS = (signal.SIGINT, signal.SIGTERM)


def _stop_when_told() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, once."""

    def stop(number: int, frame: object) -> None:
        _ignore_stops()  # nothing interrupts the clean-up
        raise KeyboardInterrupt

    for number in STOPS:
        signal.signal(number, stop)


def _ignore_stops() -> None:
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def _leave_with_parent(folder: Path) -> threading.Event:
    """Stop this process when standard input closes: the parent keeps it open and sends nothing.

    Returns:
        Set when the parent is gone: nobody else will remove the folder.
    """
    gone = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        gone.set()
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(STOP_S)  # as a daemon: the main thread usually ends the process before
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    return gone


def _work(folder: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from lrmoe.distributed.peers import telling, waiting

    function, world_size, args, timeout_s, path, command = pickle.loads((folder / "call.pickle").read_bytes())
    sys.path[:], sys.argv[:] = path, command  # figures name the command that somebody typed
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)  # type: ignore[attr-defined]  # torch exports it untold
    _wait_for_all(store, rank, world_size)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    module, _, name = function.partition(":")
    with telling():
        result = getattr(importlib.import_module(module), name)(*args)
        part = folder / f"result-{rank}.part"
        part.write_bytes(pickle.dumps(result))
        part.rename(folder / f"result-{rank}.pickle")
        with waiting("the end of all ranks"):
            dist.barrier()  # nobody leaves while a peer may still talk to it
    dist.destroy_process_group()


def _wait_for_all(store: Any, rank: int, world_size: int) -> None:
    """Return when all ranks are here: imports take a while, and longer on one rank than on another.

    Not by the store's own wait, which no signal interrupts.
    """
    store.set(f"here/{rank}", "")
    end = time.monotonic() + START_S
    while not store.check([f"here/{other}" for other in range(world_size)]):
        if time.monotonic() > end:
            raise RankError(f"the start of all ranks: some rank did not come within {START_S:g} s")
        time.sleep(POLL_S)


def main() -> int:
    """Entry of one worker: `python -m lrmoe.training.worker FOLDER RANK`."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    _stop_when_told()
    parent_gone = _leave_with_parent(folder)
    try:
        _work(folder, rank)
        return 0
    except BaseException as error:  # a worker has nobody else to tell
        _ignore_stops()  # it is on its way out
        with contextlib.suppress(FileNotFoundError):  # the folder goes with the parent
            _report(folder, rank, error)
        return 1
    finally:
        if parent_gone.is_set():
            shutil.rmtree(folder, ignore_errors=True)


def _report(folder: Path, rank: int, error: BaseException) -> None:
    failure = {
        "name": type(error).__name__,
        "message": str(error),
        "traceback": traceback.format_exc(),
        "time": time.time(),
    }
    part = folder / f"failure-{rank}.part"
    part.write_text(json.dumps(failure))
    part.rename(folder / f"failure-{rank}.json")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # peers may have died: no clean-up that could wait for them
