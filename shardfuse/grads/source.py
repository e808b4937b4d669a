"""GradSource: the gradients of an optimizer, as its driver sees them.

There are three: FullGrads keeps every gradient in p.grad (stage 1), ShardedGrads keeps this rank's
shard of the sum (stage 2), ExternalGrads reads p.grad that DistributedDataParallel has averaged.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from shardfuse.buffers import ShardArena, zeros
from shardfuse.comm import Communicator, Completion
from shardfuse.comm.native import group_copy
from shardfuse.comm.transport import AsyncModel, Label, PartialSums
from shardfuse.layout import Bucket, Flat, Fragment, ParamSpec, slots_in
from shardfuse.runtime import new_stream, on_stream, untraced


class GradPhase(enum.Enum):
    """Where gradients are in a step."""

    ACCUMULATING = "autograd and callers write p.grad"
    FROZEN = "it is known which gradients exist, and where they are; reduced() gives each once"
    REDUCED = "reduced shards are kept, and reduced() gives them as often as it is asked"


class FlatParams(NamedTuple):
    """The parameters of one flat, in slot order."""

    flat: Flat
    params: Sequence[Tensor]
    specs: Sequence[ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # this rank's, by bucket


@dataclass
class SyncControl:
    """Switches that control whether buckets are reduced during backward.

    Ignored if gradients are only reduced in step().
    """

    is_paused: bool = False
    """More gradients will be added before the next step, as inside no_sync()."""
    must_wait: bool = False
    """Gradients change after backward where it does not show, so none may be sent early. For good.
    Peers need not know."""
    accumulates: Callable[[], bool] | None = None
    """Returns the same for a single backward."""
    join_active: Callable[[], bool] = lambda: False
    """Returns whether torch's Join is active: it sends its own all-reduce at the start of each
    step(), so no bucket may be sent earlier where messages have an order."""

    before_send: Callable[[], None] = lambda: None
    """Called under backward before gradients are sent."""

    def may_send(self, *, is_ordered: bool) -> bool:
        """Return whether the gradients of this backward may be sent before step().

        Args:
            is_ordered: whether messages of the backend must be in the same order on all ranks.
        """
        accumulates = self.accumulates is not None and self.accumulates()
        if self.is_paused or self.must_wait or accumulates:
            return False
        return not (is_ordered and self.join_active())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep gradients on this rank: more will be added before the next step."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before


class GradSource(ABC):
    """Gradients of flats on their way to this rank's shards.

    freeze() ends the accumulation, keep_reduced() keeps the reduced shards, release() begins anew.
    """

    phase: GradPhase = GradPhase.ACCUMULATING
    """Set by the methods of this class alone."""

    def __init__(self) -> None:
        self._flats: dict[int, Any] = {}  # the storage of each flat; has ``no_local_grad``
        self.overflowed: dict[int, Tensor] = {}
        """By param, this rank's part of a gradient that unscale() found not to be finite."""
        self.control = SyncControl()
        self.num_made = 0
        """How many gradients autograd has made, in all."""
        self.before_first: weakref.WeakMethod[Callable[[], bool]] | None = None
        """Called once, under backward, before the first gradient is used; returns whether this
        source is replaced by another one."""

    def has(self, flat: Flat) -> bool:
        """Return whether ``flat`` is attached."""
        return flat.index in self._flats

    def no_local_grad(self, flat: Flat) -> set[int]:
        """Return the params of ``flat`` that had no gradient on this rank at the last freeze()."""
        params: set[int] = self._flats[flat.index].no_local_grad
        return params

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held for gradients."""

    @abstractmethod
    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        """Take over the gradients of flats."""

    def flush(self, *, is_frozen: bool = False) -> None:  # noqa: B027 - most send nothing early
        """Send the buckets that peers may have sent during backward, before any other message.

        ``is_frozen``: freeze() was called since gradients could change last.
        """

    @abstractmethod
    def freeze(self) -> None:
        """Find out which gradients exist, and where they are. Does nothing if nothing has changed
        since they were reduced.

        Raises:
            RuntimeError: a gradient is sparse.
        """

    @abstractmethod
    def unused(self, bucket: Bucket, parts: PartialSums) -> set[int]:
        """Return the params in ``bucket``'s shard that no rank has a gradient of.

        ``parts`` are those that reduced() gave for ``bucket``. See [Note: absent gradients].
        """

    @abstractmethod
    def mean_factor(self, flat: int) -> float | None:
        """Return the factor from a flat's reduced gradients to their mean over ranks; None is 1."""

    how_summed = "reduced already"
    """Why scale_before_sum() comes too late."""

    def scale_before_sum(self, factor: Tensor) -> None:
        """Multiply this rank's gradients by ``factor`` () before the sum; p.grad is not changed.

        Raises:
            RuntimeError: the sum was made before step().
        """
        raise RuntimeError(
            f"The ranks have different loss scales although their gradients are {self.how_summed}. "
            "Use one scale on all ranks: shardfuse.ShardedGradScaler."
        )

    @abstractmethod
    def reduced(self) -> Iterator[tuple[Bucket, PartialSums]]:
        """Yield (bucket, its shard of the summed gradient), in launch order.

        Parts are valid until the next are asked for; after keep_all_reduced(), until release().
        """

    @abstractmethod
    def keep_reduced(self) -> None:
        """Reduce the frozen gradients and keep the shards: the phase is REDUCED then."""

    def keep_all_reduced(self) -> None:
        """keep_reduced(), and have all buckets' parts stay valid until release()."""
        self.keep_reduced()

    @abstractmethod
    def release(self) -> None:
        """Forget frozen and reduced gradients: the phase is ACCUMULATING then."""

    def written(self) -> list[str]:
        """Return the params whose ``p.grad`` was written to after backward, as far as is known."""
        return []

    def note_unscaled(self, *, is_told: bool) -> None:  # noqa: B027 - most send nothing early
        """Take note that a gradient scaler has unscaled ``p.grad`` since backward.

        Its operator counts as no write, so nothing else shows it on a device.

        Args:
            is_told: whether the scaler says so before anything else uses the gradients.

        Raises:
            RuntimeError: reduced gradients are kept that were sent before.
        """

    def consume(self) -> None:
        """Take note that a step has used the gradients, or skipped them."""
        self.release()

    def unscale(self, inverse: Tensor | None) -> Tensor | None:
        """Multiply this rank's gradients by ``inverse`` (), if given; return 0.0 () if finite.

        For gradients that are not in p.grad, where scalers unscale by themselves; None if they are.
        Collective if they are not.
        """
        return None

    @abstractmethod
    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients, to None or to zero, and release().

        ``absent``: a gradient that is not written until freeze() counts as none.
        """

    @abstractmethod
    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Return tensors that every gradient is a view of, to edit them all at once.

        ``shared``: the caller may write other values than zero into the padding between them.
        """


