"""The start of a call: every rank's counts and header in one all-gather, then the same plan on every rank.

Shape letters: R ranks, E experts, L local experts.
"""

from __future__ import annotations

import socket
import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm, Header, HeaderTable
from lrmoe.distributed.header import MEANING, Fault, call_name
from lrmoe.errors import ConfigError, InputError, RankError
from lrmoe.layer.asking import CallPlanner
from lrmoe.layer.budget import CallBudget, budget_limits, device_bytes
from lrmoe.layer.controller import Controller, Moment
from lrmoe.layer.experts import BLOCK_ROWS
from lrmoe.layer.inputs import Inputs
from lrmoe.layer.past import PastCalls
from lrmoe.layer.routing import count_keys, expert_keys, sort_keys
from lrmoe.layer.timing import Timing
from lrmoe.ops import Reading, fuses, upload
from lrmoe.planning import ExpertShape, LayerPlan, Topology, get_policy, policy_info
from lrmoe.planning.call_memory import CallSizes
from lrmoe.planning.policies import Policy, UserPolicy
from lrmoe.planning.problem import IntArray
from lrmoe.planning.rates import Sizes, agreed, copy_price, device_code
from lrmoe.planning.score_bins import ScoreHistory
from lrmoe.planning.seats import Seats, seats_of
from lrmoe.telemetry import CallRecord, PhaseClock
from lrmoe.telemetry.record import OpenCall

_OF_WEIGHTS = 4 | 8  # bits of gradient_bits
_UNDER_NO_GRAD = 16  # unknown yet: a reentrant checkpoint runs its first forward without gradients
_CHECKPOINTED = 32  # beside the others: a non-reentrant checkpoint lets go of what the forward keeps
_DTYPE_CODES = {torch.float64: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}


@dataclass(frozen=True, kw_only=True, eq=False)
class Planned:
    """A call that has its plan: what a checkpoint recompute reuses."""

    plan: LayerPlan
    seats: Seats
    budget: CallBudget
    moment: Moment | None
    open_call: OpenCall


