"""FlatState: parameters, masters and states of one flat; OwnShards: the driver's view of all."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardfuse.buffers import FlatBuffer, ShardArena, are_at, foreach_copy, return_freed_memory
from shardfuse.codecs import MASTER_DTYPE, ParamCodec
from shardfuse.engine.gather import ParamGatherer
from shardfuse.engine.units import (
    BlockMap,
    ParamRows,
    ParamSet,
    ShardProvider,
    UpdateRange,
    UpdateUnit,
    small_sets,
)
from shardfuse.grads.source import GradSource
from shardfuse.layout import BLOCK, Bucket, FlatLayout, Fragment, ParamSpec, round_up
from shardfuse.rules import UpdateRule

_REMEDY = (
    "Convert and move the model before building the optimizer; or change it back, as by "
    "model.to({}), and call opt.rebind()."
)

_TRIM_NBYTES = 32 << 20
"""Bytes of parameters that move between two calls of return_freed_memory()."""

_CHUNK_NBYTES = 1 << 20
"""Bytes of parameters that move by one call: those that are there twice meanwhile."""


# Of this process. Parameters themselves have no weak references: torch would not swap them then.
_live = set[weakref.ref["FlatState"]]()


def _are_same(param: Tensor, shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether elements are in this order; a dimension of size 1 may have any stride."""
    pairs = zip(shape, stride, param.stride(), strict=False)
    return tuple(param.shape) == tuple(shape) and all(n == 1 or a == b for n, a, b in pairs)


