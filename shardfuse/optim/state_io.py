"""Optimizer state in and out: torch's ordinary dicts, and sharded ones for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.checkpoint import FragmentTensor, Piece, gather, scatter
from shardfuse.comm import Communicator
from shardfuse.layout import FlatLayout, ParamSpec
from shardfuse.optim.flat_state import MASTER_DTYPE, FlatState
from shardfuse.optim.rules import UpdateRule

MASTER = "param"
"""State key of the fp32 master of a low-precision parameter."""

Groups = list[dict[str, Any]]


def _arenas(state: FlatState) -> dict[str, ShardArena]:
    arenas = dict(state.states)
    if state.masters is not None:
        arenas[MASTER] = state.masters
    return arenas


def _agreed_steps(comm: Communicator, layout: FlatLayout, flats: Sequence[FlatState]) -> list[int]:
    """Return the update count of every parameter. Collective.

    A rank that neither has a gradient of a parameter nor owns a fragment of it cannot count its
    updates; the others can, hence the maximum.
    """
    steps = torch.zeros(len(layout.specs), dtype=torch.int32)
    for state in flats:
        for slot in state.flat.slots:
            steps[slot.param] = state.step_of(slot.param)
    if flats and layout.specs:
        steps = steps.to(flats[0].device)
        comm.all_reduce(steps, "max").wait()
    result: list[int] = steps.tolist()
    return result


def _packed_groups(groups: Groups) -> list[dict[str, Any]]:
    """Return the groups with parameters replaced by their running number, as torch does."""
    packed = []
    start = 0
    for group in groups:
        stop = start + len(group["params"])
        options = {key: value for key, value in group.items() if key != "params"}
        packed.append({**options, "params": list(range(start, stop))})
        start = stop
    return packed


def fresh(groups: Groups) -> dict[str, Any]:
    """Return torch's state dict of an optimizer that has taken no step. Local."""
    return {"state": {}, "param_groups": _packed_groups(groups)}


def consolidate(
    comm: Communicator,
    layout: FlatLayout,
    flats: Sequence[FlatState],
    groups: Groups,
    rule: UpdateRule,
    to: int | None,
) -> dict[str, Any] | None:
    """Return torch's state dict, of full CPU tensors, on rank ``to`` (None: on all). Collective."""
    keep = to is None or comm.rank == to
    steps = _agreed_steps(comm, layout, flats)
    state: dict[int, dict[str, Any]] = {}
    for flat_state in flats:
        specs = flat_state.specs
        for name, arena in _arenas(flat_state).items():
            full = gather(comm, flat_state.flat, arena, specs, keep=keep)
            for param, tensor in full.items():
                if steps[param] > 0:
                    entry = state.setdefault(param, {})
                    if rule.counts_steps:
                        entry["step"] = steps[param]
                    entry[name] = tensor
    if not keep:
        return None
    ordered = {param: state[param] for param in sorted(state)}
    return {"state": ordered, "param_groups": _packed_groups(groups)}


def _merged(groups: Groups, saved: Sequence[Mapping[str, Any]], rule: UpdateRule) -> Groups:
    """Return the groups with the hyper-parameters of ``saved``, after checking that they fit.

    Raises:
        ValueError: other numbers of groups or parameters, or a hyper-parameter out of range.
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
        options = {k: v for k, v in other.items() if k not in ("params", "param_names")}
        merged.append({**group, **options})
        rule.check(merged[-1])
    return merged


def restore(
    layout: FlatLayout,
    flats: Sequence[FlatState],
    groups: Groups,
    rule: UpdateRule,
    state_dict: Mapping[str, Any],
) -> None:
    """Load torch's state dict: every rank takes its fragments of the full tensors. Local.

    Raises:
        ValueError: tensors of another shape, groups that do not fit, or a missing state.
    """
    merged = _merged(groups, state_dict["param_groups"], rule)
    order = [p for group in state_dict["param_groups"] for p in group["params"]]
    entries = {i: dict(state_dict["state"].get(key, {})) for i, key in enumerate(order)}
    for param, spec in enumerate(layout.specs):
        _check_entry(spec, entries[param], rule, rule.state_names(merged[spec.group]))
    specs = dict(enumerate(layout.specs))
    for group, new in zip(groups, merged, strict=True):
        group.update(new)
    for state in flats:
        steps = {slot.param: _step_in(entries[slot.param], rule) for slot in state.flat.slots}
        if state.flat.frozen and not state.states and not any(steps.values()):
            continue
        state.allocate(rule.initial_states(groups[state.flat.group]))
        for name, arena in _arenas(state).items():
            held = {
                slot.param: entries[slot.param][name]
                for slot in state.flat.slots
                if entries[slot.param].get(name) is not None
            }
            if name != MASTER:
                arena.data.fill_(rule.initial(name))
            for bucket in state.flat.buckets:
                fragments = [f for f in state.fragments[bucket.index] if f.param in held]
                scatter(fragments, arena.segment(bucket), held, specs)
        state.set_steps(steps)


def _check_entry(
    spec: ParamSpec, entry: Mapping[str, Any], rule: UpdateRule, names: Sequence[str]
) -> None:
    """Raise ValueError unless a parameter's saved state is whole and of its shape."""
    for name, value in entry.items():
        if isinstance(value, Tensor) and name != "step" and value.shape != spec.shape:
            raise ValueError(
                f"State {name} of {spec.name} has shape {tuple(value.shape)}, the parameter has "
                f"{spec.shape}."
            )
    lacking = [name for name in names if entry.get(name) is None]
    if lacking and _step_in(entry, rule) > 0:
        raise ValueError(
            f"loaded state dict has no {lacking[0]} for {spec.name}; it is of another optimizer or "
            "of other options."
        )


