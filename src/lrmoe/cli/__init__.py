"""The command line: options in this package's modules, work in the parts below, imported only when a command runs.

Exit codes: 0 done, 1 failed, 2 bad usage, 3 infeasible (budget).
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

import lrmoe
from lrmoe.cli.calls import replay, simulate
from lrmoe.cli.capacity import plan
from lrmoe.cli.comparing import ablate, compare
from lrmoe.cli.looking import doctor, report
from lrmoe.cli.training import export, import_, train
from lrmoe.errors import ConfigError, InfeasibleError, UnsupportedError

app = typer.Typer(
    name="lrmoe",
    help="Train Mixture-of-Experts models with a pruned, compacted backward pass.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lrmoe {lrmoe.__version__}")
        raise typer.Exit


@app.callback(epilog="Example: lrmoe train --preset qwen3-moe-tiny --steps 50")
def _app(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train Mixture-of-Experts models with a pruned, compacted backward pass."""


# In the order of `lrmoe --help`.
app.command(epilog="Example: lrmoe train --steps 50 --set lrmoe.max_drop=0.2")(train)
app.command(epilog="Example: lrmoe compare --preset demo --name demo")(compare)
app.command(epilog="Example: lrmoe ablate --scores lrm,alpha,random --estimators topk --seeds 3")(ablate)
app.command(epilog="Example: lrmoe simulate --systems megatron,ultraep,lrmoe --ranks 8,64")(simulate)
app.command(epilog="Example: lrmoe replay --systems megatron,ultraep,lrmoe --tokens 4096")(replay)
app.command(epilog="Example: lrmoe report runs/demo --json")(report)
app.command(epilog="Example: lrmoe plan --model GLM-4.5-Air --gpus 64 --hardware h200")(plan)
app.command(epilog="Example: lrmoe export runs/train out/my-model")(export)
app.command("import", epilog="Example: lrmoe import models/Qwen3-30B-A3B runs/tuned --set data.path=text/")(
    import_
)
app.command(epilog="Example: lrmoe doctor --model qwen3-moe-tiny")(doctor)


def exit_code(error: BaseException) -> int:
    """1 failed, 2 bad usage, 3 infeasible."""
    if isinstance(error, InfeasibleError):
        return 3
    return 2 if isinstance(error, ConfigError | UnsupportedError) else 1


def main() -> None:
    """Entry point: run a command, turn errors into one line on stderr and an exit code."""
    try:
        app()
    except Exception as error:
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        own = isinstance(error, lrmoe.LRMoEError)
        hint = "" if own or "--debug" in sys.argv else " (--debug shows where)"
        print(f"error: {'' if own else type(error).__name__ + ': '}{error}{hint}", file=sys.stderr)
        sys.exit(exit_code(error))