class FlatState:
    """Storage of one flat on one rank; nothing here communicates or computes an update.

    Building it moves the parameters: each becomes a view of the flat buffer, of the same values.

    Args:
        params_buffer: where the parameters are to lie.
        fragments: this rank's part of the flat.
        params, specs: the parameters in slot order.
        rank: rank in the shard group.
        codec: how updated parameters are encoded; None: in their own dtype.
    """

    params_buffer: FlatBuffer  # all ranks' shards; the model's own tensors
    codec: ParamCodec  # and the rounding errors or masters of rounded parameters
    states: dict[str, ShardArena]  # fp32 shards by state name
    spec_of: dict[int, ParamSpec]  # by parameter, in slot order
    groups: Counter[int]
    """How many of the parameters are in each group."""
    kinds: list[tuple[int, str]]
    """(group, policy) of neighbours that are updated alike, in slot order."""

    def __init__(
        self,
        params_buffer: FlatBuffer,
        params: Sequence[Tensor],
        specs: Sequence[ParamSpec],
        *,
        fragments: Iterable[Fragment],
        rank: int,
        codec: ParamCodec | None = None,
    ) -> None:
        self.flat = flat = params_buffer.flat
        self.params = params
        self.specs = specs
        self.rank = rank
        self.fragments: dict[int, list[Fragment]] = {bucket.index: [] for bucket in flat.buckets}
        for fragment in fragments:
            self.fragments[fragment.bucket].append(fragment)
        self.groups = Counter(spec.group for spec in specs)
        members = [slot.param for slot in flat.slots]
        kinds = [spec.kind for spec in specs]
        self.kinds = list(dict.fromkeys(kinds))
        position = {kind: index for index, kind in enumerate(self.kinds)}
        self.spec_of = dict(zip(members, specs, strict=True))
        self._kind_of = {param: position[kind] for param, kind in zip(members, kinds, strict=True)}
        self.device = params[0].device
        self.params_buffer = params_buffer
        self._addresses: list[int] = []
        self._strides: list[tuple[int, ...]] = []
        self.bind()
        self.codec = ParamCodec(params_buffer, rank) if codec is None else codec
        self.states = {}
        self._holders: dict[str, set[int]] = {}  # by state: the groups whose parameters have it
        # Steps are one number while all parameters have the same one, which is the usual case.
        self._step = 0
        self._steps: dict[int, int] | None = None
        _live.add(weakref.ref(self, _live.discard))
        self._stepped: set[int] = (
            set()
        )  # no_local_grad ones that are updated in this step all the same

    def bind(self) -> None:
        """Make every parameter a view of the flat buffer, keeping its present values.

        Raises:
            TypeError: a parameter has another device, dtype or shape than the flat was laid out
                for; nothing is changed then.
        """
        change = self.change()
        if change:
            raise TypeError(change)
        views = self.params_buffer.views_with_own_storage(self.specs)
        pairs = [
            (param, view)
            for param, view in zip(self.params, views, strict=True)
            if param.data_ptr() != view.data_ptr() or param.stride() != view.stride()
        ]
        nbytes = 0
        for chunk in _chunked(pairs):
            foreach_copy([param for param, _ in chunk], [view for _, view in chunk])
            for param, view in chunk:
                param.data = view  # frees its own memory, unless other code refers to that
                nbytes += view.nbytes
            if nbytes >= _TRIM_NBYTES and self.device.type == "cpu":
                return_freed_memory()
                nbytes = 0
        if nbytes >= _TRIM_NBYTES:  # on a device once: it waits for all kernels
            return_freed_memory(self.device)
        self._addresses = [param.data_ptr() for param in self.params]
        self._strides = [param.stride() for param in self.params]

    def copy_out(self, extents: Sequence[range]) -> None:
        """Give parameters that lie in others' slots memory of their own, before any bind().

        A slot may be written then, although its values were swapped with another's or transposed.
        ``extents`` are the addresses of all slots.
        """
        moved = set(self.moved())
        for param, spec in zip(self.params, self.specs, strict=True):
            if spec.name in moved and any(param.data_ptr() in extent for extent in extents):
                param.data = param.detach().clone()

    def change(self) -> str:
        """Return how the first parameter that bind() would refuse has changed, and the remedy.

        Empty for none.
        """
        dtype = self.params_buffer.data.dtype
        for param, spec in zip(self.params, self.specs, strict=True):
            if (param.dtype, param.device, param.shape) != (dtype, self.device, spec.shape):
                return (
                    f"{spec.name} is now {tuple(param.shape)} {param.dtype} on {param.device}, not "
                    f"{spec.shape} {dtype} on {self.device}. {_REMEDY.format(dtype)}"
                )
        return ""

    def moved(self) -> list[str]:
        """Return names of parameters that were re-allocated, or transposed, since bind()."""
        strides = map(Tensor.stride, self.params)
        if are_at(self.params, self._addresses) and all(map(operator.eq, strides, self._strides)):
            return []
        places = zip(self._addresses, self._strides, strict=True)
        return [
            spec.name
            for spec, param, (address, stride) in zip(self.specs, self.params, places, strict=True)
            if param.data_ptr() != address or not _are_same(param, spec.shape, stride)
        ]

    def is_in_other_buffers(self) -> bool:
        """Return whether a parameter lies in a buffer of another optimizer."""
        own = {id(param) for param in self.params}
        return any(
            id(param) in own and param.numel() > 0 and param.data_ptr() == address
            for ref in tuple(_live)
            if (other := ref()) is not None and other is not self
            for param, address in zip(other.params, other._addresses, strict=True)
        )

    def allocate(self, values: Mapping[str, float], group: int) -> bool:
        """Give the parameters of ``group`` the states that they lack, filled with ``values``.

        Return whether they lacked any. An arena is of all groups, and has the first value in the
        parameters that do not have the state.
        """
        self.codec.allocate()
        new = [name for name in values if not self.has_state(name, group)]
        for name in new:
            if name not in self.states:
                self.states[name] = ShardArena(self.flat, self.device, MASTER_DTYPE)
                self.states[name].data.fill_(values[name])
            self._holders.setdefault(name, set()).add(group)
        return bool(new)

    def has_state(self, name: str, group: int) -> bool:
        """Return whether the parameters of ``group`` have the state ``name`` of a rule."""
        return group in self._holders.get(name, ())

    def drop_state(self, name: str, group: int) -> None:
        """Take the state ``name`` from the parameters of ``group``, and free it with the last."""
        self._holders[name].discard(group)
        if not self._holders[name]:
            del self.states[name], self._holders[name]

    @property
    def is_trained(self) -> bool:
        """Whether a parameter is not frozen, or has a gradient all the same."""
        return any(param.requires_grad or param.grad is not None for param in self.params)

    @property
    def param_nbytes(self) -> int:
        """Bytes of the parameters, and of their send buffers."""
        return self.params_buffer.data.nbytes + self.codec.nbytes

    @property
    def state_nbytes(self) -> int:
        """Bytes of this rank's states, masters and rounding errors."""
        arenas = [*self.states.values(), *([] if self.codec.arena is None else [self.codec.arena])]
        return sum(arena.data.nbytes for arena in arenas)

    # Steps

    def step_of(self, param: int) -> int:
        """Return how many updates ``param`` has had."""
        return self._step if self._steps is None else self._steps[param]

    @property
    def next_step(self) -> int:
        """The step of the next update of every parameter; 1 if they differ."""
        return self._step + 1 if self._steps is None else 1

    @property
    def most_steps(self) -> int:
        """The update count of the param that has had most."""
        return self._step if self._steps is None else max(self._steps.values(), default=0)

    def set_steps(self, steps: dict[int, int]) -> None:
        """Set the update counts of some or all parameters of the flat."""
        if len(steps) < len(self.params):
            steps = {slot.param: self.step_of(slot.param) for slot in self.flat.slots} | steps
        values = set(steps.values())
        self._steps = None if len(values) == 1 else dict(steps)
        self._step = values.pop() if len(values) == 1 else 0

    def ranges(self, bucket: Bucket, first: int) -> list[UpdateRange]:
        """Return the ranges of ``bucket``'s shard by param_set, whose padding is in them.

        The first of ``kinds`` has the number ``first``, and the others follow.
        """
        found: list[UpdateRange] = []
        for fragment in self.fragments[bucket.index]:
            number, start = first + self._kind_of[fragment.param], fragment.shard_start
            if not found:
                found.append(UpdateRange(0, bucket.shard_numel, number))
            elif found[-1].param_set != number:
                found[-1] = found[-1]._replace(stop=start)
                found.append(UpdateRange(start, bucket.shard_numel, number))
        return found

    def step_ranges(
        self,
        bucket: Bucket,
        ranges: Sequence[UpdateRange],
        no_local_grad: set[int],
        unused: set[int],
        first: int,
    ) -> list[UpdateRange]:
        """Return the ranges to update in ``bucket``'s shard: runs of fragments at the same step.

        Args:
            bucket: of this flat.
            ranges: those of ranges().
            first: as of ranges().
            no_local_grad: parameters without a gradient on this rank.
            unused: those of them without a gradient on any rank, which are left out.
        """
        if no_local_grad:
            owned = {fragment.param for fragment in self.fragments[bucket.index]}
            self._stepped |= (owned & no_local_grad) - unused
        if not unused and self._steps is None:
            step = self._step + 1
            return [UpdateRange(*each[:3], step) for each in ranges]
        step_ranges: list[UpdateRange] = []
        for fragment in self.fragments[bucket.index]:
            if fragment.param in unused:
                continue
            start = fragment.shard_start
            stop = start + round_up(fragment.numel, self.flat.align)
            key = (first + self._kind_of[fragment.param], self.step_of(fragment.param) + 1)
            if step_ranges and step_ranges[-1].stop == start and step_ranges[-1][2:] == key:
                start = step_ranges.pop().start
            step_ranges.append(UpdateRange(start, stop, *key))
        return step_ranges

    def increment_step(self, no_local_grad: set[int]) -> bool:
        """Count one update of every parameter; return whether there is any.

        Parameters in ``no_local_grad`` count only if step_ranges() has included them.
        """
        skipped = no_local_grad - self._stepped
        self._stepped.clear()
        self._mark_written(skipped)
        if not skipped and self._steps is None:
            self._step += 1
            return True
        params = [slot.param for slot in self.flat.slots]
        self.set_steps({p: self.step_of(p) + (p not in skipped) for p in params})
        return len(skipped) < len(params)

    def _mark_written(self, skipped: set[int]) -> None:
        """Tell autograd, which sees no write to the buffer, of all parameters but ``skipped``.

        A backward through a graph from before the step then raises, as under torch's optimizers.
        """
        slots = zip(self.flat.slots, self.params, strict=True)
        written = [p for slot, p in slots if slot.param not in skipped] if skipped else self.params
        increment_version(written)


