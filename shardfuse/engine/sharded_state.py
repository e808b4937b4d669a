"""The state of one rank as fragments: for torch.distributed.checkpoint, and for our checkpoints."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.codecs import ERROR, MASTER, MASTER_DTYPE
from shardfuse.comm import Communicator
from shardfuse.engine.params import FlatState
from shardfuse.engine.torch_state import (
    Groups,
    OptimizerState,
    agreed_steps,
    arenas_of,
    as_count,
    counted_groups,
    fragment_tensors,
    merged_groups,
    saved_groups,
    set_groups,
)
from shardfuse.fragments import FragmentTensor, Piece, flat_pieces, shaped_pieces
from shardfuse.layout import Bucket, ParamSpec

logger = logging.getLogger("shardfuse")


def sharded(opt: OptimizerState) -> dict[str, Any]:
    """Return a flat dict for torch.distributed.checkpoint whose tensors alias this rank's state.

    Collective (one small all-reduce). Keys are ``state.<param name>.<state>``; steps are tensors.
    """
    result: dict[str, Any] = dict(aliases(opt.flats))
    for spec, count in zip(opt.layout.specs, agreed_steps(opt), strict=True):
        result[f"state.{spec.name}.step"] = torch.tensor(count)
    result["param_groups"] = groups_to_save(opt)
    return result


def groups_to_save(opt: OptimizerState) -> Groups:
    """Return the groups as they are saved: of tensors with one element, and of numpy, the number.

    torch.distributed.checkpoint does not load a number where a tensor was saved, and numpy's are
    not plain data.
    """
    return [
        {key: _number(value) for key, value in group.items()}
        for group in counted_groups(opt.groups, opt.rule)
    ]


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_number, value))  # betas
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if is_one else plain_number(value)


def plain_number(value: Any) -> Any:
    """Return one of numpy's numbers as Python's, which is loaded without trust; else ``value``."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy else value


def _as_held(new: Any, opt: Any) -> Any:
    """Return ``new`` as a tensor like ``held``, if that is one with one element."""
    is_tensor = isinstance(opt, Tensor) and opt.numel() == 1
    return torch.full_like(opt, _number(new)) if is_tensor else new


def aliases(
    flats: Sequence[FlatState], has: Callable[[Bucket], bool] = lambda bucket: True
) -> Iterator[tuple[str, FragmentTensor]]:
    """Yield (key in sharded(), this rank's state itself)."""
    for state in flats:
        for name, arena in arenas_of(state).items():
            tensors = fragment_tensors(state, arena.view, flat_pieces, has=has)
            for spec, tensor in zip(state.specs, tensors, strict=True):
                if spec.numel:
                    yield f"state.{spec.name}.{name}", tensor


def load_sharded(opt: OptimizerState, state_dict: Mapping[str, Any]) -> None:
    """Take over steps, hyper-parameters, and tensors that were not filled in place when loaded.

    Raises:
        ValueError: groups that do not fit; states of parameters that are frozen here; a state is
            missing or is not of this rank's fragments. Nothing is loaded then, beyond what was
            filled in place.
    """
    flats = opt.flats
    merged, counts = check(opt, state_dict)
    own = dict(aliases(flats))
    for key, tensor in own.items():
        saved = state_dict.get(key)
        if not isinstance(saved, FragmentTensor) or not tensor.has_pieces_of(saved):
            raise ValueError(
                f"{key} is missing, or is not of this rank's sharded_state_dict(). Load into the "
                "dict that this optimizer returns, with torch.distributed.checkpoint.load()."
            )
    for key, tensor in own.items():
        tensor.copy_(state_dict[key])
    set_groups(opt, merged, state_dict["param_groups"], counts)
    for state in flats:
        state.set_steps({slot.param: counts[slot.param] for slot in state.flat.slots})


def check(opt: OptimizerState, state_dict: Mapping[str, Any]) -> tuple[Groups, dict[int, int]]:
    """Return the merged groups, and the steps, of a state dict of whose tensors only steps count.

    Raises:
        ValueError: groups that do not fit, or have other parameters; states of parameters that are
            frozen here.
    """
    saved = saved_groups(state_dict)
    _check_members(opt.groups, saved)
    specs = enumerate(opt.layout.specs)
    merged = [
        {key: _as_held(value, group.get(key)) for key, value in new.items()}
        for new, group in zip(
            merged_groups(opt.groups, saved, opt.rule),
            opt.groups,
            strict=True,
        )
    ]
    counts = {param: _count(state_dict, spec.name) for param, spec in specs}
    _check_room(opt, merged, counts)
    return merged, counts


