"""State dicts in torch.optim's format: consolidated, checked, loaded, and viewed.

A user may have edited a state dict, or stored it as JSON. So types, numbers, entries and values are
checked before any of them is loaded. An error names the first fault: a state dict is never loaded
in part, and no entry is ignored without an error.
"""

from __future__ import annotations

import functools
import logging
import reprlib
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.codecs import ERROR, MASTER
from shardfuse.comm import Communicator
from shardfuse.engine.params import FlatState
from shardfuse.fragments import (
    Chunk,
    FragmentTensor,
    StateDictRequest,
    gather,
    scatter,
    shaped_chunks,
)
from shardfuse.layout import Bucket, FlatLayout, ParamSpec
from shardfuse.rules import UpdateRule
from shardfuse.rules.base import check_group

logger = logging.getLogger("shardfuse")

_AUXILIARY = {MASTER, ERROR}
"""State keys of the codec's arena: fp32 master, rounding residual. No rule has such states."""

Groups = list[dict[str, Any]]
Cut = Callable[[ParamSpec, int, Tensor], list[Chunk]]


class OptimizerState(NamedTuple):
    """The objects that state dicts are made from, and loaded into."""

    comm: Communicator
    layout: FlatLayout
    flats: Sequence[FlatState]
    groups: Groups
    rule: UpdateRule


def arenas_of(state: FlatState) -> dict[str, ShardArena]:
    """Return {state key: this rank's arena}; the codec's arena comes last."""
    arenas = dict(state.states)
    if state.codec.arena is not None and state.codec.key is not None:
        # A step that failed may have left the sum of parameter and residual in the arena.
        state.codec.rollback()
        arenas[state.codec.key] = state.codec.arena
    return arenas


def holds(state: FlatState, name: str, spec: ParamSpec) -> bool:
    """Return whether a parameter of ``state`` has the state of this key, if the flat has."""
    return name in _AUXILIARY or state.has_state(name, spec.group)


def held_fragments(
    state: FlatState,
    segment: Callable[[Bucket], Tensor],
    cut: Cut,
    *,
    has: Callable[[Bucket], bool] = lambda bucket: True,
    only: Container[int] | None = None,
) -> dict[int, FragmentTensor]:
    """Return {parameter: this rank's fragments of one state}, of those with any. Local.

    The time depends on this rank's fragments, not on the number of parameters.

    Args:
        state: the flat.
        segment: returns this rank's shard of a bucket; the chunks alias it.
        cut: makes chunks of a run of elements: flat_chunks or shaped_chunks.
        has: returns whether to include the fragments of a bucket.
        only: the parameters to include; None: all.
    """
    chunks: dict[int, list[Chunk]] = {}
    for bucket in filter(has, state.flat.buckets):
        fragments = state.fragments[bucket.index]
        shard = segment(bucket) if fragments else None
        for f in fragments if only is None else [f for f in fragments if f.param in only]:
            assert shard is not None
            data = shard[f.shard_start : f.shard_start + f.numel]
            chunks.setdefault(f.param, []).extend(cut(state.spec_of[f.param], f.param_start, data))
    found = {}
    for param, pieces in chunks.items():
        spec, sample = state.spec_of[param], pieces[0].data
        shape = spec.shape if cut is shaped_chunks else (spec.numel,)
        found[param] = FragmentTensor(shape, sample.dtype, sample.device, pieces)
    return found


def fragment_tensors(
    state: FlatState, segment: Callable[[Bucket], Tensor], cut: Cut
) -> list[FragmentTensor]:
    """Return held_fragments() in slot order, with a tensor without chunks for each other param."""
    held = held_fragments(state, segment, cut)
    sample = segment(state.flat.buckets[-1]) if state.flat.buckets else state.params_buffer.data
    return [
        held[param]
        if param in held
        else FragmentTensor(
            spec.shape if cut is shaped_chunks else (spec.numel,), sample.dtype, sample.device, []
        )
        for param, spec in state.spec_of.items()
    ]


