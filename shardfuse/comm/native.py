"""ProcessGroupCommunicator: the collectives of torch.distributed, each as its backend has it."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from shardfuse.comm.regions import digest
from shardfuse.comm.session import GroupSession, GroupState, PeerError
from shardfuse.comm.transport import (
    AsyncModel,
    BufferPool,
    Communicator,
    Completion,
    Label,
    Labelled,
    PartialSums,
    ReduceOp,
    restore_if_changed,
)
from shardfuse.comm.watchdog import Watchdog
from shardfuse.layout import BLOCK

logger = logging.getLogger("shardfuse")

_ABORT_TAG = 0x3EFFFFFF
"""Of a message that no rank sends."""

_PROBE_TAG = 0x3EFFFFFE
"""Of a message that no rank takes."""

_COMPARE_TAGS = 0x3F000000
"""Tags by which neighbours compare their regions are this and 24 bits: 3 of the generation, as
receives that an error has left behind stay, and a hash of the region's number."""

# torch 2.13 renamed these and warns on the old names; the C++ entry points are the same.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
all_gather_single = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


# Backends


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """Properties of a backend, beyond SUM and MAX on contiguous tensors that all backends have."""

    in_place_all_gather: bool
    """The input may be a slice of the output."""

    prefers_pairwise: bool = False
    """Pairwise sends and receives are faster than its own reduce-scatter and all-gather on CPUs."""

    aborts_on_mismatch: bool = False
    """The process is ended by a signal where ranks give a collective different sizes."""

    mismatch_code: str | None = None
    """A part of its errors if ranks launch different collectives; None: it does not compare."""

    changes_inputs: bool | None = False
    """A reduce-scatter may change its input; None: not known before the first has run."""

    overlaps: bool = False
    """Its collectives run on a stream of the device, so it pays to launch them during backward."""


_TRAITS = {
    "gloo": BackendTraits(in_place_all_gather=True, prefers_pairwise=True, aborts_on_mismatch=True),
    "nccl": BackendTraits(in_place_all_gather=True, overlaps=True),
    # HCCL's documents can be read as forbidding overlap of send and receive buffers, so it gets a
    # staged copy unless IN_PLACE_VARIABLE says that the doctor found the in-place form right. (Not
    # run on hardware.) EI0005 reports a mismatch.
    # TORCH_HCCL_ZERO_COPY (beta) turns zero-copy on; the input is checked without it, too.
    "hccl": BackendTraits(
        in_place_all_gather=False, mismatch_code="EI0005", changes_inputs=None, overlaps=True
    ),
}

_CAUTIOUS = BackendTraits(in_place_all_gather=False, changes_inputs=None)
"""Of a backend that is not listed."""


IN_PLACE_VARIABLE = "SHARDFUSE_IN_PLACE_ALL_GATHER"
"""Environment variable; 1: every backend gathers in place. Ranks may differ in it."""


def traits_of(backend: str) -> BackendTraits:
    """Return the traits of ``backend``, a name as ``torch.distributed.get_backend`` gives it."""
    traits = _TRAITS.get(backend, _CAUTIOUS)
    if os.environ.get(IN_PLACE_VARIABLE, "0") not in ("", "0"):
        traits = replace(traits, in_place_all_gather=True)
    if backend == "hccl" and os.environ.get("TORCH_HCCL_ZERO_COPY", "0") not in ("", "0"):
        # CANN 9.0, "Zero-copy: Before You Start". (Not run on hardware.)
        return replace(traits, changes_inputs=True)
    return traits


class _Shared(NamedTuple):
    """State that the communicators of one process group share."""

    group: GroupState
    watchdog: Watchdog | None  # None where the backend's waits need none, or cannot be ended
    copies: list[_GroupCopy]
    failed_names: set[str]  # of groups that were not completed


_shared: weakref.WeakKeyDictionary[Any, _Shared] = weakref.WeakKeyDictionary()


