"""DTensorShards: a shard provider over parameters that torch has sharded (FSDP2 and the like).

torch keeps the local shard of each DTensor in memory of its own, and all-gathers parameters and
reduces gradients by itself. States lie in flat buffers here, in whole blocks per parameter. A large
shard is updated where it lies. Small ones are copied into a staging buffer of the states' layout by
one call, updated together, and copied back by one call, so that the number of kernels does not grow
with the number of tensors; [Note: staged shards] has the measurements.

[Note: copies] A mesh dimension along which a parameter is replicated has copies of each shard, and
so have the other ranks where a parameter is on a sub-mesh: FSDP2 over the "dp" dimension of a
("dp", "tp") mesh. All copies are updated alike. Sums over tensors count one of them: those of the
first ranks. All sums of a step go through one all-reduce over the largest mesh.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from shardfuse.codecs import MASTER, MASTER_DTYPE
from shardfuse.engine.params import members_fault
from shardfuse.engine.units import (
    BlockMap,
    ParamRows,
    ParamSet,
    ShardProvider,
    UpdateRange,
    UpdateUnit,
    narrowed,
    small_sets,
)
from shardfuse.grads.source import ExternalGrads, GradPhase, GradSnapshot, memory_of
from shardfuse.layout import BLOCK, Fragment, ParamSpec, round_up
from shardfuse.rules import UpdateRule

STAGED_NUMEL = {"cpu": 16 << 10}
"""See staged_numel(). Accelerators have 1 Mi elements.

[Note: staged shards] A shard that is updated where it lies costs some ten kernel calls, a staged
one three copies. 300 shards of 2,048 elements, two ranks on a busy host on 2026-11-26, least of 8
steps: AdamW 107 ms in place and 55 staged (torch's foreach 81), LAMB 336 and 77 (tensor by tensor
3,848). The bounds themselves are estimates: on an accelerator of 1.5 TB/s the copies of 1 Mi
elements take less time than ten launches of 5 us. (Not run on hardware.)
"""

_NUM_SAMPLES = 64

_PIECE_NUMEL = 4 << 20
"""Larger local shards are updated piece by piece: temporaries are as large as a piece."""


# Geometry of one DTensor


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether ``tensor`` is a DTensor, without an import of torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def mesh_of(tensor: Any) -> Any:
    """Return the device mesh of a DTensor."""
    return tensor.device_mesh


def placements_of(tensor: Any) -> tuple[Any, ...]:
    """Return the placements of a DTensor, one for each dimension of its mesh."""
    return tuple(tensor.placements)


def shard_dim(placement: Any) -> int | None:
    """Return the tensor dimension that a placement shards; None if it replicates.

    Raises:
        TypeError: it does neither (Partial).
    """
    kind = type(placement).__name__
    if kind in ("Shard", "_StridedShard"):
        return int(placement.dim)
    if kind != "Replicate":
        raise TypeError(f"{placement}")
    return None


def local_indices(
    shape: Sequence[int], placements: Sequence[Any], mesh: Any, place: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """Return {sharded dimension: the indices (n,) along it that the local shard has}.

    Of the rank with the coordinates ``place`` in the mesh, by default this one.
    Placements apply from left to right. Shard() gives each rank one chunk as torch.chunk() does;
    _StridedShard() a chunk of each of its ``split_factor`` parts.
    """
    found: dict[int, Tensor] = {}
    place = mesh.get_coordinate() if place is None else place
    for size, at, placement in zip(mesh.shape, place, placements, strict=True):
        dim = shard_dim(placement)
        if dim is None:
            continue
        indices = found.get(dim, torch.arange(shape[dim]))
        parts = torch.split(
            indices, max(1, -(-len(indices) // getattr(placement, "split_factor", 1)))
        )
        chunks = [torch.split(part, max(1, -(-len(part) // size))) for part in parts]
        own = [chunk[at] for chunk in chunks if at < len(chunk)]
        found[dim] = torch.cat(own) if own else indices[:0]
    return found


def local_part(full: Tensor, placements: Sequence[Any], mesh: Any) -> Tensor:
    """Return this rank's part of a whole tensor."""
    for dim, indices in local_indices(full.shape, placements, mesh).items():
        full = full.index_select(dim, indices.to(full.device))
    return full


