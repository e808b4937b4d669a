"""What one rank saves and loads of an optimizer and its parameters, known without the others."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.codecs import ERROR, MASTER, MASTER_DTYPE
from shardfuse.comm import Communicator
from shardfuse.engine import sharded_io
from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.state_io import Held, arenas_of, fragment_tensors
from shardfuse.fragments import FragmentTensor, Piece, flat_pieces, shaped_pieces
from shardfuse.layout import Bucket, ParamSpec

logger = logging.getLogger("shardfuse")


class Master(NamedTuple):
    """Where this rank has its part of a parameter in fp32."""

    param: Tensor
    key: str  # of a master in to_fill()
    is_kept: bool  # beside the parameter, which is or travels in low precision
    place: FragmentTensor  # of the parameter's shape where it is kept, else (numel,)
    own: FragmentTensor  # this rank's part of the parameter itself


class Parts:
    """An optimizer's state as shardfuse.checkpoint has it; its tensors alias the state.

    Keys are those of sharded_state_dict(). But every value is on one rank alone: each fragment on
    its owner, and the step of a parameter on the owner of its first fragment, because who updates a
    part of a parameter has counted its updates. Of several copies, in a mesh, one has each bucket.

    Args:
        held: the optimizer.
        take: its load_sharded_state_dict().
    """

    def __init__(self, held: Held, take: Callable[[Mapping[str, Any]], None]) -> None:
        self._held = held
        self._take = take

    @property
    def comm(self) -> Communicator:
        """All ranks that share the optimizer, copies included."""
        return self._held.comm.world

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        flats = self._held.flats
        return flats[0].device if flats else torch.device("cpu")

    @property
    def specs(self) -> Sequence[ParamSpec]:
        """All parameters in the order of their numbers."""
        return self._held.layout.specs

    @property
    def rule(self) -> str:
        """By which rule the states are updated."""
        return self._held.rule.describe()

    def to_write(self) -> dict[str, Any]:
        """Return what this rank writes of the optimizer. Local."""
        held = self._held
        result: dict[str, Any] = dict(sharded_io.aliases(held.flats, self._writes))
        for state in held.flats:
            buckets = [bucket for bucket in state.flat.buckets if self._writes(bucket)]
            owned = [f for bucket in buckets for f in state.fragments[bucket.index]]
            first = {fragment.param for fragment in owned if fragment.param_start == 0}
            for slot in state.flat.slots:
                is_mine = slot.param in first or (not slot.numel and self.comm.rank == 0)
                step = torch.tensor(state.step_of(slot.param))
                pieces = [Piece((), step)] if is_mine else []
                key = f"state.{held.layout.specs[slot.param].name}.step"
                result[key] = FragmentTensor((), step.dtype, step.device, pieces)
        result["param_groups"] = sharded_io.saved_groups(held)
        return result

    def to_fill(self) -> dict[str, Any]:
        """Return what take() takes once it is filled. Local."""
        result: dict[str, Any] = dict(sharded_io.aliases(self._held.flats))
        for spec in self._held.layout.specs:
            result[f"state.{spec.name}.step"] = torch.tensor(0)
        result["param_groups"] = sharded_io.saved_groups(self._held)
        return result

    def params(self, *, to_write: bool) -> list[tuple[Tensor, FragmentTensor]]:
        """Return (parameter, this rank's part of it), empty parameters left out. Local.

        What is to be written is on one rank alone; what is to be filled is all of this rank's part,
        and reaches the others by publish().
        """
        has = self._writes if to_write else _always
        return [pair for state in self._held.flats for pair in _param_parts(state, has)]

    def masters(self) -> list[Master]:
        """Return where parameters are in fp32, empty ones and frozen low precision left out."""
        found = []
        for state in self._held.flats:
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
        held = self._held
        return [
            {
                "slots": {held.layout.specs[s.param].name: s.start for s in state.flat.slots},
                "buckets": [
                    (bucket.start, bucket.shard_numel, bucket.numel // bucket.shard_numel)
                    for bucket in state.flat.buckets
                ],
            }
            for state in held.flats
        ]

    def ranges(self) -> list[tuple[str, int, int]]:
        """Return (parameter, first element, elements) of all that is this rank's. Local."""
        specs = self._held.layout.specs
        return [
            (specs[f.param].name, f.param_start, f.numel)
            for state in self._held.flats
            for bucket in state.flat.buckets
            for f in state.fragments[bucket.index]
        ]

    def errors(self) -> dict[str, FragmentTensor]:
        """Return what parameters lack of their values, by its key in to_fill()."""
        pairs = sharded_io.aliases(self._held.flats)
        return {key: tensor for key, tensor in pairs if key.rpartition(".")[2] == ERROR}

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise ValueError if take() would, for what to_fill() has that is not a FragmentTensor."""
        sharded_io.check(self._held, state_dict)

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
        for state in self._held.flats:
            for bucket in state.flat.buckets:
                whole = state.params_buffer.bucket(bucket)
                part = state.params_buffer.shard(bucket, state.rank)
                self._held.comm.all_gather(whole, part).wait()

    def _writes(self, bucket: Bucket) -> bool:
        copies = getattr(self._held.comm, "replicate", None)
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