def move_through_host(
    params: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    allocate: Callable[[], Sequence[FlatBuffer]],
    first: int = 0,
) -> Sequence[FlatBuffer]:
    """Move parameters to the flat buffers that ``allocate`` returns, once their memory is free.

    For a device without room for both. Host memory holds a copy of the parameters meanwhile. If
    anything raises, they have their values again. (Not run on hardware.)

    Args:
        params, specs: all parameters, by the numbers that slots have.
        allocate: returns the flat buffers, once the parameters are freed.
        first: number of the first parameter that moves.
    """
    on_host: dict[int, Tensor] = {}
    members = [number for number in range(first, len(params)) if params[number].numel()]
    device = params[members[0]].device if members else torch.device("cpu")
    try:
        for number in members:
            on_host[number] = params[number].detach().cpu()
            params[number].data = params[number].detach().new_empty(0)
        return_freed_memory(device)
        buffers = allocate()
        for buffer in buffers:
            of_buffer = buffer.views_with_own_storage(
                [specs[slot.param] for slot in buffer.flat.slots]
            )
            for slot, view in zip(buffer.flat.slots, of_buffer, strict=True):
                if slot.param in on_host:
                    view.copy_(on_host[slot.param])
                    params[slot.param].data = view
                    del on_host[slot.param]
    finally:
        for number, values in on_host.items():
            params[number].data = values.to(device)
    return buffers


