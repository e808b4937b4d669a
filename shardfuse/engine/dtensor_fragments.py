"""This rank's part of an optimizer over DTensors as fragments, for shardfuse.checkpoint.

The fragments are those of whole tensors, as of flat buffers: parameters are saved as boxes of their
shape, states as runs of elements in storage order. So any placement loads them.

[Note: runs] Adjacent rows of a tensor are one run. A shard along another dimension has a run in
each row, 4,096 in a matrix (4096, 14336). States of such a parameter are saved as boxes of its
shape, one or few a rank; a load takes the form that it finds (see set_saved_shapes()).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardfuse.codecs import MASTER
from shardfuse.engine import torch_state
from shardfuse.engine.dtensors import DTensorShards, LocalShard, local_indices, shard_dim
from shardfuse.engine.sharded_state import LocalCheckpointState, MasterRef, no_place
from shardfuse.engine.torch_state import Groups, OptimizerState
from shardfuse.fragments import Chunk, FragmentTensor

_Run = tuple[int, int, int]
"""Neighbours along a dimension: first in the whole tensor, first in the local shard, number."""


def _runs(shard: LocalShard) -> list[list[_Run]]:
    """Return the runs of the local shard along each dimension."""
    indices = local_indices(shard.spec.shape, shard.placements, shard.mesh)
    found = []
    for dim, size in enumerate(shard.shape):
        own = indices.get(dim, torch.arange(size))
        ends = ((own.diff() != 1).nonzero().flatten() + 1).tolist()
        bounds = itertools.pairwise([0, *ends, size])
        found.append([(int(own[start]), start, stop - start) for start, stop in bounds])
    return found


def boxes_of(shard: LocalShard, local: Tensor) -> Iterator[Chunk]:
    """Yield ``local``, of the local shape, as boxes of the whole tensor's shape."""
    for box in itertools.product(*_runs(shard)):
        part = local
        for dim, (_, start, size) in enumerate(box):
            part = part.narrow(dim, start, size)
        yield Chunk(tuple(first for first, _, _ in box), part)


def elements_of(shard: LocalShard, local: Tensor) -> Iterator[Chunk]:
    """Yield ``local``, of the local shape, as runs of the whole tensor's elements in storage order.

    Raises:
        TypeError: the local shard lies in another order than the whole tensor.
    """
    spec = shard.spec
    if not spec.shape:
        yield Chunk((0,), local.reshape(1))
        return
    order = sorted(range(len(spec.shape)), key=lambda dim: -spec.stride[dim])
    ordered, shape = local.permute(order), [spec.shape[dim] for dim in order]
    if not ordered.is_contiguous():
        raise TypeError(
            f"{spec.name} has the strides {spec.stride}, and its local shard {shard.stride}: their "
            "elements lie in different orders. Save what get_optimizer_state_dict() returns by "
            "torch.distributed.checkpoint.save()."
        )
    runs = [_runs(shard)[dim] for dim in order]
    steps = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    last = max((at for at, size in enumerate(shape) if ordered.shape[at] < size), default=0)
    rows = [[(a + i, b + i) for a, b, size in each for i in range(size)] for each in runs[:last]]
    for row in itertools.product(*rows):
        begin = sum(first * step for (first, _), step in zip(row, steps, strict=False))
        part = ordered[tuple(start for _, start in row)]
        for first, start, size in runs[last]:
            elements = part.narrow(0, start, size).reshape(-1)
            yield Chunk((begin + first * steps[last],), elements)


def _is_cut_by_rows(shard: LocalShard) -> bool:
    """Return whether states are saved as runs; the same on all ranks. See [Note: runs]."""
    cut = {shard_dim(placement) for placement in shard.placements} - {None}
    outermost = max(range(len(shard.spec.shape)), key=shard.spec.stride.__getitem__, default=None)
    return cut <= {outermost}


_Cut = Callable[[LocalShard, Tensor], Iterator[Chunk]]


def _fragments(shard: LocalShard, local: Tensor, cut: _Cut) -> FragmentTensor:
    shape = shard.spec.shape if cut is boxes_of else (shard.spec.numel,)
    return FragmentTensor(shape, local.dtype, local.device, list(cut(shard, local.detach())))


