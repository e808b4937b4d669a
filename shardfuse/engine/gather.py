"""Updated parameters back to all ranks, one collective per bucket, under the next forward."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction, _DisableFuncTorch
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from shardfuse import pending_params
from shardfuse.agreement import on_rank
from shardfuse.buffers import FlatBuffer
from shardfuse.comm import Communicator, Handle
from shardfuse.comm.base import PeerError, Progress
from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.param_wires import DifferentParams
from shardfuse.layout import Bucket, Flat, slots_in
from shardfuse.streams import current_stream
from shardfuse.untraced import is_in_compiled

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
        self._flats: dict[int, FlatState] = {}  # by index
        self._buckets: dict[int, Bucket] = {}
        self._plan: list[int] = []  # indices of buckets in the order of forward
        self._closed: set[int] = set()  # buckets whose turn has not come
        self._num_launched = 0  # of the plan, in this step
        self._launched: list[tuple[Handle, int]] = []  # with the index of the bucket
        self._members: dict[int, list[Tensor]] = {}  # of a bucket: parameters that lie in it
        self._in_flight: dict[int, Handle] = {}  # by bucket
        self._lacks: Counter[int] = Counter()  # id of a parameter: its buckets in flight
        self._lost: Exception | None = None  # why some will never arrive
        self._device = torch.device("cpu")
        self._left_on: Any = None  # the stream of step()
        self._left_by = 0  # the process of it
        self._is_read_elsewhere = False  # on another stream than that
        self.lock = threading.RLock()
        """Held while what is in flight changes, or is waited for: [Note: locks], pending_params."""

    @property
    def _overlaps(self) -> bool:
        enough = len(self._plan) > 1 and len(self._may_overlap) > 0
        return enough and self._comm.progress in self._may_overlap

    def plan(self, flats: Sequence[FlatState]) -> None:
        """Expect the buckets of the flats' parameters in every step."""
        self._flats = {state.flat.index: state for state in flats}
        self._buckets = {b.index: b for state in flats for b in state.flat.buckets}
        first = {b.index: _first_read(s.flat, b) for s in flats for b in s.flat.buckets}
        self._plan = sorted(first, key=lambda index: (first[index], -index))

    def expect(self) -> None:
        """Be ready for what other ranks send in this step, before this one sends anything."""
        for index in self._plan:
            bucket = self._buckets[index]
            whole = self._flats[bucket.flat].wire.sent(bucket)
            self._comm.expect("all_gather", whole, label=_label(bucket))

    def start(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        """Launch the all-gather of ``bucket`` when it is its turn.

        Its shard must not be written until finish(). ``params`` are those of the flat, by slot.
        """
        if not self._overlaps:
            self._launch(bucket)
            return
        if bucket.index not in self._members:
            flat = self._flats[bucket.flat].flat
            self._members[bucket.index] = [params[i] for i in slots_in(flat, bucket)]
        self._closed.add(bucket.index)
        while self._num_launched < len(self._plan):
            index = self._plan[self._num_launched]
            if index not in self._closed:
                break
            self._closed.remove(index)
            self._launch(self._buckets[index])
            self._num_launched += 1

    def _launch(self, bucket: Bucket) -> None:
        state = self._flats[bucket.flat]
        with record_function(f"shardfuse::all_gather b{bucket.index}"):
            whole, part = state.wire.sent(bucket), state.wire.part(bucket)
            handle = self._comm.all_gather(whole, part, label=_label(bucket))
        handle = _Unpacked(handle, functools.partial(self._unpack, state, bucket))
        if self._waits:
            handle.wait()
        self._launched.append((handle, bucket.index))

    def _unpack(self, state: FlatState, bucket: Bucket) -> None:
        """Bring what has arrived to where it is read.

        Raises:
            RuntimeError: parameters were equal on all ranks, and no longer are.
        """
        try:
            state.wire.unpack(bucket)
        except DifferentParams:
            names = ", ".join(state.specs[i].name for i in slots_in(state.flat, bucket))
            with self._comm.call("parameters on their way"):
                raise RuntimeError(
                    f"{on_rank(self._comm)}Parameters have other values here than on the rank that "
                    f"updates them, although only differences travel (param_sync_bits): {names}. "
                    "Load and edit parameters in the same way on all ranks, and build a new "
                    "optimizer; or leave param_sync_bits out."
                ) from None

    def broadcast(self, buffer: FlatBuffer) -> None:
        """Launch broadcasts of the first rank's values of the whole buffer, bucket by bucket."""
        for bucket in buffer.flat.buckets:
            handle = self._comm.broadcast(buffer.bucket(bucket))
            self._launched.append((handle, bucket.index))

    def leave(self) -> None:
        """End a step: what is in flight stays so where that is safe, else it is waited for."""
        assert not self._closed, "a bucket was updated that is not in the plan"
        if not self._overlaps:
            self.finish()
            return
        buckets: dict[int, list[int]] = {}
        params: dict[int, Tensor] = {}
        for _, index in self._launched:
            for param in self._members[index]:
                params[id(param)] = param
                buckets.setdefault(id(param), []).append(index)
        must_stay = self._is_read_elsewhere or pending_params.REGISTRY.are_compiled
        if must_stay or any(map(pending_params.is_shared, params.values())):
            self.finish()
            return
        self._device = next(iter(params.values())).device
        self._left_on = current_stream(self._device)
        is_read_by_compiled = is_in_compiled()
        with self.lock, pending_params.LOCK:
            self._left_by = os.getpid()
            self._in_flight = {index: handle for handle, index in self._launched}
            self._launched, self._num_launched = [], 0
            self._lacks = Counter({key: len(places) for key, places in buckets.items()})
            pending_params.REGISTRY.add(self)
            if not is_read_by_compiled:
                waits = {key: functools.partial(self._arrive_by, buckets[key]) for key in params}
                of_others = [
                    k for k, p in params.items() if not pending_params.mark_pending(p, waits[k])
                ]
        if is_read_by_compiled:
            pending_params.REGISTRY.compiling()
            return
        for key in of_others:
            waits[key]()

    def _arrive_by(self, buckets: Sequence[int]) -> None:
        """As _arrive(), by any thread."""
        with self.lock:
            self._arrive(buckets)

    def _arrive(self, buckets: Sequence[int]) -> None:
        """Wait for some buckets; parameters that then lack nothing are Parameters again.

        The caller holds the lock.

        Raises:
            PeerError: one will not arrive, or did not before; what would be read is not complete.
        """
        if self._lost is not None:
            raise PeerError(f"A parameter has not arrived after step(): {self._lost}")
        if self._in_flight and self._left_by != os.getpid():
            raise PeerError(
                "A parameter was still on its way when this process was forked, and arrives in the "
                "parent only. Call optimizer.synchronize() there before the fork."
            )
        if current_stream(self._device) != self._left_on:
            self._arrive_elsewhere()
        for index in buckets:
            # It stays there while it is waited for: an interrupt may end the wait, and whatever
            # runs meanwhile in this thread, as a signal's handler, may read the parameter too.
            handle = self._in_flight.get(index)
            if handle is None:
                continue
            try:
                with _unseen(), record_function(f"shardfuse::wait_all_gather b{index}"):
                    handle.wait()
            except Exception as error:
                self._lost = error
                pending_params.REGISTRY.discard(
                    self
                )  # told by its own parameters, to their readers
                raise
            if self._in_flight.pop(index, None) is None:
                continue
            with pending_params.LOCK:
                for param in self._members[index]:
                    self._lacks[id(param)] -= 1
                    if self._lacks[id(param)] == 0:
                        pending_params.mark_ready(param)
        if not self._in_flight:
            pending_params.REGISTRY.discard(self)

    def _arrive_elsewhere(self) -> None:
        """Wait for everything on the stream of step(), and have the current one wait for that.

        Who reads on a third stream is not seen where the parameter has arrived on another.
        """
        if not self._is_read_elsewhere:
            self._is_read_elsewhere = True
            logger.warning(
                "A parameter was read on another stream than that of step() while it was under "
                "way. From now on step() waits for all parameters (overlap_param_sync), because "
                "others may be read on any stream."
            )
        with torch.get_device_module(self._device).stream(self._left_on):
            self.finish()
        current_stream(self._device).wait_stream(self._left_on)

    def stay(self) -> None:
        """Wait for everything at the end of each step from now on, and for what is under way."""
        self._may_overlap = ()
        self.finish()

    def finish(self) -> None:
        """Wait for everything launched; after this the parameters may be read."""
        self._closed.clear()  # of a step that failed
        launched, self._launched, self._num_launched = self._launched, [], 0
        with record_function("shardfuse::wait_all_gather"):
            for handle, _ in launched:
                handle.wait()
            self.arrive_all()

    def arrive_all(self) -> None:
        """Wait for what step() has left under way. Any thread may, also while another steps.

        Raises:
            PeerError: as of _arrive().
        """
        with self.lock:
            if self._in_flight or self._lost is not None:
                self._arrive(list(self._in_flight))


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide how a parameter arrives from what reads it: transforms, modes, and a tracer."""
    set_tracer: Callable[[Any], None] = vars(torch._C)["_set_tracing_state"]
    tracer = torch._C._get_tracing_state()
    with ExitStack() as stack:
        stack.enter_context(_DisableFuncTorch())
        stack.enter_context(DisableTorchFunction())
        if torch._C._len_torch_dispatch_stack() > 0:
            stack.enter_context(_disable_current_modes())
        if tracer is not None:
            set_tracer(None)
            stack.callback(set_tracer, tracer)
        yield


class _Unpacked:
    """A handle whose wait() brings what has arrived to where it is read; once."""

    def __init__(self, handle: Handle, unpack: Callable[[], None]) -> None:
        self._handle = handle
        self._unpack: Callable[[], None] | None = unpack

    def wait(self) -> None:
        self._handle.wait()
        unpack, self._unpack = self._unpack, None
        if unpack is not None:
            unpack()


def _first_read(flat: Flat, bucket: Bucket) -> int:
    """Return the parameter in ``bucket`` that forward reads first: registered first."""
    return min((flat.slots[position].param for position in slots_in(flat, bucket)), default=0)


def _label(bucket: Bucket) -> str:
    return f"parameters of bucket {bucket.index}"