# Shared by the classes


class _HasHook(Protocol):
    """A source that wants to know of each gradient."""

    def on_grad(self, flat: int, position: int) -> None:
        """Take note that autograd has made the gradient of a slot."""


def register_hooks(source: _HasHook, flat: Flat, params: Sequence[Tensor]) -> None:
    """Have autograd call ``source.on_grad()`` for each of a flat's params that trains.

    Hooks are weak: they never keep an optimizer alive.
    """
    source_ref = weakref.ref(source)
    for position, param in enumerate(params):
        if param.requires_grad:
            hook = functools.partial(_on_grad, source_ref, flat.index, position, param.data_ptr())
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


@untraced  # once: for each param's own function it takes longer than all else
def _on_grad(
    source_ref: weakref.ref[_HasHook], flat: int, position: int, address: int, param: Tensor
) -> None:
    """Be a param's post-accumulate hook."""
    source = source_ref()
    # A param elsewhere is that of an optimizer which was built on it later, and which takes the
    # gradient; or it was re-allocated, of which step() raises an error.
    if source is not None and param.data_ptr() == address:
        source.on_grad(flat, position)


class HasFlat(Protocol):
    """The storage of the gradients of one flat."""

    no_local_grad: set[int]  # params with no gradient on this rank

    @property
    def flat(self) -> Flat:
        """Geometry."""


