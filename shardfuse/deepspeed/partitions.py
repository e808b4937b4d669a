"""ZeRO stages 1 and 2: our optimizers over partitions that DeepSpeed makes.

DeepSpeed replaces each group's parameters by one flat fp32 partition, and calls step() once per
group. ``optimizer.state`` has the states in torch's format, each in the partition's shape, as
DeepSpeed's checkpoints expect them, also universal ones.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardfuse.comm import Communicator, communicator_for
from shardfuse.engine import torch_state
from shardfuse.engine.external import GroupLayout, PartitionShards, PartitionSlice
from shardfuse.engine.kernels import Kernels
from shardfuse.engine.step import StepDriver
from shardfuse.engine.torch_state import merged_groups, packed_groups
from shardfuse.optim import ShardedOptimizer
from shardfuse.optim.backend import attach_backend
from shardfuse.rules.base import check_group

logger = logging.getLogger("shardfuse")


class _Partition(NamedTuple):
    """This rank's part of a group."""

    comm: Communicator  # of the ranks that share the group
    shards: PartitionShards
    driver: StepDriver
    positions: list[int]  # of the group's parameters in the optimizer's layout


_COMMUNICATION_OPTIONS = (
    "grad_sync_dtype",
    "grad_sync_bits",
    "param_sync_dtype",
    "param_sync_bits",
    "mesh",
)
"""Options of the communication, which DeepSpeed does at these stages."""