def _is_counted(placements: Sequence[Any], mesh: Any, first_rank: int) -> bool:
    """Return whether sums count this rank's shard; see [Note: copies]."""
    pairs = zip(mesh.get_coordinate(), placements, strict=True)
    is_first = all(at == 0 for at, placement in pairs if shard_dim(placement) is None)
    return is_first and bool((mesh.mesh == first_rank).any())


def local_of(tensor: Any) -> Tensor:
    """Return the local shard of a DTensor: the tensor itself, to be changed in place."""
    local = getattr(tensor, "_local_tensor", None)  # to_local() would make a view
    if local is None:
        with torch.no_grad():
            local = tensor.to_local()
    wait = getattr(local, "wait", None)  # of a collective in flight
    return local if wait is None else wait()  # type: ignore[no-any-return]


class LocalShard:
    """This rank's shard of one parameter.

    Args:
        number: of the parameter, in the order of the optimizer's.
        param: the DTensor.
        spec: of the whole tensor.
        first_rank: the first of all ranks that share the optimizer.
    """

    def __init__(self, number: int, param: Any, spec: ParamSpec, first_rank: int) -> None:
        self.number, self.param, self.spec = number, param, spec
        self.mesh, self.placements = mesh_of(param), placements_of(param)
        local = self.tensor
        self.shape, self.stride = tuple(local.shape), local.stride()
        self.numel = local.numel()
        self.is_counted = _is_counted(self.placements, self.mesh, first_rank)
        self.step = 0
        """How many updates it has had."""

    @property
    def tensor(self) -> Tensor:
        """The local shard, as it lies now."""
        return local_of(self.param)

    @property
    def grad(self) -> Tensor | None:
        """The local shard of the gradient, placed as the parameter is; None without one.

        A gradient that is placed otherwise (Partial, from a replicated parameter) is brought there
        by a collective of torch's.
        """
        grad = self.param.grad
        if grad is None:
            return None
        if not is_dtensor(grad):
            raise RuntimeError(
                f"The gradient of {self.spec.name} is a plain tensor, the parameter a DTensor. Set "
                "p.grad to a DTensor of the parameter's mesh and placements."
            )
        if mesh_of(grad) != self.mesh:
            raise RuntimeError(
                f"The gradient of {self.spec.name} is on {mesh_of(grad)}, the parameter on "
                f"{self.mesh}. Set p.grad to a DTensor of the parameter's mesh."
            )
        if placements_of(grad) != self.placements:
            with torch.no_grad():
                grad = self.param.grad = grad.redistribute(placements=self.placements)
        return local_of(grad)

    @property
    def copies(self) -> str:
        """Which ranks have copies, the same text on all ranks."""
        replicated = [at for at, each in enumerate(self.placements) if shard_dim(each) is None]
        # Slices of one mesh along different dimensions may have one shape.
        ranks = self.mesh.mesh.flatten()
        return f"{(ranks - ranks[0]).tolist()} {tuple(self.mesh.shape)} {replicated}"

    @property
    def rows(self) -> ParamRows:
        """The rows along dimension 0 of which this rank has elements.

        Raises:
            TypeError: they are no neighbours.
        """
        num_rows = self.spec.shape[0]
        indices = local_indices(self.spec.shape, self.placements, self.mesh).get(0)
        first, count = 0, num_rows
        if indices is not None:
            count = len(indices)
            first = int(indices[0]) if count else 0
            if count and int(indices[-1]) - first != count - 1:
                raise TypeError(
                    f"The rows of {self.spec.name} on this rank are no neighbours "
                    f"({self.placements}), which sums over rows need."
                )
        stride = self.numel if count == 1 else self.stride[0]
        return ParamRows(num_rows, self.spec.numel, first, count, stride)

    def flat(self, tensor: Tensor) -> Tensor:
        """Return (numel,) of a tensor of the local shape, in the order of the local shard.

        Raises:
            RuntimeError: it has another shape.
        """
        if tuple(tensor.shape) != self.shape or tensor.layout != torch.strided:
            raise RuntimeError(
                f"{self.spec.name} or its gradient is {tensor.layout} {tuple(tensor.shape)} on "
                f"this rank now, and was {self.shape} when the optimizer was built. Build a new "
                "optimizer on the model's present parameters."
            )
        if tensor.stride() != self.stride:
            ordered = torch.empty_strided(
                self.shape, self.stride, dtype=tensor.dtype, device=tensor.device
            )
            tensor = ordered.copy_(tensor)
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())