T = TypeVar("T", bound=HasFlat)


def in_backward_order(flats: Iterable[T]) -> list[tuple[T, Bucket]]:
    """Return all buckets of ``flats`` in the order in which backward completes them."""
    order = [(own, bucket) for own in flats for bucket in own.flat.buckets]
    order.sort(key=lambda entry: (-_last_made(entry[0].flat, entry[1]), entry[1].index))
    return order


def _last_made(flat: Flat, bucket: Bucket) -> int:
    """Return the parameter of ``bucket`` whose gradient backward makes last: registered first."""
    return min((flat.slots[position].param for position in slots_in(flat, bucket)), default=0)


class PendingGrads:
    """Counts, for every bucket, the gradients that autograd has yet to make."""

    def __init__(self, order: Sequence[tuple[HasFlat, Bucket]] = ()) -> None:
        self._order = order
        self._buckets_of: dict[tuple[int, int], list[int]] = {}  # of a slot: indices in the order
        self._totals = [0] * len(order)  # slots in each bucket
        for index, (own, bucket) in enumerate(order):
            for position in slots_in(own.flat, bucket):
                self._buckets_of.setdefault((own.flat.index, position), []).append(index)
                self._totals[index] += 1
        self._unused: set[tuple[int, int]] = set()  # slots without a gradient in the last step
        self._ready: set[tuple[int, int]] = set()  # slots whose gradients autograd has made
        self._pending: list[int] = []  # by bucket
        self._num_pending = 0
        self.restart()

    def restart(self) -> None:
        """Wait for all gradients, except those that did not exist in the last step."""
        self._ready.clear()
        self._pending = list(self._totals)
        self._num_pending = len(self._buckets_of)
        for key in self._unused:
            self._num_pending -= key in self._buckets_of
            for index in self._buckets_of.get(key, ()):
                self._pending[index] -= 1

    def mark_ready(self, flat: int, position: int) -> bool:
        """Take note that autograd has made a gradient; return whether that was expected."""
        key = flat, position
        if key in self._ready or key not in self._buckets_of:  # no elements: in no bucket
            return False
        self._ready.add(key)
        self._num_pending -= key not in self._unused
        for index in self._buckets_of[key]:
            self._pending[index] -= 1
        return True

    def is_ready(self, index: int) -> bool:
        """Return whether bucket ``index`` of the order lacks no gradient."""
        return self._pending[index] <= 0

    @property
    def all_ready(self) -> bool:
        """Whether no bucket lacks a gradient."""
        return self._num_pending <= 0

    def learn_unused(self) -> None:
        """Take note which slots had no gradient on this rank in the step that ends."""
        unused = {
            (own.flat.index, position)
            for own in {id(own): own for own, _ in self._order}.values()
            if own.no_local_grad
            for position, slot in enumerate(own.flat.slots)
            if slot.param in own.no_local_grad and (own.flat.index, position) in self._buckets_of
        }
        if len(unused) < len(self._buckets_of):  # else it was a step without a backward
            self._unused = unused


_num_sources: weakref.WeakKeyDictionary[Communicator, int] = weakref.WeakKeyDictionary()
"""By communicator, which optimizers may share: how many sources send through it."""

_SLOTS_PER_SOURCE = 1 << 20
"""More than the buckets of any source."""


_MAX_WRITES = 16
"""Numbers that are written to a device one by one, which the host does not wait for."""


