"""ShardedOptimizer: composes layout, storage, communication and a rule's math into a step.

step():  note -> [norms -> all_reduce -> clip] -> for each bucket: reduce-scatter, update,
         all-gather -> wait
LAMB:    two passes over the shards with one all_reduce between them
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from shardfuse.agreement import agree, on_rank
from shardfuse.buffers import CombinedBuffers
from shardfuse.comm import Communicator, communicator_for, communicator_over, device_for
from shardfuse.comm.base import bucket_nbytes, overlapped
from shardfuse.config import ShardConfig
from shardfuse.engine import intake
from shardfuse.engine.flat_state import FlatState, check_params, rebind
from shardfuse.engine.gather import ParamSync
from shardfuse.engine.kernels import Kernels
from shardfuse.engine.own_shards import OwnShards
from shardfuse.engine.param_wires import ParamWireChoice
from shardfuse.engine.step import StepEngine
from shardfuse.engine.terms import Terms
from shardfuse.grads.full import GradSync
from shardfuse.grads.partitioned import PartitionedGrads
from shardfuse.grads.protocol import GradShards
from shardfuse.grads.reduced import PresyncedGrads
from shardfuse.grads.slots import FlatParams, clear_grads
from shardfuse.grads.wires import GradWireChoice
from shardfuse.layout import FlatLayout
from shardfuse.optim.foreign import is_laid_out_elsewhere
from shardfuse.optim.memory import MemorySummary
from shardfuse.optim.torch_like import TorchOptions, checked
from shardfuse.optim.watched import Watched
from shardfuse.rules import UpdateRule
from shardfuse.scaling import Overflow, OverflowReport, agree_on_step

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("shardfuse")


class ShardedOptimizer(Watched):
    """A torch optimizer whose states are sharded over ranks (ZeRO stages 1 and 2).

    Build it after the model is on its device. That is a collective call, with the same arguments on
    all ranks of the group. It moves every parameter into a flat buffer (same tensors, same values).
    Gradients accumulate locally in ``p.grad``. ``step()`` takes their mean over ranks, updates this
    rank's shard and gathers the parameters. Subclasses provide the rule and the defaults.

    Args:
        params: parameters, (name, parameter) pairs, or group dicts holding either.
        defaults: hyper-parameters of groups that do not have their own.
        make_rule: builds the rule; its errors are raised on all ranks.
        sharding: a ShardConfig or a plain dict with its keys.
        torch_options: ``maximize``, as in torch.optim; ``foreach``, ``fused``, ``capturable``,
            which have no effect; ``differentiable``, refused if true. ``defaults`` gets them too.

    Raises:
        ValueError: a hyper-parameter out of range, or ranks that disagree.
        TypeError: a parameter that is not a dense fp32, fp16 or bf16 tensor, or in an internal
            format of an NPU.
        RuntimeError: another rank failed to build the optimizer.
    """

    _zero_is_absent = False  # [Note: absent gradients] in grads/full.py

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        make_rule: Callable[[], UpdateRule],
        sharding: ShardConfig | Mapping[str, Any] | None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        error: Exception | None = None
        self._config, is_known = ShardConfig(), False
        try:
            self._config, is_known = ShardConfig.of(sharding), True
            self._rule = make_rule()
            super().__init__(intake.given(params), checked(torch_options, type(self), defaults))
            self._device = intake.common_device(self.param_groups)
        except Exception as failure:
            error = failure
        try:
            if error is not None:  # on a device that the other ranks have, too
                self._device = device_for(self._config.process_group)
            self.communicator = self._communicator()
        except Exception as failure:
            raise error or failure from None
        with self.communicator.call(intake.building(self._config, None if is_known else error)):
            self._build(error)

    def _build(self, error: Exception | None) -> None:
        """Lay out and adopt the parameters; ``error`` is what went wrong on this rank before."""
        nbytes = bucket_nbytes(self._config.bucket_cap_mb, self.communicator.progress)
        alone = self.communicator.world_size == 1
        if alone and error is None and self._rule.grain != "row":
            # Nothing is sent, and no temporary is as large as a bucket: fewer, larger calls.
            nbytes = sys.maxsize
        grain = "element" if error else self._rule.grain
        if not alone and self._config.grad_sync_bits is not None:
            grain = "block"  # of one scale: of one parameter
        self.layout = FlatLayout(self.communicator.world_size, nbytes, grain)
        self._params: list[Tensor] = []
        self._flats: list[FlatState] = []
        self._buffers = CombinedBuffers()
        self._grads = self._make_grads()
        self._param_wire = ParamWireChoice()
        if not alone:
            dtype, bits = self._config.param_sync_dtype, self._config.param_sync_bits
            self._param_wire = ParamWireChoice(dtype, bits, self._config.error_feedback)
        self._gather = ParamSync(
            self.communicator,
            overlaps=overlapped(self._config.overlap_param_sync),
            waits=self._config.debug_sync,
        )
        self._overflows = OverflowReport(self.communicator, self._config.report_overflow)
        if error is None:
            self._kernels = Kernels(self._rule, self._config.kernel, self._device)
        self._clip_coefficient: Tensor | None = None
        self._terms = Terms(self.communicator, self._config.grads_are_reduced)
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._is_fresh = True
        self._adopt(first_group=0, error=error)
        self._built = True
        logger.info("%s: %s\n%s", type(self).__name__, self._config, self.layout.describe())

    def _communicator(self) -> Communicator:
        """Return what moves data between the ranks of the configuration."""
        group, how = self._config.process_group, self._config.collectives
        if self._config.mesh is None:
            return communicator_for(group, self._device, how)
        return communicator_over(self._config.mesh, group, self._device, how)

    def _make_grads(self) -> GradShards:
        """Return where gradients come from."""
        if self._config.grads_are_reduced:
            return PresyncedGrads()
        wire = GradWireChoice(self._config.grad_sync_dtype)
        if self.communicator.world_size > 1:
            wire = GradWireChoice(self._config.grad_sync_dtype, self._config.grad_sync_bits)
        if self._are_partitioned:
            waits = self._config.debug_sync or self._config.overlap_grad_sync is False
            return PartitionedGrads(self.communicator, wire, waits=waits)
        return GradSync(
            self.communicator,
            wire,
            overlaps=overlapped(self._config.overlap_grad_sync),
            waits=self._config.debug_sync,
        )

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time. Collective, like the constructor. See torch.optim.Optimizer."""
        if not self._built:
            super().add_param_group(self._read_group(intake.ordered(param_group)))
            return
        self._refuse_if_foreign("add_param_group()")
        error: Exception | None = None
        first_group = len(self.param_groups)
        with self.communicator.call("add_param_group()"):
            self._grads.under_backward.end()
            try:
                super().add_param_group(self._read_group(intake.ordered(param_group)))
            except Exception as failure:
                error = failure
            try:
                self._adopt(first_group, error)
            except Exception:
                del self.param_groups[first_group:]
                raise

    def _read_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group as torch and the rule have it. What this raises, all ranks hear of."""
        return group

    def _adopt(self, first_group: int, error: Exception | None) -> None:
        """Lay out, move and share the parameters of the groups from ``first_group`` on."""
        entries: list[str] = []
        added: list[tuple[Tensor, Any]] = []
        layout, rank = self.layout, self.communicator.rank
        try:
            if error is None:
                added = intake.read(self.param_groups, first_group, self._rule)
                layout = layout.extended([spec for _, spec in added])
                entries = intake.describe(
                    self.param_groups, first_group, self._rule, self._config, added
                )
                intake.warn(rank, self._rule, self.param_groups, first_group, layout.specs)
        except Exception as failure:
            error = failure
        agree(self.communicator, self._device, entries, error)
        num_old = len(self._flats)
        self.layout = layout
        self._params += [param for param, _ in added]
        if is_laid_out_elsewhere():
            return
        for buffer in self._buffers.add(layout.flats[num_old:], self._device):
            flat = buffer.flat
            members = [slot.param for slot in flat.slots]
            state = FlatState(
                buffer,
                [self._params[param] for param in members],
                [layout.specs[param] for param in members],
                fragments=layout.fragments(flat, rank),
                rank=rank,
                wire=self._param_wire.of(buffer, rank),
            )
            self._flats.append(state)
            if self._config.broadcast_params:
                self._gather.broadcast(buffer)
        self._gather.finish()
        self._wake([state for state in self._flats[num_old:] if not state.flat.frozen])

    def _wake(self, states: list[FlatState]) -> None:
        """Give flats gradients and states; frozen ones have none until they are unfrozen."""
        members = [FlatParams(s.flat, s.params, s.specs, s.fragments) for s in states]
        for state in states:
            state.allocate(self._rule.initial_states(self.param_groups[state.flat.group]))
        self._grads.attach(members, self._device)  # last: until then they are woken once more
        awake = [state for state in self._flats if self._grads.has(state.flat)]
        self._kernels.choose(sum(b.shard_numel for state in awake for b in state.flat.buckets))
        self._shards = OwnShards(
            self._rule,
            self.param_groups,
            self._flats,
            grads=self._grads,
            gather=self._gather,
            row=self.layout.align,
        )
        self._engine = StepEngine(
            self._rule, self._shards, comm=self.communicator, kernels=self._kernels
        )

    def rebind(self) -> None:
        """Move parameters that were re-allocated (``.data =``, ``.to()``) back into the buffers.

        Their present values are kept. Local: call it on every rank.

        Raises:
            TypeError: a parameter has another device, dtype or shape now; build a new optimizer.
        """
        self._refuse_if_foreign("rebind()")
        rebind(self._flats)

    def memory_summary(self) -> MemorySummary:
        """Return the bytes held on this rank for parameters, gradients and states."""
        self._refuse_if_foreign("memory_summary()")
        state_nbytes = sum(state.state_nbytes for state in self._flats)
        return MemorySummary(
            world_size=self.communicator.world_size,
            num_buckets=len(self.layout.buckets),
            param_nbytes=sum(state.param_nbytes for state in self._flats),
            grad_nbytes=self._grads.nbytes,
            state_nbytes=state_nbytes,
            unsharded_state_nbytes=state_nbytes * self.communicator.world_size,
        )

    def accumulates_while(self, condition: Callable[[], bool]) -> None:
        """Act as no_sync(), for an engine that knows which backward is the last one of a step.

        Args:
            condition: asked under backward, on all ranks alike; gradients stay here while it holds.
        """
        if self._foreign is None:
            self._grads.under_backward.accumulates = condition

    def synchronize(self) -> None:
        """Wait for all parameters that step() has left in flight. Local.

        Reading a parameter waits for it, unless Python cannot see it (``overlap_param_sync``).
        """
        if self._foreign is None:
            self._gather.finish()

    # Gradients

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, to None or to zero."""
        self._clip_coefficient = None
        if self._foreign is not None:
            super().zero_grad(set_to_none)
            return
        self._grads.zero(set_to_none, absent=self._zero_is_absent)
        for state in self._flats:
            if not self._grads.has(state.flat):
                clear_grads(state.params, set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, as under DistributedDataParallel.

        Use it for all backwards of a step except the last. Where buckets are sent during backward
        (``overlap_grad_sync``), a gradient that changes after that is sent again.
        """
        if self._foreign is not None:
            yield
            return
        with self._grads.under_backward.paused():
            yield

    # The step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters from the mean gradient over ranks. Collective.

        A parameter without a gradient on any rank does not change. If only some ranks lack the
        gradient, it counts as zero there. ``p.grad`` is not changed. Under torch.amp.GradScaler a
        non-finite gradient on one rank makes all ranks skip the step, and nothing changes.

        Args:
            closure: called first, with gradients enabled; its result is returned.

        Raises:
            RuntimeError: parameters were re-allocated or replaced, a gradient is sparse, or
                gradients changed between clip_grad_norm() and step().
        """
        with self._ends_if_it_fails(), self.communicator.call("step()"):
            return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._foreign is not None:
            self._foreign.step()
            return loss
        self._before_step()
        scaler = "without" if self.__dict__.get("found_inf") is None else "under"
        clipped = "without" if self._clip_coefficient is None else "with"
        self._begin(f"{scaler} a gradient scaler, {clipped} clipped gradients{self._watched}")
        self._refuse_changed("step()")
        self._consolidated = None
        self._is_fresh = False
        with record_function("shardfuse::step"):
            found_inf, grad_scale = (self.__dict__.get(n) for n in ("found_inf", "grad_scale"))
            if found_inf is not None and not isinstance(found_inf, Tensor):
                # torch's scaler gives the number 0 where this rank has no gradient at all.
                found_inf = torch.tensor(float(found_inf), device=self._device)
            scaled = agree_on_step(self.communicator, found_inf, grad_scale)
            self._was_skipped = scaled.skip
            if scaled.skip:
                self._overflows.note(self._shards.named_grads(), self._device)
            else:
                coefficient = self._shards.unscale(scaled, self._clip_coefficient)
                self._gather.expect()
                self._engine.run(coefficient, self._config.clip_grad_norm, self._watching(scaled))
            self._grads.spend()
            if not scaled.skip:
                self._gather.leave()
        self._clip_coefficient = None
        self._after_step()
        return loss

    @property
    def last_overflow(self) -> Overflow | None:
        """(parameter name, rank) of the last skipped step, with ``report_overflow``; else None."""
        self._refuse_if_foreign("last_overflow")
        return self._overflows.last

    def _begin(self, *lines: str) -> None:
        """Check and pack what the next collectives need; ``lines`` are what ranks must agree on."""
        awake, woken = self._check()
        self._grads.note()
        self._grads.under_backward.end(is_noted=True)
        self._shards.groups = self.param_groups  # which may have been set to another list
        grads = None if "found_inf" in self.__dict__ else self._shards.named_grads
        self._terms.declare(lines, self.param_groups, awake, woken, grads)
        self._terms.averaged.warn(self._params)
        if woken:
            self._wake(woken)
            self._grads.note()

    def _check(self) -> tuple[list[FlatState], list[FlatState]]:
        """Check params, make states; return flats that train, and that begin to. Tells nobody."""
        self._gather.finish()
        prefix = f"{on_rank(self.communicator)}{type(self).__name__}: "
        check_params(self.param_groups, self._params, self._flats, prefix)
        awake = [state for state in self._flats if self._grads.has(state.flat)]
        for state in awake:
            values = self._rule.initial_states(self.param_groups[state.flat.group])
            if state.allocate(values) and not self._rule.counts_steps:
                # Momentum was set above 0 later: its first update comes now.
                state.set_steps({slot.param: 0 for slot in state.flat.slots})
        return awake, [s for s in self._flats if s not in awake and s.is_trained]