class Announcer:
    """Gathers counts, raises faults on every rank, and plans.

    Attributes:
        past: what policies that plan from history know of past calls.
    """

    def __init__(
        self,
        *,
        config: LRMoEConfig,
        comm: Comm,
        topology: Topology,
        controller: Controller,
        hidden: int,
        width: int,
        activation: str,
        homes: bool,
        policy: Policy | None = None,
    ) -> None:
        self._config = config
        self._config_hash = zlib.crc32(repr(config).encode())
        self._comm = comm
        self._topology = topology
        self._controller = controller
        self._hidden, self._width = hidden, width
        self._policy = get_policy(config.policy) if policy is None else policy
        if ":" in config.policy and config.max_drop > 0 and not policy_info(config.policy).drops:
            raise ConfigError(
                f"max_drop={config.max_drop}: policy={config.policy!r} drops nothing; valid: max_drop=0, or drops=True "
                "in the INFO of a policy that leaves pairs out"
            )
        self.past = PastCalls(config.policy)
        self._timing = Timing(controller.drops)
        self._planner = CallPlanner(
            config=config, comm=comm, topology=topology, controller=controller, policy=self._policy
        )
        self._homes = homes
        self._met = False
        self._calls = 0  # of any kind, counted for messages
        self._device, self._hosts = 0, 1  # of all ranks, from the first call on
        self._device_bytes: int | None = None  # of the smallest device
        self._fused = True  # on all other ranks
        self._sizes = {
            "the number of experts": topology.experts,
            "the hidden size": hidden,
            "the expert width": width,
            "the layer's index": controller.layer,
            "the activation (hash)": zlib.crc32(activation.encode()),
            MEANING["config"]: self._config_hash,  # what ranks tell each other in a call depends on it
        }

    def plan(
        self,
        inputs: Inputs,
        moment: Moment | None,
        gradients: int,
        compute_dtype: torch.dtype,
        weight_bytes: int,
        *,
        checkpointed: bool,
    ) -> tuple[Planned, Tensor]:
        """Count this rank's pairs, tell all ranks, plan.

        Args:
            gradients: see `gradient_bits`.
            weight_bytes: element size of the parameters.
            checkpointed: a non-reentrant checkpoint will run this forward again.

        Returns:
            the plan with its record; int64 (T*K,) flat pair ids sorted by expert.

        Raises:
            RankError: a rank reported a fault, or the ranks disagree.
            InfeasibleError: the call cannot fit its budget. Raised on every rank.
        """
        clock = PhaseClock(inputs.x_TH.device)
        with clock.phase("plan"):
            met = self._meet(inputs.x_TH.device)
            key_N = expert_keys(inputs.ids_TK, self._topology.experts)
            counts_E = count_keys(key_N, self._topology.experts)
            told = gradients  # what plans depend on has to be the same on all ranks
            if checkpointed and self._config.memory_budget is not None:
                told |= _CHECKPOINTED
            header = self._header(inputs, moment, told, compute_dtype)
            message = self._message(header, counts_E)
            reading = self._tell(message, header)
            order = sort_keys(key_N, self._topology.experts)  # a device sorts while the host waits and plans
            counts_RE, scores, tokens_R = self._hear(reading, header)
            prune = moment is not None and moment.prune and gradients > 0
            drop = self._config.max_drop if prune else 0.0
            self._controller.prices = self._prices(moment, gradients, compute_dtype, drop)
            budget = self._budget(inputs, moment, gradients, compute_dtype, weight_bytes, tokens_R)
            budget.checkpointed |= checkpointed
            history = self.past.history()
            chosen = self._planner.choose(counts_RE, drop, scores, budget, history, inputs.x_TH.device)
            plan = chosen.plan
            if moment is not None:
                self.past.add(plan)
        record = self._record(plan, moment, inputs)
        record.variance_known, record.control = chosen.predicted, chosen.told
        open_call = OpenCall(record=record, clock=clock)
        self._timing.watch(open_call)
        ints = met + message.shape[0]
        ints += isinstance(self._policy, UserPolicy)  # its plan's digest
        open_call.sent("plan", (self._comm.size - 1) * ints * 8)
        seats = seats_of(plan, homes=self._homes)
        planned = Planned(plan=plan, seats=seats, budget=budget, moment=moment, open_call=open_call)
        return planned, order

    def _budget(
        self,
        inputs: Inputs,
        moment: Moment | None,
        gradients: int,
        dtype: torch.dtype,
        weight_bytes: int,
        tokens_R: IntArray,
    ) -> CallBudget:
        """The call's memory, with this layer's limits. What a checkpoint will ask for is taken to be everything."""
        config, device = self._config, inputs.x_TH.device
        unknown = gradients == _UNDER_NO_GRAD
        wanted = (15 if moment is not None else 0) if unknown else gradients
        shape = ExpertShape(hidden=self._hidden, width=self._width, element_bytes=dtype.itemsize)

        @cache
        def sizes(exact: bool) -> CallSizes:
            scored = wanted > 0 and (not exact or (config.observe and moment is not None))
            outputs = wanted > 0 and config.full_router_grad and not exact
            return CallSizes(
                shape=shape,
                tokens_R=tokens_R,
                slots=inputs.ids_TK.shape[1],
                input_bytes=inputs.x_TH.element_size(),
                alpha_bytes=inputs.alpha_TK.element_size(),
                weight_bytes=weight_bytes,
                lean=self._comm.size > 1 and config.lean and not outputs,
                keeps_outputs=outputs,
                norms=scored and config.needs_phi,
                scored=scored,
                early=wanted > 0 and not exact and config.select_in == "forward",
                differentiable=wanted > 0,
                needs=(wanted & 1 > 0, wanted & 2 > 0, wanted & 4 > 0, wanted & 8 > 0),
                block_rows=BLOCK_ROWS if device.type == "cpu" else None,
                fused=self._fused and fuses(device, dtype),
            )

        whole = device_bytes(device) if self._device_bytes is None else self._device_bytes
        layer, model = budget_limits(config, whole)
        return CallBudget(
            config=config,
            layer=self._controller.layer,
            sizes=sizes,
            limit=layer,
            model_limit=model,
            waiting=self._controller.clock.waiting,
            checkpointed=unknown,
        )

    def _prices(
        self, moment: Moment | None, gradients: int, dtype: torch.dtype, max_drop: float
    ) -> tuple[float, float]:
        """What copies and crossing rows cost in this call, in rows of compute."""
        unknown = gradients == _UNDER_NO_GRAD
        sizes = Sizes(
            hidden=self._hidden,
            width=self._width,
            ranks=self._comm.size,
            element_bytes=dtype.itemsize,
            backward=moment is not None if unknown else gradients > 0,
            weights=unknown or gradients & _OF_WEIGHTS > 0,
            lean=self._config.lean and not (self._config.full_router_grad and max_drop > 0),
        )
        return copy_price(self._device, sizes, hosts=self._hosts)

    def report(self, error: Exception, weight: object) -> None:
        """Tell the other ranks that this one cannot make the call; they raise, and so does the caller."""
        if self._comm.size == 1:
            return
        fault = Fault.INPUT if isinstance(error, InputError) else Fault.OTHER
        device = weight.device if isinstance(weight, Tensor) else torch.device("cpu")
        self._meet(device)
        nothing = torch.zeros(self._topology.experts, dtype=torch.int64, device=device)
        self._comm.all_gather_ints(self._message(Header(fault=int(fault)), nothing), "telling of bad input")

    def _meet(self, device: torch.device) -> int:
        """At the first call: all ranks built the same layer, or RankError on all. Returns the integers exchanged.

        Layers of other sizes would send messages of other lengths, which backends answer with a crash. What each rank
        runs on crosses too: prices and budgets depend on it, and plans must be the same on ranks that differ.
        """
        if self._met or self._comm.size == 1:
            return 0
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        host = zlib.crc32(socket.gethostname().encode())
        fused = int(fuses(device, torch.float32))
        place = [device_code(device.type, name), host, device_bytes(device), fused]
        mine = torch.tensor([*self._sizes.values(), *place], dtype=torch.int64, device=device)
        table = self._comm.all_gather_ints(mine, "waiting for all ranks at the first call").cpu().numpy()
        devices, hosts, sizes, all_fused = table[:, -len(place) :].T.tolist()
        table = table[:, : -len(place)]
        for name, values in zip(self._sizes, table.T, strict=True):
            if (values != values[0]).any():
                seen = ", ".join(f"rank {r}: {int(v)}" for r, v in enumerate(values))
                raise RankError(f"MoE layer {self._controller.layer}: {name} differs between ranks ({seen})")
        self._device, self._hosts, self._met = agreed(devices), len(set(hosts)), True
        self._device_bytes, self._fused = min(sizes), all(all_fused)
        return len(mine)

    def _header(
        self, inputs: Inputs, moment: Moment | None, gradients: int, compute_dtype: torch.dtype
    ) -> Header:
        return Header(
            tokens=inputs.x_TH.shape[0],
            layer=self._controller.layer,
            step=0 if moment is None else moment.step,
            micro_batch=0 if moment is None else moment.micro_batch,
            hidden=self._hidden,
            dtype=_DTYPE_CODES[compute_dtype],
            training=int(moment is not None),
            gradients=gradients,
            config=self._config_hash,
        )

    def _message(self, header: Header, counts_E: Tensor) -> Tensor:
        """int64: header, counts (E), what calls taught this rank and how long one took, as fp64 bits."""
        device = counts_E.device
        timing = self._timing.take(training=header.training > 0).view(np.int64)
        known = upload(np.concatenate([header.to_ints(), timing]), device)
        learned = self._controller.learned.message(device)
        return torch.cat([known[: Header.WIDTH], counts_E, learned, known[Header.WIDTH :]])

    def _tell(self, message: Tensor, header: Header) -> Reading:
        """All ranks' messages, on their way here: the forward's one host read."""
        self._calls += 1
        call = call_name(header.training, header.step, header.micro_batch)
        waits = f"waiting for all ranks at {call} (the layer's call {self._calls} on rank {self._comm.rank})"
        return Reading(self._comm.all_gather_ints(message, waits))

    def _hear(self, reading: Reading, header: Header) -> tuple[IntArray, ScoreHistory | None, IntArray]:
        """All ranks' counts (R, E), past scores, ranks' tokens (R,)."""
        table = reading.wait().numpy()
        headers = HeaderTable(table[:, : Header.WIDTH])
        headers.raise_on_trouble(self._comm.rank, self._controller.layer)
        split = Header.WIDTH + self._topology.experts
        told = np.array(table[:, split:]).view(np.float64)  # copies: a view would keep the message alive
        scores = self._controller.hear(told, self._topology, training=header.training > 0)
        return np.array(table[:, Header.WIDTH : split]), scores, headers.tokens_R

    def _record(self, plan: LayerPlan, moment: Moment | None, inputs: Inputs) -> CallRecord:
        reason = plan.reason if moment is None or moment.prune else moment.reason
        return CallRecord(
            step=0 if moment is None else moment.step,
            micro_batch=0 if moment is None else moment.micro_batch,
            layer=self._controller.layer,
            world_size=self._comm.size,
            tokens=inputs.x_TH.shape[0],
            pairs=plan.pairs,
            kept=plan.kept,
            drop_reason="eval" if moment is None else reason,
            counts_E=plan.counts_E.tolist(),
            quota_E=plan.quota_E.tolist(),
            forward_load_R=plan.forward_load_R.tolist(),
            backward_load_R=plan.backward_load_R.tolist(),
            rows_forward_local=int(plan.forward_load_R[self._comm.rank]),
            chunks=max(plan.forward_chunks, plan.backward_chunks),
            recomputed=plan.recompute or plan.forward_chunks > 1 or self._config.recompute,
            replicas_R=plan.replicas_R.tolist(),
            counts_RE=plan.counts_RE,
        )


def gradient_bits(inputs: Inputs, gate_up: Tensor, down: Tensor) -> int:
    """Which tensors need gradients, as bits 1 (input), 2 (routing weights), 4 (gate_up), 8 (down)."""
    if not torch.is_grad_enabled():
        return _UNDER_NO_GRAD
    wanted = (inputs.x_TH, inputs.alpha_TK, gate_up, down)
    return sum(1 << bit for bit, tensor in enumerate(wanted) if tensor.requires_grad)