class HostAllReduceMax:
    """The maximum over ranks of numbers that the host knows and needs. Collective.

    On a device the all-reduce has a stream of its own. So the host waits for the hosts of its
    peers, and not for the backward that is queued on the device.

    Args:
        comm: all ranks.
        device: where the numbers are reduced.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._stream = None if device.type == "cpu" else new_stream(device)
        self._numbers: list[float] = []  # of this rank, the last ones
        self._sent = torch.empty(0)  # the same numbers, on the device
        self._result: tuple[Tensor, Completion[None]] | None = None

    def post_receive(self, count: int, label: Label) -> None:
        """Post the receives of the all-reduce of ``count`` numbers ahead."""
        like = torch.empty(1, dtype=torch.float32, device=self._device).expand(count)
        self._comm.post_receive("all_reduce", like, label=label)

    def forget_posted(self, sender: str) -> None:
        """Forget the receives that were posted for labels of ``sender``."""
        self._comm.forget_posted(sender)

    def launch(self, numbers: list[float], label: Label | None = None) -> None:
        """Launch the all-reduce of as many ``numbers`` on each rank."""
        with on_stream(self._stream):
            self._write(numbers)
            result = self._sent.clone()
            self._result = result, self._comm.all_reduce(result, "max", label=label)

    def _write(self, numbers: list[float]) -> None:
        """Write ``numbers`` to the device, by kernels if few differ from the last ones."""
        before, self._numbers = self._numbers, numbers
        changed = map(operator.ne, before, numbers)
        indices = [index for index, is_changed in enumerate(changed) if is_changed]
        if len(before) == len(numbers) and len(indices) <= _MAX_WRITES:
            for index in indices:
                self._sent[index].fill_(numbers[index])
            return
        self._sent = torch.tensor(numbers, dtype=torch.float32, device=self._device)

    def wait(self) -> list[float]:
        """Wait for it."""
        assert self._result is not None, "launch() comes before wait()"
        (result, completion), self._result = self._result, None
        with on_stream(self._stream):
            completion.wait()
            numbers: list[float] = result.tolist()
        return numbers


def overlap_communicators(comm: Communicator, user: object) -> tuple[Communicator, Communicator]:
    """Return the communicators of ``user``'s buckets and of its agreement. Collective, in a region.

    One of them is a group_copy(). Where messages have an order, that is the buckets', so that it is
    theirs alone. Elsewhere it is the agreement's: a link may be behind by many buckets when
    backward ends, and the first pass of LAMB would wait for the last bucket.
    """
    copy = group_copy(comm, user)
    if comm.async_model is AsyncModel.UNORDERED:
        return comm, copy
    return copy, comm.world


class MessageNames:
    """Labels and receive buffers of one source's messages, apart from those of others."""

    def __init__(self, comm: Communicator) -> None:
        self._session = comm.session
        self._num_buckets = self._first_channel = 0
        number = _num_sources[comm] = _num_sources.get(comm, 0) + 1  # equal on all ranks
        self.first_slot = number * _SLOTS_PER_SOURCE
        """The first of the communicator's receive buffers for this source."""
        self.sender = f"sender {number},"
        """A part of every label of this source."""

    def begin_order(self, num_buckets: int) -> None:
        """Begin a new order of as many buckets. To be called by all ranks, in a region."""
        self._num_buckets = num_buckets
        self._first_channel = self._session.reserve_channels(num_buckets + 2)

    def label(self, iteration: int, index: int, resend: int = 0) -> Label:
        """Return the label of bucket ``index`` of an iteration.

        Buckets that are sent again are sent one by one.
        """
        text = f"{self.sender} round {iteration}, bucket {index}, attempt {resend}"
        return Label(text, self._first_channel + (self._num_buckets if resend else index))

    def agreement(self, iteration: int) -> Label:
        """Return the label of the all-reduce of the facts that hosts must know in an iteration."""
        text = f"{self.sender} round {iteration}, agreement"
        return Label(text, self._first_channel + self._num_buckets + 1)