class DeepSpeedBackend:
    """The ExternalBackend of an optimizer over DeepSpeed's partitions.

    A parameter without a gradient counts as one with gradient zero, which DeepSpeed fills in.

    Args:
        optimizer: has read its parameters; this constructor attaches ``self`` to it.

    Raises:
        ValueError: it was stepped, has partitions already, is watched, clips by itself, or has
            options of the communication, which DeepSpeed does.
    """

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        if isinstance(optimizer._external, DeepSpeedBackend):
            raise ValueError(
                f"This {type(optimizer).__name__} is driven by another DeepSpeed engine. Build a "
                "new one for this engine."
            )
        if optimizer._config.clip_grad_norm is not None:
            raise ValueError(
                'sharding={"clip_grad_norm": ...} is for loops without DeepSpeed, whose engine '
                'clips at ZeRO stages 1 and 2: write "gradient_clipping" in its configuration.'
            )
        sent = [
            name for name in _COMMUNICATION_OPTIONS if getattr(optimizer._config, name) is not None
        ]
        sent += ["stage"] if optimizer._config.stage != 1 else []
        if sent:
            raise ValueError(
                f'sharding={{"{sent[0]}": ...}} is for what shardfuse sends. At ZeRO stages 1 and '
                '2 DeepSpeed sends: remove the option, and see "communication_data_type"; or set '
                '"zero_optimization": {"stage": 0}.'
            )
        if optimizer._watch is not None:
            raise ValueError(
                "watch_step() was called for a step that DeepSpeed makes: at ZeRO stages 1 and 2 "
                'it records nothing. Leave it out, or set "zero_optimization": {"stage": 0}.'
            )
        flats = optimizer._flats
        if any(state.step_of(slot.param) for state in flats for slot in state.flat.slots):
            raise ValueError(
                f"This {type(optimizer).__name__} was stepped already. Pass a fresh one to "
                "deepspeed.initialize(), and load its state through engine.load_checkpoint()."
            )
        self._optimizer = weakref.ref(optimizer)
        self._partitions: dict[int, _Partition] = {}
        # Updates by step(). The ``step`` of a state differs once DeepSpeed has loaded it.
        self._counts: dict[Tensor, int] = {}
        self.state: Any = defaultdict(dict)
        self.ratio: Tensor | None = None
        self._num_params = len(optimizer.layout.specs)
        attach_backend(optimizer, self)

    def step(self) -> None:
        """Update the partitions in the groups. Collective if the rule needs norms.

        Raises:
            RuntimeError: the tensor in a group is no partition of bind().
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        for group in optimizer.param_groups:
            flat = group["params"][0]
            if id(flat) not in self._partitions or flat.grad is None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} got a flat partition whose tensors it does not "
                    "know, or no gradient for it. Build it through deepspeed.initialize() "
                    "with shardfuse.deepspeed imported, and leave the steps to the engine."
                )
            with self._partitions[id(flat)].comm.session.region("step()"):
                self._update(optimizer, flat, group)

    def _update(self, optimizer: ShardedOptimizer, flat: Tensor, group: dict[str, Any]) -> None:
        rule, state, own = optimizer._rule, self.state[flat], self._partitions[id(flat)]
        index = next(i for i, own in enumerate(optimizer.param_groups) if own is group)
        check_group(rule, group, f"param_groups[{index}]")
        counts = rule.has_step(group)
        is_known = not counts or state.get("step", 0) == self._counts.get(flat, 0)
        for name, value in rule.initial_states(group).items():
            if name not in state:
                if not is_known:
                    raise ValueError(
                        f"The loaded checkpoint has no {name} for {type(optimizer).__name__}. "
                        "Universal checkpoints of DeepSpeed leave out all states but exp_avg and "
                        "exp_avg_sq: resume from the checkpoint that this one was made of."
                    )
                state[name] = torch.full_like(flat, value, requires_grad=False)
                if not counts:
                    state["step"] = 0  # the user has set a momentum: this is its first update
        step = int(state.get("step", 0)) + 1
        own.driver.ratio = None
        own.shards.set_step(group, [state[name] for name in rule.state_names(group)], step)
        own.driver.run(None, None)
        state["step"] = self._counts[flat] = step
        if rule.counts_in_groups:
            group["step"] = step
        if self.ratio is None:
            self.ratio = torch.ones(self._num_params, device=flat.device)
        self.ratio[own.positions] = 1.0 if own.driver.ratio is None else own.driver.ratio

    def collect(self) -> dict[str, Any]:
        """Return this rank's partitions of the states, in torch's format. Local."""
        optimizer = self._optimizer()
        assert optimizer is not None
        flats = [flat for group in optimizer.param_groups for flat in group["params"]]
        state = {index: self.state[flat] for index, flat in enumerate(flats) if flat in self.state}
        return {"state": state, "param_groups": packed_groups(optimizer.param_groups)}

    def prepared(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a result of collect() on this rank; return the function that loads it. Local.

        Raises:
            ValueError: a hyper-parameter out of range, no step, or states of another partition's
                size.
            TypeError: an entry has another type.
        """
        optimizer = self._optimizer()
        assert optimizer is not None
        groups, rule = optimizer.param_groups, optimizer._rule
        saved = torch_state.saved_groups(state_dict)
        merged = merged_groups(groups, saved, rule)
        names = [f"the partition of group {index}" for index in range(len(groups))]
        entries = [*torch_state.saved_entries(state_dict, saved, names).values()]
        for name, group, new, own, entry in zip(names, groups, merged, saved, entries, strict=True):
            torch_state.check_known(rule, name, entry, {*rule.state_names(new)})
            _check_shapes(entry, group["params"][0])
            for key in entry.keys() - {"step"}:
                if entry[key] is None:
                    del entry[key]
                else:
                    shape = group["params"][0].shape
                    torch_state.check_tensor(key, entry[key], name, shape, rule)
            if entry and "step" not in entry and rule.has_step(new):
                if "step" not in own:
                    raise ValueError("loaded state dict has no step, neither of states nor groups.")
                entry["step"] = own["step"]  # apex counts there
            if "step" in entry:
                entry["step"] = torch_state.as_count(entry["step"], f"step of {name}")
            lacking = [key for key in rule.state_names(new) if key not in entry]
            if lacking and entry.get("step", 0) > 0:
                raise ValueError(
                    f"loaded state dict has no {lacking[0]} for {name}; it is of another optimizer "
                    "or of other options."
                )
        return functools.partial(self._load, groups, merged, entries)

    def _load(
        self,
        groups: list[dict[str, Any]],
        merged: list[dict[str, Any]],
        entries: list[dict[str, Any]],
    ) -> None:
        """Load a state dict that prepared() has checked."""
        for group, new, entry in zip(groups, merged, entries, strict=True):
            group.update(new)
            flat = group["params"][0]
            self.state[flat] = {
                name: value.to(flat.device, flat.dtype, copy=True)
                if isinstance(value, Tensor)
                else value
                for name, value in entry.items()
            }
            self._counts[flat] = entry.get("step", 0)

    def check_available(self, what: str) -> NoReturn:
        """Raise RuntimeError: DeepSpeed does ``what`` itself, or ``what`` needs flat buffers."""
        raise RuntimeError(
            f"{what} is not available while DeepSpeed shards (ZeRO stages 1 and 2). Ask the "
            'engine, or set "zero_optimization": {"stage": 0}.'
        )


def _check_shapes(entry: Mapping[str, Any], flat: Tensor) -> None:
    """Raise ValueError unless all states of ``entry`` have the shape of the partition ``flat``."""
    for name, value in entry.items():
        if isinstance(value, Tensor) and name != "step" and value.shape != flat.shape:
            raise ValueError(
                f"State {name} has shape {tuple(value.shape)}, this rank's partition has "
                f"{tuple(flat.shape)}. Load what this rank has saved at the same number of ranks, "
                "or a checkpoint through engine.load_checkpoint()."
            )