def agreed_steps(opt: OptimizerState) -> list[int]:
    """Return the update count of every parameter. Collective.

    A rank with neither a gradient nor a fragment of a parameter cannot count the parameter's
    updates. Its peers can, so the count is the maximum over ranks.
    """
    steps = torch.zeros(len(opt.layout.specs), dtype=torch.int32)
    for state in opt.flats:
        for slot in state.flat.slots:
            steps[slot.param] = state.step_of(slot.param)
    if opt.flats and opt.layout.specs:
        steps = steps.to(opt.flats[0].device)
        opt.comm.all_reduce(steps, "max").wait()
    result: list[int] = steps.tolist()
    return result


def packed_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups with consecutive numbers in place of parameters, as torch packs them."""
    packed = []
    start = 0
    for group in groups:
        stop = start + len(group["params"])
        options = {key: value for key, value in group.items() if key != "params"}
        packed.append({**options, "params": list(range(start, stop))})
        start = stop
    return packed


def counted_groups(groups: Groups, rule: UpdateRule) -> list[dict[str, Any]]:
    """Return packed_groups(), with a ``step`` in every group if the rule counts in groups.

    A live group has no ``step`` before the first one. torch.distributed.checkpoint loads only keys
    that both sides have, also of flattened state dicts.
    """
    packed = packed_groups(groups)
    for group in packed if rule.counts_in_groups else ():
        group.setdefault("step", 0)
    return packed


def consolidate(opt: OptimizerState, to: int | None) -> dict[int, dict[str, Any]] | None:
    """Return torch's states, of full CPU tensors, on rank ``to`` (None: on all). Collective."""
    rule, keep = opt.rule, to is None or opt.comm.world.rank == to
    steps = agreed_steps(opt)
    state: dict[int, dict[str, Any]] = {}
    for param, name, tensor in _full_tensors(opt, keep):
        # A count of 0 does not exclude a master that differs from the parameter. A rule that counts
        # no steps may have updated it before the user set a momentum. The master of an fp32
        # parameter has more digits than the parameter even before the first update.
        spec = opt.layout.specs[param]
        has_step = rule.has_step(opt.groups[spec.group])
        if steps[param] > 0 or (name == MASTER and (spec.dtype == "float32" or not has_step)):
            entry = state.setdefault(param, {"step": steps[param]} if has_step else {})
            entry[name] = tensor
    return dict(sorted(state.items())) if keep else None


def _full_tensors(opt: OptimizerState, keep: bool) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (parameter, state key, full CPU tensor) where ``keep`` is True. Collective."""
    for flat_state in opt.flats:
        for name, arena in arenas_of(flat_state).items():
            full = gather(opt.comm, flat_state.flat, arena, flat_state.specs, keep=keep)
            for param, tensor in full.items():
                if holds(flat_state, name, opt.layout.specs[param]):
                    yield param, name, tensor


def for_torch(opt: OptimizerState, request: StateDictRequest) -> dict[str, Any]:
    """Return the state dict for the functions of torch.distributed.checkpoint.state_dict.

    Collective. Every trained parameter has an entry, updated or not, because torch loads only
    into entries that exist. Steps are fp32 tensors, as in torch.optim. Tensors are copies in the
    parameter's shape: full ones with ``full_state_dict`` and for one rank, else FragmentTensors.
    With ``cpu_offload`` they are on the CPU, and only the first rank keeps full ones, as in torch.
    """
    steps = agreed_steps(opt)
    state: dict[int, dict[str, Any]] = {}
    for flat_state in opt.flats:
        if is_trained(flat_state):
            for slot in flat_state.flat.slots:
                state[slot.param] = {"step": torch.tensor(float(steps[slot.param]))}
    if request.full_state_dict or opt.comm.world_size == 1:
        keep = not (request.full_state_dict and request.cpu_offload) or opt.comm.world.rank == 0
        values = _full_tensors(opt, keep)
    else:
        values = _fragment_copies(opt.flats)
    for param, name, tensor in values:
        device = "cpu" if request.cpu_offload else opt.layout.specs[param].device
        # torch broadcasts a full tensor's memory and receives it as contiguous.
        value = tensor if isinstance(tensor, FragmentTensor) else tensor.contiguous()
        state[param][name] = value.to(device)
    groups = counted_groups(opt.groups, opt.rule)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def is_trained(state: FlatState) -> bool:
    """Return whether a flat has states, or would have them if its rule had any."""
    return bool(state.states) or state.codec.arena is not None or not state.flat.frozen


def _fragment_copies(flats: Sequence[FlatState]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (parameter, state key, copy of this rank's fragments of it)."""
    for state in flats:
        for name, arena in arenas_of(state).items():
            tensors = fragment_tensors(state, arena.view, shaped_chunks)
            for slot, spec, tensor in zip(state.flat.slots, state.specs, tensors, strict=True):
                # torch writes a FragmentTensor chunk by chunk, and an empty one has no chunk.
                empty = torch.zeros(spec.shape, dtype=tensor.dtype)
                if holds(state, name, spec):
                    yield slot.param, name, tensor.clone() if spec.numel else empty


