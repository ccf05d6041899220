"""What the headline measures: models, seeds, systems, and which of them run less often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lrmoe.experiments.headline.jobs import EXACT
from lrmoe.experiments.stage.inputs import StageSize
from lrmoe.experiments.stage.lanes import system_config
from lrmoe.experiments.systems.registry import SYSTEMS, get_system
from lrmoe.experiments.trajectories.regimes import get_regime

JUDGED = ("megatron", "symi", "ultraep", "lrmoe", "lrmoe-sampled50", "lrmoe-topk20")
OTHERS = tuple(name for name in SYSTEMS if name not in JUDGED)
# Executed steps between two of what is told beside the judged systems: the whole is to end within 90 minutes.
SELDOM = 3


@dataclass(frozen=True, kw_only=True)
class Headline:
    """What is measured.

    Attributes:
        folder: of everything it leaves. models, auxes, seeds: all combinations.
        systems: in every combination. others: exact systems, in the first combination of each model only, at every
            third executed step. stashed: systems that run with stashed activations too, in the first combination of
            each model, as seldom.
        regime: how trajectories are trained. target_loss, steps: instead of the regime's.
        size: of executed layers.
        ablated_seeds: of the ablation beside it; none: no ablation.
        command: that makes it.
    """

    folder: Path = Path("runs") / "headline"
    models: tuple[str, ...] = ("qwen3-moe-micro", "glm4-moe-micro")
    auxes: tuple[float, ...] = (0.0, 0.001)
    seeds: tuple[int, ...] = (0, 1, 2)
    systems: tuple[str, ...] = JUDGED
    others: tuple[str, ...] = OTHERS
    stashed: tuple[str, ...] = JUDGED
    regime: str = "memorise"
    target_loss: float | None = None
    steps: int | None = None
    size: StageSize = field(default_factory=StageSize)
    ablated_seeds: tuple[int, ...] = (0,)
    command: str = "make headline"

    @property
    def target(self) -> float:
        """The loss that counts.

        Raises:
            ValueError: neither it nor the regime has one.
        """
        target = get_regime(self.regime).target_loss if self.target_loss is None else self.target_loss
        if target is None:
            raise ValueError(f"target_loss: the regime {self.regime!r} has none; give one")
        return target

    def trajectory(self, model: str, aux: float, seed: int, system: str) -> Path:
        """Folder of the trajectory that a system executes."""
        kind = EXACT if is_exact(system) else system
        return self.folder / "trajectories" / f"{model}-aux{aux:g}-seed{seed}-{kind}"

    def places(self) -> Iterator[tuple[str, float, int, tuple[str, ...]]]:
        """Model, auxiliary loss, seed and systems of every block: what `headline-quick` needs first."""
        for seed in self.seeds:
            for aux in self.auxes:
                for model in self.models:
                    first = self.is_first(aux, seed)
                    yield model, aux, seed, (*self.systems, *(self.others if first else ()))

    def is_first(self, aux: float, seed: int) -> bool:
        """Whether these are the first auxiliary loss and seed."""
        return seed == self.seeds[0] and aux == self.auxes[0]


FULL = Headline()
QUICK = Headline(
    folder=Path("runs") / "headline-quick",
    models=FULL.models[:1],
    auxes=(0.0,),
    seeds=(0,),
    systems=("megatron", "symi", "ultraep", "lrmoe-sampled50"),
    others=(),
    stashed=(),
    ablated_seeds=(),
    command="make headline-quick",
)


def is_exact(system: str) -> bool:
    """Whether a system leaves nothing out, so that it executes the exact trajectory."""
    return system == EXACT or system_config(get_system(system), 0).max_drop == 0