def bind(zero: Any, optimizer: ShardedOptimizer, own: DeepSpeedBackend) -> None:
    """Register with ``own`` every partition that ``zero`` has put in the groups of ``optimizer``.

    Args:
        zero: DeepSpeed's optimizer of stage 1 or 2, which wraps ``optimizer``.

    Raises:
        RuntimeError: the partitions contradict zero's tables.
    """
    rule = optimizer._rule
    index_of = {param: index for index, param in enumerate(optimizer._params)}
    square = functools.partial(_global_square, weakref.ref(zero))
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        members = zero.round_robin_bit16_groups[number]
        positions = [index_of[param] for param in members]
        specs = [optimizer.layout.specs[position] for position in positions]
        policies = [spec.policy for spec in specs]
        whole = zero.bit16_groups_flat[number]
        group, collectives = zero.real_dp_process_group[number], optimizer._config.collectives
        comm = communicator_for(group, whole.device, collectives)
        _check_partition(zero, number)
        extents = _extents(members, whole, number)
        slices_of = functools.partial(_slices, extents, policies, zero.partition_size[number])
        slices = slices_of(comm.rank)
        shards = PartitionShards(
            rule,
            flat,
            slices,
            policies=policies,
            group=optimizer.param_groups[number],
            layout=GroupLayout(specs, comm.rank, slices_of),
            global_square=square,
        )
        kernels = Kernels(rule, optimizer._config.kernel, flat.device)
        kernels.choose(flat.numel())
        engine = StepDriver(rule, shards, comm=comm, kernels=kernels, comm_device=whole.device)
        own._partitions[id(flat)] = _Partition(comm, shards, engine, positions)
        _warn_of_other_map(members, slices, number)
    optimizer._params = []  # keep no parameter alive: DeepSpeed has replaced them
    _unscale_by_scale_of_backward(zero)


def _unscale_by_scale_of_backward(zero: Any) -> None:
    """Make ``zero`` divide gradients by the loss scale of their backward.

    In 0.19.8, a step in which a dynamic scale grows divides by the new scale: half the gradient.
    """
    cls, zero_ref = type(zero), weakref.ref(zero)
    scale = zero.loss_scale

    def update_scale(has_overflow: bool = False) -> None:
        nonlocal scale
        own = zero_ref()
        assert own is not None
        scale = own.loss_scale
        cls._update_scale(own, has_overflow)

    def unscale_and_clip_grads(grads: Any, total_norm: Any) -> None:
        own = zero_ref()
        assert own is not None
        new, own.loss_scale = own.loss_scale, scale
        try:
            cls.unscale_and_clip_grads(own, grads, total_norm)
        finally:
            own.loss_scale = new

    zero._update_scale = update_scale
    zero.unscale_and_clip_grads = unscale_and_clip_grads


def _check_partition(zero: Any, number: int) -> None:
    """Raise RuntimeError unless the partition of group ``number`` is fp32 and as large as told."""
    flat, size = zero.single_partition_of_fp32_groups[number], zero.partition_size[number]
    if flat.dtype != torch.float32 or flat.numel() != size or not flat.is_contiguous():
        raise RuntimeError(
            f"DeepSpeed's partition of group {number} is {tuple(flat.shape)} {flat.dtype}, not "
            f"({size},) torch.float32. Remove bf16_master_weights_and_grads and "
            "fp16_master_weights_and_grads."
        )


def _extents(members: Sequence[Tensor], whole: Tensor, number: int) -> list[tuple[int, int]]:
    """Return (start, stop) in ``whole`` of each parameter of group ``number``."""
    extents: list[tuple[int, int]] = []
    end = 0
    for position, param in enumerate(members):
        # DeepSpeed has made the parameters views of the flat.
        nbytes = param.data_ptr() - whole.data_ptr()
        start = nbytes // whole.element_size() if param.numel() else end
        if start < end or start + param.numel() > whole.numel():
            raise RuntimeError(
                f"Parameter {position} of group {number} does not lie in DeepSpeed's "
                "bit16_groups_flat after the one before, so its norm is unknown. Report this "
                "with the DeepSpeed version."
            )
        end = start + param.numel()
        extents.append((start, end))
    return extents


def _slices(
    extents: Sequence[tuple[int, int]], policies: Sequence[str], size: int, rank: int
) -> list[PartitionSlice]:
    """Return the slices of the partition of ``rank``, of ``size`` elements."""
    first, last = rank * size, (rank + 1) * size
    slices = []
    for position, (begin, end) in enumerate(extents):
        start, stop = max(begin, first), min(end, last)
        if stop > start:
            place = start - first, stop - start
            slices.append(PartitionSlice(position, *place, policies[position], start - begin))
    return slices


def _warn_of_other_map(members: list[Tensor], slices: list[PartitionSlice], number: int) -> None:
    """Warn if DeepSpeed's map of tensors, for universal checkpoints, differs from ``slices``.

    In 0.19.8 it does under round_robin_gradients: the map has the order of registration.
    """
    for segment in slices:
        mapping = getattr(members[segment.param], "_hp_mapping", None)
        address = None if mapping is None else mapping.get_hp_fragment_address()
        if address is None or (address.start, address.numel) != (segment.start, segment.numel):
            logger.warning(
                "Do not convert checkpoints of this run to universal ones: DeepSpeed's map of "
                "group %d names other tensors than the partition holds. Remove "
                "round_robin_gradients.",
                number,
            )
            return


def _global_square(zero_ref: weakref.ref[Any]) -> Tensor:
    """Return the squared norm () of all gradients in step(), which DeepSpeed has clipped."""
    zero = zero_ref()
    assert zero is not None
    norm = torch.as_tensor(zero._global_grad_norm, dtype=torch.float32)
    if zero.clip_grad > 0:
        norm = norm / ((norm + 1e-6) / zero.clip_grad).clamp(min=1.0)
    return norm.square()
