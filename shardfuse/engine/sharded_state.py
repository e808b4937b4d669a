"""One rank's state as fragments, for torch.distributed.checkpoint and shardfuse.checkpoint."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
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
    held_fragments,
    holds,
    merged_groups,
    saved_groups,
    set_groups,
)
from shardfuse.fragments import Chunk, FragmentTensor, flat_chunks, shaped_chunks
from shardfuse.layout import Bucket, ParamSpec

logger = logging.getLogger("shardfuse")


def sharded(opt: OptimizerState) -> dict[str, Any]:
    """Return a flat dict for torch.distributed.checkpoint; tensors alias this rank's state.

    Collective (one small all-reduce). Keys are ``state.<param name>.<state>``; steps are tensors.
    """
    result: dict[str, Any] = dict(aliases(opt.flats))
    for spec, count in zip(opt.layout.specs, agreed_steps(opt), strict=True):
        result[f"state.{spec.name}.step"] = torch.tensor(count)
    result["param_groups"] = groups_to_save(opt)
    return result


def groups_to_save(opt: OptimizerState) -> Groups:
    """Return the groups to save, with Python numbers for one-element tensors and numpy scalars.

    torch.distributed.checkpoint does not load a number where a tensor was saved. numpy scalars are
    not plain data.
    """
    return [
        {key: _as_number(value) for key, value in group.items()}
        for group in counted_groups(opt.groups, opt.rule)
    ]


def _as_number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_number, value))  # betas
    is_one = isinstance(value, Tensor) and value.numel() == 1
    return value.item() if is_one else plain_number(value)


def plain_number(value: Any) -> Any:
    """Return a numpy scalar as Python's number, which a safe unpickler loads; else ``value``."""
    is_numpy = type(value).__module__ == "numpy" and getattr(value, "shape", None) == ()
    return value.item() if is_numpy else value


def _like(new: Any, old: Any) -> Any:
    """Return ``new`` as a tensor like ``old``, if ``old`` is a tensor with one element."""
    is_tensor = isinstance(old, Tensor) and old.numel() == 1
    return torch.full_like(old, _as_number(new)) if is_tensor else new


def aliases(flats: Sequence[FlatState]) -> Iterator[tuple[str, FragmentTensor]]:
    """Yield (key in sharded(), tensor that aliases this rank's state)."""
    for state in flats:
        for name, arena in arenas_of(state).items():
            tensors = fragment_tensors(state, arena.view, flat_chunks)
            for spec, tensor in zip(state.specs, tensors, strict=True):
                if spec.numel and holds(state, name, spec):
                    yield f"state.{spec.name}.{name}", tensor


def load_sharded(opt: OptimizerState, state_dict: Mapping[str, Any]) -> None:
    """Load steps, hyper-parameters, and the tensors that the reader did not fill in place.

    Raises:
        ValueError: groups that do not fit; states of parameters that are frozen here; a state is
            missing or is not of this rank's fragments. Then nothing is loaded, except for the
            tensors that the reader filled in place.
    """
    flats = opt.flats
    merged, counts = check(opt, state_dict)
    own = dict(aliases(flats))
    for key, tensor in own.items():
        saved = state_dict.get(key)
        if not isinstance(saved, FragmentTensor) or not tensor.has_same_chunks(saved):
            raise ValueError(
                f"{key} is missing, or is not of this rank's sharded_state_dict(). Load into the "
                "dict that this optimizer returns, with torch.distributed.checkpoint.load()."
            )
    for key, tensor in own.items():
        tensor.copy_(state_dict[key])
    set_hyper_parameters(opt, state_dict, merged, counts)


def set_hyper_parameters(
    opt: OptimizerState, state_dict: Mapping[str, Any], merged: Groups, counts: Mapping[int, int]
) -> None:
    """Set groups and steps of a state dict to the result of check()."""
    set_groups(opt, merged, state_dict["param_groups"], counts)
    for state in opt.flats:
        state.set_steps({slot.param: counts[slot.param] for slot in state.flat.slots})


def check(opt: OptimizerState, state_dict: Mapping[str, Any]) -> tuple[Groups, dict[int, int]]:
    """Check groups and steps of a state dict, and no states; return merged groups and steps.

    Raises:
        ValueError: groups that do not fit, or have other parameters; states of parameters that are
            frozen here.
    """
    saved = saved_groups(state_dict)
    _check_groups_match(opt.groups, saved)
    specs = enumerate(opt.layout.specs)
    merged = [
        {key: _like(value, group.get(key)) for key, value in new.items()}
        for new, group in zip(
            merged_groups(opt.groups, saved, opt.rule),
            opt.groups,
            strict=True,
        )
    ]
    counts = {param: _step_count(state_dict, spec.name) for param, spec in specs}
    _check_has_arenas(opt, merged, counts)
    return merged, counts


