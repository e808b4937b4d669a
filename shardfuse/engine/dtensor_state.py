"""States of parameters that torch has sharded, in torch.optim's format: DTensors, placed alike.

So torch's own tools gather, save and reshard them: get_optimizer_state_dict() and
torch.distributed.checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardfuse.engine import torch_state
from shardfuse.engine.dtensors import DTensorShards, LocalShard, is_dtensor, local_of, local_part
from shardfuse.engine.torch_state import Groups, OptimizerState, ParamState, refuse_replacement


class DTensorStates(Mapping[Tensor, ParamState]):
    """{parameter: its states} of all trained parameters; DTensors that alias the optimizer's own.

    As of StateView, there is an entry before the first step, too. ``step`` is a () fp32 tensor on
    the CPU, as torch.optim has it, and a copy.

    Args:
        shards: of the optimizer.
    """

    def __init__(self, shards: DTensorShards) -> None:
        self._shards = shards
        self._made: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}  # memory, DTensor
        self._numbers: dict[int, int] = {}

    def __getitem__(self, param: Tensor) -> ParamState:
        """Return the states of ``param``; empty if it is frozen.

        Raises:
            KeyError: it is not a parameter of this optimizer.
        """
        if len(self._numbers) != len(self._shards.shards):
            self._numbers = {id(shard.param): shard.number for shard in self._shards.shards}
        if id(param) not in self._numbers:
            raise KeyError("not a parameter of this optimizer")
        return self.of(self._shards.shards[self._numbers[id(param)]])

    def of(self, shard: LocalShard) -> ParamState:
        """Return the states of a parameter by its shard."""
        values: dict[str, Any] = {}
        if self._shards.is_trained(shard.number) and self._shards.has_step(shard):
            values["step"] = torch.tensor(float(shard.step))
        for name, local in self._shards.state_of(shard.number).items():
            memory, made = self._made.get((shard.number, name), (None, None))
            if made is None or memory is None or memory.data_ptr() != local.data_ptr():
                made = _dtensor_like(shard.param, local)
                self._made[shard.number, name] = local, made
            values[name] = made
        return ParamState(values)

    __setitem__ = __delitem__ = clear = refuse_replacement

    def __iter__(self) -> Iterator[Tensor]:
        trained = (s for s in self._shards.shards if self._shards.is_trained(s.number))
        return (shard.param for shard in trained)

    def __len__(self) -> int:
        return sum(self._shards.is_trained(shard.number) for shard in self._shards.shards)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"DTensorStates({len(self)} parameters)"


def _dtensor_like(param: Any, local: Tensor) -> Tensor:
    """Return a DTensor with the placement of ``param``, over the memory of ``local``."""
    with torch.no_grad():
        made: Tensor = type(param).from_local(
            local,
            param.device_mesh,
            param.placements,
            run_check=False,
            shape=param.shape,
            stride=param.stride(),
        )
    return made


def collect(states: DTensorStates, shards: DTensorShards, opt: OptimizerState) -> dict[str, Any]:
    """Return torch's state dict. Large tensors alias the states, as torch's do. Local.

    Small ones are copies: several lie in one buffer, and torch.distributed.checkpoint.async_save()
    takes a DTensor whose memory begins inside of a buffer for a plain tensor.
    """
    trained = [shard for shard in shards.shards if shards.is_trained(shard.number)]
    entries = {shard.number: dict(states.of(shard)) for shard in trained}
    for shard in trained:
        for name, local in shards.state_of(shard.number).items():
            if local.nbytes != local.untyped_storage().nbytes():
                entries[shard.number][name] = _dtensor_like(shard.param, local.clone())
    groups = torch_state.counted_groups(opt.groups, opt.rule)
    # set_optimizer_state_dict() of whole states needs every key that torch's own class has.
    keys = _torch_defaults(type(opt.rule).__name__.removesuffix("Rule"))
    return {"state": entries, "param_groups": [{**keys, **group} for group in groups]}


@functools.cache
def _torch_defaults(name: str) -> dict[str, Any]:
    """Return the keys of a group of torch's optimizer of this name; none if there is none."""
    cls = getattr(torch.optim, name, None)
    return {} if cls is None else dict(cls([torch.zeros(1, 1)]).defaults)