def _count(state_dict: Mapping[str, Any], name: str) -> int:
    key = f"state.{name}.step"
    if key not in state_dict:
        raise ValueError(f"The loaded state dict has no {key}. Load what sharded_state_dict() has.")
    return as_count(state_dict[key], key)


def _check_members(groups: Groups, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a parameter would get the hyper-parameters of another group.

    States are saved by name, groups by number.
    """
    for index, (group, other) in enumerate(zip(groups, saved, strict=False)):
        moved = sorted(set(other.get("param_names", ())) - set(group.get("param_names", ())))
        if moved and "param_names" in group:
            raise ValueError(
                f"{moved[0]} was in group {index} when it was saved, and is not there now: it "
                "would train with the hyper-parameters of another group. Build the optimizer with "
                "the groups, and the order of groups, that were saved."
            )


def _check_room(opt: OptimizerState, groups: Groups, steps: Mapping[int, int]) -> None:
    """Raise ValueError if an updated parameter has elements and lacks a state or master here.

    What the optimizer has no place for was not read from the checkpoint. ``groups`` are as they
    will be once it is loaded.
    """
    for state in opt.flats:
        names = opt.rule.state_names(groups[state.flat.group])
        lacking = [name for name in names if name not in state.states]
        if state.codec.arena is None and state.codec.key is not None:
            lacking.append(state.codec.key)
        trained = [s.param for s in state.flat.slots if s.numel and steps[s.param] > 0]
        if not lacking or not trained:
            continue
        name = opt.layout.specs[trained[0]].name
        remedy = (
            f"{name} was frozen. Build while it requires a gradient, load, then freeze it."
            if state.flat.frozen
            else "the hyper-parameters were others. Build it with those of the checkpoint."
        )
        raise ValueError(
            f"The checkpoint is of an optimizer that has trained {name}, and this one has no place "
            f"for its {lacking[0]}: when this one was built, {remedy}"
        )


# For shardfuse.checkpoint


class Master(NamedTuple):
    """Where this rank has its part of a parameter in fp32."""

    param: Tensor
    key: str  # of a master in to_fill()
    is_kept: bool  # beside the parameter, which is or travels in low precision
    place: FragmentTensor  # of the parameter's shape where it is kept, else (numel,)
    own: FragmentTensor  # this rank's part of the parameter itself


class LocalCheckpointState:
    """An optimizer's state as shardfuse.checkpoint has it; its tensors alias the state.

    Keys are those of sharded_state_dict(). But every value is on one rank alone: each fragment on
    its owner, and the step of a parameter on the owner of its first fragment, because who updates a
    part of a parameter has counted its updates. Of several copies, in a mesh, one has each bucket.

    Args:
        opt: the optimizer.
        take: its load_sharded_state_dict().
    """

    def __init__(self, opt: OptimizerState, take: Callable[[Mapping[str, Any]], None]) -> None:
        self._optimizer_state = opt
        self._take = take

    @property
    def comm(self) -> Communicator:
        """All ranks that share the optimizer, copies included."""
        return self._optimizer_state.comm.world

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        flats = self._optimizer_state.flats
        return flats[0].device if flats else torch.device("cpu")

    @property
    def specs(self) -> Sequence[ParamSpec]:
        """All parameters in the order of their numbers."""
        return self._optimizer_state.layout.specs

    @property
    def rule(self) -> str:
        """By which rule the states are updated."""
        return self._optimizer_state.rule.describe()

    def to_write(self) -> dict[str, Any]:
        """Return what this rank writes of the optimizer. Local."""
        opt = self._optimizer_state
        result: dict[str, Any] = dict(aliases(opt.flats, self._writes))
        for state in opt.flats:
            buckets = [bucket for bucket in state.flat.buckets if self._writes(bucket)]
            owned = [f for bucket in buckets for f in state.fragments[bucket.index]]
            first = {fragment.param for fragment in owned if fragment.param_start == 0}
            for slot in state.flat.slots:
                is_mine = slot.param in first or (not slot.numel and self.comm.rank == 0)
                step = torch.tensor(state.step_of(slot.param))
                pieces = [Piece((), step)] if is_mine else []
                key = f"state.{opt.layout.specs[slot.param].name}.step"
                result[key] = FragmentTensor((), step.dtype, step.device, pieces)
        result["param_groups"] = groups_to_save(opt)
        return result

    def to_fill(self) -> dict[str, Any]:
        """Return what take() takes once it is filled. Local."""
        result: dict[str, Any] = dict(aliases(self._optimizer_state.flats))
        for spec in self._optimizer_state.layout.specs:
            result[f"state.{spec.name}.step"] = torch.tensor(0)
        result["param_groups"] = groups_to_save(self._optimizer_state)
        return result

    def params(self, *, to_write: bool) -> list[tuple[Tensor, FragmentTensor]]:
        """Return (parameter, this rank's part of it), empty parameters left out. Local.

        What is to be written is on one rank alone; what is to be filled is all of this rank's part,
        and reaches the others by publish().
        """
        has = self._writes if to_write else _always
        return [pair for state in self._optimizer_state.flats for pair in _param_parts(state, has)]

    def masters(self) -> list[Master]:
        """Return where parameters are in fp32, empty ones and frozen low precision left out."""
        found = []
        for state in self._optimizer_state.flats:
            arena = arenas_of(state).get(MASTER)
            if arena is not None:
                places = fragment_tensors(state, arena.view, shaped_pieces)
            elif state.params_buffer.data.dtype == MASTER_DTYPE:
                places = fragment_tensors(state, functools.partial(_shard, state), flat_pieces)
            else:
                continue
            names = [f"state.{spec.name}.{MASTER}" for spec in state.specs if spec.numel]
            kept = [place for place in places if place.numel()]
            for name, place, pair in zip(names, kept, _param_parts(state, _always), strict=True):
                found.append(Master(pair[0], name, arena is not None, place, pair[1]))
        return found

    def geometry(self) -> list[dict[str, Any]]:
        """Return by which integers all ranks' parts are cut, flat by flat. Local.

        {"slots": {parameter: start}, "buckets": [(start, elements of a shard, shards)]}.
        """
        opt = self._optimizer_state
        return [
            {
                "slots": {opt.layout.specs[s.param].name: s.start for s in state.flat.slots},
                "buckets": [
                    (bucket.start, bucket.shard_numel, bucket.numel // bucket.shard_numel)
                    for bucket in state.flat.buckets
                ],
            }
            for state in opt.flats
        ]

    def ranges(self) -> list[tuple[str, int, int]]:
        """Return (parameter, first element, elements) of all that is this rank's. Local."""
        specs = self._optimizer_state.layout.specs
        return [
            (specs[f.param].name, f.param_start, f.numel)
            for state in self._optimizer_state.flats
            for bucket in state.flat.buckets
            for f in state.fragments[bucket.index]
        ]

    def errors(self) -> dict[str, FragmentTensor]:
        """Return what parameters lack of their values, by its key in to_fill()."""
        pairs = aliases(self._optimizer_state.flats)
        return {key: tensor for key, tensor in pairs if key.rpartition(".")[2] == ERROR}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if take() would, for what to_fill() has that is not a FragmentTensor."""
        check(self._optimizer_state, state_dict)

    def take(self, state_dict: Mapping[str, Any], saved: str) -> None:
        """Take over what to_fill() returned, filled. Local.

        Warns on the first rank if it was ``saved`` by another rule; empty: that is unknown. States
        of the same names and hyper-parameters mean the same, as those of Adam and AdamW.
        """
        self._take(state_dict)
        if saved not in ("", self.rule) and self.comm.rank == 0:
            logger.warning(
                "The loaded states are of %s, and go on under %s. Updates will differ from those "
                "of the run that saved them.",
                saved,
                self.rule,
            )

    def publish(self) -> None:
        """Bring every rank's part of the parameters to all. Collective: one gather a bucket."""
        for state in self._optimizer_state.flats:
            for bucket in state.flat.buckets:
                whole = state.params_buffer.bucket(bucket)
                part = state.params_buffer.shard(bucket, state.rank)
                self._optimizer_state.comm.all_gather(whole, part).wait()

    def _writes(self, bucket: Bucket) -> bool:
        copies = getattr(self._optimizer_state.comm, "replicate", None)
        return copies is None or bucket.index % copies.world_size == copies.rank


def _always(bucket: Bucket) -> bool:
    return True


def _shard(state: FlatState, bucket: Bucket) -> Tensor:
    return state.params_buffer.shard(bucket, state.rank)


def _param_parts(
    state: FlatState, has: Callable[[Bucket], bool]
) -> list[tuple[Tensor, FragmentTensor]]:
    segment = functools.partial(_shard, state)
    tensors = fragment_tensors(state, segment, shaped_pieces, has=has)
    pairs = zip(state.params, tensors, strict=True)
    return [(param, tensor) for param, tensor in pairs if param.numel()]
