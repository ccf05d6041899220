"""Peak host memory of loading, exporting and importing a model that is large beside what a rank holds of it.

A Qwen3-MoE with random weights is written in files of about 50 MB. Then, in fresh processes, each rank loads its part
(expert-parallel over gloo), and one process exports and imports the whole. What a process gained is the most it ever
had resident (getrusage) less what it had before, after a small model went the same way, so that modules and libraries
are in memory. The page cache does not count, but every page of a file that is mapped and was read does.

    python benchmarks/load_memory.py --json

Names: load.<path>.peak_over_share_plus_shard: the gain over the bytes of parameters and buffers that the rank holds
afterwards plus the largest file, of the rank where that is most; <path> is train (`lrmoe train --set
model.checkpoint=...`), train_sharded (with lrmoe.storage=sharded), resume (a checkpoint of this package instead) or
pretrained (transformers' from_pretrained with ep_implementation="lrmoe"). load.<path>.private_over_share_plus_shard:
the same without pages of files, which the kernel takes back when memory is short (sampled every few milliseconds).
load.export.peak_over_shard and load.import.peak_over_shard: the gain over the largest file written or read.

All but pretrained, which is transformers' own reading, are held to at most 1. Expected duration on 2 cores: 1 to 2
minutes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import command_line
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from lrmoe.checkpoint import export_checkpoint, import_checkpoint
from lrmoe.telemetry import figure
from lrmoe.training.config import ModelConfig
from lrmoe.training.launch import run_workers

TRAINED = ("train", "train_sharded", "resume")  # this package reads
PATHS = (*TRAINED, "pretrained")
WRITTEN = ("export", "import")
LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """The model: 600 MB of experts in float32, and 50 MB beside."""

    experts: int = 48
    layers: int = 4
    hidden: int = 512
    width: int = 512
    vocabulary: int = 8192
    file_mb: int = 50


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What one process gained at most, without pages of files too, and the bytes of the tensors it then holds."""

    peak: int
    private: int
    share: int


def model_of(case: Case) -> Any:
    """The model with random weights, in float32."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        moe_intermediate_size=case.width,
        intermediate_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=case.experts,
        num_experts_per_tok=4,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def write_folders(case: dict[str, Any], root: str) -> None:
    """root/model and root/small in the Transformers layout, root/run and root/small-run as checkpoints of them."""
    torch.manual_seed(0)
    whole = Case(**case)
    small = Case(experts=whole.experts, layers=1, hidden=64, width=8, vocabulary=64, file_mb=whole.file_mb)
    for name, one in (("", whole), ("small-", small)):
        folder = Path(root) / f"{name}model"
        model_of(one).save_pretrained(folder, max_shard_size=f"{one.file_mb}MB")
        import_checkpoint(folder, Path(root) / f"{name}run")


def load(path: str, folder: Path, ranks: int) -> nn.Module:
    """A model loaded in one of PATHS, as this rank holds it."""
    if path == "pretrained":
        return pretrained(folder, ranks)
    from lrmoe.training.model import build_model

    return build_model(
        ModelConfig(checkpoint=str(folder)),
        seed=0,
        device=torch.device("cpu"),
        group=dist.group.WORLD if ranks > 1 else None,
        storage="sharded" if path == "train_sharded" else "owned",
    )


def pretrained(folder: Path, ranks: int) -> nn.Module:
    """By transformers, expert-parallel over all ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from lrmoe.integrations import transformers as lrmoe_hf

    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, WORLD_SIZE=str(ranks), LOCAL_RANK=rank)
    lrmoe_hf.register()
    layout = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="lrmoe")
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, distributed_config=layout
    )
    return model


def measure_load(path: str, root: str, ranks: int) -> Gain:
    """Gain of this rank."""
    kind = "run" if path == "resume" else "model"
    load(path, Path(root) / f"small-{kind}", ranks)
    model, peak, private = gained(lambda: load(path, Path(root) / kind, ranks))
    return Gain(peak=peak, private=private, share=sum(held(model)))


def measure_write(path: str, root: str) -> Gain:
    """Gain of one process that exports or imports; the share is the largest file."""
    act = export_one if path == "export" else import_one
    act(Path(root), "small-")
    _, peak, private = gained(lambda: act(Path(root), ""))
    return Gain(peak=peak, private=private, share=0)


