"""Optimizer state in and out: torch's ordinary dicts, and sharded ones for checkpoints."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.codecs import ERROR, MASTER
from shardfuse.comm import Communicator
from shardfuse.engine import state_checks
from shardfuse.engine.flat_state import FlatState
from shardfuse.fragments import Asked, FragmentTensor, Piece, gather, scatter, shaped_pieces
from shardfuse.layout import Bucket, FlatLayout, ParamSpec
from shardfuse.rules import UpdateRule

logger = logging.getLogger("shardfuse")

_BESIDE = {MASTER, ERROR}
"""Keys of what is kept beside parameters; no states of a rule's."""

Groups = list[dict[str, Any]]
Cut = Callable[[ParamSpec, int, Tensor], list[Piece]]


class Held(NamedTuple):
    """What state dicts are made of, and loaded into."""

    comm: Communicator
    layout: FlatLayout
    flats: Sequence[FlatState]
    groups: Groups
    rule: UpdateRule


def arenas_of(state: FlatState) -> dict[str, ShardArena]:
    """Return {state key: this rank's part}, what is kept beside parameters last."""
    arenas = dict(state.states)
    if state.codec.arena is not None and state.codec.key is not None:
        state.codec.rollback()
        arenas[state.codec.key] = state.codec.arena
    return arenas


def fragment_tensors(
    state: FlatState,
    segment: Callable[[Bucket], Tensor],
    cut: Cut,
    position: int | None = None,
    *,
    has: Callable[[Bucket], bool] = lambda bucket: True,
) -> list[FragmentTensor]:
    """Return what this rank has of one state of a flat, a tensor per parameter in slot order.

    Args:
        state: the flat.
        segment: gives this rank's part of a bucket, which the pieces alias.
        cut: makes pieces of a run of elements: flat_pieces or shaped_pieces.
        position: of the one parameter that is wanted; None: all of them.
        has: whether pieces in a bucket are wanted.
    """
    wanted = range(len(state.specs)) if position is None else [position]
    specs = {state.flat.slots[at].param: state.specs[at] for at in wanted}
    pieces: dict[int, list[Piece]] = {param: [] for param in specs}
    sample = state.params_buffer.data
    for bucket in state.flat.buckets:
        sample = segment(bucket)
        for f in state.fragments[bucket.index] if has(bucket) else ():
            if f.param in specs:
                data = sample[f.shard_start : f.shard_start + f.numel]
                pieces[f.param] += cut(specs[f.param], f.param_start, data)
    return [
        FragmentTensor(
            spec.shape if cut is shaped_pieces else (spec.numel,),
            sample.dtype,
            sample.device,
            pieces[param],
        )
        for param, spec in specs.items()
    ]


def agreed_steps(held: Held) -> list[int]:
    """Return the update count of every parameter. Collective.

    A rank that neither has a gradient of a parameter nor owns a fragment of it cannot count its
    updates; the others can, hence the maximum.
    """
    steps = torch.zeros(len(held.layout.specs), dtype=torch.int32)
    for state in held.flats:
        for slot in state.flat.slots:
            steps[slot.param] = state.step_of(slot.param)
    if held.flats and held.layout.specs:
        steps = steps.to(held.flats[0].device)
        held.comm.all_reduce(steps, "max").wait()
    result: list[int] = steps.tolist()
    return result