def is_nested_backward() -> bool:
    """Return whether a node of another backward has started the current one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False


def is_absent(grad: Tensor) -> Tensor:
    """Return () whether every element is -0.0; [Note: absent gradients] in grads/full.py."""
    return (grad.signbit() & (grad == 0)).all()


def check_grad(grad: Tensor, spec: ParamSpec) -> None:
    """Raise RuntimeError if ``grad`` is sparse, or has another size than its parameter."""
    if grad.layout != torch.strided:
        raise RuntimeError(
            f"The gradient of {spec.name} is sparse; shardfuse needs dense gradients (for an "
            "embedding: sparse=False)."
        )
    if grad.numel() != spec.numel:
        raise RuntimeError(
            f"The gradient of {spec.name} has {grad.numel()} elements, the parameter {spec.numel}. "
            "Set p.grad to a tensor of the parameter's shape."
        )


def slot_range(grad: Tensor, spec: ParamSpec, start: int, numel: int) -> Tensor:
    """Return (numel,) of ``grad`` from ``start`` on, in the order of the parameter's slot."""
    if tuple(grad.stride()) != spec.stride:
        ordered = torch.empty_strided(spec.shape, spec.stride, dtype=grad.dtype, device=grad.device)
        grad = ordered.copy_(grad)
    return grad.as_strided((numel,), (1,), grad.storage_offset() + start)


def clear_grads(params: Iterable[Tensor], set_to_none: bool) -> None:
    """Clear gradients that are in no buffer of ours, to None or to zero."""
    for param in params:
        if set_to_none:
            param.grad = None
        elif param.grad is not None:
            clear_grad(param.grad)


def clear_grad(grad: Tensor, value: float = 0.0) -> None:
    """Fill a gradient in place, out of its graph if it has one, as torch's zero_grad() does."""
    if grad.grad_fn is not None:
        grad.detach_()
    elif grad.requires_grad:
        grad.requires_grad_(False)
    if grad.layout == torch.strided:
        grad.fill_(value)
    else:
        grad.zero_()


# Whether gradients have changed


def checksum(words: Tensor) -> Tensor:
    """Return the sum () of the bits of whole words, eight bytes a number, at the speed of memory.

    Raises:
        RuntimeError: the elements of ``words`` are not dense, or make no whole words.
    """
    return words.view(-1).view(torch.int64).sum()


def memory_of(grads: Iterable[Tensor | None]) -> list[Tensor]:
    """Return tensors that cover all CPU memory of ``grads``, for a GradSnapshot.

    A flat buffer is one tensor: a checksum for each of thousands of gradients would take longer.
    """
    storages = {}
    for grad in grads:
        if grad is None or not grad.numel():
            continue
        if grad.device.type == "cpu" and grad.layout == torch.strided:
            storage = grad.untyped_storage()
            storages[storage.data_ptr()] = grad, storage
    memory = []
    for grad, storage in storages.values():
        if grad.nbytes == storage.nbytes() and grad.nbytes % 8 == 0 and grad.is_contiguous():
            memory.append(grad.detach())
        else:
            memory.append(torch.empty(0, dtype=torch.uint8).set_(storage))
    return memory


class HasGrad(Protocol):
    """A parameter, or this rank's shard of one."""

    @property
    def grad(self) -> Tensor | None:
        """The gradient."""


class GradSnapshot:
    """Which tensors the gradients of some parameters are, and their contents.

    A gradient has changed if it is another tensor, or its address, version or checksum differs.
    Scalers unscale by an operator that counts as no write, and ``grad.data`` has a version of its
    own: only the checksum shows these. On a device there is none, because the host would wait for
    it: there a scaler reports its writes (note_unscaled()). Views of one buffer share a version, so
    a write to one counts as a write to all.

    Args:
        params: the parameters.
        memory: dense tensors of the CPU to take checksums of.
        grads: of the parameters, if they were read already.
    """

    def __init__(
        self,
        params: Sequence[HasGrad],
        memory: Sequence[Tensor] = (),
        grads: Sequence[Tensor | None] | None = None,
    ) -> None:
        self._params = params
        self._grads = [param.grad for param in params] if grads is None else grads
        self._marks = [_mark(grad) for grad in self._grads]
        self._memory = memory
        self._sums = _sums(memory)

    def is_current(self) -> bool:
        """Return whether nothing has changed since."""
        for param, grad, mark in zip(self._params, self._grads, self._marks, strict=True):
            if param.grad is not grad or _mark(grad) != mark:
                return False
        now = _sums(self._memory)
        if self._sums is None or now is None:
            return True
        return bool(self._sums.tolist() == now.tolist())


def _mark(grad: Tensor | None) -> tuple[int, int]:
    return (0, 0) if grad is None else (grad._version, grad.data_ptr())


def _sums(memory: Sequence[Tensor]) -> Tensor | None:
    sums = []
    for tensor in memory:
        if tensor.dtype is not torch.uint8:
            sums.append(checksum(tensor))
            continue
        end = tensor.numel() // 8 * 8
        sums += [checksum(tensor[:end]), tensor[end:].sum()]
    return torch.stack(sums) if sums else None


# Gradients that are reduced elsewhere


class _Copy(NamedTuple):
    """A copy from a parameter's gradient, or from a fragment of it, into the shard."""

    param: Tensor
    spec: ParamSpec
    fragment: Fragment | None  # None is the whole
    into: Tensor  # of the parameter's shape; a fragment (numel,)


@dataclass
class _BucketShard:
    """This rank's shard of the gradients of one bucket, and the copies that fill it."""

    shard: Tensor  # (shard_numel,)
    copies: list[_Copy]
    gaps: list[Tensor]  # parts of the shard that no copy covers

    def pack(self) -> Tensor:
        """Copy this rank's fragments of every gradient; return the shard."""
        into, out_of = [], []
        unwritten = list(self.gaps)
        for param, spec, fragment, part in self.copies:
            grad = param.grad
            if grad is None:
                unwritten.append(part)
                continue
            into.append(part)
            if fragment is not None:
                grad = slot_range(grad, spec, fragment.param_start, fragment.numel)
            out_of.append(grad)
        if unwritten:
            torch._foreach_zero_(unwritten)
        if into:
            torch._foreach_copy_(into, out_of)  # one call: there may be thousands
        return self.shard


@dataclass
class _ExternalFlat:
    """The gradients of one flat, and this rank's fragments of them by bucket."""

    flat: Flat
    params: dict[int, Tensor]
    specs: dict[int, ParamSpec]
    fragments: Mapping[int, Sequence[Fragment]]  # by bucket
    scratch: Tensor
    """One bucket's shard: buckets are packed one after another, so no copy of all is held."""
    buckets: dict[int, _BucketShard]
    no_local_grad: set[int]
    arena: ShardArena | None = None
    """All buckets' shards, if a rule needs them at the same time."""

    def place(self, arena: ShardArena | None) -> None:
        """Have buckets packed into ``arena``; None: each into the same scratch buffer."""
        self.arena = arena
        for bucket in self.flat.buckets:
            shard = self.scratch[: bucket.shard_numel] if arena is None else arena.view(bucket)
            fragments = self.fragments[bucket.index]
            copies = [
                _copy_of(self.params[f.param], self.specs[f.param], f, shard) for f in fragments
            ]
            self.buckets[bucket.index] = _BucketShard(shard, copies, _gaps(fragments, shard))

    def freeze(self) -> None:
        """Find out which gradients exist."""
        self.no_local_grad = {p for p, param in self.params.items() if param.grad is None}
        for number, param in self.params.items():
            if param.grad is not None:
                check_grad(param.grad, self.specs[number])