def fingerprint_of_copies(shards: Sequence[LocalShard], main: Any) -> tuple[int, int]:
    """Return 24 bits of this rank's place in sub-meshes of ``main``, and 24 of its shards there.

    Ranks of one place have copies of the same shards, so that the second number is equal, too. It
    is of a sample of the values. (0, 0): all parameters are on ``main`` itself.
    """
    place, values = b"", b""
    for shard in shards:
        if shard.mesh != main:
            place += repr(shard.mesh.get_coordinate()).encode()
            flat = shard.flat(shard.tensor)
            sample = flat[:: max(1, shard.numel // _NUM_SAMPLES)].float().tolist()
            values += repr(sample).encode()
    return (zlib.crc32(place) & 0xFFFFFF, zlib.crc32(values) & 0xFFFFFF) if place else (0, 0)


def _global_rank(rank: int, mesh: Any) -> int:
    """Return the global rank of ``rank`` in the group of all ranks of ``mesh``, in their order."""
    return int(sorted(mesh.mesh.flatten().tolist())[rank])


def _elements_on(rank: int, shard: LocalShard, mesh_size: int) -> tuple[int, int]:
    """Return (start, number) of the elements of a whole parameter that ``rank`` has.

    Raises:
        TypeError: they are no whole, adjacent rows, or the parameter is not on all ranks.
    """
    spec, mesh = shard.spec, shard.mesh
    indices: dict[int, Tensor] = {}
    if mesh.size() == mesh_size:
        place = (mesh.mesh == _global_rank(rank, mesh)).nonzero()[0].tolist()
        indices = local_indices(spec.shape, shard.placements, mesh, place)
    rows = indices.get(0, torch.arange(spec.shape[0]))
    first, count = (int(rows[0]), len(rows)) if len(rows) else (0, 0)
    is_adjacent = count == 0 or int(rows[-1]) - first == count - 1
    is_by_rows = mesh.size() == mesh_size and indices.keys() <= {0} and is_adjacent
    if not is_by_rows or shard.stride[-1] != 1:
        raise TypeError(
            f"{spec.name} is sharded by {shard.placements} on {mesh}, and Muon takes matrices that "
            "are sharded by rows, Shard(0), over the mesh of all parameters. Give it to a group "
            'with "use_muon": False, which follows AdamW.'
        )
    row = spec.numel // max(1, spec.shape[0])
    return first * row, count * row


# Gradients


class DTensorGrads(ExternalGrads):
    """Gradients that torch has reduced and sharded: the local shards of p.grad, read in place."""

    how_summed = "reduced by torch"

    def __init__(self) -> None:
        super().__init__()
        self.shards: list[LocalShard] = []  # of trained parameters
        self.all_shards: Sequence[LocalShard] = ()  # those of frozen ones, too
        self.present: list[Tensor | None] = []
        """By trained parameter, its gradient (numel,) at the last freeze(); None without one."""
        self.absent: set[int] = set()
        """The numbers of those without one."""

    @property
    def nbytes(self) -> int:
        return sum(grad.nbytes for grad in self.present if grad is not None)

    def freeze(self) -> None:
        if self._snapshot is not None and self._snapshot.is_current():
            return
        self.phase, self._snapshot = GradPhase.FROZEN, None
        grads = [shard.grad for shard in self.shards]
        self.present = [
            None if grad is None else shard.flat(grad)
            for shard, grad in zip(self.shards, grads, strict=True)
        ]
        pairs = zip(self.shards, self.present, strict=True)
        self.absent = {shard.number for shard, grad in pairs if grad is None}

    def keep_reduced(self) -> None:
        if self.phase is not GradPhase.REDUCED:
            self.phase = GradPhase.REDUCED
            memory = memory_of(shard.grad for shard in self.shards)
            self._snapshot = GradSnapshot(self.shards, memory)

    def keep_all_reduced(self) -> None:
        self.keep_reduced()

    def release(self) -> None:
        super().release()
        self.present = []

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients, to None or to zero; ``absent`` has no effect, as for others'."""
        self.release()
        for shard in self.all_shards:
            if set_to_none:
                shard.param.grad = None
            elif shard.param.grad is not None:
                shard.param.grad.detach_().zero_()

    def missing(self) -> list[str]:
        """Return the names of trained parameters that had no gradient at the last freeze()."""
        return [shard.spec.name for shard in self.shards if shard.number in self.absent]


# States and units


class _SetKey(NamedTuple):
    """Parameters that are one set without sharding."""

    group: int
    policy: str
    dtype: str
    frozen: bool  # when the optimizer was built


class _UnitPlan(NamedTuple):
    """Elements that are updated together."""

    number: int
    start: int  # in the states of its flat
    numel: int
    row: int
    is_staged: bool
    fragments: tuple[Fragment, ...]
    ranges: tuple[UpdateRange, ...]  # of all fragments


class _StagedCopies(NamedTuple):
    """A buffer in which small shards are updated together."""

    buffer: Tensor  # (numel,) as the states of the unit
    slots: list[Tensor]  # of each fragment, a view


@dataclass
class _Flat:
    """States on this rank: of one large shard, or of all small ones of a dtype added together."""

    shards: dict[int, LocalShard]
    starts: dict[int, int]  # of each parameter's states
    numel: int
    units: list[_UnitPlan]
    states: dict[str, Tensor] = field(default_factory=dict)  # each (numel,) fp32
    holders: dict[str, set[int]] = field(default_factory=dict)  # groups that have the state
    staged: dict[str, _StagedCopies] = field(default_factory=dict)  # gradients, parameters

    @property
    def is_low(self) -> bool:
        """Whether parameters are of lower precision, and have masters."""
        return next(iter(self.shards.values())).spec.dtype != "float32"

    def staging(self, name: str, dtype: torch.dtype) -> _StagedCopies:
        """Return the staging buffer of a name, zeros at first."""
        if name not in self.staged or self.staged[name].buffer.dtype != dtype:
            device = next(iter(self.shards.values())).tensor.device
            buffer = torch.zeros(self.numel, dtype=dtype, device=device)
            parts = self.units[0].fragments
            slots = [buffer[f.shard_start : f.shard_start + f.numel] for f in parts]
            self.staged[name] = _StagedCopies(buffer, slots)
        return self.staged[name]

    def slot(self, name: str, number: int) -> Tensor:
        """Return the state of one parameter (numel,)."""
        start, shard = self.starts[number], self.shards[number]
        return self.states[name][start : start + shard.numel]

    def shaped(self, name: str, number: int) -> Tensor:
        """Return the state of one parameter in the shape of its local shard."""
        shard = self.shards[number]
        flat = self.states[name]
        start = flat.storage_offset() + self.starts[number]
        return flat.as_strided(shard.shape, shard.stride, start)


class DTensorShards(ShardProvider):
    """Units are large local shards, and all small ones together; see ShardProvider.

    Args:
        rule: names the states.
        groups: the optimizer's own ``param_groups``; may be set anew.
        grads: of the trained parameters, which this object attaches.
        first_rank, mesh_size: the first of the ranks that share the optimizer, and their number.
        device: where the local shards are.
    """

    def __init__(
        self,
        rule: UpdateRule,
        groups: Sequence[dict[str, Any]],
        grads: DTensorGrads,
        first_rank: int,
        mesh_size: int,
        device: torch.device,
    ) -> None:
        self._rule = rule
        self.groups = groups
        self._grads = grads
        self._first_rank = first_rank
        self._mesh_size = mesh_size
        self._device = device
        self._flats: list[_Flat] = []
        self._flat_of: dict[int, _Flat] = {}
        self._given: Counter[int] = Counter()  # by group
        self._all: list[LocalShard] = []  # of all parameters, also frozen ones
        self._sets: dict[
            tuple[_SetKey, str], list[LocalShard]
        ] = {}  # by kind, and where copies are
        self._small: set[int] = set()
        self._units: list[tuple[_Flat, _UnitPlan]] = []
        self._counted: dict[str, Tensor] = {}
        self._checked_out: dict[int, tuple[list[Tensor], list[Tensor]]] = {}  # staged units
        self.has_updated = False  # any parameter on this rank in the last step

    # Members

    def add(self, params: Sequence[tuple[Tensor, ParamSpec]]) -> None:
        """Add parameters, numbered on; those that train get states."""
        for param, spec in params:
            self._all.append(LocalShard(len(self._all), param, spec, self._first_rank))
            self._given[spec.group] += 1
        self.activate()

    def activate(self) -> bool:
        """Give states to the parameters that train and have none yet; return whether any does."""
        new = [s for s in self._all if s.number not in self._flat_of and _is_trained(s.param)]
        if not new:
            return False
        for shard in new:
            spec = shard.spec
            kind = _SetKey(spec.group, spec.policy, spec.dtype, spec.frozen)
            self._sets.setdefault((kind, shard.copies), []).append(shard)
        # Without regard to copies: numbers then have the form, and updates the bits, that they have
        # without sharding.
        sizes: Counter[_SetKey] = Counter()
        for (kind, _), members in self._sets.items():
            sizes[kind] += sum(shard.spec.numel for shard in members)
        kinds = [*sizes]
        small = {kinds[number] for number in small_sets([*sizes.values()])}
        self._small = {number for number, (kind, _) in enumerate(self._sets) if kind in small}
        number_of = {s.number: i for i, own in enumerate(self._sets.values()) for s in own}
        new.sort(key=lambda shard: number_of[shard.number])
        staged: dict[tuple[str, str], list[LocalShard]] = {}
        for shard in new:
            if not shard.numel or self._is_staged(shard):
                staged.setdefault((shard.spec.dtype, shard.spec.storage), []).append(shard)
            else:
                self._add_flat(_in_place(shard, number_of[shard.number], len(self._units)))
        for members in staged.values():
            self._add_flat(_staged(members, number_of, len(self._units)))
        for group in {shard.spec.group for shard in new}:
            self.allocate(group)
        self._grads.shards = [s for s in self._all if s.number in self._flat_of]
        self._grads.all_shards = self._all
        self._grads.release()
        self._counted.clear()
        return True

    def _is_staged(self, shard: LocalShard) -> bool:
        least = staged_numel(self._device.type)
        # A tail has no whole blocks, and rules with sums over rows take units of these alone.
        has_tail = shard.numel % BLOCK > 0 and self._rule.granularity == "row"
        return shard.numel < least or has_tail

    def _add_flat(self, flat: _Flat) -> None:
        self._flats.append(flat)
        self._flat_of |= dict.fromkeys(flat.shards, flat)
        self._units += [(flat, unit) for unit in flat.units]
        if not flat.is_low:
            return
        flat.states[MASTER] = torch.zeros(flat.numel, dtype=MASTER_DTYPE, device=self._device)
        flat.holders[MASTER] = {shard.spec.group for shard in flat.shards.values()}
        for number, shard in flat.shards.items():
            flat.slot(MASTER, number).copy_(shard.flat(shard.tensor))

    def allocate(self, group: int) -> None:
        """Give the parameters of ``group`` the states that its hyper-parameters need."""
        self._add_states(group, self._rule.initial_states(self.groups[group]))

    def _add_states(self, group: int, names: Mapping[str, float]) -> None:
        for flat in self._flats:
            if not any(shard.spec.group == group for shard in flat.shards.values()):
                continue
            for name, value in names.items():
                if group in flat.holders.get(name, ()):
                    continue
                if name not in flat.states:
                    flat.states[name] = torch.full(
                        (flat.numel,), value, dtype=MASTER_DTYPE, device=self._device
                    )
                flat.holders.setdefault(name, set()).add(group)
                if not self._rule.counts_steps:  # momentum was set later: its first update comes
                    for shard in flat.shards.values():
                        shard.step = 0 if shard.spec.group == group else shard.step

    @property
    def shards(self) -> Sequence[LocalShard]:
        """Those of all parameters, also of frozen ones."""
        return self._all

    def has_step(self, shard: LocalShard) -> bool:
        """Return whether the states of a parameter have a ``step``."""
        return self._rule.has_step(self.groups[shard.spec.group])

    @property
    def masters(self) -> frozenset[str]:
        """The names of states that are fp32 copies of the parameters."""
        return frozenset({MASTER})

    @property
    def most_steps(self) -> int:
        """The update count of the parameter that has had most; 0 where states have no step.

        From states without a step each rank knows of updates of its own elements alone.
        """
        steps = (shard.step for shard in self._all) if self._rule.counts_steps else ()
        return max(steps, default=0)

    def set_states(self, group: int, names: Sequence[str]) -> None:
        """Give the parameters of ``group`` these states and take all others but masters."""
        for flat in self._flats:
            for name in [*flat.states]:
                if name not in names and name != MASTER:
                    flat.holders[name].discard(group)
                    if not flat.holders[name]:
                        del flat.states[name], flat.holders[name]
        self._add_states(group, {name: self._rule.initial(name) for name in names})

    @property
    def param_nbytes(self) -> int:
        """Bytes of the local shards."""
        return sum(shard.tensor.nbytes for shard in self._all)

    def check(
        self, groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor], prefix: str
    ) -> None:
        """Raise RuntimeError if ``groups`` no longer hold ``params``, those of the optimizer."""
        pairs = ((shard.param, shard.spec) for shard in self._all)
        fault = members_fault(groups, params, self._given, pairs)
        if fault:
            raise RuntimeError(f"{prefix}{fault}")

    def entries(self) -> list[str]:
        """Return further lines that must be equal on all ranks in a step."""
        missing = self._grads.missing()
        digest = zlib.crc32(repr(missing).encode())
        more = f" and {len(missing) - 3} more ({digest:08x})" if len(missing) > 3 else ""
        names = ", ".join(missing[:3]) or "none"
        count = f"{len(self._grads.shards)} of {len(self._all)} parameters train"
        return [f"{count}; without a gradient: {names}{more}"]

    @property
    def local_numel(self) -> int:
        """Elements that this rank updates."""
        return sum(flat.numel for flat in self._flats)

    @property
    def num_units(self) -> int:
        """Units that this rank updates, at least 1."""
        return max(1, len(self._units))

    @property
    def state_nbytes(self) -> int:
        """Bytes of states, masters and staging buffers."""
        states = [state for flat in self._flats for state in flat.states.values()]
        staged = [own.buffer for flat in self._flats for own in flat.staged.values()]
        return sum(tensor.nbytes for tensor in (*states, *staged))

    def state_of(self, number: int) -> dict[str, Tensor]:
        """Return {name: state in the shape of the local shard}; empty if it is frozen."""
        flat = self._flat_of.get(number)
        if flat is None:
            return {}
        group = flat.shards[number].spec.group
        names = [name for name in flat.states if group in flat.holders[name]]
        return {name: flat.shaped(name, number) for name in names}

    def is_trained(self, number: int) -> bool:
        """Return whether the parameter has states, or would have them if its rule had any."""
        return number in self._flat_of

    # ShardProvider

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def param_sets(self) -> Sequence[ParamSet]:
        """Parameters of one group, policy and dtype, with copies on the same ranks."""
        found = []
        for number, ((kind, _), members) in enumerate(self._sets.items()):
            steps = {shard.step for shard in members}
            step = steps.pop() + 1 if len(steps) == 1 else 1
            shares = number in self._small
            found.append(
                ParamSet(
                    number,
                    self.groups[kind.group],
                    kind.policy,
                    kind.dtype,
                    shares_calls=shares,
                    step=step,
                )
            )
        return found

    def parts_of(self, rank: int, params: Collection[int]) -> Sequence[Fragment]:
        """Return the parts that ``rank`` has, also where they are copies of another rank's.

        Raises:
            TypeError: a parameter is cut otherwise than by rows, or is on a sub-mesh.
        """
        members = [self._all[number] for number in sorted(params)]
        ranges = {shard.number: _elements_on(rank, shard, self._mesh_size) for shard in members}
        if members and members[0].mesh.get_rank() != _global_rank(rank, members[0].mesh):
            return [Fragment(n, -1, start, 0, numel) for n, (start, numel) in ranges.items()]
        own = [f for _, unit in self._units for f in unit.fragments if f.param in ranges]
        own.sort(key=lambda fragment: (fragment.param, fragment.param_start))
        return [f._replace(param_start=ranges[f.param][0] + f.param_start) for f in own]

    def counted(self, columns: str) -> Tensor | None:
        if not self._all or all(shard.is_counted for shard in self._all):
            return None
        if columns not in self._counted:
            own = [shard.is_counted for shard in self._all]
            if columns == "sets":
                own = [members[0].is_counted for members in self._sets.values()]
            self._counted[columns] = torch.tensor(own, device=self._device)
        return self._counted[columns]

    def gradients(self) -> Iterator[UpdateUnit]:
        present = self._grads.present
        grads = {s.number: g for s, g in zip(self._grads.shards, present, strict=True)}
        for flat, unit in self._units:
            if unit.is_staged:
                grad = self._stage_gradients(flat, unit, grads)
            else:
                whole, part = grads[unit.fragments[0].param], unit.fragments[0]
                if whole is None:
                    continue
                grad = narrowed(whole, part.param_start, part.numel)
            yield UpdateUnit(
                unit.number,
                unit.numel,
                unit.row,
                (grad,),
                unit.ranges,
                fragments=unit.fragments,
            )

    def _stage_gradients(
        self, flat: _Flat, unit: _UnitPlan, grads: Mapping[int, Tensor | None]
    ) -> Tensor:
        own = [grads[part.param] for part in unit.fragments]
        dtypes = {grad.dtype for grad in own if grad is not None}
        staging = flat.staging("grad", dtypes.pop() if len(dtypes) == 1 else MASTER_DTYPE)
        pairs = list(zip(staging.slots, own, strict=True))
        absent = [slot for slot, grad in pairs if grad is None]
        if absent:
            torch._foreach_zero_(absent)
        present = [(slot, grad) for slot, grad in pairs if grad is not None]
        if present:
            torch._foreach_copy_([slot for slot, _ in present], [grad for _, grad in present])
        return staging.buffer

    def checkout(self, unit: UpdateUnit) -> None:
        flat, own = self._units[unit.index]
        states = {n: narrowed(state, own.start, own.numel) for n, state in flat.states.items()}
        master = states.pop(MASTER, None)
        unit.states = states
        values = _values(flat, own)
        unit.p, unit.low = values[0], None
        if own.is_staged:
            staging = flat.staging("param", values[0].dtype)
            torch._foreach_copy_(staging.slots, values)
            unit.p = staging.buffer
            self._checked_out[own.number] = staging.slots, values
        if master is not None:
            unit.p, unit.low = master, unit.p
        unit.ranges = self._step_ranges(flat, own)

    def commit(self, unit: UpdateUnit) -> None:
        """Copy a staged unit back to the local shards."""
        if unit.index in self._checked_out:
            slots, values = self._checked_out.pop(unit.index)
            torch._foreach_copy_(values, slots)

    def _step_ranges(self, flat: _Flat, unit: _UnitPlan) -> list[UpdateRange]:
        """Return the ranges to update: runs of parameters with gradients, at the same step."""
        absent = self._grads.absent
        ranges: list[UpdateRange] = []
        for part, whole in zip(unit.fragments, unit.ranges, strict=True):
            if part.param in absent:
                continue
            own = whole._replace(step=flat.shards[part.param].step + 1)
            if ranges and ranges[-1].stop == own.start and ranges[-1][2:] == own[2:]:
                own = own._replace(start=ranges.pop().start)
            ranges.append(own)
        return ranges

    def increment_step(self) -> None:
        """Count an update of every parameter that had a gradient on this rank."""
        updated = [s for s in self._grads.shards if s.number not in self._grads.absent]
        for shard in updated:
            shard.step += 1
        self.has_updated = bool(updated)
        increment_version([shard.param for shard in updated])
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
        return [(shard.spec.name, shard.grad) for shard in self._all]

    def blocks(self, param_sets: Sequence[int]) -> BlockMap:
        """Return the blocks of units that hold ``param_sets``; a shorter row is one."""
        sets = list(self._sets.values())
        owned = {shard.number for number in param_sets for shard in sets[number]}
        owners: list[tuple[int, int, int]] = []
        extents: dict[int, tuple[int, int]] = {}
        num_blocks = 0
        for _, unit in self._units:
            if owned.isdisjoint(part.param for part in unit.fragments):
                continue
            stop = num_blocks + -(-unit.numel // BLOCK)
            extents[unit.number] = (num_blocks, stop)
            for part in unit.fragments:
                if part.param in owned:
                    start = num_blocks + part.shard_start // BLOCK
                    owners.append((part.param, start, start + -(-part.numel // BLOCK)))
            num_blocks = stop
        return BlockMap(owners, extents, num_blocks, len(self._all))

    def params(self, param_set: int) -> Sequence[tuple[int, ParamSpec]]:
        return [(shard.number, shard.spec) for shard in list(self._sets.values())[param_set]]

    def rows(self, param: int) -> ParamRows:
        return self._all[param].rows


def staged_numel(device_type: str) -> int:
    """Return the elements below which a local shard is staged."""
    return STAGED_NUMEL.get(device_type, 1 << 20)


def _values(flat: _Flat, unit: _UnitPlan) -> list[Tensor]:
    """Return the parts of the local shards that a unit has."""
    found = []
    for part in unit.fragments:
        shard = flat.shards[part.param]
        whole = shard.tensor
        if whole.stride() != shard.stride or tuple(whole.shape) != shard.shape:
            shard.flat(whole.new_empty(0))  # raises
        start = whole.storage_offset() + part.param_start
        found.append(whole.as_strided((part.numel,), (1,), start))
    return found


def _is_trained(param: Tensor) -> bool:
    return param.requires_grad or param.grad is not None


def _staged(members: Sequence[LocalShard], number_of: Mapping[int, int], unit: int) -> _Flat:
    """Lay out the states of shards that are staged, or empty; ``unit`` is the number of the unit.

    They are of one dtype, in order of their param_sets, {parameter: param_set} in ``number_of``.
    """
    starts: dict[int, int] = {}
    fragments: list[Fragment] = []
    ranges: list[UpdateRange] = []
    used = 0
    for shard in members:
        starts[shard.number] = used
        if shard.numel:
            stop = used + round_up(shard.numel, BLOCK)
            fragments.append(Fragment(shard.number, unit, 0, used, shard.numel))
            ranges.append(UpdateRange(used, stop, number_of[shard.number]))
            used = stop
    plan = _UnitPlan(unit, 0, used, BLOCK, True, tuple(fragments), tuple(ranges))
    return _Flat({s.number: s for s in members}, starts, used, [plan] if used else [])


def _in_place(shard: LocalShard, param_set: int, unit: int) -> _Flat:
    """Lay out the states of a shard that is updated where it lies; ``unit`` is the next number."""
    units: list[_UnitPlan] = []
    for start, numel in _pieces(shard.numel):
        index = unit + len(units)
        row = BLOCK if numel % BLOCK == 0 else numel
        fragments = (Fragment(shard.number, index, start, 0, numel),)
        ranges = (UpdateRange(0, numel, param_set),)
        units.append(_UnitPlan(index, start, numel, row, False, fragments, ranges))
    return _Flat({shard.number: shard}, {shard.number: 0}, shard.numel, units)


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    """Yield (start, elements) of the whole blocks of a shard, piece by piece, and of its tail."""
    whole = numel - numel % BLOCK
    for start in range(0, whole, _PIECE_NUMEL):
        yield start, min(_PIECE_NUMEL, whole - start)
    if numel > whole:
        yield whole, numel - whole