def packed_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups with parameters replaced by their running number, as torch does."""
    packed = []
    start = 0
    for group in groups:
        stop = start + len(group["params"])
        options = {key: value for key, value in group.items() if key != "params"}
        packed.append({**options, "params": list(range(start, stop))})
        start = stop
    return packed


def counted_groups(groups: Groups, rule: UpdateRule) -> list[dict[str, Any]]:
    """Return packed_groups(), with a step in every group where the rule counts in groups.

    A live group has none before the first step. torch.distributed.checkpoint and its flattened form
    load only keys that both sides have.
    """
    packed = packed_groups(groups)
    for group in packed if rule.counts_in_groups else ():
        group.setdefault("step", 0)
    return packed


def consolidate(held: Held, to: int | None) -> dict[int, dict[str, Any]] | None:
    """Return torch's states, of full CPU tensors, on rank ``to`` (None: on all). Collective."""
    rule, keep = held.rule, to is None or held.comm.world.rank == to
    steps = agreed_steps(held)
    state: dict[int, dict[str, Any]] = {}
    for param, name, tensor in _whole(held, keep):
        # Where updates are not counted, a master may have been updated before a momentum was set.
        # That of an fp32 parameter has digits of its own before any update.
        is_fp32 = held.layout.specs[param].dtype == "float32"
        if steps[param] > 0 or (name == MASTER and (is_fp32 or not rule.counts_steps)):
            entry = state.setdefault(param, {"step": steps[param]} if rule.counts_steps else {})
            entry[name] = tensor
    return dict(sorted(state.items())) if keep else None


def _whole(held: Held, keep: bool) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (parameter, state key, full CPU tensor) where ``keep`` is True. Collective."""
    for flat_state in held.flats:
        for name, arena in arenas_of(flat_state).items():
            full = gather(held.comm, flat_state.flat, arena, flat_state.specs, keep=keep)
            for param, tensor in full.items():
                yield param, name, tensor


def for_torch(held: Held, asked: Asked) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint.state_dict makes its results of. Collective.

    It has an entry for every parameter that is trained, updated or not, because torch loads only
    what is there to be overwritten; steps are fp32 tensors, as torch.optim's. Tensors are copies,
    and have the parameter's shape: whole with ``full_state_dict`` and where one rank has them
    all, else FragmentTensors. With ``cpu_offload`` they are on the CPU, and of full ones only the
    first rank's are kept, as by torch.
    """
    steps = agreed_steps(held)
    state: dict[int, dict[str, Any]] = {}
    for flat_state in held.flats:
        if is_trained(flat_state):
            for slot in flat_state.flat.slots:
                state[slot.param] = {"step": torch.tensor(float(steps[slot.param]))}
    if asked.full_state_dict or held.comm.world_size == 1:
        keep = not (asked.full_state_dict and asked.cpu_offload) or held.comm.world.rank == 0
        values = _whole(held, keep)
    else:
        values = _parts(held.flats)
    for param, name, tensor in values:
        device = "cpu" if asked.cpu_offload else held.layout.specs[param].device
        # torch broadcasts a full tensor's memory and receives it as contiguous.
        whole = tensor if isinstance(tensor, FragmentTensor) else tensor.contiguous()
        state[param][name] = whole.to(device)
    groups = counted_groups(held.groups, held.rule)
    return {"state": dict(sorted(state.items())), "param_groups": groups}


def is_trained(state: FlatState) -> bool:
    """Return whether a flat has states, or would have them if its rule had any."""
    return bool(state.states) or state.codec.arena is not None or not state.flat.frozen


def _parts(flats: Sequence[FlatState]) -> Iterator[tuple[int, str, Tensor]]:
    """Yield (parameter, state key, a copy of what this rank has of it)."""
    for state in flats:
        for name, arena in arenas_of(state).items():
            tensors = fragment_tensors(state, arena.view, shaped_pieces)
            for slot, spec, tensor in zip(state.flat.slots, state.specs, tensors, strict=True):
                # An empty one has no pieces, and would not be written at all.
                empty = torch.zeros(spec.shape, dtype=tensor.dtype)
                yield slot.param, name, tensor.clone() if spec.numel else empty


