from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from lrmoe.errors import ConfigError
from lrmoe.training.process import joined, pick_device


def test_alone_there_is_no_group() -> None:
    with joined("cpu") as process:
        assert (process.rank, process.world_size, process.group) == (0, 1, None)
        assert process.is_main
        assert process.device == torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"train.device='cuda': PyTorch sees 0 CUDA devices"):
        pick_device("cuda")
    assert pick_device("auto") == torch.device("cpu")


@pytest.mark.distributed
def test_torchruns_variables_give_a_group() -> None:
    code = (
        "from lrmoe.training.process import joined\n"
        "import torch.distributed as dist\n"
        "with joined('cpu') as process:\n"
        "    print(process.rank, process.world_size, process.group is not None)\n"
        "print(dist.is_initialized())\n"
    )
    variables = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["0", "1", "True", "False"]