def _step_in(entry: Mapping[str, Any], rule: UpdateRule) -> int:
    """Return the update count of a parameter's saved state."""
    if "step" in entry:
        return int(entry["step"])
    has_state = any(value is not None for value in entry.values())
    return int(has_state and not rule.counts_steps)


def sharded(
    comm: Communicator, layout: FlatLayout, flats: Sequence[FlatState], groups: Groups
) -> dict[str, Any]:
    """Return a flat dict for torch.distributed.checkpoint whose tensors alias this rank's state.

    Collective (one small all-reduce). Keys are ``state.<param name>.<state>``; steps are tensors.
    """
    result: dict[str, Any] = {}
    steps = _agreed_steps(comm, layout, flats)
    for state in flats:
        for name, arena in _arenas(state).items():
            pieces: dict[int, list[Piece]] = {slot.param: [] for slot in state.flat.slots}
            for bucket in state.flat.buckets:
                segment = arena.segment(bucket)
                for f in state.fragments[bucket.index]:
                    data = segment[f.shard_start : f.shard_start + f.numel]
                    pieces[f.param].append(Piece(f.param_start, data))
            for param, parts in pieces.items():
                spec = layout.specs[param]
                if spec.numel:
                    key = f"state.{spec.name}.{name}"
                    result[key] = FragmentTensor(spec.numel, arena.data.dtype, parts)
        for slot in state.flat.slots:
            key = f"state.{layout.specs[slot.param].name}.step"
            result[key] = torch.tensor(steps[slot.param])
    result["param_groups"] = _packed_groups(groups)
    return result


def load_sharded(
    layout: FlatLayout,
    flats: Sequence[FlatState],
    groups: Groups,
    rule: UpdateRule,
    state_dict: Mapping[str, Any],
) -> None:
    """Take over steps and hyper-parameters; the tensors were filled in place when loaded.

    Raises:
        ValueError: groups that do not fit, or states of parameters that are frozen here.
    """
    merged = _merged(groups, state_dict["param_groups"], rule)
    steps = {
        index: int(state_dict[f"state.{spec.name}.step"]) for index, spec in enumerate(layout.specs)
    }
    _check_room(layout, flats, merged, rule, steps)
    for group, new in zip(groups, merged, strict=True):
        group.update(new)
    for state in flats:
        state.set_steps({slot.param: steps[slot.param] for slot in state.flat.slots})


def _check_room(
    layout: FlatLayout,
    flats: Sequence[FlatState],
    groups: Groups,
    rule: UpdateRule,
    steps: Mapping[int, int],
) -> None:
    """Raise ValueError if an updated parameter has elements and lacks a state or master here.

    What the optimizer has no place for was not read from the checkpoint.
    """
    for state in flats:
        names = rule.state_names(groups[state.flat.group])
        lacking = [name for name in names if name not in state.states]
        if state.masters is None and state.params_buffer.data.dtype != MASTER_DTYPE:
            lacking.append(MASTER)
        trained = [s.param for s in state.flat.slots if s.numel and steps[s.param] > 0]
        if not lacking or not trained:
            continue
        name = layout.specs[trained[0]].name
        remedy = (
            f"{name} was frozen. Build while it requires a gradient, load, then freeze it."
            if state.flat.frozen
            else "the hyper-parameters were others. Build it with those of the checkpoint."
        )
        raise ValueError(
            f"The checkpoint is of an optimizer that has trained {name}, for whose {lacking[0]} "
            f"this one has no place: when this one was built, {remedy}"
        )