def merged_groups(groups: Groups, saved: Sequence[Mapping[str, Any]], rule: UpdateRule) -> Groups:
    """Return the groups with the hyper-parameters of ``saved``, after checking that they fit.

    A hyper-parameter that a saved group lacks stays as it is, and is named in a warning.

    Raises:
        ValueError: other numbers of groups or parameters, or a hyper-parameter out of range.
        TypeError: a hyper-parameter of another kind.
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
            # torch.distributed.checkpoint.state_dict and JSON make lists of tuples.
            key: tuple(value) if isinstance(value, list) and _is_tuple(group, key) else value
            for key, value in state_checks.copied(other, index).items()
        }
        merged.append({**group, **options})
        state_checks.check_saved_options(rule, merged[-1], index)
        if reason := rule.mismatch(other, merged[-1]):
            raise ValueError(f"loaded state dict is of another optimizer: {reason}")
    return merged


def _is_tuple(group: Mapping[str, Any], key: str) -> bool:
    return isinstance(group.get(key), tuple) or key == "grad_clip"


def prepared(held: Held, state_dict: Mapping[str, Any]) -> Callable[[], None]:
    """Check all of torch's state dict; return what loads it. Local.

    That has every rank take its fragments of the full tensors, and raises nothing any more.

    Raises:
        ValueError: tensors of another shape, groups that do not fit, names of parameters in another
            order, a missing state, or one that would be lost.
        TypeError: something is of another kind; or a parameter has another device, dtype or shape
            than the optimizer was built with.
    """
    for state in held.flats:
        if change := state.change():
            raise TypeError(change)
    layout, groups, rule = held.layout, held.groups, held.rule
    saved = state_checks.saved_groups(state_dict)
    merged = merged_groups(groups, saved, rule)
    state_checks.check_names(saved)
    _check_order(groups, saved)
    entries = state_checks.saved_entries(state_dict, saved, [s.name for s in layout.specs])
    counts = {}
    for param, spec in enumerate(layout.specs):
        entry, own = entries[param], saved[spec.group]
        if entry and "step" not in entry and "step" in own and rule.counts_steps:
            entry["step"] = own["step"]  # apex counts there
        names = rule.state_names(merged[spec.group])
        _check_entry(spec, entry, rule, names)
        counts[param] = _step_in(entry, rule, names, spec.name)
    for state in held.flats:
        _check_parts(state, entries)
    _warn_of_masters(held, entries)
    return functools.partial(_load, held, merged, saved, entries, counts)


def _load(
    held: Held,
    merged: Groups,
    saved: Sequence[Mapping[str, Any]],
    entries: Mapping[int, Mapping[str, Any]],
    counts: Mapping[int, int],
) -> None:
    """Do what prepared() has checked."""
    rule, specs = held.rule, dict(enumerate(held.layout.specs))
    set_groups(held, merged, saved, counts)
    for state in held.flats:
        own = [slot.param for slot in state.flat.slots]
        steps = {param: counts[param] for param in own}
        if state.flat.frozen and not state.states and not any(steps.values()):
            continue
        names = rule.state_names(held.groups[state.flat.group])
        others = {name for param in own for name in entries[param]} & {*rule.optional_states}
        for name in state.states.keys() - {*names, *others}:
            del state.states[name]  # of hyper-parameters that are no more
        state.allocate({name: rule.initial(name) for name in (*names, *sorted(others))})
        for name, arena in arenas_of(state).items():
            if name not in _BESIDE:
                arena.data.fill_(rule.initial(name))
            elif name == ERROR:
                arena.data.zero_()
            _fill(state, arena, {p: e[name] for p, e in entries.items() if name in e}, specs)
        state.set_steps(steps)


def _warn_of_masters(held: Held, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Say on the first rank that what is saved beside a parameter has no place here."""
    for state in held.flats if held.comm.world.rank == 0 else ():
        beside = {key for slot in state.flat.slots for key in entries[slot.param]} & _BESIDE
        if beside - {state.codec.key}:
            logger.warning(
                "States %s in the loaded state dict, of %s and others, are left out: parameters "
                "have another dtype here, or are sent in another one.",
                " and ".join(sorted(beside)),
                state.specs[-1].name,
            )
            return