class ExternalGrads(GradSource):
    """Copies this rank's fragments out of ``p.grad``, which is the mean over ranks already.

    Nothing is communicated, and ``p.grad`` is not changed: one bucket's shard is copied at a time.
    A parameter without a gradient on this rank has none on any.
    """

    def __init__(self) -> None:
        super().__init__()
        self._flats: dict[int, _ExternalFlat]
        self._snapshot: GradSnapshot | None = None
        self._scratch: dict[torch.dtype, Tensor] = {}  # shared by flats
        self._device = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        scratch = {own.scratch.data_ptr(): own.scratch.nbytes for own in self._flats.values()}
        arenas = [own.arena for own in self._flats.values() if own.arena is not None]
        return sum(scratch.values()) + sum(arena.data.nbytes for arena in arenas)

    def attach(self, members: Sequence[FlatParams], device: torch.device) -> None:
        self._device = device
        for flat, params, specs, fragments in members:
            dtype = params[0].dtype
            numel = max((bucket.shard_numel for bucket in flat.buckets), default=0)
            if dtype not in self._scratch or self._scratch[dtype].numel() < numel:
                self._scratch[dtype] = zeros(numel, device, dtype)
            numbers = [slot.param for slot in flat.slots]
            own = self._flats[flat.index] = _ExternalFlat(
                flat,
                dict(zip(numbers, params, strict=True)),
                dict(zip(numbers, specs, strict=True)),
                fragments,
                self._scratch[dtype],
                {},
                set(),
            )
            own.place(None)

    def unused(self, bucket: Bucket, parts: PartialSums) -> set[int]:
        return self._flats[bucket.flat].no_local_grad

    def mean_factor(self, flat: int) -> float | None:
        return None

    def freeze(self) -> None:
        if self._snapshot is not None and self._snapshot.is_current():
            return
        self.phase, self._snapshot = GradPhase.FROZEN, None
        for own in self._flats.values():
            own.freeze()

    def combined(self, *, shared: bool) -> list[Tensor | None]:
        """Return every gradient by itself; no tensor of ours contains them all.

        Raises:
            RuntimeError: ``shared``, because the caller wants that tensor.
        """
        if shared:
            raise RuntimeError(
                "There are no combined gradients with grads_are_reduced=True: each p.grad belongs "
                "to whatever averages it, such as DistributedDataParallel. Use p.grad, or train "
                "without that wrapper and with grads_are_reduced=False."
            )
        grads = [param.grad for param in self._params() if param.grad is not None]
        return [grad.detach() for grad in grads if grad.layout == torch.strided]

    def zero(self, set_to_none: bool, *, absent: bool = False) -> None:
        """Clear the gradients, to None or to zero.

        ``absent`` has no effect: DistributedDataParallel knows which parameters were used, and sets
        zeros for gradients.
        """
        self.release()
        for own in self._flats.values():
            clear_grads(own.params.values(), set_to_none)

    def keep_reduced(self) -> None:
        params = self._params()
        self.phase = GradPhase.REDUCED
        self._snapshot = GradSnapshot(params, memory_of(param.grad for param in params))

    def keep_all_reduced(self) -> None:
        self.keep_reduced()
        for own in self._flats.values():
            if own.arena is None:
                own.place(ShardArena(own.flat, self._device, own.scratch.dtype))

    def release(self) -> None:
        self.phase, self._snapshot = GradPhase.ACCUMULATING, None

    def _params(self) -> list[Tensor]:
        return [param for own in self._flats.values() for param in own.params.values()]

    def reduced(self) -> Iterator[tuple[Bucket, PartialSums]]:
        for own in self._flats.values():
            for bucket in own.flat.buckets:
                yield bucket, (own.buckets[bucket.index].pack(),)


def _copy_of(param: Tensor, spec: ParamSpec, fragment: Fragment, shard: Tensor) -> _Copy:
    """Return the copy of ``fragment`` of a gradient into ``shard``, that of its bucket."""
    part = shard[fragment.shard_start : fragment.shard_start + fragment.numel]
    if fragment.numel < spec.numel:
        return _Copy(param, spec, fragment, part)
    return _Copy(param, spec, None, part.as_strided(spec.shape, spec.stride, part.storage_offset()))


def _gaps(fragments: Sequence[Fragment], shard: Tensor) -> list[Tensor]:
    """Return the parts of ``shard`` outside all fragments: padding, which is zero."""
    gaps, end = [], 0
    for fragment in sorted(fragments, key=lambda fragment: fragment.shard_start):
        if fragment.shard_start > end:
            gaps.append(shard[end : fragment.shard_start])
        end = fragment.shard_start + fragment.numel
    return [*gaps, shard[end:]] if end < shard.numel() else gaps