def _step_count(state_dict: Mapping[str, Any], name: str) -> int:
    key = f"state.{name}.step"
    if key not in state_dict:
        raise ValueError(f"The loaded state dict has no {key}. Load what sharded_state_dict() has.")
    return as_count(state_dict[key], key)


def _check_groups_match(groups: Groups, saved: Sequence[Mapping[str, Any]]) -> None:
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


def _check_has_arenas(opt: OptimizerState, groups: Groups, steps: Mapping[int, int]) -> None:
    """Raise ValueError if an updated parameter has elements and lacks a state or master here.

    A reader fills only the arenas that exist, so it has skipped such a state. ``groups`` are the
    merged ones, which the load will set.
    """
    places = [(flat, index) for flat in opt.flats for index in flat.groups]
    for state, index in places:
        names = opt.rule.state_names(groups[index])
        lacking = [name for name in names if not state.has_state(name, index)]
        if state.codec.arena is None and state.codec.key is not None:
            lacking.append(state.codec.key)
        own = [s.param for s in state.flat.slots if s.numel and steps[s.param] > 0]
        trained = [param for param in own if opt.layout.specs[param].group == index]
        if not lacking or not trained:
            continue
        name = opt.layout.specs[trained[0]].name
        raise no_place(name, lacking[0], is_frozen=state.flat.frozen)


def no_place(name: str, state: str, *, is_frozen: bool) -> ValueError:
    """Return the error that a checkpoint has a ``state`` of a parameter, and the optimizer not."""
    remedy = (
        f"{name} was frozen. Build while it requires a gradient, load, then freeze it."
        if is_frozen
        else "the hyper-parameters were others. Build it with those of the checkpoint."
    )
    return ValueError(
        f"The checkpoint is of an optimizer that has trained {name}, and this one has no place "
        f"for its {state}: when this one was built, {remedy}"
    )


# For shardfuse.checkpoint


def is_auxiliary(key: str) -> bool:
    """Return whether a key is that of a master or a rounding error, which no rule has."""
    return key.rpartition(".")[2] in (MASTER, ERROR)


class MasterRef(NamedTuple):
    """This rank's fp32 values of a parameter: in the master's arena, or the parameter itself."""

    param: Tensor
    key: str  # of the master in a checkpoint
    is_kept: bool  # True: in an arena, because the parameter is kept or sent in low precision
    place: FragmentTensor  # in the parameter's shape for an arena, else see set_saved_shapes()
    own: FragmentTensor  # this rank's fragments of the parameter itself