def _check_order(groups: Groups, saved: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if states, which are numbered, are of the same names in another order."""
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
    """Take this rank's fragments of whole tensors, and what is its own part already."""
    slots = state.flat.slots
    held = {s.param: value for s in slots if (value := saved.get(s.param)) is not None}
    parts = {p: held.pop(p) for p in list(held) if isinstance(held[p], FragmentTensor)}
    for bucket in state.flat.buckets:
        fragments = [f for f in state.fragments[bucket.index] if f.param in held]
        scatter(fragments, arena.view(bucket), held, specs)
    own = fragment_tensors(state, arena.view, shaped_pieces)
    for slot, tensor in zip(slots, own, strict=True):
        if slot.param in parts:
            tensor.copy_(parts[slot.param])


def _check_parts(state: FlatState, entries: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise ValueError if a FragmentTensor of a saved state is not of this rank's fragments."""

    def shard(bucket: Bucket) -> Tensor:
        return state.params_buffer.shard(bucket, state.rank)

    own_tensors = fragment_tensors(state, shard, shaped_pieces)
    for slot, spec, own in zip(state.flat.slots, state.specs, own_tensors, strict=True):
        for name, value in entries[slot.param].items():
            if isinstance(value, FragmentTensor) and not own.has_pieces_of(value):
                raise ValueError(
                    f"State {name} of {spec.name} holds another rank's part, or one of another "
                    "world size. Save and load it with torch.distributed.checkpoint, which gives "
                    "every rank its part, or use full_state_dict=True."
                )


def _check_entry(
    spec: ParamSpec, entry: Mapping[str, Any], rule: UpdateRule, names: Sequence[str]
) -> None:
    """Raise unless a parameter's saved state is whole, of its shape, and of this rule."""
    state_checks.check_known(rule, spec.name, entry, {*names, *_BESIDE})
    for name, value in entry.items():
        if name != "step" and value is not None:
            state_checks.check_tensor(name, value, spec.name, spec.shape, rule)
    lacking = [name for name in names if entry.get(name) is None]
    num_steps = _step_in(entry, rule, names, spec.name)
    if lacking and num_steps > 0:
        raise ValueError(
            f"loaded state dict has no {lacking[0]} for {spec.name}; it is of another optimizer or "
            "of other options."
        )
    if len(lacking) < len(names) and "step" not in entry and rule.counts_steps:
        raise ValueError(
            f"loaded state dict has no step for {spec.name}, neither with its states nor in its "
            "group, so the number of its updates is unknown. Add it to the dict."
        )
    for name in entry.keys() - _BESIDE - {"step"} if num_steps == 0 else ():
        if not state_checks.is_untouched(entry[name], rule.initial(name)):
            raise ValueError(
                f"State {name} of {spec.name} has had updates, and its step in the loaded state "
                "dict is 0. Correct the step, or remove the states of the parameter."
            )


def set_groups(
    held: Held, merged: Groups, saved: Sequence[Mapping[str, Any]], counts: Mapping[int, int]
) -> None:
    """Write ``merged`` into the groups.

    Their ``step``, if they have one, is the saved one, or else the most of any parameter.
    """
    most = max(counts.values(), default=0)
    for group, new, other in zip(held.groups, merged, saved, strict=True):
        group.update(new)
        if held.rule.counts_in_groups:
            group["step"] = state_checks.count(other["step"], "step") if "step" in other else most
            if not group["step"]:
                del group["step"]


def _step_in(entry: Mapping[str, Any], rule: UpdateRule, names: Sequence[str], owner: str) -> int:
    """Return the update count of the saved state of the parameter ``owner``."""
    if "step" in entry:
        return state_checks.count(entry["step"], f"step of {owner}")
    # Where there are states, a master alone is none of them: a momentum was set after the updates.
    held = [name for name, value in entry.items() if value is not None]
    is_updated = not set(held) <= _BESIDE if names else bool(held)
    return int(is_updated and bool(held) and not rule.counts_steps)