def _chunked(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield ``pairs`` of equal size in chunks of at most _CHUNK_NBYTES, a larger one alone."""
    batch: list[tuple[Tensor, Tensor]] = []
    nbytes = 0
    for pair in pairs:
        size = pair[1].nbytes
        if batch and nbytes + size > _CHUNK_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += size
    if batch:
        yield batch


def rebind(flats: Sequence[FlatState]) -> None:
    """Move parameters of all flats back into the buffers, keeping their present values.

    Raises:
        TypeError: as of FlatState.bind().
    """
    buffers = [state.params_buffer.data for state in flats]
    extents = [range(data.data_ptr(), data.data_ptr() + data.nbytes) for data in buffers]
    for state in flats:
        state.copy_out(extents)
    for state in flats:
        state.bind()


def params_of_all() -> list[Tensor]:
    """Return the parameters of all optimizers of this process, which keep them equal on all ranks.

    Nothing is read: some may be in flight.
    """
    live = [state for ref in tuple(_live) if (state := ref()) is not None]
    return [param for state in live for param in state.params]


def check_params(
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    flats: Sequence[FlatState],
    prefix: str,
) -> None:
    """Raise if ``groups`` no longer hold the parameters of the flat buffers.

    Args:
        groups: the optimizer's ``param_groups``.
        params: the parameters it was built with, in the same order.
        flats: all flats.
        prefix: start of the message.

    Raises:
        RuntimeError: parameters were replaced by others, moved to another group, or re-allocated.
    """
    given: Counter[int] = Counter()
    for state in flats:
        given.update(state.groups)
    pairs = (pair for state in flats for pair in zip(state.params, state.specs, strict=True))
    fault = members_fault(groups, params, given, pairs)
    if fault:
        raise RuntimeError(f"{prefix}{fault}")
    moved = [name for state in flats for name in state.moved()]
    if moved:
        names = ", ".join(moved[:3]) + (", ..." if len(moved) > 3 else "")
        change = next((text for state in flats if (text := state.change())), "")
        if change:
            raise RuntimeError(
                f"{prefix}{len(moved)} parameters were cast or moved after the optimizer was built "
                f"({names}), where rebind() cannot follow: {change}"
            )
        if any(state.is_in_other_buffers() for state in flats):
            raise RuntimeError(
                f"{prefix}{len(moved)} parameters ({names}) belong to another optimizer, which was "
                "built on them later: updates would not reach the model. Keep one of the two, or "
                "give each of them parameters of its own."
            )
        raise RuntimeError(
            f"{prefix}{len(moved)} parameters were re-allocated or transposed since the optimizer "
            f"was built ({names}), so that updates would not reach the model. Call opt.rebind() "
            "after moving them, on every rank."
        )


def members_fault(
    groups: Sequence[Mapping[str, Any]],
    params: Sequence[Tensor],
    given: Mapping[int, int],
    pairs: Iterable[tuple[Tensor, ParamSpec]],
) -> str:
    """Return the fault of the parameters in ``groups``; empty if there is none.

    Args:
        groups: the optimizer's ``param_groups``.
        params: the parameters it was built with, in the same order.
        given: {group: how many of them it was given}.
        pairs: (parameter, spec) of all; read only if there is a fault.
    """
    members = itertools.chain.from_iterable(group["params"] for group in groups)
    num_members = sum(len(group["params"]) for group in groups)
    if num_members != len(params) or not all(map(operator.is_, members, params)):
        return (
            "param_groups hold other parameters than the optimizer was built with. Use "
            "add_param_group() to add some, or build a new optimizer; a wrapper that replaces "
            "parameters by copies cannot be used."
        )
    held = {index: len(group["params"]) for index, group in enumerate(groups) if group["params"]}
    return "" if held == given else _regrouped(groups, pairs)


def _regrouped(
    groups: Sequence[Mapping[str, Any]], pairs: Iterable[tuple[Tensor, ParamSpec]]
) -> str:
    """Return which parameter is in another group than the one that it was given in."""
    specs = {id(param): spec for param, spec in pairs}
    members = [(specs[id(p)], i) for i, group in enumerate(groups) for p in group["params"]]
    spec, index = next((spec, i) for spec, i in members if spec.group != i)
    return (
        f"{spec.name} is in group {index} of param_groups now, and was given in group "
        f"{spec.group}. Change the hyper-parameters of the groups, and leave the parameters where "
        "they are; to group them anew, build a new optimizer."
    )


# The shards of ShardedOptimizer


class OwnShards(ShardProvider):
    """Units are buckets' shards; see ShardProvider. A flat that ``grads`` does not have is frozen.

    Args:
        rule: names the states.
        groups: the optimizer's own ``param_groups``, read at every step; may be set anew.
        flats: all flats, indexed as in the layout; may grow.
        grads, gather: the two directions of data.
        row: elements of a tile's row, which every slot has a multiple of.
    """

    def __init__(
        self,
        rule: UpdateRule,
        groups: Sequence[dict[str, Any]],
        flats: Sequence[FlatState],
        *,
        grads: GradSource,
        gather: ParamGatherer,
        row: int,
    ) -> None:
        self.has_updated = False  # any parameter in the last step, as far as this rank knows
        self._rule = rule
        self.groups = groups
        self._flats = flats
        self._grads = grads
        self._gather = gather
        self._row = row
        self._active = [state for state in flats if grads.has(state.flat)]
        gather.plan(self._active)
        self._means = {s.flat.index: grads.mean_factor(s.flat.index) for s in self._active}
        self._buckets: dict[int, Bucket] = {
            bucket.index: bucket for state in self._active for bucket in state.flat.buckets
        }
        self._first: dict[int, int] = {}  # by flat, the number of its first param_set
        self._members: list[list[tuple[int, ParamSpec]]] = []  # by param_set
        for state in self._active:
            self._first[state.flat.index] = len(self._members)
            by_kind: dict[tuple[int, str], list[tuple[int, ParamSpec]]] = {}
            for slot, spec in zip(state.flat.slots, state.specs, strict=True):
                by_kind.setdefault(spec.kind, []).append((slot.param, spec))
            self._members += by_kind.values()
        self._specs = {number: spec for members in self._members for number, spec in members}
        self._small = small_sets([sum(s.numel for _, s in members) for members in self._members])
        self._ranges = {
            bucket.index: state.ranges(bucket, self._first[state.flat.index])
            for state in self._active
            for bucket in state.flat.buckets
        }

    @property
    def most_steps(self) -> int:
        """The update count of the parameter that has had most."""
        return max((state.most_steps for state in self._flats), default=0)

    @property
    def local_numel(self) -> int:
        """Elements that a rank updates, the same number on all ranks.

        Without padding, which under LAMB may be most of a flat.
        """
        numel = sum(slot.numel for state in self._active for slot in state.flat.slots)
        padded = sum(bucket.numel for bucket in self._buckets.values())
        shards = sum(bucket.shard_numel for bucket in self._buckets.values())
        return numel * shards // padded if padded else 0

    @property
    def param_nbytes(self) -> int:
        """Bytes of the flat buffers of parameters."""
        return sum(state.param_nbytes for state in self._flats)

    @property
    def state_nbytes(self) -> int:
        """Bytes of this rank's states, masters and rounding errors."""
        return sum(state.state_nbytes for state in self._flats)

    def check(
        self, groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor], prefix: str
    ) -> None:
        """Raise as check_params() does."""
        check_params(groups, params, self._flats, prefix)

    def allocate(self, group: int) -> None:
        """Give the trained parameters of ``group`` the states that its hyper-parameters need."""
        for state in [state for state in self._active if group in state.groups]:
            is_new = state.allocate(self._rule.initial_states(self.groups[group]), group)
            if is_new and not self._rule.counts_steps:
                # Momentum was set above 0 later: its first update comes now.
                members = zip(state.flat.slots, state.specs, strict=True)
                state.set_steps({slot.param: 0 for slot, s in members if s.group == group})

    def entries(self) -> list[str]:
        """Return further lines that must be equal on all ranks in a step: none."""
        return []

    @property
    def device(self) -> torch.device:
        return self._flats[0].device if self._flats else torch.device("cpu")

    @property
    def param_sets(self) -> Sequence[ParamSet]:
        """The parts of trained flats that are of one group and policy."""
        kinds = [
            (state.flat, state.next_step, kind) for state in self._active for kind in state.kinds
        ]
        return [
            ParamSet(
                number,
                self.groups[group],
                policy,
                flat.dtype,
                self._means[flat.index],
                number in self._small,
                step,
            )
            for number, (flat, step, (group, policy)) in enumerate(kinds)
        ]

    def gradients(self) -> Iterator[UpdateUnit]:
        for bucket, parts in self._grads.reduced():
            yield UpdateUnit(
                bucket.index,
                bucket.shard_numel,
                self._row,
                parts,
                self._ranges[bucket.index],
                mean=self._means[bucket.flat],
                fragments=self._flats[bucket.flat].fragments[bucket.index],
            )

    def checkout(self, unit: UpdateUnit) -> None:
        bucket = self._buckets[unit.index]
        state, first = self._flats[bucket.flat], self._first[bucket.flat]
        unit.p, unit.low = state.codec.begin_update(bucket)
        unit.states = {name: arena.view(bucket) for name, arena in state.states.items()}
        unused = self._grads.unused(bucket, unit.grad)
        no_local_grad = self._grads.no_local_grad(state.flat)
        unit.ranges = state.step_ranges(bucket, unit.ranges, no_local_grad, unused, first)

    def commit(self, unit: UpdateUnit) -> None:
        """Launch the all-gather of the bucket."""
        bucket = self._buckets[unit.index]
        state = self._flats[bucket.flat]
        state.codec.commit(bucket)
        self._gather.launch(bucket, state.params)

    def increment_step(self) -> None:
        """Count an update of every parameter that had one, and the step where groups have one."""
        updated = [
            state.increment_step(self._grads.no_local_grad(state.flat)) for state in self._active
        ]
        self.has_updated = any(updated)
        for group in self.groups if self._rule.counts_in_groups else ():
            group["step"] = group.get("step", 0) + 1

    def keep_reduced(self) -> None:
        self._grads.keep_reduced()

    def keep_all_reduced(self) -> None:
        self._grads.keep_all_reduced()

    def global_square(self) -> Tensor | None:
        return None

    def named_grads(self) -> list[tuple[str, Tensor | None]]:
        """Return (name, gradient on this rank) of every parameter, in order of registration."""
        shards = self._grads.overflowed
        members = [
            (slot.param, spec.name, shards.get(slot.param, param.grad))
            for state in self._flats
            for slot, spec, param in zip(state.flat.slots, state.specs, state.params, strict=True)
        ]
        return [(name, grad) for _, name, grad in sorted(members, key=lambda member: member[0])]

    def blocks(self, param_sets: Sequence[int]) -> BlockMap:
        """Return the blocks of flats that hold ``param_sets``, which have slots of whole ones."""
        owned = {param for number in param_sets for param, _ in self._members[number]}
        owners: list[tuple[int, int, int]] = []
        extents: dict[int, tuple[int, int]] = {}
        num_blocks = 0
        for state in self._active:
            if owned.isdisjoint(slot.param for slot in state.flat.slots):
                continue
            assert state.flat.align == BLOCK, "a block holds several parameters"
            for bucket in state.flat.buckets:
                stop = num_blocks + bucket.shard_numel // BLOCK
                extents[bucket.index] = (num_blocks, stop)
                for fragment in state.fragments[bucket.index]:
                    if fragment.param in owned:
                        start = num_blocks + fragment.shard_start // BLOCK
                        length = round_up(fragment.numel, BLOCK) // BLOCK
                        owners.append((fragment.param, start, start + length))
                num_blocks = stop
        num_params = sum(len(state.params) for state in self._flats)
        return BlockMap(owners, extents, num_blocks, num_params)

    def params(self, param_set: int) -> Sequence[tuple[int, ParamSpec]]:
        return self._members[param_set]

    def rows(self, param: int) -> ParamRows:
        return ParamRows.whole(self._specs[param])

    def parts_of(self, rank: int, params: Collection[int]) -> Sequence[Fragment]:
        flats = [state.flat for state in self._active]
        parts = [f for flat in flats for f in FlatLayout.fragments(flat, rank)]
        return [fragment for fragment in parts if fragment.param in params]

    def counted(self, columns: str) -> Tensor | None:
        return None
