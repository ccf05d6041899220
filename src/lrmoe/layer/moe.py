"""The layer: checks, counts, one plan for all ranks, then the walk."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lrmoe.config import LRMoEConfig
from lrmoe.distributed import Comm
from lrmoe.distributed.peers import tell_when_failing
from lrmoe.distributed.probe import current
from lrmoe.errors import ConfigError
from lrmoe.layer.announce import Announcer, Planned, gradient_bits
from lrmoe.layer.call import Call, Memo
from lrmoe.layer.controller import Controller, StepClock
from lrmoe.layer.function import MoEFunction, run_forward
from lrmoe.layer.inputs import Inputs, LayerShape, check_build, check_inputs
from lrmoe.layer.replay import FirstForward, ReplayStore, draw_token, inside_backward, lets_go, may_recompute
from lrmoe.layer.routing import sort_pairs
from lrmoe.layer.sharded import Sharded
from lrmoe.layer.weights import Owned, Storage
from lrmoe.planning import Execution, ExpertShape, Topology, predict_bytes
from lrmoe.planning.policies import Policy
from lrmoe.planning.shards import expert_cuts, storage_bytes
from lrmoe.telemetry import CallRecord, Telemetry
from lrmoe.telemetry.record import OpenCall
from lrmoe.telemetry.watch import EnergyWatch


class MoELayer:
    """Runs one experts module: full forward, planned and pruned backward.

    It owns no parameters: they are passed at each call, so that frameworks may shard, swap or cast them.

    Args:
        num_experts: experts of the whole group; a multiple of its size. Expert e lives on rank e // (experts / size).
        hidden_size, intermediate_size: H and I.
        config: what backward leaves out, and how.
        activation: "silu", "gelu" or "gelu_tanh", applied to the gate half.
        group: expert-parallel process group; None for one rank.
        layer: index of the layer, part of its random key and of messages.
        clock: optimizer-step clock shared by all layers; a private one by default.
        telemetry: where finished training calls are recorded; a private one by default.
        policy: plans instead of the configuration's, such as one with other options.
        storage: brings weights and takes gradients instead of the configuration's storage kind.

    Raises:
        PlanError: experts not divisible by the group's size.
        ConfigError: `config` is no LRMoEConfig, unknown activation, or a size that is no integer of at least 1.
    """

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        config: LRMoEConfig,
        activation: str = "silu",
        group: dist.ProcessGroup | None = None,
        layer: int = 0,
        clock: StepClock | None = None,
        telemetry: Telemetry | None = None,
        policy: Policy | None = None,
        storage: Storage | None = None,
    ) -> None:
        check_build(
            config,
            activation,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
        )
        self.config = config
        self.comm = Comm(group, f"MoE layer {layer}")
        if self.comm.size > 1:
            tell_when_failing()
        sharded = storage is None and config.storage == "sharded"
        cuts = expert_cuts(hidden_size, intermediate_size, self.comm.size)
        if sharded:  # SYMI builds its layout with the optimizer's update, once a step
            storage = Sharded(self.comm, cuts, per_step=config.policy == "symi")
        self.storage: Storage = Owned() if storage is None else storage
        self.topology = Topology(ranks=self.comm.size, experts=num_experts)
        local = self.topology.experts_per_rank
        self.shape = LayerShape(
            experts=num_experts,
            local_experts=local,
            hidden=hidden_size,
            width=intermediate_size,
            cuts=cuts if sharded else None,
        )
        self.activation = activation
        self.layer = layer
        self.clock = StepClock() if clock is None else clock
        self.telemetry = Telemetry() if telemetry is None else telemetry
        if config.estimator == "topk" and config.max_drop > 0 and self.telemetry.watch is None:
            self.telemetry.watch = EnergyWatch()
        self.controller = Controller(
            config=config, clock=self.clock, layer=layer, experts=local, ranks=self.comm.size
        )
        self._replay = ReplayStore()
        self._announcer = Announcer(
            config=config,
            comm=self.comm,
            topology=self.topology,
            controller=self.controller,
            hidden=hidden_size,
            width=intermediate_size,
            activation=activation,
            homes=self.storage.homes,
            policy=policy,
        )
        self._last: OpenCall | None = None
        self.clock.watch(self)
        self.clock.waiting.parameters[layer] = local * 3 * hidden_size * intermediate_size

    @property
    def last_record(self) -> CallRecord | None:
        """Record of the latest training call, complete after its backward."""
        return None if self._last is None else self._last.close()

    def __call__(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        training: bool,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of expert outputs for every token.

        Every rank of the group must make the call, also with zero tokens.

        Args:
            hidden_states: (T, H) or (..., H), floating point.
            top_k_index: (T, K) integer global expert ids; ids outside [0, num_experts) mean "no expert".
            top_k_weights: (T, K) routing weights.
            gate_up_proj: (E_local, 2I, H), gate half first; down_proj: (E_local, H, I). In sharded storage this rank's
                part of every expert, (E, P), as `lrmoe.distributed.sharded.cut_experts` makes it.
            training: whether backward may leave pairs out; False is exact and touches no state.
            padding_mask: bool or integer, T entries, nonzero where the token is real; default: `lrmoe.padding`.

        Returns:
            Same shape and dtype as `hidden_states`; zero where a token has no expert.

        Raises:
            InputError: bad shapes, dtypes or ids on this rank.
            RankError: another rank was given bad input, or the ranks disagree: raised on every rank. Or some rank was
                lost, failed elsewhere, or did not come in time, as where it makes fewer calls.
        """
        tensors = (hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj)
        recompute = training and inside_backward()
        token = draw_token() if training else 0
        try:
            inputs = check_inputs(self.shape, *tensors, padding_mask)
        except Exception as error:
            if not recompute:
                if training:  # a call that failed counts here as it does on the ranks that were ready for it
                    self.controller.next_moment()
                self._announcer.report(error, gate_up_proj)
            raise
        if recompute:
            first, check = self._replay.take(
                token, self._stored(inputs.ids_TK), again=not torch.is_grad_enabled()
            )
            planned, ids_TK, memo = first.planned, first.ids_TK, first.memo
            planned.open_call.ledger.restart()
            planned.budget.again = True
            order, _ = sort_pairs(ids_TK, self.shape.experts)
        else:
            moment = self.controller.next_moment() if training else None
            planned, order = self._announcer.plan(
                inputs,
                moment,
                gradient_bits(inputs, gate_up_proj, down_proj),
                _compute_dtype(gate_up_proj),
                gate_up_proj.element_size(),
                checkpointed=torch.is_grad_enabled() and lets_go(),
            )
            memo = Memo(asked=training and may_recompute())
            if memo.asked:
                ids_TK = self._stored(inputs.ids_TK)
                self._replay.put(token, FirstForward(ids_TK=ids_TK, planned=planned, memo=memo))
        try:
            out = self._run(inputs, planned, memo, order, gate_up_proj, down_proj)
        finally:  # a checkpoint may leave its recompute inside, with an exception, once it has what it needs
            if recompute:
                check()
        # No needless view: FSDP2 warns about views, since its backward hook is lost when one is changed in place.
        return out if out.shape == hidden_states.shape else out.view(hidden_states.shape)

    def release(self) -> None:
        """Forget what only an unfinished step needs: forwards to recompute, and weights that stay for the step."""
        self._replay.clear()
        self._release_weights()

    def _release_weights(self) -> None:
        if isinstance(self.storage, Sharded):
            self.storage.release()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state of this rank: the controller's, and `past`, what policies that plan from history know."""
        return {**self.controller.state_dict(), "past": self._announcer.past.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; a log line says what of it begins anew, as at another number of ranks.

        Raises:
            ConfigError: it does not fit this layer; nothing is changed then.
        """
        past, given = self._announcer.past, state.get("past")
        try:
            history = past.checked(given, self.topology)
        except ConfigError as error:
            raise ConfigError(f"state of layer {self.layer}: {error}") from error
        lost = [past.lost(given, self.topology), self.controller.learned.lost(state)]
        self.controller.load_state_dict(state)
        past.load(history)
        self._release_weights()
        for said in filter(None, lost):
            self.clock.say_anew(said)

    def _stored(self, ids_TK: Tensor) -> Tensor:
        """Ids as a replay keeps them: as narrow as they fit, "no expert" as -1."""
        exists = (ids_TK >= 0) & (ids_TK < self.shape.experts)
        narrow = torch.int16 if self.shape.experts < 2**15 else torch.int64
        return torch.where(exists, ids_TK, -1).to(narrow)

    def _run(
        self, inputs: Inputs, planned: Planned, memo: Memo, order: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        tensors = (inputs.x_TH, inputs.alpha_TK, gate_up, down)
        current().plan(self.comm, self.layer, planned.plan, inputs.x_TH)
        call = Call(
            config=self.config,
            comm=self.comm,
            controller=self.controller,
            telemetry=self.telemetry,
            storage=self.storage,
            plan=planned.plan,
            seats=planned.seats,
            budget=planned.budget,
            moment=planned.moment,
            open_call=planned.open_call,
            activation=self.activation,
            slots=inputs.ids_TK.shape[1],
            hidden=self.shape.hidden,
            compute_dtype=_compute_dtype(gate_up),
            differentiable=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
            memo=memo,
        )
        if (
            planned.moment is None
            and call.differentiable
            and (self.config.max_drop > 0 or self.config.observe)
        ):
            self.clock.warn_evaluation()
        if planned.moment is not None:
            self._last = planned.open_call
            planned.open_call.record.mem_predicted = self._predict(call, inputs, gate_up)
        if planned.budget.binds:
            planned.open_call.record.peak_predicted = planned.budget.peak(planned.plan, self.comm.rank)
        order_N = order[: int(planned.plan.counts_RE[self.comm.rank].sum())]
        if call.differentiable:
            return MoEFunction.apply(call, order_N, *tensors)
        with torch.no_grad(), torch.autocast(inputs.x_TH.device.type, enabled=False):
            return run_forward(call, order_N, *tensors).out_TH.to(inputs.x_TH.dtype)

    def _predict(self, call: Call, inputs: Inputs, gate_up: Tensor) -> dict[str, int]:
        shape = ExpertShape(
            hidden=self.shape.hidden, width=self.shape.width, element_bytes=call.compute_dtype.itemsize
        )
        run = Execution(
            differentiable=call.differentiable,
            stash=call.keeps_rows,
            norms=call.scored and self.config.needs_phi,
            early=call.selects_early,
            input_gradient=inputs.x_TH.requires_grad,
            weight_gradient=gate_up.requires_grad,
        )
        parts = predict_bytes(shape, call.plan, self.comm.rank, run)
        if not self.storage.homes and self.comm.size > 1:
            cuts = expert_cuts(self.shape.hidden, self.shape.width, self.comm.size)
            parts |= storage_bytes(cuts, call.plan, self.comm.rank, run, shape.element_bytes)
        return parts


def _compute_dtype(weight: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on (fp64 stays), otherwise the weights'."""
    device = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype
