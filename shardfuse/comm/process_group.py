"""The collectives of torch.distributed, each as its backend has it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardfuse.comm.base import Communicator, Handle, Labelled, PartsHandle, Progress, ReduceOp
from shardfuse.comm.board import Board
from shardfuse.comm.calls import digest
from shardfuse.comm.staging import PartsInFlight, Staging, WorkHandle, put_back
from shardfuse.comm.traits import traits_of
from shardfuse.comm.watch import Watch

logger = logging.getLogger("shardfuse")

_UNBLOCK_TAG = 0x5EFFFFFF
"""Of a message that nobody sends."""

_COMPARE_TAGS = 0x3F000000
"""Tags by which neighbours compare their calls are this and 24 bits of the call."""

# torch 2.13 renamed these and warns on the old names; the C++ entry points are the same.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
all_gather_single = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


class _Post(NamedTuple):
    """What the communicators of one process group share."""

    board: Board
    watch: Watch | None  # None where the backend's waits need none, or cannot be ended


_posts: weakref.WeakKeyDictionary[Any, _Post] = weakref.WeakKeyDictionary()


def _post_of(group: Any, device: torch.device, backend: str) -> _Post:
    """Return the board of ``group``, the same for all its communicators, and who watches it."""
    if group not in _posts:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = PrefixStore("shardfuse", dist.distributed_c10d._get_process_group_store(group))
        # A group may be destroyed and made again under the same name, in the same store.
        life = store.add(f"lives/{rank}", 1)
        board = Board(PrefixStore(str(life), store), rank, world_size)
        _posts[group] = _Post(board, _watch_over(board, group, device, backend))
    return _posts[group]


def _watch_over(board: Board, group: Any, device: torch.device, backend: str) -> Watch | None:
    """Return what ends waits in ``group`` where ``board`` tells of an error."""
    unblock = _UNBLOCKERS.get(backend)
    if unblock is None:
        return None
    group_ref = weakref.ref(group)
    return Watch(
        board,
        lambda: unblock(group_ref(), device),
        blocks=device.type == "cpu",
        mismatch_code=traits_of(backend).mismatch_code,
    )


def _ranks_in(larger: Any, group: Any) -> list[int]:
    """Return the rank in ``larger`` of each rank of ``group``."""
    members = range(dist.get_world_size(group))
    return [dist.get_group_rank(larger, dist.get_global_rank(group, rank)) for rank in members]


def _close_gloo(group: Any, device: torch.device) -> None:
    """Close all connections of a gloo group: what waits for them raises, here and elsewhere.

    gloo closes them when a wait times out, and has no other call that does. A wait for a rank that
    has ended raises at once and closes nothing else, so that every rank is tried.
    """
    if group is None:
        return
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for distance in range(1, world_size):
        other = (rank + distance) % world_size
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_UNBLOCK_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _abort(group: Any, device: torch.device) -> None:
    """Abort what a group of NCCL or HCCL has in flight. (Not run on hardware.)"""
    if group is not None:
        with suppress(RuntimeError, AttributeError):
            backend = group._get_backend(device)
            if hasattr(backend, "abort_hccl_comm"):
                # HCCL's abort() is c10d's, which does nothing (torch_npu 2.7.1 to 2.14.0).
                backend.abort_hccl_comm("shardfuse: the ranks are out of step")
            else:
                backend.abort()


_UNBLOCKERS = {"gloo": _close_gloo, "nccl": _abort, "hccl": _abort}


class ProcessGroupCommunicator:
    """A Communicator over a torch process group of any backend.

    Args:
        process_group: a ``torch.distributed.ProcessGroup``; None is the default group.
        device: where the tensors live; picks the backend of a group that has several.
        within: of a larger group, whose calls are those of this one.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not a member of the group.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        *,
        within: ProcessGroupCommunicator | None = None,
    ) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise RuntimeError(
                "torch.distributed is not initialised. Call init_process_group() first."
            )
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("process_group does not contain this process's rank.")
        self.world_size = dist.get_world_size(group)
        # Weak: a gloo group that outlives destroy_process_group() aborts the process at exit.
        self._group_ref: weakref.ref[Any] = weakref.ref(group)
        self.backend = backend_for(group, device)
        self._traits = traits_of(self.backend)
        self._changes_inputs = self._traits.changes_inputs
        if within is None:
            self._board, self._watch = _post_of(group, device, self.backend)
        else:
            self._board = within._board
            self._watch = _watch_over(self._board, group, device, self.backend)
        self._board_ranks = _ranks_in(group if within is None else within._live_group(), group)
        self._staging = Staging()
        self._staged_epoch = 0
        self.number = 0  # of this communicator, the same on all ranks, from the first call on

    @property
    def everyone(self) -> Communicator:
        """This one."""
        return self

    @property
    def progress(self) -> Progress:
        """In order: backends know no labels."""
        return "in order"

    @property
    def epoch(self) -> int:
        """How often the ranks have begun anew after an error, or will have in the next call."""
        return self._board.next_epoch

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        self._live_group()
        with self._board.call(name):
            if self.number == 0:
                self.number = self._board.number(self)
            yield

    def declare(self, lines: Sequence[str], *, is_new: bool = False) -> None:
        self._board.present.declare([f"optimizer {self.number} of its process group", *lines])
        if is_new and self._watch is not None:
            self._confirm()

    def tell(self, topic: str, text: str) -> None:
        self._board.tell(f"{self.number}/{topic}", text)

    def told(self, topic: str) -> list[str | None]:
        return self._board.told(f"{self.number}/{topic}")

    @property
    def is_store_gone(self) -> bool:
        """Whether the board has found it gone."""
        return self._board.is_store_gone

    def _confirm(self) -> None:
        """Have the ranks compare what they declared, where messages cannot tell."""
        if self._traits.aborts_on_mismatch:
            _compare_by_messages(self)
        else:
            self._board.confirm()

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        """Count a collective of the backend's own, which must be alike on all ranks."""
        self._board.present.note(kind, tensor.numel(), tensor.dtype)
        if self._traits.aborts_on_mismatch:
            _compare_by_messages(self)
        elif self._watch is not None and not self._board.present.is_confirmed:
            _compare_by_reduction(self, self._watch, tensor.device)

    def _launch(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Return ``function(...)`` of this group, a Work in flight."""
        try:
            return function(*args, group=self._live_group(), **options)
        except RuntimeError as error:
            if self._watch is None:
                raise
            # gloo sends here; others only check what they are given, or that nothing has failed.
            what = "the connection to another rank" if self.backend == "gloo" else self.backend
            raise self._watch.explain(error, what=what) from error

    @property
    def staging_nbytes(self) -> int:
        return self._staging.nbytes

    def _live_group(self) -> Any:
        """Return the process group.

        Raises:
            RuntimeError: it was destroyed; it may be alive all the same, held by somebody.
        """
        group: Any = self._group_ref()
        if group is None or group not in dist.distributed_c10d._world.pg_map:
            raise RuntimeError(
                "The optimizer's process group was destroyed. Build a new optimizer after "
                "init_process_group()."
            )
        return group

    def reduce_scatter(
        self,
        input: torch.Tensor,
        into: torch.Tensor | None = None,
        *,
        slot: int = 0,
        label: str | None = None,
        is_summed: bool = True,
    ) -> PartsHandle:
        assert reduce_scatter_single is not None
        if is_summed and self._changes_inputs is None:
            return self._first_reduce_scatter(input, into, slot=slot, label=label)
        if into is None:
            numel = input.numel() // self.world_size if is_summed else input.numel()
            into = self._staged("receive", slot, numel, input)
        if label is None:
            self._note("reduce_scatter" if is_summed else "all_to_all", input)
        if is_summed and self._changes_inputs:
            input = self._staged("send", slot, input.numel(), input).copy_(input)
        sending = self._board.begin_sending(label)
        function = reduce_scatter_single if is_summed else dist.all_to_all_single
        handle = WorkHandle(
            self._watch, [self._launch(function, into, input, async_op=True)], into, input
        )
        if is_summed:
            return PartsInFlight(handle, (into,), sending)
        parts = into.chunk(self.world_size)
        order = [(self.rank - distance) % len(parts) for distance in range(len(parts))]
        return PartsInFlight(handle, tuple(parts[rank] for rank in order), sending)

    def _first_reduce_scatter(self, input: torch.Tensor, *args: Any, **options: Any) -> PartsHandle:
        """Find out by it whether inputs are left as they are, and put this one back if not."""
        self._changes_inputs, kept = False, input.clone()
        arrived = self.reduce_scatter(input, *args, **options)
        arrived.wait()
        self._changes_inputs = put_back(input, kept)
        if self._changes_inputs:
            logger.warning(
                "%s changes the input of a reduce-scatter (zero-copy). From now on gradients are "
                "copied before they are sent, which takes a bucket's memory.",
                self.backend,
            )
        return arrived

    def expect(self, kind: Labelled, tensor: torch.Tensor, *, label: str, slot: int = 0) -> None:
        """Do nothing: backends make room for what arrives by themselves."""

    def _staged(self, role: str, slot: int, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return (numel,) of a buffer."""
        if self._staged_epoch != self.epoch:
            # What was under way before an error may still arrive where it was to.
            self._staging, self._staged_epoch = Staging(), self.epoch
        return self._staging.take(role, slot, numel, like)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: str | None = None
    ) -> Handle:
        assert all_gather_single is not None
        if not self._traits.in_place_all_gather and _overlaps(output, input):
            input = input.clone()
        self._note("all_gather", output)
        work = self._launch(all_gather_single, output, input, async_op=True)
        return WorkHandle(self._watch, [work], output, input)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        self._note(f"all_reduce by {op}", tensor)
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        work = self._launch(dist.all_reduce, tensor, reduce_op, async_op=True)
        return WorkHandle(self._watch, [work], tensor)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        self._note("broadcast", tensor)
        global_src = dist.get_global_rank(self._live_group(), src)
        work = self._launch(dist.broadcast, tensor, global_src, async_op=True)
        return WorkHandle(self._watch, [work], tensor)