def merged_groups(groups: Groups, saved: Sequence[Mapping[str, Any]], rule: UpdateRule) -> Groups:
    """Return the groups with the hyper-parameters of ``saved``, after checking that they fit.

    A hyper-parameter that a saved group lacks keeps this optimizer's value.

    Raises:
        ValueError: other numbers of groups or parameters, or a hyper-parameter out of range.
        TypeError: a hyper-parameter has another type.
    """
    if len(saved) != len(groups):
        raise ValueError(
            f"loaded state dict has {len(saved)} parameter groups, the optimizer has {len(groups)}"
        )
    merged = []
    for index, (group, other) in enumerate(zip(groups, saved, strict=True)):
        if len(other["params"]) != len(group["params"]):
            raise ValueError(
                f"loaded state dict has {len(other['params'])} parameters in group {index}, the "
                f"optimizer has {len(group['params'])}"
            )
        options = {
            # torch.distributed.checkpoint.state_dict and JSON turn tuples into lists.
            key: tuple(value) if isinstance(value, list) and _is_tuple(group, key) else value
            for key, value in copied(other, index).items()
        }
        merged.append({**group, **options})
        check_saved_options(rule, merged[-1], index)
        for key in rule.fixed_keys:
            if key in other and other[key] != group[key]:
                raise ValueError(
                    f"loaded state dict has {key}={other[key]!r} in group {index}, the optimizer "
                    f"{group[key]!r}. Build it with the saved value."
                )
        if reason := rule.mismatch(other, merged[-1]):
            raise ValueError(f"loaded state dict is of another optimizer: {reason}")
    return merged


def _is_tuple(group: Mapping[str, Any], key: str) -> bool:
    return isinstance(group.get(key), tuple) or key == "grad_clip"


