"""Updated parameters back to all ranks, one collective per bucket, under the next forward."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Collection, Sequence

from torch import Tensor
from torch._C import _DisableFuncTorch
from torch.profiler import record_function

from shardfuse.buffers import FlatBuffer
from shardfuse.comm import Communicator, Handle
from shardfuse.comm.base import PeerError, Progress
from shardfuse.engine import under_way
from shardfuse.layout import Bucket, Flat, slots_in

logger = logging.getLogger("shardfuse")


class ParamSync:
    """All-gathers updated shards into the flat parameter buffers, one collective per bucket.

    They are launched in the order in which the next forward reads parameters, that of
    registration: the first layers are wanted first, and their gradients came last.

    Args:
        comm: the ranks that share the buffers.
        overlaps: where leave() leaves gathers in flight.
        waits: wait for each where it is launched.
    """

    def __init__(
        self, comm: Communicator, *, overlaps: Collection[Progress] = (), waits: bool = False
    ) -> None:
        self._comm = comm
        self._may_overlap = overlaps
        self._waits = waits
        self._plan: list[int] = []  # indices of buckets in the order of forward
        self._closed: dict[int, tuple[FlatBuffer, Bucket, Sequence[Tensor]]] = {}
        self._num_launched = 0  # of the plan, in this step
        self._handles: dict[int, Handle] = {}  # by bucket, or below 0
        self._params: dict[int, list[Tensor]] = {}  # of each bucket in flight
        self._lacks: Counter[int] = Counter()  # id of a parameter: its buckets in flight
        self._lost: Exception | None = None  # why some will never arrive

    def plan(self, flats: Sequence[Flat]) -> None:
        """Expect the buckets of ``flats`` in every step."""
        first = {
            bucket.index: min((flat.slots[i].param for i in slots_in(flat, bucket)), default=0)
            for flat in flats
            for bucket in flat.buckets
        }
        self._plan = sorted(first, key=lambda index: (first[index], -index))

    def start(self, buffer: FlatBuffer, bucket: Bucket, params: Sequence[Tensor]) -> None:
        """Launch the all-gather of ``bucket`` when it is its turn.

        Its shard must not be written until finish(). ``params`` are those of the flat, by slot.
        """
        self._closed[bucket.index] = (buffer, bucket, params)
        if not self._overlaps:
            self._launch(bucket.index)
            return
        while self._num_launched < len(self._plan):
            index = self._plan[self._num_launched]
            if index not in self._closed:
                break
            self._launch(index)
            self._num_launched += 1

    @property
    def _overlaps(self) -> bool:
        return bool(self._may_overlap) and self._comm.progress in self._may_overlap

    def _launch(self, index: int) -> None:
        buffer, bucket, params = self._closed.pop(index)
        with record_function(f"shardfuse::all_gather b{index}"):
            shard = buffer.shard(bucket, self._comm.rank)
            handle = self._comm.all_gather(buffer.bucket(bucket), shard)
        if self._waits:
            handle.wait()
        self._handles[index] = handle
        self._params[index] = [params[position] for position in slots_in(buffer.flat, bucket)]

    def broadcast(self, buffer: FlatBuffer) -> None:
        """Launch broadcasts of the first rank's values of the whole buffer, bucket by bucket."""
        for bucket in buffer.flat.buckets:
            self._handles[-1 - bucket.index] = self._comm.broadcast(buffer.bucket(bucket))

    def leave(self) -> None:
        """End a step: what is in flight stays so where that is safe, else it is waited for."""
        assert not self._closed, "a bucket was updated that is not in the plan"
        params = {id(param): param for members in self._params.values() for param in members}
        if not self._overlaps or any(map(under_way.is_shared, params.values())):
            self.finish()
            return
        self._lacks = Counter(id(param) for members in self._params.values() for param in members)
        buckets: dict[int, list[int]] = {}
        for index, members in self._params.items():
            for param in members:
                buckets.setdefault(id(param), []).append(index)
        for key, param in params.items():
            if not under_way.set_out(param, functools.partial(self._arrive, buckets[key])):
                self._arrive(buckets[key])
        if self._handles:
            under_way.TRAVELLERS.add(self)
        self._num_launched = 0

    def _arrive(self, buckets: Sequence[int]) -> None:
        """Wait for some buckets; parameters that then lack nothing are Parameters again.

        Raises:
            PeerError: one will not arrive, or did not before; what would be read is not complete.
        """
        if self._lost is not None:
            raise PeerError(f"A parameter has not arrived after step(): {self._lost}")
        for index in buckets:
            handle = self._handles.pop(index, None)
            if handle is None:
                continue
            try:
                # A transform that reads a parameter must not see how it arrives.
                with record_function(f"shardfuse::wait_all_gather b{index}"), _DisableFuncTorch():
                    handle.wait()
            except Exception as error:
                self._lost = error
                raise
            for param in self._params.pop(index):
                self._lacks[id(param)] -= 1
                if self._lacks[id(param)] == 0:
                    under_way.has_arrived(param)
        if not self._handles:
            under_way.TRAVELLERS.discard(self)

    def stay(self) -> None:
        """Wait for everything at the end of each step from now on, and for what is under way."""
        self._may_overlap = ()
        self.finish()

    def finish(self) -> None:
        """Wait for everything launched; after this the parameters may be read."""
        self._closed.clear()  # of a step that failed
        self._num_launched = 0
        with record_function("shardfuse::wait_all_gather"):
            self._arrive([index for index in self._handles if index >= 0])
            for handle in self._handles.values():
                handle.wait()
        self._handles.clear()