class DTensorCheckpointState(LocalCheckpointState):
    """This rank's part of an optimizer over DTensors; see LocalCheckpointState.

    Of copies, the first ranks write theirs ([Note: copies] in engine/dtensors.py). All fill theirs.

    Args:
        opt: the optimizer.
        loaded: called after load().
        shards: of the optimizer.
    """

    def __init__(
        self, opt: OptimizerState, loaded: Callable[[], None], shards: DTensorShards
    ) -> None:
        super().__init__(opt, loaded)
        self._shards = shards

    @property
    def device(self) -> torch.device:
        return self._shards.device

    def _own(self, *, to_write: bool = False) -> list[LocalShard]:
        """Return the shards that have elements; of copies, those to write."""
        own = [shard for shard in self._shards.shards if shard.numel]
        return [shard for shard in own if shard.is_counted] if to_write else own

    def _states(self, *, to_write: bool) -> Iterator[tuple[str, FragmentTensor]]:
        for shard in self._own(to_write=to_write):
            is_by_rows = _is_cut_by_rows(shard)
            for name, value in self._shards.state_of(shard.number).items():
                key = f"state.{shard.spec.name}.{name}"
                is_shaped = not is_by_rows if to_write else key in self._shaped
                cut = boxes_of if is_shaped else elements_of
                yield key, _fragments(shard, value, cut)

    def _counts(self) -> dict[str, int]:
        firsts = [s for s in self._own(to_write=True) if _has_first_element(s)]
        if self.comm.rank == 0:
            firsts += [s for s in self._shards.shards if not s.spec.numel]
        return {shard.spec.name: shard.step for shard in firsts}

    def _state_shapes(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for shard in self._shards.shards:
            for name in self._shards.state_of(shard.number) if shard.spec.numel else ():
                key = f"state.{shard.spec.name}.{name}"
                found[key] = shard.spec.shape if key in self._shaped else (shard.spec.numel,)
        return found

    def params(self) -> list[Tensor]:
        return [shard.param for shard in self._shards.shards]

    def param_fragments(self, *, to_write: bool) -> list[tuple[Tensor, FragmentTensor]]:
        own = self._own(to_write=to_write)
        found = [(shard.param, _fragments(shard, shard.tensor, boxes_of)) for shard in own]
        for shard in self._shards.shards if to_write and self.comm.rank == 0 else ():
            if not shard.spec.numel:
                shape = shard.spec.shape
                nothing = shard.tensor.detach().new_empty(shape)
                whole = [Chunk((0,) * len(shape), nothing)]
                found.append(
                    (shard.param, FragmentTensor(shape, nothing.dtype, nothing.device, whole))
                )
        return found

    def masters(self, saved: Container[str]) -> list[MasterRef]:
        found = []
        for shard in self._own():
            kept = self._shards.state_of(shard.number).get(MASTER)
            key, is_kept = f"state.{shard.spec.name}.{MASTER}", kept is not None
            if (is_kept or shard.spec.dtype == "float32") and (key in saved) != is_kept:
                own = _fragments(shard, shard.tensor, boxes_of)
                place = (
                    _fragments(
                        shard, shard.tensor, boxes_of if key in self._shaped else elements_of
                    )
                    if kept is None
                    else _fragments(shard, kept, boxes_of)
                )
                found.append(MasterRef(shard.param, key, is_kept, place, own))
        return found

    def geometry(self) -> list[dict[str, Any]]:
        """Return the shards of parameters that are cut by rows over all ranks, as fully_shard does.

        The index files of all ranks are read where a parameter is cut in another way.
        """
        found = []
        for shard in self._shards.shards:
            spec, ranks = shard.spec, shard.mesh.mesh.tolist()
            placements = [(type(own).__name__, shard_dim(own)) for own in shard.placements]
            is_by_rows = placements == [("Shard", 0)] and ranks == sorted(ranks)
            is_on_all = len(ranks) == self.comm.world_size
            if is_by_rows and is_on_all and 0 < spec.numel == spec.shape[0] * spec.stride[0]:
                numel = -(-spec.shape[0] // len(ranks)) * spec.stride[0]
                found.append({"slots": {spec.name: 0}, "buckets": [(0, numel, len(ranks))]})
        return found

    def ranges(self) -> list[tuple[str, int, int]]:
        found = []
        for shard in self._own():
            name = shard.spec.name
            if not _is_cut_by_rows(shard):
                found.append((name, 0, shard.spec.numel))
                continue
            chunks = elements_of(shard, shard.tensor.detach())
            found += [(name, chunk.offsets[0], chunk.data.numel()) for chunk in chunks]
        return found

    def residuals(self) -> dict[str, FragmentTensor]:
        return {}

    def publish(self) -> None:
        """Do nothing: each rank fills its own shards, copies too, and torch all-gathers them."""

    def check(self, state_dict: Mapping[str, Any]) -> tuple[Groups, dict[int, int]]:
        merged, counts = super().check(state_dict)
        rule = self._optimizer_state.rule
        for shard in self._shards.shards:
            spec, held = shard.spec, self._shards.state_of(shard.number)
            names = [*rule.state_names(merged[spec.group])]
            names += [] if spec.dtype == "float32" else [MASTER]
            lacking = [name for name in names if name not in held]
            if lacking and spec.numel and counts[shard.number] > 0:
                is_frozen = not self._shards.is_trained(shard.number)
                raise no_place(spec.name, lacking[0], is_frozen=is_frozen)
        return merged, counts

    def _set(
        self, state_dict: Mapping[str, Any], merged: Groups, counts: Mapping[int, int]
    ) -> None:
        opt = self._optimizer_state
        torch_state.set_groups(opt, merged, state_dict["param_groups"], counts)
        for shard in self._shards.shards:
            shard.step = counts[shard.number]


def _has_first_element(shard: LocalShard) -> bool:
    indices = local_indices(shard.spec.shape, shard.placements, shard.mesh)
    return all(int(own[0]) == 0 for own in indices.values())