def prepared(opt: OptimizerState, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Check a state dict in torch's format; return the function that loads it. Local.

    That function copies this rank's fragments of the full tensors, and raises no error.

    Raises:
        ValueError: tensors of another shape, groups that do not fit, names of parameters in another
            order, a missing state, or one that this optimizer would ignore.
        TypeError: an entry has another type; or a parameter has another device, dtype or shape than
            the optimizer was built with.
    """
    for state in opt.flats:
        if change := state.change():
            raise TypeError(change)
    layout, groups, rule = opt.layout, opt.groups, opt.rule
    saved = saved_groups(state_dict)
    merged = merged_groups(groups, saved, rule)
    check_names(saved)
    check_order(groups, saved)
    entries = saved_entries(state_dict, saved, [s.name for s in layout.specs])
    counts = {}
    for param, spec in enumerate(layout.specs):
        entry, own = entries[param], saved[spec.group]
        group = merged[spec.group]
        if entry and "step" not in entry and "step" in own and rule.has_step(group):
            entry["step"] = own["step"]  # apex counts there
        counts[param] = checked_step(spec, entry, rule, group)
    for state in opt.flats:
        _check_parts(state, entries)
    _warn_of_masters(opt, entries)
    return functools.partial(_load, opt, merged, saved, entries, counts)


def _load(
    opt: OptimizerState,
    merged: Groups,
    saved: Sequence[Mapping[str, Any]],
    entries: Mapping[int, Mapping[str, Any]],
    counts: Mapping[int, int],
) -> None:
    """Load a state dict that prepared() has checked."""
    rule, specs = opt.rule, dict(enumerate(opt.layout.specs))
    set_groups(opt, merged, saved, counts)
    for state in opt.flats:
        own = [slot.param for slot in state.flat.slots]
        steps = {param: counts[param] for param in own}
        if state.flat.frozen and not state.states and not any(steps.values()):
            continue
        for group in state.groups:
            saved_names = {n for p in own if specs[p].group == group for n in entries[p]}
            others = sorted(saved_names & {*rule.optional_states})
            names = (*rule.state_names(opt.groups[group]), *others)
            for name in [n for n in state.states if n not in names and state.has_state(n, group)]:
                state.drop_state(name, group)  # only the replaced hyper-parameters need it
            state.allocate({name: rule.initial(name) for name in names}, group)
        for name, arena in arenas_of(state).items():
            if name not in _AUXILIARY:
                arena.data.fill_(rule.initial(name))
            elif name == ERROR:
                arena.data.zero_()
            _fill(state, arena, {p: e[name] for p, e in entries.items() if name in e}, specs)
        state.set_steps(steps)


def _warn_of_masters(opt: OptimizerState, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Warn on the first rank if this optimizer has no arena for a saved master or residual."""
    for state in opt.flats if opt.comm.world.rank == 0 else ():
        saved = {key for slot in state.flat.slots for key in entries[slot.param]} & _AUXILIARY
        if saved - {state.codec.key}:
            logger.warning(
                "States %s in the loaded state dict, of %s and others, are left out: parameters "
                "have another dtype here, or are sent in another one.",
                " and ".join(sorted(saved)),
                state.specs[-1].name,
            )
            return


def check_order(groups: Groups, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if numbered states are of the same parameter names in another order."""
    now, then = ([n for group in g for n in group.get("param_names", ())] for g in (groups, saved))
    numbers = [number for group in saved for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        then = numbers if all(isinstance(number, str) for number in numbers) else []
    if now != then and sorted(now) == sorted(then):
        found = next((a, b) for a, b in zip(then, now, strict=True) if a != b)
        raise ValueError(
            f"loaded state dict has the states of {found[0]} where the optimizer has {found[1]}. "
            "Build the optimizer with groups, and parameters in them, in the order that was saved."
        )


def _fill(
    state: FlatState,
    arena: ShardArena,
    saved: Mapping[int, Tensor | None],
    specs: dict[int, ParamSpec],
) -> None:
    """Copy this rank's fragments of saved full tensors, and FragmentTensors, into ``arena``."""
    slots = state.flat.slots
    full = {s.param: value for s in slots if (value := saved.get(s.param)) is not None}
    parts = {p: full.pop(p) for p in list(full) if isinstance(full[p], FragmentTensor)}
    for bucket in state.flat.buckets:
        fragments = [f for f in state.fragments[bucket.index] if f.param in full]
        scatter(fragments, arena.view(bucket), full, specs)
    for param, tensor in held_fragments(state, arena.view, shaped_chunks, only=parts).items():
        tensor.copy_(parts[param])


def _check_parts(state: FlatState, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError if a saved FragmentTensor does not have this rank's chunks."""

    def shard(bucket: Bucket) -> Tensor:
        return state.params_buffer.shard(bucket, state.rank)

    parts = {
        slot.param: {n: v for n, v in entries[slot.param].items() if isinstance(v, FragmentTensor)}
        for slot in state.flat.slots
    }
    parts = {param: values for param, values in parts.items() if values}
    held = held_fragments(state, shard, shaped_chunks, only=parts)
    for param, values in parts.items():
        for name, value in values.items():
            own = held.get(param)
            if value.pieces if own is None else not own.has_same_chunks(value):
                raise ValueError(
                    f"State {name} of {state.spec_of[param].name} holds another rank's part, or "
                    "one of another world size. Save and load it with "
                    "torch.distributed.checkpoint, which gives every rank its part, or use "
                    "full_state_dict=True."
                )


def checked_step(
    spec: ParamSpec, entry: Mapping[str, Any], rule: UpdateRule, group: Mapping[str, Any]
) -> int:
    """Return the update count of the saved state of a parameter of ``group``.

    Raises unless the state is complete, of its shape, and of this rule.
    """
    names, has_step = rule.state_names(group), rule.has_step(group)
    check_known(rule, spec.name, entry, {*names, *_AUXILIARY})
    for name, value in entry.items():
        if name != "step" and value is not None:
            check_tensor(name, value, spec.name, spec.shape, rule)
    lacking = [name for name in names if entry.get(name) is None]
    num_steps = _step_in(entry, names, spec.name, has_step=has_step)
    if lacking and num_steps > 0:
        raise ValueError(
            f"loaded state dict has no {lacking[0]} for {spec.name}; it is of another optimizer or "
            "of other options."
        )
    if len(lacking) < len(names) and "step" not in entry and has_step:
        raise ValueError(
            f"loaded state dict has no step for {spec.name}, neither with its states nor in its "
            "group, so the number of its updates is unknown. Add it to the dict."
        )
    for name in entry.keys() - _AUXILIARY - {"step"} if num_steps == 0 else ():
        if not is_untouched(entry[name], rule.initial(name)):
            raise ValueError(
                f"State {name} of {spec.name} has had updates, and its step in the loaded state "
                "dict is 0. Correct the step, or remove the states of the parameter."
            )
    return num_steps


def set_groups(
    opt: OptimizerState,
    merged: Groups,
    saved: Sequence[Mapping[str, Any]],
    counts: Mapping[int, int],
) -> None:
    """Write ``merged`` into the groups.

    Where the rule counts in groups, ``step`` is the saved one, or the largest of any parameter.
    """
    most = max(counts.values(), default=0)
    for group, new, other in zip(opt.groups, merged, saved, strict=True):
        group.update(new)
        if opt.rule.counts_in_groups:
            group["step"] = as_count(other["step"], "step") if "step" in other else most
            if not group["step"]:
                del group["step"]


def _step_in(entry: Mapping[str, Any], names: Sequence[str], owner: str, *, has_step: bool) -> int:
    """Return the update count of the saved state of the parameter ``owner``."""
    if "step" in entry:
        return as_count(entry["step"], f"step of {owner}")
    # A master without the rule's states is from updates before the user set a momentum: the states
    # have had no update yet.
    present = [name for name, value in entry.items() if value is not None]
    is_updated = not set(present) <= _AUXILIARY if names else bool(present)
    return int(is_updated and bool(present) and not has_step)


# The state attribute


_REMEDY = (
    "States lie in flat buffers, a part on each rank, and what optimizer.state holds only shows "
    'them: nothing can be put in its place. Use load_state_dict() on all ranks (with "state": {} '
    "it starts afresh), or change its tensors in place."
)


def refuse_replacement(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise RuntimeError with the remedy: replaces the methods that would change the mapping."""
    raise RuntimeError(_REMEDY)


class ParamState(dict[str, Any]):
    """One parameter's state on this rank: ``step``, and tensors that alias the optimizer's own.

    With one rank the tensors have the parameter's shape. With several ranks they are
    FragmentTensors of that shape, with this rank's chunks in ``pieces``. A value may be assigned to
    its own key, as by code that moves states to the device they are on. Any other assignment would
    have no effect, and raises.

    Raises:
        RuntimeError: a value was replaced or removed.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or value is not self[key]:
            refuse_replacement()

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = refuse_replacement

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # so that a copy is a plain dict


class StateView(Mapping[Tensor, ParamState]):
    """{parameter: its state on this rank} of all trained parameters.

    There is an entry before the first step, too, with step 0. bool() of the mapping is True even
    without entries. Where ``optimizer.state`` is false, torch.distributed.checkpoint.state_dict
    calls step() to create states; here they exist as soon as they are needed.

    Args:
        flats: of the optimizer; may grow.
    """

    def __init__(self, flats: Sequence[FlatState]) -> None:
        self._flats = flats
        self._places: dict[int, tuple[FlatState, int]] = {}
        self._num_indexed = 0

    def __getitem__(self, param: Tensor) -> ParamState:
        """Return the state of ``param``; empty if it is frozen.

        Raises:
            KeyError: it is not a parameter of this optimizer.
        """
        for state in self._flats[self._num_indexed :]:
            self._places.update((id(p), (state, at)) for at, p in enumerate(state.params))
        self._num_indexed = len(self._flats)
        if id(param) not in self._places:
            raise KeyError("not a parameter of this optimizer")
        state, position = self._places[id(param)]
        if not is_trained(state):
            return ParamState()
        values: dict[str, Any] = {"step": state.step_of(state.flat.slots[position].param)}
        for name, arena in arenas_of(state).items():
            if holds(state, name, state.specs[position]):
                values[name] = _shown(state, arena, position)
        return ParamState(values)

    __setitem__ = __delitem__ = clear = refuse_replacement

    def __iter__(self) -> Iterator[Tensor]:
        for state in self._flats:
            if is_trained(state):
                yield from state.params

    def __len__(self) -> int:
        return sum(len(state.params) for state in self._flats if is_trained(state))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"StateView({len(self)} parameters; a part of each on this rank)"


def _shown(state: FlatState, arena: ShardArena, position: int) -> Tensor:
    """Return one state of the parameter at ``position``, as ParamState has it."""
    slot, spec = state.flat.slots[position], state.specs[position]
    if arena.data.numel() == state.flat.numel:  # one rank: the arena has the layout of the flat
        start = arena.data.storage_offset() + slot.start
        return arena.data.as_strided(spec.shape, spec.stride, start)
    held = held_fragments(state, arena.view, shaped_chunks, only=(slot.param,))
    data = arena.data
    return held.get(slot.param, FragmentTensor(spec.shape, data.dtype, data.device, []))


# Checks before anything is changed


MAX_STEP = 2**30
"""Ranks exchange counts as int32. The bound keeps counts of later steps in that range, too."""

_EXACT = 2**24
"""Whole numbers up to this are exact in fp32."""

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def as_count(value: Any, what: str) -> int:
    """Return a number of updates, an int, float, or one element of a tensor or array, as an int.

    Raises:
        TypeError: it has another type; text and True are refused, too.
        ValueError: below 0, fractional, NaN or beyond MAX_STEP.
    """
    number: Any = value
    if hasattr(value, "item"):
        try:
            number = value.item()
        except (TypeError, ValueError, RuntimeError):  # of several elements, or on meta
            number = None
    is_plain = type(number) in (int, float)  # found sooner than by the class of all numbers
    if not is_plain and (isinstance(number, bool) or not issubclass(type(number), Real)):
        raise TypeError(f"{what} must be a whole number, got {reprlib.repr(value)}. Correct it.")
    if not (0 <= number <= MAX_STEP and int(number) == number):
        raise ValueError(
            f"{what} must be a whole number from 0 to {MAX_STEP}, got {reprlib.repr(number)}. "
            "Correct it in the dict."
        )
    return int(number)


def saved_groups(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of a state dict, each with a list ``params``.

    Raises:
        TypeError: an entry has another type.
        ValueError: the state dict has no groups.
    """
    groups = _required(state_dict, "param_groups")
    if not isinstance(groups, list | tuple):
        raise TypeError(
            f"param_groups of the loaded state dict must be a list, got {_described(groups)}."
        )
    for index, group in enumerate(groups):
        if not isinstance(group, Mapping):
            raise TypeError(f"{_at(index)} must be a dict, got {_described(group)}.")
        if not isinstance(group.get("params"), list | tuple):
            raise TypeError(
                f"{_at(index)} must have a list 'params' of the numbers of its parameters, got "
                f"{reprlib.repr(group.get('params'))}."
            )
        names = group.get("param_names", [])
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(
                f"param_names of {_at(index)} must be a list of names, got {reprlib.repr(names)}. "
                "Correct it, or remove the key."
            )
    return list(groups)


def check_names(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless each group of saved_groups() has a name for each of its params."""
    for index, group in enumerate(groups):
        names, num_params = group.get("param_names"), len(group["params"])
        if names is not None and len(names) != num_params:
            raise ValueError(
                f"param_names of {_at(index)} must be {num_params} names, one for each of its "
                f"params, got {reprlib.repr(names)}. Correct it, or remove the key."
            )


def copied(group: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return a copy of a saved group without its parameters and their names.

    Raises:
        TypeError: a value cannot be copied.
    """
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        try:
            options[key] = deepcopy(value)  # a tensor lr is not shared with the caller
        except Exception as error:
            raise TypeError(
                f"{key!r} of {_at(index)} cannot be copied ({type(error).__name__}: {error}). "
                "Leave it out of the dict."
            ) from error
    return options


def check_saved_options(rule: UpdateRule, group: Mapping[str, Any], index: int) -> None:
    """Raise as ``rule.check`` does, and if the ``step`` of a group is no valid count."""
    check_group(rule, group, _at(index))
    if rule.counts_in_groups and "step" in group:
        as_count(group["step"], f"step of {_at(index)}")


def saved_entries(
    state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[int, dict[str, Any]]:
    """Return {parameter, counted through all groups: its states} of a state dict.

    Numbers may have become text, as keys do in JSON.

    Args:
        state_dict: its states are keyed by the numbers, or names, in ``groups``.
        groups: its saved_groups().
        names: of this optimizer's parameters, for messages.

    Raises:
        TypeError: the states are no dict of dicts.
        ValueError: a number occurs twice, a parameter has two entries, or an entry no parameter.
    """
    state = _required(state_dict, "state")
    if not isinstance(state, Mapping):
        raise TypeError(f"state of the loaded state dict must be a dict, got {_described(state)}.")
    places: dict[Hashable, int] = {}
    for group_index, group in enumerate(groups):
        for number in group["params"]:
            if not isinstance(number, Hashable) or isinstance(number, Tensor):
                raise TypeError(
                    f"params of {_at(group_index)} must be numbers, got {reprlib.repr(number)}."
                )
            if number in places:
                raise ValueError(
                    f"loaded state dict has {number!r} twice among the params of its groups, last "
                    f"in group {group_index}. Each parameter has a number of its own, which its "
                    "states have as key."
                )
            places[number] = len(places)
    texts = {str(number): at for number, at in places.items() if isinstance(number, int)}
    entries: dict[int, dict[str, Any]] = {at: {} for at in places.values()}
    seen: dict[int, Any] = {}
    for key, entry in state.items():
        at = places.get(key, texts.get(key) if isinstance(key, str) else None)
        if at is None:
            raise ValueError(
                f"loaded state dict has states of {key!r}, which is not among the params of its "
                "groups. Give them the number of their parameter, or remove them."
            )
        if at in seen:
            raise ValueError(
                f"loaded state dict has states of {names[at]} twice, as {seen[at]!r} and as "
                f"{key!r}. Remove one of them."
            )
        if not isinstance(entry, Mapping):
            raise TypeError(f"The states of {names[at]} must be a dict, got {_described(entry)}.")
        seen[at], entries[at] = key, dict(entry)
    return entries


def check_known(rule: UpdateRule, owner: str, entry: Mapping[Any, Any], others: set[str]) -> None:
    """Raise ValueError if an entry has a state that is unknown to this class of optimizer."""
    known = {*rule.optional_states, *others, "step"}
    extra = [name for name, value in entry.items() if name not in known and value is not None]
    if extra:
        raise ValueError(
            f"State {extra[0]!r} of {owner} in the loaded state dict is none of "
            f"{type(rule).__name__.removesuffix('Rule')}'s and would be lost. Load the dict into "
            "the class that saved it, or remove the state from it."
        )


def check_tensor(name: str, value: Any, owner: str, shape: Sequence[int], rule: UpdateRule) -> None:
    """Raise unless a saved state is a dense tensor of ``shape``, with values that fp32 can hold.

    NaN and infinity are allowed. fp64 is rounded, as by torch.

    Args:
        name: of the state.
        value: the saved state.
        owner: the parameter's name.
        shape: the required shape.
        rule: lists the states that are squares.
    """
    what = f"State {name} of {owner}"
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{what} must be a tensor, got {_described(value)}. Make it one, as by "
            f"torch.tensor(value).reshape({tuple(shape)})."
        )
    parts = [value]
    if isinstance(value, FragmentTensor):
        parts = [chunk.data for chunk in value.pieces]
    for is_so, kind, remedy in (
        (hasattr(value, "full_tensor"), "a DTensor", "Give what its full_tensor() returns."),
        (value.is_nested, "nested", "Make it one dense tensor of the parameter's shape."),
        (value.is_meta, "on the meta device, without values", "Load the file on the CPU."),
        (value.is_quantized, "quantized", "Give what its dequantize() returns."),
        (value.layout != torch.strided, f"{value.layout}", "Give what its to_dense() returns."),
    ):
        if is_so:
            raise TypeError(f"{what} is {kind}, and must be a plain dense tensor. {remedy}")
    if value.shape != torch.Size(shape):
        raise ValueError(
            f"{what} has shape {tuple(value.shape)}, the parameter has {tuple(shape)}."
        )
    for part in parts:
        _check_values(what, part, name in rule.squares)


def is_untouched(value: Any, initial: float) -> bool:
    """Return whether a checked state has only zeros and values from before the first update."""
    if value is None:
        return True
    parts = [p.data for p in value.pieces] if isinstance(value, FragmentTensor) else [value]
    return all(bool(((part == 0) | (part == initial)).all()) for part in parts)


def _check_values(what: str, value: Tensor, is_square: bool) -> None:
    """Raise unless fp32 holds ``value``, and no average of squares is below 0."""
    is_integer = value.dtype in _INTEGERS
    if not (is_integer or value.is_floating_point()):
        raise TypeError(
            f"{what} is of {value.dtype}, and states are kept in fp32. Save it again in a "
            "floating-point dtype."
        )
    if value.numel() == 0:
        return
    if is_integer:
        is_lost = int(value.min()) < -_EXACT or int(value.max()) > _EXACT
    else:
        plain = value.float()
        is_lost = value.dtype == torch.float64 and bool((plain.isinf() & ~value.isinf()).any())
        value = plain
    if is_lost:
        raise ValueError(
            f"{what} has values that fp32, in which states are kept, does not hold. Correct them "
            "in the dict."
        )
    if is_square and float(value.amin()) < 0:
        raise ValueError(f"{what} is an average of squares, and has values below 0 in the dict.")


def _required(state_dict: Any, key: str) -> Any:
    if key not in state_dict:
        raise ValueError(
            f"loaded state dict has no {key!r}, but {reprlib.repr(list(state_dict))}. Pass what "
            "state_dict() of an optimizer has returned."
        )
    return state_dict[key]


def _described(value: Any) -> str:
    return f"{type(value).__name__} ({reprlib.repr(value)})"


def _at(index: int) -> str:
    return f"param_groups[{index}] of the loaded state dict"