def _shared_of(group: Any, device: torch.device, backend: str) -> _Shared:
    """Return the state and the watchdog of ``group``, the same for all its communicators."""
    if group not in _shared:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        store = PrefixStore("shardfuse", dist.distributed_c10d._get_process_group_store(group))
        # A group may be destroyed and made again under the same name, in the same store.
        life = store.add(f"lives/{rank}", 1)
        state = GroupState(PrefixStore(str(life), store), rank, world_size)
        watchdog = _watchdog_of(state, list(range(world_size)), group, device, backend)
        _shared[group] = _Shared(state, watchdog, [], set())
    return _shared[group]


def _watchdog_of(
    state: GroupState, names: Sequence[int], group: Any, device: torch.device, backend: str
) -> Watchdog | None:
    """Return the watchdog that ends waits in ``group`` once a peer has reported an error.

    ``names``: for each rank of ``group``, its rank in ``state``.
    """
    abort = _ABORTS.get(backend)
    if abort is None:
        return None
    group_ref = weakref.ref(group)

    def find_lost() -> list[int] | None:
        return [names[rank] for rank in _lost_by_gloo(group_ref())] if backend == "gloo" else None

    return Watchdog(
        state,
        lambda: abort(group_ref(), device),
        device=device,
        find_lost=find_lost,
        mismatch_code=traits_of(backend).mismatch_code,
        ranks=names,
    )


def _ranks_in(larger: Any, group: Any) -> list[int]:
    """Return the rank in ``larger`` of each rank of ``group``."""
    members = range(dist.get_world_size(group))
    return [dist.get_group_rank(larger, dist.get_global_rank(group, rank)) for rank in members]


def _close_gloo(group: Any, device: torch.device) -> None:
    """Close all connections of a gloo group: waits on them raise, here and on the peers.

    gloo closes them when a wait times out, and has no other call for it. A wait for a rank that has
    ended raises at once and closes nothing else, so every rank is tried.
    """
    if group is None:
        return
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for distance in range(1, world_size):
        other = (rank + distance) % world_size
        with suppress(RuntimeError):
            work = dist.irecv(torch.empty(1), group=group, group_src=other, tag=_ABORT_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _lost_by_gloo(group: Any) -> list[int]:
    """Return the ranks of a gloo group to which this rank's connections have failed.

    A send to such a rank raises at once. To any other rank, it announces a message.
    """
    if group is None or group not in dist.distributed_c10d._world.pg_map:
        return []
    lost = []
    for other in range(dist.get_world_size(group)):
        if other != dist.get_rank(group):
            message = torch.empty(1)
            try:
                work = dist.isend(message, group=group, group_dst=other, tag=_PROBE_TAG)
            except RuntimeError:
                lost.append(other)
            else:
                Completion(_nothing, [work], [message])  # kept, as it is dropped in flight
    return lost


def _abort(group: Any, device: torch.device) -> None:
    """Abort the collectives in flight of a group of NCCL or HCCL. (Not run on hardware.)"""
    if group is not None:
        with suppress(RuntimeError, AttributeError):
            backend = group._get_backend(device)
            if hasattr(backend, "abort_hccl_comm"):
                # HCCL's abort() is c10d's, which does nothing (torch_npu 2.7.1 to 2.14.0).
                backend.abort_hccl_comm("shardfuse: the ranks are out of step")
            else:
                backend.abort()


_ABORTS = {"gloo": _close_gloo, "nccl": _abort, "hccl": _abort}


class ProcessGroupCommunicator:
    """A Communicator over a torch process group of any backend.

    Args:
        process_group: a ``torch.distributed.ProcessGroup``; None is the default group.
        device: where the tensors live; picks the backend of a group that has several.
        parent: of a larger group, whose regions are those of this communicator, too.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not a member of the group.
    """

    def __init__(
        self,
        process_group: Any,
        device: torch.device,
        *,
        parent: ProcessGroupCommunicator | None = None,
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
        self.device = device
        self.num_launched = 0
        """Collectives so far."""
        # Weak: a gloo group that outlives destroy_process_group() aborts the process at exit.
        self._group_ref: weakref.ref[Any] = weakref.ref(group)
        self.backend = backend_for(group, device)
        self._traits = traits_of(self.backend)
        self._changes_inputs = self._traits.changes_inputs
        if parent is None:
            shared = _shared_of(group, device, self.backend)
            self._state, self._watchdog = shared.group, shared.watchdog
            self.session = GroupSession(
                self._state, check_alive=self._live_group, verify=self._verify_declared
            )
        else:
            self.session, self._state = parent.session, parent._state
        self._state_ranks = _ranks_in(group if parent is None else parent._live_group(), group)
        if parent is not None:
            self._watchdog = _watchdog_of(
                self._state, self._state_ranks, group, device, self.backend
            )
        self._buffers = BufferPool()
        self.session.on_restart(self._renew_buffers, is_transport=True)

    @property
    def world(self) -> Communicator:
        """This one."""
        return self

    @property
    def async_model(self) -> AsyncModel:
        """Backends know no labels."""
        return AsyncModel.ORDERED

    def with_group(self, process_group: Any) -> ProcessGroupCommunicator:
        """Return a communicator of this class over another group, in the regions of this one."""
        return type(self)(process_group, self.device, parent=self)

    def _verify_declared(self) -> None:
        """Have the ranks compare their entries: messages of backends carry no digest."""
        if self._watchdog is None:
            return
        if self._traits.aborts_on_mismatch:
            _compare_by_messages(self)
        else:
            self._state.verify_digest()

    def _note(self, kind: str, tensor: torch.Tensor) -> None:
        """Count a collective of the backend's own, which must be alike on all ranks."""
        self._state.current.note(kind, tensor.numel(), tensor.dtype)
        if self._traits.aborts_on_mismatch:
            _compare_by_messages(self)
        elif self._watchdog is not None and not self._state.current.is_verified:
            _compare_by_reduction(self, self._watchdog, tensor.device)

    def _launch(
        self, function: Callable[..., Any], *args: Any, is_ahead: bool = False, **options: Any
    ) -> Any:
        """Return ``function(...)`` of this group, a Work in flight.

        Raises:
            PeerError: the transport failed. With ``is_ahead``, its RuntimeError is passed on: the
                call may never be due.
        """
        self.num_launched += 1
        try:
            work = function(*args, group=self._live_group(), **options)
        except RuntimeError as error:
            if self._watchdog is None or is_ahead:
                raise
            # gloo sends here; other backends only check their arguments, and for earlier errors.
            is_gloo = self.backend == "gloo"
            failed = "the connection to another rank" if is_gloo else self.backend
            raise self._watchdog.attribute_error(error, failed=failed) from error
        if self._watchdog is not None and "async_op" in options:  # messages have tags
            self._watchdog.note_launch(work)
        return work

    @property
    def staging_nbytes(self) -> int:
        return self._buffers.nbytes

    def _live_group(self) -> Any:
        """Return the process group.

        Raises:
            RuntimeError: it was destroyed; it may be alive all the same, held by other code.
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
        label: Label | None = None,
        is_summed: bool = True,
    ) -> Completion[PartialSums]:
        assert reduce_scatter_single is not None
        if is_summed and self._changes_inputs is None:
            return self._first_reduce_scatter(input, into, slot=slot, label=label)
        if into is None:
            numel = input.numel() // self.world_size if is_summed else input.numel()
            into = self._buffers.get("receive", slot, numel, input)
        if label is None:
            self._note("reduce_scatter" if is_summed else "all_to_all", input)
        if is_summed and self._changes_inputs:
            input = self._buffers.get("send", slot, input.numel(), input).copy_(input)
        in_flight = self._state.begin_send(is_labelled=label is not None)
        function = reduce_scatter_single if is_summed else dist.all_to_all_single
        work = self._launch(function, into, input, async_op=True)
        parts: PartialSums = (into,)
        if not is_summed:
            of_ranks = into.chunk(self.world_size)
            order = [(self.rank - distance) % len(of_ranks) for distance in range(len(of_ranks))]
            parts = tuple(of_ranks[rank] for rank in order)
        return Completion(
            lambda: parts,
            [work],
            [into, input],
            watcher=self._watchdog,
            while_waiting=in_flight,
        )

    def _first_reduce_scatter(
        self, input: torch.Tensor, *args: Any, **options: Any
    ) -> Completion[PartialSums]:
        """Find out by it whether inputs are left as they are, and restore this one if not."""
        self._changes_inputs, kept = False, input.clone()
        completion = self.reduce_scatter(input, *args, **options)
        completion.wait()
        self._changes_inputs = restore_if_changed(input, kept)
        if self._changes_inputs:
            logger.warning(
                "%s changes the input of a reduce-scatter (zero-copy). From now on gradients are "
                "copied before they are sent, which takes a bucket's memory.",
                self.backend,
            )
        return completion

    def post_receive(
        self, kind: Labelled, tensor: torch.Tensor, *, label: Label, slot: int = 0
    ) -> None:
        """Do nothing: backends manage their receive buffers."""

    def forget_posted(self, sender: str) -> None:
        """Do nothing: none is posted."""

    def _renew_buffers(self) -> None:
        # A message that was in flight before an error may still arrive in the old ones.
        self._buffers = BufferPool()

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        assert all_gather_single is not None
        if not self._traits.in_place_all_gather and _overlaps(output, input):
            input = input.clone()
        self._note("all_gather", output)
        work = self._launch(all_gather_single, output, input, async_op=True)
        return self._completion(work, output, input)

    def try_all_gather_in_place(self, output: torch.Tensor) -> Completion[None]:
        """Gather every rank's part of ``output``, from where it lies, whatever the traits say.

        Raises:
            RuntimeError: the backend refuses it; the ranks stay connected.
        """
        assert all_gather_single is not None
        part = output.chunk(self.world_size)[self.rank]
        self._note("all_gather in place", output)
        work = all_gather_single(output, part, group=self._live_group(), async_op=True)
        return self._completion(work, output)

    def all_reduce(
        self, tensor: torch.Tensor, op: ReduceOp = "sum", *, label: Label | None = None
    ) -> Completion[None]:
        self._note(f"all_reduce by {op}", tensor)
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        work = self._launch(dist.all_reduce, tensor, reduce_op, async_op=True)
        return self._completion(work, tensor)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_numels: Sequence[int],
        input_numels: Sequence[int],
    ) -> Completion[None]:
        self._note("all_to_all", input[:0])  # sizes differ between ranks
        sizes = list(output_numels), list(input_numels)
        work = self._launch(dist.all_to_all_single, output, input, *sizes, async_op=True)
        return self._completion(work, output, input)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Completion[None]:
        self._note("broadcast", tensor)
        global_src = dist.get_global_rank(self._live_group(), src)
        work = self._launch(dist.broadcast, tensor, global_src, async_op=True)
        return self._completion(work, tensor)

    def _completion(self, work: Any, *tensors: torch.Tensor) -> Completion[None]:
        return Completion(_nothing, [work], tensors, watcher=self._watchdog)


# Process groups of one user


class _GroupCopy:
    """A process group of another one's ranks, for collectives of one user after another.

    Besides, any number of users may send messages with labels through it.
    """

    def __init__(self, comm: ProcessGroupCommunicator) -> None:
        self.comm = comm
        self._user: weakref.ref[Any] | None = None

    def comm_of(self, comm: ProcessGroupCommunicator, user: object) -> ProcessGroupCommunicator:
        """Return a communicator over it, for what ``user`` sends by ``comm``.

        Collectives of the backend are in use as long as ``user`` lives. Labels name the session of
        ``comm``, so each user needs one of its own.
        """
        if comm.async_model is AsyncModel.UNORDERED:
            return comm.with_group(self.comm._live_group())
        self._user = weakref.ref(user)
        return self.comm

    def numbers(self) -> list[int]:
        """Return whether it is in use, and how many collectives this rank has launched."""
        is_used = self._user is not None and self._user() is not None
        return [int(is_used), self.comm.num_launched, -self.comm.num_launched]


def overlaps_in_order(comm: Communicator) -> bool:
    """Return whether to overlap by default although messages of ``comm`` have an order.

    That needs a backend with a stream of its own, and a group_copy(). Over a mesh, where each
    bucket takes three collectives and waits between them, it is left to the user.
    """
    return (
        isinstance(comm, ProcessGroupCommunicator)
        and comm._traits.overlaps
        and _can_be_copied(comm)
    )


def _can_be_copied(comm: ProcessGroupCommunicator) -> bool:
    """Return whether the ranks of ``comm`` can make another group without all other ranks.

    If the default group is bound to a device, NCCL splits its communicator, which takes all ranks.
    """
    is_bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return comm.backend in _TRAITS and (not is_bound or comm.world_size == dist.get_world_size())


def group_copy(comm: Communicator, user: object) -> Communicator:
    """Return a communicator over a process group of ``user`` alone, of the ranks of ``comm``.

    Collective, in a region. Messages of two groups have no common order. So ``user`` may launch
    collectives while the ranks communicate by ``comm`` in any order: the model's own collectives
    (SyncBatchNorm), other optimizers, a save. Its own order must still be the same on all ranks.

    gloo gives each group connections of its own, so a message does not wait there for those of
    ``comm`` that are in flight. Where messages have labels, all users share one such group.

    On a device, kernels of two groups may wait for peers at the same time, in different orders.
    NCCL allows that while the device has room for both. (Not run on hardware.)

    The group is kept for a later user when ``user`` is freed: a communicator of HCCL takes twice
    HCCL_BUFFSIZE (2 x 200 MB) of the device, one of NCCL tens of MB. A group in which ranks have
    launched different numbers of collectives is never lent again.

    Returns ``comm`` itself where ranks read each other's memory, where it is no process group of
    gloo, NCCL or HCCL (a mesh, an object of the user's), or where no group can be made.
    """
    if not isinstance(comm, ProcessGroupCommunicator) or comm.async_model is AsyncModel.BLOCKING:
        return comm
    if not _can_be_copied(comm):
        return comm
    has_labels = comm.async_model is AsyncModel.UNORDERED
    group = comm._live_group()
    copies, failed_names = _shared[group].copies, _shared[group].failed_names
    name = _next_group_name(dist.get_process_group_ranks(group))
    is_taken = name in failed_names or name in dist.distributed_c10d._world.pg_names.values()
    number = digest(name) % (1 << 24)
    mine = [number, -number, is_taken, *(n for copy in copies for n in copy.numbers())]
    agreed = torch.tensor(mine, device=comm.device)
    comm.all_reduce(agreed, "max").wait()
    most, least, is_taken, *numbers = agreed.tolist()
    for copy, is_used, launched, fewest in zip(
        copies, numbers[::3], numbers[1::3], numbers[2::3], strict=True
    ):
        if has_labels or (not is_used and launched == -fewest):
            return copy.comm_of(comm, user)
    if most != -least or is_taken:
        logger.log(
            logging.INFO if has_labels else logging.WARNING,
            "torch cannot make a process group for the optimizer alone, because %s. %s.",
            "a group of its name is left since another one was destroyed, or was not completed"
            if is_taken
            else "ranks have made, or are members of, different numbers of groups",
            "Small messages wait behind large ones"
            if has_labels
            else "Gradients that are sent during backward share the model's group: all ranks must "
            "launch collectives in one order",
        )
        return comm
    failed_names.add(name)  # until it is made: the store keeps addresses of a failed attempt
    copies.append(_GroupCopy(_connected(comm, group)))
    failed_names.discard(name)
    return copies[-1].comm_of(comm, user)


def _next_group_name(ranks: list[int]) -> str:
    """Return the name that torch gives the next group of these ``ranks``, on this rank.

    It has a count: of this rank's groups, which falls when one is destroyed (before torch 2.14), or
    of the groups that this rank has made. A rank with another name would wait for its peers.
    """
    c10d = dist.distributed_c10d
    name_of = getattr(c10d, "_hash_ranks_to_str", lambda _: str(len(c10d._world.pg_names)))
    return str(name_of(ranks))


def _connected(comm: ProcessGroupCommunicator, group: Any) -> ProcessGroupCommunicator:
    """Return a communicator over a new group of the same ranks, after a first collective.

    Ranks connect at the first collective, and wait there for each other. Under backward, a peer
    might wait for this rank in a collective of the model.
    """
    backend, watchdog = group._get_backend(comm.device), comm._watchdog
    make = functools.partial(
        dist.new_group,
        dist.get_process_group_ranks(group),
        timeout=getattr(getattr(backend, "options", None), "_timeout", None),
        backend=comm.backend,
        use_local_synchronization=True,
    )
    try:
        comm._state.use_connection(_connected_anew(comm._state.store))
        made = make() if watchdog is None else watchdog.run_while_polling(make)
    except PeerError:
        raise
    except RuntimeError as error:
        if watchdog is None:
            raise
        raise watchdog.attribute_error(error, failed="a new process group") from error
    copy = ProcessGroupCommunicator(made, comm.device, parent=comm)
    first = torch.ones(comm.world_size * BLOCK, device=comm.device)
    copy.reduce_scatter(first, label=Label("the first", 0)).wait()
    return copy


def _connected_anew(store: Any) -> Any:
    """Return the same store by another connection; ``store`` where torch cannot."""
    root = store
    while isinstance(root, PrefixStore):
        root = root.underlying_store
    return store.clone() if isinstance(root, TCPStore) and hasattr(store, "clone") else store


def _nothing() -> None:
    """Return the result of a collective that writes its tensors in place."""


def _compare_by_messages(comm: ProcessGroupCommunicator) -> None:
    """Compare the current region with the neighbours', by a message of 8 bytes to the next one.

    Not through the store, which does not show that a neighbour has ended.

    Raises:
        PeerError: the regions differ, or a rank cannot be reached.
    """
    state, rank = comm._state, comm.rank
    region = state.current
    if region.is_verified:
        return
    region.num_verified += 1  # a region may be declared anew after its first collectives
    mine = torch.tensor([region.digest])
    theirs = torch.empty_like(mine)
    number = digest(f"{region.number} {region.num_verified}")
    tag = _COMPARE_TAGS | state.generation % 8 << 21 | number % (1 << 21)
    before, after = ((rank + step) % comm.world_size for step in (-1, 1))
    works = [
        comm._launch(dist.irecv, theirs, group_src=before, tag=tag),
        comm._launch(dist.isend, mine, group_dst=after, tag=tag),
    ]
    Completion(_nothing, works, [mine, theirs], watcher=comm._watchdog).wait()
    if int(theirs) != region.digest:
        state.raise_mismatch(comm._state_ranks[before])
    region.is_verified = True


def _compare_by_reduction(
    comm: ProcessGroupCommunicator, watchdog: Watchdog, device: torch.device
) -> None:
    """Compare the current region on all ranks, by the maximum of its digest and of its negative.

    Where waits do not block the host, the host does not read the result: ``watchdog`` does.

    Raises:
        PeerError: the regions differ.
    """
    region, before = comm._state.current, comm._state_ranks[(comm.rank - 1) % comm.world_size]
    region.is_verified = True
    low, high = region.digest % (1 << 28), region.digest >> 28
    values = [low, high, region.number, -low, -high, 0]
    on_device = device.type != "cpu"
    marks = torch.tensor(values, dtype=torch.int32, pin_memory=on_device)
    marks = marks.to(device, non_blocking=True)
    work = comm._launch(dist.all_reduce, marks, dist.ReduceOp.MAX, async_op=True)
    Completion(_nothing, [work], [marks], watcher=watchdog).wait()
    # The largest value less the least one is 0 where all are equal; and the number.
    watchdog.compare(marks[:3] + marks[3:], before)


def _overlaps(output: torch.Tensor, input: torch.Tensor) -> bool:
    start = output.data_ptr()
    return start <= input.data_ptr() < start + output.numel() * output.element_size()


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def group_of_mesh(mesh: Any) -> Any:
    """Return the process group of all ranks of a DeviceMesh; None for the default group.

    The first call for a mesh of several dimensions that has not all ranks makes a group: every rank
    of the mesh must call it.
    """
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    groups = _mesh_groups.setdefault(dist.group.WORLD, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return groups[ranks]


_mesh_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = (
    weakref.WeakKeyDictionary()
)
"""Groups that group_of_mesh() has made, by the default group under which it did."""


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
