"""The stage: recorded trajectories' calls executed at a stated larger size, all systems side by side.

    trajectory of the exact systems --+--> megatron symi ultraep ...   } every 10th step, layer by layer,
    trajectory of lrmoe ------------- | --> lrmoe                       } in rotating order, in the same
    trajectory of lrmoe-sampled50 ----| --> lrmoe-sampled50             } processes; beside them the same
                                      +--> balanced counts              } layers on balanced counts

A trajectory is trained once, small, in one process; it says how many steps a loss takes, and what each step routes
where. What a step costs in MoE layers is measured here, with its counts multiplied until GEMMs dominate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lrmoe.experiments.stage import lines as stage_lines
from lrmoe.experiments.stage.inputs import StageSize
from lrmoe.experiments.stage.lines import MAIN, Call
from lrmoe.experiments.trajectories.trajectory import RECORD_EVERY
from lrmoe.training.launch import run_workers


@dataclass(frozen=True, kw_only=True)
class Block:
    """What is executed of one (model, aux loss, seed): systems that take turns.

    Attributes:
        model, aux, seed: of the trajectories.
        folders: by system, the trajectory whose calls it executes; exact systems share one.
        last_step: by system, the last step that counts.
        activations: of all its layers.
        stride: by system, it takes part in every so many-th executed step from the first on; 1 where nothing is said.
    """

    model: str
    aux: float
    seed: int
    folders: Mapping[str, Path]
    last_step: Mapping[str, int]
    activations: str = MAIN
    stride: Mapping[str, int] = field(default_factory=dict)

    def systems_at(self, step: int, place: int) -> list[str]:
        """Systems that are still under way at a step, the `place`-th executed one from 0 on, and take part in it."""
        return [
            name
            for name, last in self.last_step.items()
            if step <= last and place % self.stride.get(name, 1) == 0
        ]

    @property
    def title(self) -> str:
        """For people."""
        stored = "" if self.activations == MAIN else f", {self.activations}"
        return f"{self.model}, aux {self.aux:g}, seed {self.seed}{stored}"

    @property
    def place(self) -> tuple[str, float, int, str]:
        """What its calls' keys begin with."""
        return (self.model, self.aux, self.seed, self.activations)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is executed, and how.

    Attributes:
        blocks: in their order. size: of layers. every: steps between executed ones (trajectories record as many).
        balanced_every: executed steps between two with balanced counts. out: file of lines.
    """

    blocks: Sequence[Block]
    out: Path
    size: StageSize = field(default_factory=StageSize)
    every: int = RECORD_EVERY
    balanced_every: int = 3


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a block that is to be executed: who takes part, and whether balanced counts run too."""

    block: Block
    number: int
    systems: tuple[str, ...]
    balanced: bool


def pending(stage: Stage, layers: int, done: Sequence[Call]) -> list[Step]:
    """Steps that lack a call of a system under way there; these run anew with all their systems.

    Args:
        layers: of a trajectory. done: calls that are in the file.
    """
    keys = {call.key for call in done}
    found = []
    for block in stage.blocks:
        steps = range(stage.every, max(block.last_step.values()) + 1, stage.every)
        for place, number in enumerate(steps):
            systems = block.systems_at(number, place)
            missing = len(systems) * layers - sum(
                key[:4] == block.place and key[5] == number and key[4] in systems for key in keys
            )
            if missing:
                found.append(
                    Step(
                        block=block,
                        number=number,
                        systems=tuple(systems),
                        balanced=place % stage.balanced_every == 0,
                    )
                )
    return found


def run(stage: Stage, layers: int, *, time_limit_s: float | None = None) -> int:
    """Execute what is not in the file yet; progress on stderr.

    Args:
        layers: MoE layers of the models.

    Returns:
        Steps that were executed: 0 where the file was complete.

    Raises:
        LRMoEError: an exact system's results differ from the others', or a worker failed.
    """
    steps = pending(stage, layers, stage_lines.read(stage.out))
    if steps:
        stage.out.parent.mkdir(parents=True, exist_ok=True)
        arguments = (steps, stage.size, stage.out)
        run_workers(
            "lrmoe.experiments.stage.rank:execute", stage.size.ranks, arguments, time_limit_s=time_limit_s
        )
    return len(steps)