def prepared(
    shards: DTensorShards, opt: OptimizerState, state_dict: Mapping[str, Any]
) -> Callable[[], None]:
    """Check a state dict; return the function that loads it, and raises no error. Local.

    States are DTensors with the parameter's mesh and placements, or whole tensors.

    Raises:
        ValueError: another shape or placement, groups that do not fit, a state missing or unknown.
        TypeError: an entry has another type.
    """
    groups, rule = opt.groups, opt.rule
    saved = torch_state.saved_groups(state_dict)
    merged = torch_state.merged_groups(groups, saved, rule)
    torch_state.check_names(saved)
    torch_state.check_order(groups, saved)
    entries = torch_state.saved_entries(state_dict, saved, [s.spec.name for s in shards.shards])
    counts = {}
    for shard in shards.shards:
        spec, entry = shard.spec, entries[shard.number]
        own = saved[spec.group]
        group = merged[spec.group]
        if entry and "step" not in entry and "step" in own and rule.has_step(group):
            entry["step"] = own["step"]  # apex counts there
        may_be_initial = not rule.counts_steps and "step" not in entry
        for name, value in [*entry.items()]:
            if name != "step" and isinstance(value, Tensor):
                entry[name] = _local(shard, name, value)
                if may_be_initial and _is_initial(value, rule.initial(name)):
                    del entry[name]
        local_spec = replace(spec, shape=shard.shape)
        counts[shard.number] = torch_state.checked_step(local_spec, entry, rule, group)
    return functools.partial(_load, shards, opt, merged, saved, entries, counts)


def _is_initial(value: Tensor, initial: float) -> bool:
    """Return whether a state without a step has had no update.

    torch.distributed.checkpoint needs an entry of every parameter, so these are saved, too: as -0.0
    alone, which no update leaves unless all gradients were. A part without elements tells nothing.
    """
    own = local_of(value) if is_dtensor(value) else value
    return initial == 0 and bool(own.numel()) and bool(((own == 0) & own.signbit()).all())


def _local(shard: LocalShard, name: str, value: Tensor) -> Tensor:
    """Return this rank's part of a saved state."""
    what = f"State {name} of {shard.spec.name}"
    if tuple(value.shape) != shard.spec.shape:
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, the parameter has {shard.spec.shape}."
        )
    if not is_dtensor(value):
        return local_part(value, shard.placements, shard.mesh) if value.numel() else value
    held: Any = value
    if tuple(held.placements) != shard.placements or held.device_mesh != shard.mesh:
        raise ValueError(
            f"{what} is placed as {held.placements} over {held.device_mesh}, the parameter as "
            f"{shard.placements} over {shard.mesh}. Load through torch.distributed.checkpoint, "
            "which reshards, or give what its full_tensor() returns."
        )
    return local_of(held)


def _load(
    shards: DTensorShards,
    opt: OptimizerState,
    merged: Groups,
    saved: Sequence[Mapping[str, Any]],
    entries: Mapping[int, Mapping[str, Any]],
    counts: Mapping[int, int],
) -> None:
    torch_state.set_groups(opt, merged, saved, counts)
    rule = opt.rule
    for index, group in enumerate(opt.groups):
        members = [s for s in shards.shards if s.spec.group == index]
        held = {name for shard in members for name in entries[shard.number]}
        optional = sorted(held & {*rule.optional_states})
        shards.set_states(index, [*rule.state_names(group), *optional])
    for shard in shards.shards:
        shard.step = counts[shard.number]
        for name, own in shards.state_of(shard.number).items():
            value = entries[shard.number].get(name)
            if value is not None:
                own.copy_(value)
            elif name in shards.masters:
                own.copy_(shard.tensor)
            else:
                own.fill_(rule.initial(name))
