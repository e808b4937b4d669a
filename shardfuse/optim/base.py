"""ShardedOptimizer: composes layout, storage, communication and a rule's math into a step.

step():  note -> [norms -> all_reduce -> clip] -> for each bucket: reduce-scatter, update,
         all-gather -> wait
LAMB:    two passes over the shards with one all_reduce between them
"""

from __future__ import annotations

import functools
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from shardfuse.agreement import agree, on_rank
from shardfuse.buffers import CombinedBuffers
from shardfuse.codecs import GradCodecChoice, ParamCodecChoice
from shardfuse.comm import (
    Communicator,
    communicator_for,
    communicator_of,
    communicator_over,
    device_for,
)
from shardfuse.comm.native import overlaps_in_order
from shardfuse.comm.numbers import Counter
from shardfuse.comm.transport import AsyncModel, bucket_nbytes, overlapped
from shardfuse.config import ShardConfig
from shardfuse.engine import ddp, setup
from shardfuse.engine.consistency import (
    ConsistencyCheck,
    DdpCheck,
    EditedGradsWarning,
    GradlessSteps,
    ReplacedParamsWarning,
    UnsyncedTensorsWarning,
)
from shardfuse.engine.ddp import (
    ModuleBuffers,
    ModuleWatch,
    Owners,
    unwrapped,
)
from shardfuse.engine.dtensors import DTensorGrads, DTensorShards
from shardfuse.engine.gather import ParamGatherer
from shardfuse.engine.kernels import Kernels
from shardfuse.engine.params import (
    FlatState,
    OwnShards,
    move_through_host,
    params_of_all,
    rebind,
)
from shardfuse.engine.step import StepDriver
from shardfuse.engine.step_norms import StepNorms
from shardfuse.grads.full import FullGrads
from shardfuse.grads.sharded import ShardedGrads
from shardfuse.grads.source import (
    ExternalGrads,
    FlatParams,
    GradPhase,
    GradSource,
    checksum,
    clear_grads,
)
from shardfuse.layout import FlatLayout
from shardfuse.optim import dtensors
from shardfuse.optim.backend import is_external_layout, own_layout
from shardfuse.optim.compat import MemorySummary, TorchCompat, TorchOptions, checked
from shardfuse.optim.stateful import warn_of_saves_on_one_rank
from shardfuse.rules import UpdateRule
from shardfuse.rules.base import SCHEDULED, check_group
from shardfuse.runtime import paused_gc, stacklevel_of_caller, untraced
from shardfuse.scaling import UNSCALED, GradScale, Overflow, OverflowReport, agree_on_scale

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("shardfuse")