def export_one(root: Path, name: str) -> None:
    """Export a checkpoint made by `write_folders`."""
    export_checkpoint(root / f"{name}run", root / f"{name}out", max_shard_size="50MB")


def import_one(root: Path, name: str) -> None:
    """Import a folder made by `write_folders` once more."""
    import_checkpoint(root / f"{name}model", root / f"{name}again")


def gained(act: Callable[[], Any]) -> tuple[Any, int, int]:
    """What `act` returns, and bytes that were resident at most, more than before: all, and those of no file."""
    gc.collect()
    before = resident()
    with sampled() as most:
        found = act()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found, peak - sum(before), max(most) - before[0]


def resident() -> tuple[int, int]:
    """Bytes of this process in memory now: of no file, and of files."""
    pages, of_files = (int(text) for text in Path("/proc/self/statm").read_text().split()[1:3])
    size = os.sysconf("SC_PAGE_SIZE")
    return (pages - of_files) * size, of_files * size


@contextlib.contextmanager
def sampled() -> Iterator[list[int]]:
    """Bytes of no file that were resident, again and again while the body runs."""
    found, done = [resident()[0]], threading.Event()

    def sample() -> None:
        while not done.wait(0.003):
            found.append(resident()[0])

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def held(model: nn.Module) -> Iterator[int]:
    """Bytes of every parameter and buffer on this rank, tied ones once."""
    seen: set[int] = set()
    for tensor in [*model.parameters(), *model.buffers()]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.data_ptr() not in seen:
            seen.add(local.data_ptr())
            yield local.nbytes


def largest(folder: Path) -> int:
    """Bytes of the largest file of weights."""
    return max(path.stat().st_size for path in folder.glob("*.safetensors"))


def figures(path: str, case: Case, ranks: int, root: Path) -> Iterator[dict[str, Any]]:
    """Measure one path in fresh processes."""
    if path in WRITTEN:
        gains = run_workers("load_memory:measure_write", 1, (path, str(root)), time_limit_s=LIMIT_S)
    else:
        gains = run_workers("load_memory:measure_load", ranks, (path, str(root), ranks), time_limit_s=LIMIT_S)
    shard = largest(root / ("out" if path == "export" else "model"))
    over = "over_shard" if path in WRITTEN else "over_share_plus_shard"
    for quantity in ("peak",) if path in WRITTEN else ("peak", "private"):
        ratios = {getattr(gain, quantity) / (gain.share + shard): gain for gain in gains}
        worst = ratios[max(ratios)]
        yield figure(
            f"load.{path}.{quantity}_{over}",
            round(max(ratios), 4),
            "ratio",
            "lower",
            gained_bytes=getattr(worst, quantity),
            share_bytes=worst.share,
            shard_bytes=shard,
            case=asdict(case),
            ranks=len(gains),
        )


def show(rows: list[dict[str, Any]]) -> None:
    """A table on stderr."""
    table = Table("path", "", "MB gained", "MB held", "MB largest file", "gained / (held + file)")
    for row in rows:
        _, path, quantity = row["name"].split(".")
        sizes = [row["context"][f"{name}_bytes"] / 1e6 for name in ("gained", "share", "shard")]
        words = "in all" if quantity.startswith("peak") else "of no file"
        table.add_row(path, words, *(f"{size:.1f}" for size in sizes), f"{row['value']:.3f}")
    Console(stderr=True).print(table)


def main(argv: list[str] | None = None) -> int:
    """Run and print; JSON lines on stdout with --json. Exit code 1: a path of this package gained more than it may."""
    parser = command_line.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="size of the process group")
    parser.add_argument("--paths", nargs="+", choices=(*PATHS, *WRITTEN), default=[*PATHS, *WRITTEN])
    command_line.add_sizes(parser, Case())
    args = parser.parse_args(argv)
    case = Case(**command_line.sizes_of(args, Case()))
    with tempfile.TemporaryDirectory(prefix="lrmoe-load-") as root:
        run_workers("load_memory:write_folders", 1, (asdict(case), root), time_limit_s=LIMIT_S)
        rows = [row for path in args.paths for row in figures(path, case, args.ranks, Path(root))]
    show(rows)
    for row in rows:
        print(json.dumps(row) if args.json else f"{row['name']:52} {row['value']}")
    return int(any(row["value"] > 1 for row in rows if ".pretrained." not in row["name"]))


if __name__ == "__main__":
    sys.exit(main())