class LocalCheckpointState:
    """This rank's state of an optimizer, for shardfuse.checkpoint; its tensors alias the state.

    The keys are those of sharded_state_dict(), but only of params of which this rank has fragments:
    the time of a save or load depends on these. Only one rank writes a value: the owner of a
    fragment writes the fragment, and the owner of a parameter's first fragment writes its step,
    because a rank counts the updates of the fragments that it owns. Over a mesh, the replicas of a
    shard share its buckets: each bucket is written by one of them.

    Args:
        opt: the optimizer.
        loaded: called after load().
    """

    def __init__(self, opt: OptimizerState, loaded: Callable[[], None]) -> None:
        self._optimizer_state = opt
        self._loaded = loaded
        self._shaped: set[str] = set()  # keys of states to fill that are saved in a param's shape

    def set_saved_shapes(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Fill states in the form of a checkpoint, which has tensors of the shapes ``saved``.

        They are runs of elements, or boxes of a shape that is not cut by rows (DTensors). Local.
        """
        by_name = {spec.name: spec.shape for spec in self.specs if len(spec.shape) > 1}
        self._shaped = {
            key
            for key, shape in saved.items()
            if len(shape) > 1
            and tuple(shape) == by_name.get(key.rpartition(".")[0].removeprefix("state."))
        }

    @property
    def comm(self) -> Communicator:
        """All ranks that share the optimizer, replicas included."""
        return self._optimizer_state.comm.world

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        flats = self._optimizer_state.flats
        return flats[0].device if flats else torch.device("cpu")

    @property
    def specs(self) -> Sequence[ParamSpec]:
        """The specs of all parameters, in the order of their numbers."""
        return self._optimizer_state.layout.specs

    @property
    def rule(self) -> str:
        """The description of the rule that updates the states."""
        return self._optimizer_state.rule.describe()

    def to_write(self) -> dict[str, Any]:
        """Return the state dict that this rank writes. Local."""
        result: dict[str, Any] = dict(self._states(to_write=True))
        counts = self._counts()
        steps = torch.tensor([*counts.values()], dtype=torch.int64)
        for name, step in zip(counts, steps, strict=True):
            own = FragmentTensor((), step.dtype, step.device, [Chunk((), step)])
            result[f"state.{name}.step"] = own
        if self.comm.rank == 0:
            result["param_groups"] = self.groups()
        return result

    def _counts(self) -> dict[str, int]:
        """Return {parameter: update count} of those whose count this rank writes."""
        found: dict[str, int] = {}
        for state in self._optimizer_state.flats:
            buckets = [bucket for bucket in state.flat.buckets if self._writes(bucket)]
            owned = [f for bucket in buckets for f in state.fragments[bucket.index]]
            mine = [fragment.param for fragment in owned if fragment.param_start == 0]
            if self.comm.rank == 0:
                mine += [slot.param for slot in state.flat.slots if not slot.numel]
            found |= {state.spec_of[param].name: state.step_of(param) for param in mine}
        return found

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of all ranks, by key: a load needs all. Local."""
        return self._state_shapes() | dict.fromkeys(self.step_keys(), ())

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {}
        for state in self._optimizer_state.flats:
            arenas = arenas_of(state)
            names = {  # by group
                spec.group: [name for name in arenas if holds(state, name, spec)]
                for spec in {spec.group: spec for spec in state.specs}.values()
            }
            for slot, spec in zip(state.flat.slots, state.specs, strict=True):
                for name in names[spec.group] if slot.numel else ():
                    key = f"state.{spec.name}.{name}"
                    found[key] = spec.shape if key in self._shaped else (slot.numel,)
        return found

    def step_keys(self) -> list[str]:
        """Return the keys of all step counts. Local."""
        return [f"state.{spec.name}.step" for spec in self.specs]

    def tensors_to_fill(self) -> dict[str, FragmentTensor]:
        """Return this rank's states, which a reader fills in place. Local."""
        return dict(self._states(to_write=False))

    def groups(self) -> Groups:
        """Return groups as they are saved. Local."""
        return groups_to_save(self._optimizer_state)

    def groups_to_fill(self) -> Groups:
        """Return groups in which a reader replaces values. Local.

        Lists, as of parameters' names, are empty: planners visit each element several times.
        """
        return [
            {key: [] if isinstance(value, list) else value for key, value in group.items()}
            for group in self.groups()
        ]

    def _states(self, *, to_write: bool) -> Iterator[tuple[str, FragmentTensor]]:
        """Yield (key, this rank's fragments of a state), of params of which it has any."""
        has = self._writes if to_write else _always
        for state in self._optimizer_state.flats:
            for name, arena in arenas_of(state).items():
                held = self._state_fragments(state, name, arena.view, has=has)
                for param, tensor in held.items():
                    if holds(state, name, spec := state.spec_of[param]):
                        yield f"state.{spec.name}.{name}", tensor

    def _state_fragments(
        self, state: FlatState, name: str, segment: Callable[[Bucket], Tensor], **options: Any
    ) -> dict[int, FragmentTensor]:
        """Return held_fragments() of the state ``name``, each in the form of set_saved_shapes()."""
        found = held_fragments(state, segment, flat_chunks, **options)
        for param in found if self._shaped else ():
            if f"state.{state.spec_of[param].name}.{name}" in self._shaped:
                options["only"] = {param}
                found |= held_fragments(state, segment, shaped_chunks, **options)
        return found

    def params(self) -> list[Tensor]:
        """Return the parameters that have elements: load() fills them on all ranks. Local."""
        flats = self._optimizer_state.flats
        return [param for state in flats for param in state.params if param.numel()]

    def param_fragments(self, *, to_write: bool) -> list[tuple[Tensor, FragmentTensor]]:
        """Return (parameter, this rank's fragments of it), of those with any. Local.

        Fragments to write are on one rank each. Fragments to fill are this rank's whole shard, and
        publish() sends them to the peers.
        """
        has = self._writes if to_write else _always
        found = []
        for state in self._optimizer_state.flats:
            held = held_fragments(state, functools.partial(_shard, state), shaped_chunks, has=has)
            by_number = _params_by_number(state)
            found += [(by_number[param], tensor) for param, tensor in held.items()]
        return found

    def masters(self, saved: Container[str]) -> list[MasterRef]:
        """Return this rank's fp32 values that a checkpoint with masters ``saved`` has elsewhere.

        They are those kept in an arena of which no master is saved, and of parameters kept in fp32
        of which one is.
        """
        found = []
        for state in self._optimizer_state.flats:
            arena = arenas_of(state).get(MASTER)
            is_kept = arena is not None
            if not is_kept and state.params_buffer.data.dtype != MASTER_DTYPE:
                continue
            keys = {p: f"state.{spec.name}.{MASTER}" for p, spec in state.spec_of.items()}
            only = {param for param, key in keys.items() if (key in saved) != is_kept}
            shard = functools.partial(_shard, state)
            own = held_fragments(state, shard, shaped_chunks, only=only)
            places = (
                self._state_fragments(state, MASTER, shard, only=only)
                if arena is None
                else held_fragments(state, arena.view, shaped_chunks, only=only)
            )
            by_number = _params_by_number(state) if places else {}
            found += [
                MasterRef(by_number[param], keys[param], is_kept, place, own[param])
                for param, place in places.items()
            ]
        return found

    def master_keys(self) -> list[str]:
        """Return the keys of masters of parameters that are kept in fp32, on any rank. Local."""
        return [f"state.{s.name}.{MASTER}" for s in self.specs if s.dtype == "float32"]

    def geometry(self) -> list[dict[str, Any]]:
        """Return the integers that define the shards of all ranks, flat by flat. Local.

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
        """Return (parameter, first element, number of elements) of this rank's fragments. Local."""
        specs = self._optimizer_state.layout.specs
        return [
            (specs[f.param].name, f.param_start, f.numel)
            for state in self._optimizer_state.flats
            for bucket in state.flat.buckets
            for f in state.fragments[bucket.index]
        ]

    def residuals(self) -> dict[str, FragmentTensor]:
        """Return this rank's rounding errors, by key in tensors_to_fill(). Local."""
        found = {}
        for state in self._optimizer_state.flats:
            arena = arenas_of(state).get(ERROR)
            if arena is not None:
                for param, tensor in held_fragments(state, arena.view, flat_chunks).items():
                    found[f"state.{state.spec_of[param].name}.{ERROR}"] = tensor
        return found

    def check(self, state_dict: Mapping[str, Any]) -> tuple[Groups, dict[int, int]]:
        """Return merged groups, and the update count of each parameter, for load(). Local.

        Raises:
            ValueError: groups and steps of the state dict do not fit.
        """
        return check(self._optimizer_state, state_dict)

    def load(
        self, state_dict: Mapping[str, Any], checked: tuple[Groups, dict[int, int]], saved: str
    ) -> None:
        """Load groups and steps, after a reader has filled tensors_to_fill(). Local.

        ``checked`` is the result of check().

        Warns on the first rank if ``saved`` is another rule; empty: the rule is unknown. It is only
        a warning, because states with the same names and hyper-parameters mean the same under both
        rules, as those of Adam and AdamW.
        """
        self._set(state_dict, *checked)
        self._loaded()
        if saved not in ("", self.rule) and self.comm.rank == 0:
            logger.warning(
                "The loaded states are of %s, and go on under %s. Updates will differ from those "
                "of the run that saved them.",
                saved,
                self.rule,
            )

    def _set(
        self, state_dict: Mapping[str, Any], merged: Groups, counts: Mapping[int, int]
    ) -> None:
        """Set groups and steps to what check() has returned."""
        set_hyper_parameters(self._optimizer_state, state_dict, merged, counts)

    def publish(self) -> None:
        """All-gather the parameters, bucket by bucket. Collective."""
        for state in self._optimizer_state.flats:
            for bucket in state.flat.buckets:
                output = state.params_buffer.bucket(bucket)
                shard = state.params_buffer.shard(bucket, state.rank)
                self._optimizer_state.comm.all_gather(output, shard).wait()

    def _writes(self, bucket: Bucket) -> bool:
        copies = getattr(self._optimizer_state.comm, "replicate", None)
        return copies is None or bucket.index % copies.world_size == copies.rank


def _always(bucket: Bucket) -> bool:
    return True


def _shard(state: FlatState, bucket: Bucket) -> Tensor:
    return state.params_buffer.shard(bucket, state.rank)


def _params_by_number(state: FlatState) -> dict[int, Tensor]:
    return dict(zip(state.spec_of, state.params, strict=True))