class ShardedOptimizer(TorchCompat):
    """A torch optimizer whose states are sharded over ranks (ZeRO stages 1 and 2).

    Build it after the model is on its device. That is a collective call, with the same arguments on
    all ranks of the group. It moves every parameter into a flat buffer (same tensors, same values).
    Gradients accumulate locally in ``p.grad``. ``step()`` takes their mean over ranks, updates this
    rank's shard and gathers the parameters. Subclasses provide the rule and the defaults.

    A model in place of its parameters is trained as under DistributedDataParallel: its parameters,
    also the frozen ones, and its buffers become equal on all ranks, and step() broadcasts the
    buffers (``ShardConfig(broadcast_buffers=)``). If the model is in a DistributedDataParallel,
    gradients are taken as averaged, and buffers are left to it.

    Args:
        params: a module; or parameters, (name, parameter) pairs, or group dicts holding either.
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
            super().__init__(
                self._read_params(params), checked(torch_options, type(self), defaults)
            )
            self._device = setup.common_device(self.param_groups)
            if dtensors.are_sharded_by_torch(setup.named(self.param_groups)):
                self._config = dtensors.config_for(self._config)
                self._mesh = dtensors.main_mesh(setup.named(self.param_groups))
        except Exception as failure:
            error = failure
        try:
            if error is not None:  # on a device that the other ranks have, too
                self._device = device_for(self._config.process_group)
            self.communicator = self._communicator()
        except Exception as failure:
            raise error or failure from None
        label = setup.construction_label(self._config, None if is_known else error)
        with self.communicator.session.region(label), paused_gc():
            self._build(error, params if isinstance(params, nn.Module) else None)

    def _build(self, error: Exception | None, model: nn.Module | None) -> None:
        """Lay out and adopt the parameters, those of ``model`` if one was given.

        ``error`` is an earlier error of this rank, raised on all ranks here.
        """
        moves, world_size = self.communicator.async_model, self.communicator.world_size
        choices = self._config.overlap_grad_sync, self._config.overlap_param_sync
        overlaps = any(moves in self._overlapped(choice) for choice in choices)
        nbytes = bucket_nbytes(
            self._config.bucket_cap_mb,
            moves,
            world_size=world_size,
            device_type=self._device.type,
            overlaps=overlaps or self._config.stage == 2,
            payload_nbytes=0 if error else setup.payload_nbytes(self.param_groups),
        )
        alone = world_size == 1
        if alone and error is None and self._rule.granularity != "row":
            # Nothing is sent, and no temporary is as large as a bucket: fewer, larger calls.
            nbytes = sys.maxsize
        granularity = "element" if error else self._rule.granularity
        # A rule of two passes reads all gradients before any parameter is updated.
        self._in_forward_order = granularity == "element"
        if not alone and self._config.grad_sync_bits is not None:
            granularity = "block"  # of one scale: of one parameter
        self.layout = FlatLayout(world_size, nbytes, granularity)
        self._params: list[Tensor] = []
        self._flats: list[FlatState] = []
        self._active: list[FlatState] = []  # flats that train
        if error is None and not alone and not is_external_layout() and self._mesh is None:
            try:
                owners, named = self._find_owners(), self._named_params()
                watch = self._modules = ModuleWatch(owners.modules)
                self._replaced_params = ReplacedParamsWarning(watch, named, owners)
                del owners  # which would keep the modules alive
            except Exception as failure:
                error = failure
        self._buffers = CombinedBuffers()
        self._grads = self._make_grads()
        self._param_codec = ParamCodecChoice()
        if not alone:
            dtype, bits = self._config.param_sync_dtype, self._config.param_sync_bits
            self._param_codec = ParamCodecChoice(dtype, bits, self._config.error_feedback)
        self._gather = ParamGatherer(
            self.communicator,
            overlaps=self._overlapped(self._config.overlap_param_sync),
            waits=self._config.debug_sync,
        )
        self._overflows = OverflowReport(self.communicator, self._config.report_overflow)
        if error is None:
            self._kernels = Kernels(
                self._rule,
                self._config.kernel,
                self._device,
                tells=self.communicator.world.rank == 0,
            )
        self._on_rank = on_rank(self.communicator)
        self._error_prefix = f"{self._on_rank}{type(self).__name__}: "
        self._clip_coefficient: Tensor | None = None
        # Gradients of DTensors are sharded: they differ between ranks.
        compares_grads = self._are_reduced and self._mesh is None
        self._consistency = ConsistencyCheck(self.communicator, compares_grads)
        self._has_model = model is not None
        self._had_modules = self._had_modules or self._has_model
        self._module_buffers: ModuleBuffers | None = None
        self._rest_of_model = UnsyncedTensorsWarning(self.communicator)
        self._written_grads = EditedGradsWarning(self.communicator)
        self._gradless = GradlessSteps(self.communicator)
        self._num_calls = Counter(self.communicator.session)
        self._consolidated: dict[int, dict[str, Any]] | None = None
        self._is_fresh = True
        keeps = model is not None and not alone and not self._are_reduced
        averaged = "elsewhere" if self._are_reduced else "here"
        lines = [f"gradients are averaged {averaged}, buffers of a model are kept equal: {keeps}"]
        self._adopt(0, error, lines)
        if keeps:
            self._keep_equal(model, self._config.broadcast_params)
        self._built = True
        logger.info("%s: %s\n%s", type(self).__name__, self._config, self.layout.describe())

    def _communicator(self) -> Communicator:
        """Return the communicator of the configuration."""
        group, how = self._config.process_group, self._config.collectives
        if self._mesh is not None:
            return communicator_of(self._mesh, self._device, how)
        if self._config.mesh is None:
            return communicator_for(group, self._device, how)
        return communicator_over(self._config.mesh, group, self._device, how)

    def _overlapped(self, choice: bool | Literal["auto"]) -> list[AsyncModel]:
        """Return the models of communication under which to overlap."""
        return overlapped(choice, in_order=overlaps_in_order(self.communicator))

    def _make_grads(self) -> GradSource:
        """Return where gradients come from."""
        if self._mesh is not None:
            return DTensorGrads()
        if self._are_reduced:
            return ExternalGrads()
        wire = GradCodecChoice(self._config.grad_sync_dtype)
        if self.communicator.world_size > 1:
            wire = GradCodecChoice(self._config.grad_sync_dtype, self._config.grad_sync_bits)
        if self._are_partitioned:
            waits = self._config.debug_sync or self._config.overlap_grad_sync is False
            return ShardedGrads(
                self.communicator, wire, waits=waits, in_forward_order=self._in_forward_order
            )
        grads = FullGrads(
            self.communicator,
            wire,
            overlaps=self._overlapped(self._config.overlap_grad_sync),
            waits=self._config.debug_sync,
            in_forward_order=self._in_forward_order,
        )
        grads.before_first = weakref.WeakMethod(self._before_first_gradient)
        return grads

    @property
    def _notifies_join(self) -> bool:
        """Whether each step() takes part in the collective of Join: in one, and from then on."""
        return self._join_config is not None and self._join_config.enable

    @property
    def _are_reduced(self) -> bool:
        """Whether p.grad is the mean over ranks."""
        return self._config.grads_are_reduced is True

    @property
    def _are_partitioned(self) -> bool:
        """Whether gradients leave under backward."""
        return self._config.stage == 2 and self.communicator.world_size > 1

    # Wrappers of the model, and other changes

    _replaced_params: ReplacedParamsWarning | None = None
    _mesh: Any = None  # where torch has sharded the parameters: that of all ranks
    _had_modules = False  # whether any module held the parameters, as far as was looked
    _sees_gradients = False
    """Whether wrappers of the model were looked for since autograd has made gradients."""
    _modules: ModuleWatch | None = None  # until then: the modules that may hold the parameters

    def _find_owners(self) -> Owners:
        """Find out whether DistributedDataParallel averages the gradients. Local.

        Raises:
            TypeError: a parameter is a part of a sharded one.
            RuntimeError: stage 2 under a DistributedDataParallel.
            ValueError: an option of no use there; or only some gradients are averaged.
        """
        named = self._named_params()
        modules = None if self._modules is None else self._modules.modules()
        owners = Owners([param for _, param in named], modules)
        self._had_modules = self._had_modules or len(owners.roots) > 0
        sharded = owners.sharded_by()
        if sharded is not None:
            position, by = sharded
            raise TypeError(
                f"Parameter {named[position][0]} is a part of one that is sharded by {by}: the "
                "ranks hold different values, which would be overwritten. Use torch.optim for it; "
                "or train the model without that sharding, whose optimizer states shardfuse shards."
            )
        is_averaged = self._config.grads_are_reduced is not False and owners.is_averaged()
        if self._config.grads_are_reduced != "auto" or not is_averaged:
            return owners
        if self._config.stage == 2:
            raise RuntimeError(
                "The model is wrapped in DistributedDataParallel, which averages gradients that "
                "are sent during backward here (stage=2). Train the model without the wrapper, or "
                "use stage=1."
            )
        self._config = replace(self._config, grads_are_reduced=True)
        return owners

    def _named_params(self) -> Sequence[tuple[str, Tensor]]:
        names = [spec.name for spec in self.layout.specs]
        named = list(zip(names, self._params, strict=False))  # groups may have been changed since
        return named or setup.named(self.param_groups)

    def _are_in_no_module(self) -> bool:
        """Return whether modules held the parameters once, and none does now."""
        return self._had_modules and not Owners(self._params).roots

    def _before_first_gradient(self) -> bool:
        """Search for a wrapper at the first gradient; return whether the source was replaced.

        A wrapper is often built after the optimizer, but before the first backward.
        """
        if self._sees_gradients:
            return False
        try:
            return self._look_for_wrapper()
        except Exception as error:
            self.communicator.session.fail("backward()", error)

    def _look_for_wrapper(self) -> bool:
        """Search once for a wrapper, and for tensors that are not synced. Return as above."""
        self._sees_gradients = True
        if self.communicator.world_size == 1 or self._config.grads_are_reduced is True:
            return False
        owners, self._modules = self._find_owners(), None
        if self._are_reduced:
            self._leave_gradients_to_wrapper()
            return True
        if self._config.grads_are_reduced is False and owners.is_averaged():
            if self.communicator.world.rank == 0:
                warnings.warn(
                    "The model is wrapped in DistributedDataParallel, which averages the "
                    "gradients, and the optimizer averages them again "
                    "(grads_are_reduced=False), so everything is sent twice. Leave "
                    "grads_are_reduced out, or train the model without the wrapper.",
                    UserWarning,
                    stacklevel=stacklevel_of_caller(),
                )
        elif self._config.broadcast_buffers and self._module_buffers is None:
            kept = [*params_of_all(), *ddp.buffers_of_all()]
            self._rest_of_model.publish(owners.roots, kept)
        return False

    def _leave_gradients_to_wrapper(self) -> None:
        """Read averaged gradients from p.grad from now on; no bucket was sent yet."""
        old, self._grads = self._grads, self._make_grads()
        self._grads.control = old.control
        self._grads.num_made = old.num_made
        self._consistency.ddp_check = DdpCheck(self.communicator, are_reduced=True)
        self._module_buffers = None
        self._attach([state for state in self._flats if old.has(state.flat)])
        logger.info("%s: DistributedDataParallel averages the gradients", type(self).__name__)

    @own_layout()
    def broadcast_buffers(self, model: nn.Module) -> None:
        """Keep all tensors of ``model`` that are no parameters of this optimizer equal. Collective.

        The first rank's are copied to all ranks now, and its buffers in every step() from now on,
        unless ``ShardConfig(broadcast_buffers=False)``. A model that was passed in place of
        parameters needs no such call; one whose parameters were passed in groups does. Under
        DistributedDataParallel, which does this itself, nothing is done.

        Args:
            model: the module, or several in a torch.nn.ModuleList.

        Raises:
            TypeError: it is no module, or has a tensor that cannot be sent.
            ValueError: ranks have different models.
            RuntimeError: another rank failed, or DeepSpeed shards the parameters.
        """
        if self.communicator.world_size > 1 and not self._are_reduced:
            with self.communicator.session.region("broadcast_buffers()"):
                self._grads.flush()
                self._keep_equal(model, True)

    def _keep_equal(self, model: Any, broadcasts_now: bool) -> None:
        error: Exception | None = None
        sources: list[ddp.BufferRef] = []
        params: Sequence[tuple[str, Tensor]] = ()
        try:
            if not isinstance(model, nn.Module):
                raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
            model = unwrapped(model)
            sources = ddp.buffers_of(model)
            params = ddp.params_of(model, without=self._params)
        except Exception as failure:
            error = failure
        lines = ddp.describe(sources, params)
        agree(self.communicator, self._device, lines, error, to="broadcast the model's tensors")
        buffers = ModuleBuffers(self.communicator, self._device)
        buffers.add(sources)
        if broadcasts_now:
            buffers.launch()
            buffers.wait()
            ddp.broadcast(self.communicator, [param for _, param in params])
        if self._config.broadcast_buffers and sources:
            if self._module_buffers is None:
                self._module_buffers = ModuleBuffers(self.communicator, self._device)
            self._module_buffers.add(sources)

    def _rank_of_buffers(self) -> int:
        """Return the source rank of buffers: the first, under Join one that still trains."""
        if not self._notifies_join:
            return 0
        mine = -1 if self._is_shadow else self.communicator.world.rank
        last = torch.tensor([mine], dtype=torch.int32, device=self._device)
        self.communicator.world.all_reduce(last, "max").wait()
        return max(0, int(last))

    # Parameters

    @own_layout()
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at any time. Collective, like the constructor. See torch.optim.Optimizer."""
        if not self._built:
            super().add_param_group(self._read_group(setup.ordered(param_group)))
            return
        error: Exception | None = None
        first_group = len(self.param_groups)
        with self.communicator.session.region("add_param_group()"):
            self._grads.flush()
            try:
                super().add_param_group(self._read_group(setup.ordered(param_group)))
            except Exception as failure:
                error = failure
            try:
                self._adopt(first_group, error)
            except Exception:
                del self.param_groups[first_group:]
                raise

    def _read_params(self, params: Any) -> list[Any]:
        """Return parameters or groups. Errors are raised on all ranks."""
        return setup.as_list(params)

    def _read_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a group with torch's and the rule's keys. Errors are raised on all ranks."""
        return group

    def _adopt(self, first_group: int, error: Exception | None, lines: Sequence[str] = ()) -> None:
        """Lay out, move and share the parameters of the groups from ``first_group`` on.

        ``lines`` must be equal on all ranks, too.
        """
        entries: list[str] = []
        added: list[tuple[Tensor, Any]] = []
        layout, rank = self.layout, self.communicator.rank
        try:
            if error is None:
                added = setup.read(self.param_groups, first_group, self._rule)
                specs = [spec for _, spec in added]
                if first_group > 0 or self._mesh is not None:
                    entries += self._check_dtensors(added)
                if self._mesh is None:
                    layout = layout.extended(specs)
                else:
                    layout = replace(layout, specs=(*layout.specs, *specs))
                entries += setup.describe(
                    self.param_groups, first_group, self._rule, self._config, added
                )
                entries += lines
                if first_group > 0 and self._are_reduced and self._mesh is None:
                    self._find_owners()
                setup.warn(rank, self._rule, self.param_groups, first_group, layout.specs)
        except Exception as failure:
            error = failure
        agree(self.communicator, self._device, entries, error)
        if self._mesh is not None:
            dtensors.check_copies(added, self._mesh, self.communicator, self._device)
        num_old = len(self._flats)
        self.layout = layout
        first_param = len(self._params)
        self._params += [param for param, _ in added]
        if is_external_layout():
            return
        if self._mesh is not None:
            self._adopt_dtensors(added)
            return
        allocate = functools.partial(self._buffers.add, layout.flats[num_old:], self._device)
        try:
            buffers = allocate()
        except torch.OutOfMemoryError:
            buffers = list(move_through_host(self._params, layout.specs, allocate, first_param))
        for buffer in buffers:
            flat = buffer.flat
            members = [slot.param for slot in flat.slots]
            state = FlatState(
                buffer,
                [self._params[param] for param in members],
                [layout.specs[param] for param in members],
                fragments=layout.fragments(flat, rank),
                rank=rank,
                codec=self._param_codec.of(buffer, rank),
            )
            self._flats.append(state)
        before = self._checksums(num_old)
        if self._config.broadcast_params:
            for state in self._flats[num_old:]:
                self._gather.broadcast(state.params_buffer)
        self._gather.wait_all()
        if before != self._checksums(num_old):
            logger.warning(
                "Parameters had other values on rank 1 than on the first rank, whose values all "
                "ranks have now (broadcast_params). That is right if each rank has initialized "
                "the same model. If ranks hold different parts of a larger model (tensor or expert "
                "parallelism), pass the ranks with equal parts as process_group. If you pass the "
                "model in place of its parameters, this line is left out."
            )
        self._activate([state for state in self._flats[num_old:] if not state.flat.frozen])

    def _check_dtensors(self, added: Sequence[tuple[Tensor, Any]]) -> list[str]:
        """Check parameters that torch has sharded; return lines that ranks must share."""
        named = [(spec.name, param) for param, spec in added]
        if self._mesh is None:
            if dtensors.are_sharded_by_torch(named):
                raise ValueError(
                    f"Parameter {named[0][0]} is a DTensor, and those of the optimizer are not. "
                    "Give the new group an optimizer of its own."
                )
            return []
        of_all = setup.named(self.param_groups)
        if not dtensors.are_sharded_by_torch(of_all) or dtensors.main_mesh(of_all) != self._mesh:
            raise ValueError(
                f"The optimizer was built for the ranks of {self._mesh}, and a parameter of the "
                "new group is on other ranks. Give it an optimizer of its own."
            )
        return dtensors.describe(named)

    def _adopt_dtensors(self, added: Sequence[tuple[Tensor, Any]]) -> None:
        """Make states for parameters that torch has sharded, and lies out by itself."""
        if self._external is None:
            assert self._mesh is not None
            assert isinstance(self._grads, DTensorGrads)
            self._shards = DTensorShards(
                self._rule,
                self.param_groups,
                self._grads,
                first_rank=int(self._mesh.mesh.flatten()[0]),
                mesh_size=self._mesh.size(),
                device=self._device,
            )
            self._external = dtensors.DTensorLayout(self._shards, self._optimizer_state)
        assert isinstance(self._shards, DTensorShards)
        self._shards.add(added)
        self._drive()

    def _drive(self) -> None:
        """Build the driver over all shards."""
        self._driver = StepDriver(
            self._rule, self._shards, comm=self.communicator, kernels=self._kernels
        )
        shards = self._shards
        num_units = shards.num_units if isinstance(shards, DTensorShards) else 1
        self._kernels.choose(shards.local_numel, num_units=num_units)

    def _checksums(self, first: int) -> list[int]:
        """Return a checksum of each flat's parameters from ``first`` on, on rank 1 alone."""
        if self.communicator.world.rank != 1 or self._has_model:
            return []
        return [int(checksum(state.params_buffer.data)) for state in self._flats[first:]]

    def _activate(self, states: list[FlatState]) -> None:
        """Allocate gradients and states of flats; frozen ones have none until they are unfrozen."""
        for state in states:
            for index in state.groups:
                state.allocate(self._rule.initial_states(self.param_groups[index]), index)
        self._attach(states)  # last: until then they are unfrozen once more

    def _attach(self, states: Sequence[FlatState]) -> None:
        """Attach the gradients of these flats, and rebuild the driver over all."""
        members = [FlatParams(s.flat, s.params, s.specs, s.fragments) for s in states]
        self._grads.attach(members, self._device)
        self._active = [state for state in self._flats if self._grads.has(state.flat)]
        self._consistency.flats = self._active
        self._grads.control.before_send = self._consistency.sample_on_device
        self._shards = OwnShards(
            self._rule,
            self.param_groups,
            self._flats,
            grads=self._grads,
            gather=self._gather,
            row=self.layout.align,
        )
        self._drive()

    @own_layout()
    def rebind(self) -> None:
        """Move parameters that were re-allocated (``.data =``, ``.to()``) back into the buffers.

        Their present values are kept. Local: call it on every rank.

        Raises:
            TypeError: a parameter has another device, dtype or shape now; build a new optimizer.
        """
        rebind(self._flats)

    @own_layout()
    def memory_summary(self) -> MemorySummary:
        """Return the bytes held on this rank for parameters, gradients and states."""
        state_nbytes = self._shards.state_nbytes
        return MemorySummary(
            world_size=self.communicator.world_size,
            num_buckets=len(self.layout.buckets),
            param_nbytes=self._shards.param_nbytes,
            grad_nbytes=self._grads.nbytes,
            state_nbytes=state_nbytes,
            unsharded_state_nbytes=state_nbytes * self.communicator.world_size,
        )

    @untraced
    def accumulates_while(self, condition: Callable[[], bool]) -> None:
        """Act as no_sync(), for an engine that knows which backward is the last one of a step.

        Args:
            condition: asked under backward, on all ranks alike; gradients stay here while it holds.
        """
        self._grads.control.accumulates = condition

    @untraced
    def synchronize(self) -> None:
        """Wait for all parameters that step() has left in flight. Local.

        Reading a parameter waits for it, unless Python cannot see it (``overlap_param_sync``).
        """
        if self._stepped_by is None:
            self._gather.wait_deferred()

    # Gradients

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, to None or to zero."""
        self._clip_coefficient = None
        if self._stepped_by is not None:
            super().zero_grad(set_to_none)
            return
        self._grads.zero(set_to_none, absent=self._zero_is_absent)
        for state in self._flats:
            if not self._grads.has(state.flat):
                clear_grads(state.params, set_to_none)
        self._kernels.tidy()

    @untraced
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate without communication, as under DistributedDataParallel.

        Use it for all backwards of a step except the last. Under FSDP2, which sends gradients by
        itself, it has no effect: call ``model.set_requires_gradient_sync(False)``. Where buckets
        are sent during backward (``overlap_grad_sync``), a gradient that changes after that is sent
        again.
        """
        with self._grads.control.paused():
            yield

    # The step

    @untraced
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
        with self._ends_if_it_fails(), self.communicator.session.region("step()"):
            return self._step(closure)

    @contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        """Clean up after a step that fails, so that the next one starts as if it were the first."""
        try:
            yield
        except BaseException:
            # Masters and errors must match the parameters: the caller may load other values next.
            for state in self._flats:
                state.codec.rollback()
            # torch clears these after a successful step only; the next would unscale again.
            self.__dict__.pop("found_inf", None)
            self.__dict__.pop("grad_scale", None)
            raise

    def _before_step(self) -> None:
        """Refuse a graph capture; under Join, take part in its all-reduce.

        Raises:
            RuntimeError: a CUDA graph is being captured, or a scaler is used under Join.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"step() of {type(self).__name__} cannot be captured in a CUDA graph: the learning "
                "rate and the step count would stay those of the capture. Capture forward and "
                "backward alone, and call step() between replays."
            )
        self._check_scaler()
        if not self._notifies_join:
            return
        self._left_join = False
        if self.__dict__.get("found_inf") is not None:
            self._refuse_in_join("step() under a gradient scaler")
        if not self._is_shadow:
            self._notify_join()

    def _check_scaler(self) -> None:
        """Find out whether a scaler that is not ShardedGradScaler has unscaled p.grad.

        Raises:
            RuntimeError: at stage 2, where p.grad is empty; or it has unscaled gradients that were
                sent before and have been clipped.
        """
        is_told, self._has_unscaled = self._has_unscaled, False
        if is_told or self.__dict__.get("found_inf") is None:
            return
        if self._are_partitioned:
            raise RuntimeError(
                "This gradient scaler found no gradients: they are in the ranks' shards (stage=2). "
                "Use shardfuse.ShardedGradScaler, which reaches them, or stage=1."
            )
        if self.__dict__.get("grad_scale") is None:
            self._grads.note_unscaled(is_told=False)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._stepped_by is not None:
            self._stepped_by.step()
            return loss
        self._before_step()
        scaler = "without" if self.__dict__.get("found_inf") is None else "under"
        clipped = "without" if self._clip_coefficient is None else "with"
        self._begin(f"{scaler} a gradient scaler, {clipped} clipped gradients{self._watched}")
        self._refuse_changed("step()")
        self._consolidated = None
        self._is_fresh = False
        with record_function("shardfuse::step"):
            if self._module_buffers is not None:
                self._module_buffers.launch(self._rank_of_buffers())
            found_inf, scale = self.__dict__.get("found_inf"), UNSCALED
            if found_inf is not None:
                if not isinstance(found_inf, Tensor):
                    # torch's scaler gives the number 0 where this rank has no gradient at all.
                    found_inf = torch.tensor(float(found_inf), device=self._device)
                grad_scale = self.__dict__.get("grad_scale")
                scale = agree_on_scale(self.communicator, found_inf, grad_scale)
            self._was_skipped = scale.skip
            if scale.skip:
                self._overflows.note(self._shards.named_grads(), self._device)
            else:
                before_sum = scale.before_sum()
                if before_sum is not None:
                    self._grads.scale_before_sum(before_sum)
                self._gather.post_receives()
                after_sum = scale.after_sum(self._clip_coefficient)
                self._driver.run(after_sum, self._config.clip_grad_norm, self._watching(scale))
            self._grads.consume()
            if self._module_buffers is not None:
                self._module_buffers.wait()
            if not scale.skip:
                self._gather.defer()
                if not self._is_shadow:
                    self._gradless.note(
                        self._params,
                        self._grads.num_made,
                        call=self._num_calls.value,
                        has_updated=self._shards.has_updated,
                        name=type(self).__name__,
                        are_in_no_module=self._are_in_no_module,
                    )
        self._clip_coefficient = None
        self._after_step()
        return loss

    @property
    @own_layout("last_overflow")
    def last_overflow(self) -> Overflow | None:
        """(parameter name, rank) of the last skipped step, with ``report_overflow``; else None."""
        return self._overflows.last

    def _refuse_changed(self, then: str) -> None:
        """Raise RuntimeError if gradients changed since they were clipped; after _begin()."""
        if self._clip_coefficient is None or self._grads.phase is GradPhase.REDUCED:
            return
        self._clip_coefficient = None
        raise RuntimeError(
            f"{on_rank(self.communicator)}Gradients changed between clip_grad_norm() and {then}. "
            "Clip once, after the last backward() of the step and any unscale_(). To leave a step "
            "out, clear the gradients by the optimizer's zero_grad()."
        )

    @property
    def _watched(self) -> str:
        """The end of the entry that all ranks must share."""
        return "" if self._watch is None else ", watched"

    def _watching(self, scale: GradScale) -> StepNorms | None:
        """Return the recorder of norms for this step, if it is watched."""
        watch, self._watch = self._watch, None
        if watch is not None and scale.is_equal:
            watch.inverse = scale.inverse
        return watch

    def _after_step(self) -> None:
        """Consolidate if it is due by ``consolidate_every``; else warn once of state_dict()."""
        num_calls = self._num_calls.increment()
        every = self._config.consolidate_every
        if every and num_calls % every == 0:
            self.consolidate_state_dict(to=0)
        alone = self.communicator.world_size == 1 or self.communicator.world.rank != 0
        if self._external is not None:  # state_dict() needs no other rank
            return
        # DeepSpeed's engine replaces state_dict() on the instance.
        arranged = self._can_be_saved or every is not None or "state_dict" in self.__dict__
        if not (alone or arranged):
            warn_of_saves_on_one_rank(type(self).__name__)

    def _begin(self, *lines: str) -> None:
        """Check parameters, freeze gradients, and declare ``lines`` with all other entries."""
        if not self._sees_gradients:  # p.grad was set by hand, so no hook has run
            self._look_for_wrapper()
        unfrozen = self._check()
        self._grads.freeze()
        self._warn_of_replaced_ddp()
        self._grads.flush(is_frozen=True)
        self._shards.groups = self.param_groups  # which may have been set to another list
        grads = None if "found_inf" in self.__dict__ else self._shards.named_grads
        averaged = "elsewhere" if self._are_reduced else "here"
        lines = (*lines, f"gradients are averaged {averaged}", *self._shards.entries())
        self._consistency.declare(lines, self.param_groups, self._active, unfrozen, grads)
        if unfrozen:
            if self._are_reduced:  # by a wrapper that may not know of these
                self._find_owners()
            self._activate(unfrozen)
            self._grads.freeze()

    def _warn_of_replaced_ddp(self) -> None:
        """Warn of unsynced tensors and of edited gradients; after freeze()."""
        self._rest_of_model.warn()
        if self._replaced_params is not None:
            self._replaced_params.warn()
        if not self._written_grads.is_over:  # unscale_() of a scaler does not change versions
            self._written_grads.note(self._grads.written())

    def _check(self) -> list[FlatState]:
        """Check parameters and hyper-parameters; return flats that begin to train. Local."""
        self._gather.wait_all()
        self._shards.check(self.param_groups, self._params, self._error_prefix)
        hyper_params, where = self._consistency.hyper_params, f"{self._on_rank}param_groups"
        for index, values in hyper_params.changes(self.param_groups).items():
            group, changed = self.param_groups[index], values.keys() - {"step"}  # which we count
            if changed:  # a check reads lr, also on a device
                check_group(self._rule, group, f"{where}[{index}]", changed)
            if not changed <= SCHEDULED:  # no state depends on that
                self._shards.allocate(index)
            # Last: after an error here, the next step does it.
            hyper_params.accept(index, group, values)
        if isinstance(self._shards, DTensorShards):
            if self._shards.activate():
                self._drive()
            return []
        if len(self._active) == len(self._flats):
            return []
        return [s for s in self._flats if s not in self._active and s.is_trained]