def _compare_by_messages(comm: ProcessGroupCommunicator) -> None:
    """Compare the present call with the neighbours', by a message of 8 bytes to the next one.

    Not through the store, which knows nothing of a neighbour that has ended.

    Raises:
        PeerError: the calls differ, or a rank cannot be reached.
    """
    board, rank = comm._board, comm.rank
    call = board.present
    if call.is_confirmed:
        return
    call.num_confirmed += 1  # a call may be declared anew after its first collectives
    mine = torch.tensor([call.digest])
    theirs = torch.empty_like(mine)
    tag = _COMPARE_TAGS | digest(f"{call.number} {call.num_confirmed}") % (1 << 24)
    before, after = ((rank + step) % comm.world_size for step in (-1, 1))
    works = [
        comm._launch(dist.irecv, theirs, group_src=before, tag=tag),
        comm._launch(dist.isend, mine, group_dst=after, tag=tag),
    ]
    WorkHandle(comm._watch, works, mine, theirs).wait()
    if int(theirs) != call.digest:
        board.resolve(comm._board_ranks[before])
    call.is_confirmed = True


def _compare_by_reduction(
    comm: ProcessGroupCommunicator, watch: Watch, device: torch.device
) -> None:
    """Compare the present call on all ranks, by the maximum of its digest and of its negative.

    Where waits do not block the host it is not read here: ``watch`` does.

    Raises:
        PeerError: the calls differ.
    """
    board = comm._board
    call, before = board.present, comm._board_ranks[(comm.rank - 1) % comm.world_size]
    call.is_confirmed = True
    halves = call.digest % (1 << 28), call.digest >> 28
    marks = torch.empty(4, dtype=torch.int32, device=device)
    for place, value in enumerate((*halves, *(-half for half in halves))):
        marks[place].fill_(value)
    work = comm._launch(dist.all_reduce, marks, dist.ReduceOp.MAX, async_op=True)
    WorkHandle(watch, [work], marks).wait()
    watch.compare(marks[:2] + marks[2:], before)


def _overlaps(output: torch.Tensor, input: torch.Tensor) -> bool:
    start = output.data_ptr()
    return start <= input.data_ptr() < start + output.numel() * output.element_size()


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def backend_for(process_group: Any, device: torch.device) -> str:
    """Return the backend name that serves ``device`` in ``process_group``: "gloo", "hccl", ..."""
    config = dist.get_backend_config(process_group)
    for entry in config.split(","):
        device_type, _, backend = entry.rpartition(":")
        if device_type in ("", device.type):
            return backend
    raise ValueError(
        f"The process group has no backend for {device.type!r} tensors (it has {config!r}). "
        f"Call init_process_group({dist.get_default_backend_for_device(device)!r})."
    )
