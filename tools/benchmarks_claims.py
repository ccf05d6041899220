"""What docs/benchmarks.md claims: which committed figures carry each claim, and the mark it is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim.

    Attributes:
        text: what the figures say. figures: regular expression of their whole names.
        mark: the value they must not pass, or None where none was set. lower: whether below it is kept.
    """

    text: str
    figures: str
    mark: float | None = None
    lower: bool = True


@dataclass(frozen=True, kw_only=True)
class Section:
    """The figures of one committed file.

    Attributes:
        title: heading. about: what is measured, in a sentence or two. command: how the file is made.
        file: of benchmarks/results.
    """

    title: str
    about: str
    command: str
    file: str
    claims: tuple[Claim, ...]


SECTIONS = (
    Section(
        title="One layer on one device",
        about=(
            "Forward and backward of one MoE layer (hidden 512, expert width 192, 32 experts, top-8, 4096 tokens) "
            "against Transformers' own experts and the bare matrix products. Names mean 2 threads, `.t1` 1, timed by CPU time. "
            "Memory is the most that a call holds at once beside what was there before."
        ),
        command="python benchmarks/layer.py --json",
        file="layer.jsonl",
        claims=(
            Claim(
                text="exact, over the faster of Transformers' eager and grouped_mm",
                figures=r"layer\.\w+\.drop0\.over_best_peer(\.t\d+)?",
                mark=0.8,
            ),
            Claim(
                text="pruned, over the same",
                figures=r"layer\.\w+\.drop0\.\d\.over_best_peer(\.t\d+)?",
            ),
            Claim(
                text="exact, over the bare matrix products",
                figures=r"layer\.\w+\.drop0\.over_gemms(\.t\d+)?",
                mark=1.35,
            ),
            Claim(
                text="half the pairs, over its own exact time",
                figures=r"layer\.\w+\.drop0\.5\.over_drop0(\.t\d+)?",
                mark=0.72,
            ),
            Claim(
                text="share of the time that pruning adds",
                figures=r"layer\.\w+\.drop0\.2\.overhead_share(\.t\d+)?",
                mark=0.04,
            ),
            Claim(
                text="half the pairs masked instead of left out",
                figures=r"layer\.\w+\.masked_twin\.over_drop0(\.t\d+)?",
            ),
            Claim(
                text="peak memory, exact, over grouped_mm",
                figures=r"memory\.\w+\.drop0\.over_grouped_mm",
                mark=0.9,
            ),
            Claim(text="at drop 0.2", figures=r"memory\.\w+\.drop0\.2\.over_grouped_mm"),
            Claim(
                text="at drop 0.5, activations computed again",
                figures=r"memory\.\w+\.drop0\.5\.over_grouped_mm",
                mark=0.6,
            ),
        ),
    ),
    Section(
        title="Growth",
        about=(
            "Time of a layer call while one of tokens, experts and experts per token grows and the rest stays. "
            "The exponent is the slope of log time over log size; every phase's are in the file. Phases that take "
            "more than 2 % at the largest size are held to 1.1: the median slope between neighbours in the upper half "
            "of the sizes."
        ),
        command="python benchmarks/scaling.py --json",
        file="scaling.jsonl",
        claims=(
            Claim(text="no faster than the input", figures=r"scaling\.\w+\.exponent", mark=1.1),
            Claim(
                text="the steepest phase",
                figures=r"scaling\.\w+\.steepest_phase",
                mark=1.1,
            ),
        ),
    ),
    Section(
        title="Two ranks over a limited link",
        about=(
            "Wall clock of a layer call on two ranks in network namespaces, over a token bucket at whose rate exchange "
            "takes a third of a balanced call. Same routing, processes and `layer_budget` for all."
        ),
        command="sudo python benchmarks/link.py --json",
        file="link.jsonl",
        claims=(
            Claim(text="over fixed ownership", figures=r"link\.drop[\d.]+\.wall_over_fixed"),
            Claim(text="over UltraEP's policy", figures=r"link\.drop[\d.]+\.wall_over_ultraep"),
            Claim(text="UltraEP's policy over fixed ownership", figures=r"link\.ultraep\.wall_over_fixed"),
        ),
    ),
    Section(
        title="Time to the same loss",
        about=(
            "Recorded training executed at EP 8, critical path over a modelled link: how, and everything else that was "
            "found, is in [results](results.md). `lrmoe` drops 0.3, `lrmoe-sampled50` 0.5, `lrmoe-topk20` is the "
            "published setting."
        ),
        command="make headline",
        file="headline.jsonl",
        claims=tuple(
            Claim(text=text, figures=rf"headline\.[\w-]+\.memorise\.[\d.]+\.{system}\.{quantity}", mark=mark)
            for text, system, quantity, mark in (
                ("half the pairs, over SYMI's time", "lrmoe-sampled50", "time_to_loss_over_symi", 0.552),
                ("over UltraEP's time", "lrmoe-sampled50", "time_to_loss_over_ultraep", 0.75),
                ("layer over balanced counts", "lrmoe-sampled50", "layer_time_over_balanced", 1.1),
                ("the default, over SYMI's time", "lrmoe", "time_to_loss_over_symi", None),
                ("the published setting, over SYMI's time", "lrmoe-topk20", "time_to_loss_over_symi", None),
            )
        ),
    ),
    Section(
        title="The same calls on a real clock",
        about="Recorded calls of the run above on two ranks over a limited link, wall clock.",
        command="sudo python benchmarks/link_wall.py --run runs/headline --json",
        file="link_wall.jsonl",
        claims=(
            Claim(text="over SYMI's time", figures=r"link_wall\.lrmoe[\w-]*\.wall_over_symi"),
            Claim(text="over UltraEP's time", figures=r"link_wall\.lrmoe[\w-]*\.wall_over_ultraep"),
        ),
    ),
    Section(
        title="Demo",
        about="A small model trained to the same loss on two processes, `lrmoe` over fixed ownership.",
        command="make demo",
        file="demo.json",
        claims=(Claim(text="lrmoe over fixed ownership", figures=r"demo\.lrmoe\.\w+_over_fixed"),),
    ),
    Section(
        title="Quality",
        about=(
            "What rules for the kept set cost in final training loss, in nats, beside nothing dropped and paired over "
            "seeds: the default rule at two drops, and the published one."
        ),
        command="lrmoe ablate --preset full --json",
        file="ablate.jsonl",
        claims=(
            Claim(text="sampled by lrm", figures=r"ablate\.\w+\.lrm\.sampled\.drop[\d.]+\.dloss"),
            Claim(text="largest by lrm", figures=r"ablate\.\w+\.lrm\.topk\.drop[\d.]+\.dloss"),
        ),
    ),
    Section(
        title="Bias",
        about=(
            "Relative error of a pruned gradient against the full one, and of the mean over 32 batches: an unbiased "
            "rule's falls with the batches, a biased one's stays."
        ),
        command="python benchmarks/unbiased.py --json",
        file="unbiased.jsonl",
        claims=(
            Claim(text="mean of 32 over one, sampled", figures=r"unbiased\.sampled\.drop[\d.]+\.ratio"),
            Claim(text="mean of 32 over one, topk", figures=r"unbiased\.topk\.drop[\d.]+\.ratio"),
        ),
    ),
    Section(
        title="Limit on added variance",
        about="`max_added_variance` on drifting data: the worst mean over 50 calls, over the limit.",
        command="python benchmarks/fidelity.py --json",
        file="fidelity.jsonl",
        claims=(
            Claim(text="worst over the limit", figures=r"fidelity\.limit[\d.]+\.ep\d\.worst_over_limit"),
            Claim(text="pairs kept meanwhile", figures=r"fidelity\.limit[\d.]+\.ep\d\.kept_share"),
        ),
    ),
    Section(
        title='`drop="auto"`',
        about="Time to the same loss with the drop chosen by the layer, over the best fixed drop.",
        command="python benchmarks/auto.py --json",
        file="auto.jsonl",
        claims=(
            Claim(
                text="over the best fixed drop",
                figures=r"auto\.\w+\.time_to_loss_over_best_fixed",
                mark=1.02,
            ),
        ),
    ),
    Section(
        title="Memory under a budget",
        about="Calls of many settings under budgets on 1, 2 and 4 ranks: what they held against what was promised.",
        command="python benchmarks/budget.py --json",
        file="budget.jsonl",
        claims=(
            Claim(text="calls that were tried", figures=r"budget\.cases"),
            Claim(text="calls above their budget", figures=r"budget\.exceeded", mark=0),
            Claim(text="worst error of the prediction", figures=r"budget\.prediction_error_max"),
        ),
    ),
    Section(
        title="What waits for backward",
        about="Choosing the kept set in forward over choosing it in backward, at drop 0.3.",
        command="python benchmarks/stash.py --json",
        file="stash.jsonl",
        claims=(
            Claim(text="stash", figures=r"stash\.\w+\.ep\d\.forward_over_backward", mark=0.72),
            Claim(text="peak of the call", figures=r"stash\.\w+\.ep\d\.peak_forward_over_backward"),
            Claim(text="time", figures=r"stash\.\w+\.ep\d\.time_forward_over_backward"),
        ),
    ),
    Section(
        title="Bytes on the wire",
        about="Lean wire over one row per pair, EP 8, 128 experts.",
        command="python benchmarks/wire.py --json",
        file="wire.jsonl",
        claims=(Claim(text="bytes of a call", figures=r"wire\..+"),),
    ),
    Section(
        title="Planning",
        about="CPU time of a plan on one core, and how even it makes the load.",
        command="python benchmarks/planning.py --json",
        file="planning.jsonl",
        claims=(
            Claim(text="forward peak in mean loads", figures=r"planning\.\w+\.peak", mark=1.005),
            Claim(
                text="backward peak, a fifth left out",
                figures=r"planning\.\w+\.backward_peak_drop0\.2",
                mark=0.805,
            ),
            Claim(text="time of a plan", figures=r"planning\.\w+\.ms"),
        ),
    ),
    Section(
        title="Ops",
        about="Each op over its plain form in torch, at the sizes of the layer benchmark.",
        command="python benchmarks/ops.py --json",
        file="ops.jsonl",
        claims=(Claim(text="over the plain form", figures=r"ops\.\w+\.\w+\.over_plain"),),
    ),
    Section(
        title="One call of a large model, rank by rank",
        about=(
            "`lrmoe replay` computes a call of Qwen3-30B-A3B's routing on eight ranks one after the other, here with "
            "rows of 256 numbers; exchange is modelled. See [replay](replay.md)."
        ),
        command="lrmoe replay --json",
        file="replay.jsonl",
        claims=(
            Claim(
                text="times faster than fixed ownership, at drop 0.2 and 0.5",
                figures=r"replay\.(drop0\.5\.)?(forward|backward|layer)_speedup",
            ),
            Claim(
                text="fewer bytes of weights, gradients and tokens on the fullest rank",
                figures=r"replay\.(drop0\.5\.)?(forward|backward)_subtotal_reduction",
            ),
        ),
    ),
    Section(
        title="The published comparison, simulated",
        about="Counts and a cost model, nothing executed; beside the published figures in [published](published.md).",
        command="lrmoe simulate --preset published --json",
        file="published.jsonl",
        claims=(
            Claim(text="step time over SYMI", figures=r"published\.step_time_over_symi"),
            Claim(text="memory saved", figures=r"published\.memory_reduction"),
            Claim(text="backward speedup", figures=r"published\.backward_speedup"),
        ),
    ),
    Section(
        title="Loading and resuming",
        about="Host memory that loading needs over what a rank then holds plus the largest file.",
        command="python benchmarks/load_memory.py --json",
        file="load_memory.jsonl",
        claims=(
            Claim(
                text="reading of this package",
                figures=r"load\.(train|train_sharded|resume|export|import)\.peak_over_\w+",
                mark=1,
            ),
            Claim(text="Transformers' own", figures=r"load\.pretrained\.peak_over_\w+"),
        ),
    ),
    Section(
        title="Changing the number of ranks",
        about="A checkpoint of one layout goes on in another: every pair of layouts on 1, 2, 4 and 8 ranks.",
        command="python benchmarks/reshard.py --json",
        file="reshard.jsonl",
        claims=(
            Claim(text="pairs of layouts", figures=r"reshard\.cases"),
            Claim(text="worst difference", figures=r"reshard\.worst_relative_difference"),
            Claim(
                text="same layout, same bits", figures=r"reshard\.bitwise_same_layout", mark=1, lower=False
            ),
        ),
    ),
    Section(
        title="Long runs",
        about="Memory, open files, threads and processes over 2000 steps of drifting skew on four ranks.",
        command="python benchmarks/soak.py --steps 2000 --json",
        file="soak.jsonl",
        claims=(
            Claim(text="growth of memory", figures=r"soak\.(rss|ledger)_growth", mark=0.02),
            Claim(
                text="of files, threads and processes",
                figures=r"soak\.(open_files|threads|processes)_growth",
                mark=0,
            ),
        ),
    ),
    Section(
        title="Random calls",
        about="Each ends in the right answer or in a documented error.",
        command="python benchmarks/fuzz.py --calls 10000 --json",
        file="fuzz.jsonl",
        claims=(
            Claim(text="calls", figures=r"fuzz\.calls"),
            Claim(text="failures", figures=r"fuzz\.failures", mark=0),
        ),
    ),
)
