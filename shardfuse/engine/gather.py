"""ParamGatherer: all-gathers of updated parameters, in flight until the parameters are read.

[Note: in flight] With overlap_param_sync, step() returns before the updated parameters of the peers
have arrived. Until then the class of such a parameter is PendingParam, whose ``__torch_function__``
torch calls before it reads the parameter in any way that Python can: an operator, an attribute such
as ``.data``, indexing, saving, ``data_ptr()``. It waits for the buckets of the parameter, makes it
a Parameter again, and lets torch continue. Other ways to read need other means:

* A kernel of an extension, TorchScript or a compiled module reads memory without such a call. A
  module calls it: a hook on the forward of all modules, present only while something is in flight,
  waits for the module's own parameters, or for all where Python does not see which code runs.
* A tensor that shares memory with a parameter (an old ``p.data``, a kept state dict) is read
  without a trace. If there is one at the end of step(), step() waits for everything. Where all
  parameters share a storage (NPUs), tensors over it are counted when they are laid out, and again
  in each step before it makes any of its own.
* torch.compile guards on classes, and would compile a function again for each that it finds. If a
  function is compiled while something is in flight, or calls step(), every step() waits for
  everything from then on.
* torch.func wraps tensors below Python. A module that is called with other parameters than its own
  waits for everything; vmap() calls dim() of a parameter, which waits.
* A few functions of torch take a tensor without that call (_NEVER_ASK). torch has no hook for them,
  so functions that wait replace them, only while something is in flight.

shardfuse/optim/errors.md lists the readers that cannot be seen: kernels of extensions.

[Note: locks] Any thread may read a parameter in flight, also while another one is in step() or
backward. The waiting thread holds the lock of that optimizer's ParamGatherer until the parameter's
class is restored. LOCK guards the classes and the registry of this process. No thread waits for a
collective while it holds LOCK: the peer may be a thread of this process, as in tests. A thread
takes LOCK after the lock of a ParamGatherer, never before. A forked child has no connection to
other ranks: os.fork() first waits for everything, and holds all these locks, so that a step() in
another thread puts nothing in flight meanwhile. If that wait fails, reading is an error in the
child too.
"""

from __future__ import annotations

import atexit
import copy
import functools
import logging
import os
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction, _DisableFuncTorch
from torch.profiler import record_function
from torch.utils._python_dispatch import _disable_current_modes

from shardfuse.agreement import on_rank
from shardfuse.buffers import FlatBuffer, has_own_storage
from shardfuse.codecs import DifferentParams, ParamCodec
from shardfuse.comm import Communicator, Completion
from shardfuse.comm.session import PeerError
from shardfuse.comm.transport import AsyncModel, Label
from shardfuse.layout import Bucket, Flat, ParamSpec, slots_in
from shardfuse.runtime import before_tracing, current_stream, is_in_compiled, untraced

logger = logging.getLogger("shardfuse")

LOCK = threading.RLock()
"""Held while the class of a parameter, or the registry, changes; see [Note: locks]."""


class GatheredFlat(Protocol):
    """The parameters of one flat, of all ranks."""

    @property
    def flat(self) -> Flat:
        """Geometry."""

    @property
    def params(self) -> Sequence[Tensor]:
        """The parameters, in slot order."""

    @property
    def specs(self) -> Sequence[ParamSpec]:
        """Of the parameters, in slot order."""

    @property
    def codec(self) -> ParamCodec:
        """How updated parameters are encoded."""


class ParamGatherer:
    """All-gathers updated shards into the flat parameter buffers, one collective per bucket.

    They are launched in the order in which the next forward reads parameters, that of registration:
    the first layers are read first, and their gradients came last.

    Args:
        comm: the ranks that share the buffers.
        overlaps: models of communication under which defer() leaves all-gathers in flight.
        waits: wait for each all-gather where it is launched.
    """

    def __init__(
        self, comm: Communicator, *, overlaps: Collection[AsyncModel] = (), waits: bool = False
    ) -> None:
        self._comm = comm
        self._may_overlap = overlaps
        self._waits = waits
        self._flats: dict[int, GatheredFlat] = {}  # by index
        self._buckets: dict[int, Bucket] = {}
        self._order: list[int] = []  # indices of buckets, in the order of forward
        self._first_channel = self._num_channels = 0  # of labels
        self._ready: set[int] = set()  # buckets that are updated, and not launched yet
        self._num_launched = 0  # of the order, in this step
        self._launched: list[tuple[Completion[None], int]] = []  # with the index of the bucket
        self._members: dict[int, list[Tensor]] = {}  # the parameters in each bucket
        self._in_flight: dict[int, Completion[None]] = {}  # by bucket
        self._pending: Counter[int] = Counter()  # id of a parameter: its buckets in flight
        self._lost: Exception | None = None  # why some will never arrive
        self._device = torch.device("cpu")
        self._stream: Any = None  # of the step() that left something in flight
        self._pid = 0  # of that step()
        self._is_read_elsewhere = False  # a parameter was read on another stream
        self._counts: dict[int, tuple[Tensor, int]] = {}
        """By storage that parameters share: one of them, and how many tensors have the storage."""
        self._is_aliased = False  # there were more when this step began
        comm.session.on_restart(self._restart)
        self.lock = threading.RLock()
        """Held while the set in flight changes, or is waited for; see [Note: locks]."""

    def _restart(self) -> None:
        # A peer has forgotten its part of these, if it moves inside wait().
        if self._comm.async_model is AsyncModel.BLOCKING:
            self._launched, self._num_launched = [], 0
            self._ready.clear()

    @property
    def _overlaps(self) -> bool:
        enough = len(self._order) > 1 and len(self._may_overlap) > 0
        return enough and self._comm.async_model in self._may_overlap

    def plan(self, flats: Sequence[GatheredFlat]) -> None:
        """Expect the buckets of the flats' parameters in every step."""
        self._flats = {state.flat.index: state for state in flats}
        self._buckets = {b.index: b for state in flats for b in state.flat.buckets}
        num_buckets = max(self._buckets, default=-1) + 1
        if num_buckets > self._num_channels:  # the layout has grown, on all ranks
            self._num_channels = num_buckets
            self._first_channel = self._comm.session.reserve_channels(num_buckets)
        first = {b.index: _first_read(s.flat, b) for s in flats for b in s.flat.buckets}
        self._order = sorted(first, key=lambda index: (first[index], -index))
        for param in (param for state in flats for param in state.params):
            key = param.untyped_storage().data_ptr()
            if param.numel() and not has_own_storage(param) and key not in self._counts:
                self._counts[key] = param, count_tensors(param)

    def post_receives(self) -> None:
        """Post the receives of this step, before this rank sends anything."""
        pairs = self._counts.values()
        self._is_aliased = any(not 0 < count_tensors(param) <= count for param, count in pairs)
        for index in self._order:
            bucket = self._buckets[index]
            whole = self._flats[bucket.flat].codec.send_buffer(bucket)
            self._comm.post_receive("all_gather", whole, label=self._label(bucket))

    def _label(self, bucket: Bucket) -> Label:
        text = f"parameters of bucket {bucket.index}"
        return Label(text, self._first_channel + bucket.index)

    def launch(self, bucket: Bucket, params: Sequence[Tensor]) -> None:
        """Launch the all-gather of an updated ``bucket``, once those before it are launched.

        Its shard must not be written until wait_all(). ``params`` are those of the flat, by slot.
        """
        if not self._overlaps:
            self._launch(bucket)
            return
        if bucket.index not in self._members:
            flat = self._flats[bucket.flat].flat
            self._members[bucket.index] = [params[i] for i in slots_in(flat, bucket)]
        self._ready.add(bucket.index)
        while self._num_launched < len(self._order):
            index = self._order[self._num_launched]
            if index not in self._ready:
                break
            self._ready.remove(index)
            self._launch(self._buckets[index])
            self._num_launched += 1

    def _launch(self, bucket: Bucket) -> None:
        state = self._flats[bucket.flat]
        with record_function(f"shardfuse::all_gather b{bucket.index}"):
            whole, part = state.codec.send_buffer(bucket), state.codec.own_slice(bucket)
            gathered = self._comm.all_gather(whole, part, label=self._label(bucket))
        completion = gathered.then(lambda _: self._decode(state, bucket))
        if self._waits:
            completion.wait()
        self._launched.append((completion, bucket.index))

    def _decode(self, state: GatheredFlat, bucket: Bucket) -> None:
        """Write the gathered values into the parameters."""
        with self._explained(state):
            state.codec.decode(bucket)

    @contextmanager
    def _explained(self, state: GatheredFlat) -> Iterator[None]:
        """Have DifferentParams raised on all ranks, with the names.

        Raises:
            RuntimeError: parameters were equal on all ranks, and no longer are.
        """
        try:
            yield
            return
        except DifferentParams as different:
            names = ", ".join(state.specs[i].name for i in slots_in(state.flat, different.bucket))
        error = RuntimeError(
            f"{on_rank(self._comm)}Parameters have other values here than on the rank that "
            f"updates them, although only differences travel (param_sync_bits): {names}. "
            "Load and edit parameters in the same way on all ranks, and build a new "
            "optimizer; or leave param_sync_bits out."
        )
        self._comm.session.fail("parameters on their way", error)

    def broadcast(self, buffer: FlatBuffer) -> None:
        """Launch broadcasts of the first rank's values of the whole buffer, bucket by bucket."""
        for bucket in buffer.flat.buckets:
            completion = self._comm.broadcast(buffer.bucket(bucket))
            self._launched.append((completion, bucket.index))

    def defer(self) -> None:
        """End a step: leave all-gathers in flight if that is safe, else wait for them."""
        assert not self._ready, "a bucket was updated that is not in the plan"
        if not self._overlaps:
            self.wait_all()
            return
        buckets: dict[int, list[int]] = {}
        params: dict[int, Tensor] = {}
        for _, index in self._launched:
            for param in self._members[index]:
                params[id(param)] = param
                buckets.setdefault(id(param), []).append(index)
        must_wait = self._is_read_elsewhere or REGISTRY.are_compiled or self._is_aliased
        if must_wait or any(map(is_shared, params.values())):
            self.wait_all()
            return
        self._device = next(iter(params.values())).device
        self._stream = current_stream(self._device)
        is_read_by_compiled = is_in_compiled()
        with self.lock, LOCK:
            self._pid = os.getpid()
            self._in_flight = {index: completion for completion, index in self._launched}
            self._launched, self._num_launched = [], 0
            self._pending = Counter({key: len(indices) for key, indices in buckets.items()})
            REGISTRY.add(self)
            if not is_read_by_compiled:
                waits = {key: functools.partial(self._wait_locked, buckets[key]) for key in params}
                of_subclasses = [k for k, p in params.items() if not mark_pending(p, waits[k])]
        if is_read_by_compiled:
            REGISTRY.finish_for_compiled()
            return
        for key in of_subclasses:
            waits[key]()

    def _wait_locked(self, buckets: Sequence[int]) -> None:
        """_wait(), from any thread."""
        with self.lock:
            self._wait(buckets)

    def _wait(self, buckets: Sequence[int]) -> None:
        """Wait for some buckets; restore the class of parameters that are complete then.

        The caller holds the lock.

        Raises:
            PeerError: one will not arrive, or did not before; the values read would be incomplete.
        """
        if self._lost is not None:
            raise PeerError(f"A parameter has not arrived after step(): {self._lost}")
        if self._in_flight and self._pid != os.getpid():
            raise PeerError(
                "A parameter was still on its way when this process was forked, and arrives in the "
                "parent only. Call optimizer.synchronize() there before the fork."
            )
        if self._stream is not None and current_stream(self._device) != self._stream:
            self._wait_on_other_stream()
        for index in buckets:
            # It stays in the dict while it is waited for: an interrupt may end the wait, and code
            # that runs meanwhile in this thread, as a signal's handler, may read the parameter too.
            completion = self._in_flight.get(index)
            if completion is None:
                continue
            try:
                with _unseen(), record_function(f"shardfuse::wait_all_gather b{index}"):
                    completion.wait()
            except Exception as error:
                self._lost = error
                # Reading its parameters raises the error; other readers need not wait for them.
                REGISTRY.discard(self)
                raise
            if self._in_flight.pop(index, None) is None:
                continue
            with LOCK:
                for param in self._members[index]:
                    self._pending[id(param)] -= 1
                    if self._pending[id(param)] == 0:
                        mark_ready(param)
        if not self._in_flight:
            REGISTRY.discard(self)

    def _wait_on_other_stream(self) -> None:
        """Wait for everything on the stream of step(), and have the current one wait for that.

        If a parameter was already waited for on stream A, a read on stream B is not noticed. Hence
        overlap is disabled, too.
        """
        if not self._is_read_elsewhere:
            self._is_read_elsewhere = True
            logger.warning(
                "A parameter was read on another stream than that of step() while it was under "
                "way. From now on step() waits for all parameters (overlap_param_sync), because "
                "others may be read on any stream."
            )
        with torch.get_device_module(self._device).stream(self._stream):
            self.wait_all()
        current_stream(self._device).wait_stream(self._stream)

    def disable_overlap(self) -> None:
        """Wait for everything at the end of each step from now on, and for all in flight."""
        self._may_overlap = ()
        self.wait_all()

    def wait_all(self) -> None:
        """Wait for everything launched; after this the parameters may be read."""
        self._ready.clear()  # of a step that failed
        launched, self._launched, self._num_launched = self._launched, [], 0
        with record_function("shardfuse::wait_all_gather"):
            for completion, _ in launched:
                completion.wait()
            self.wait_deferred()
        with self.lock:
            for state in self._flats.values():
                with self._explained(state):
                    state.codec.check()

    def wait_deferred(self) -> None:
        """Wait for all that step() has left in flight, from any thread, also during a step.

        Raises:
            PeerError: as of _wait().
        """
        with self.lock:
            if self._in_flight or self._lost is not None:
                self._wait(list(self._in_flight))


@contextmanager
def _unseen() -> Iterator[None]:
    """Hide the wait from code that observes the read: transforms, modes, and a tracer."""
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


def _first_read(flat: Flat, bucket: Bucket) -> int:
    """Return the parameter in ``bucket`` that forward reads first: registered first."""
    return min((flat.slots[position].param for position in slots_in(flat, bucket)), default=0)


# Parameters in flight

_ATTRIBUTES = """
    device dtype grad grad_fn is_cpu is_cuda is_leaf is_meta is_nested is_quantized is_sparse
    itemsize layout nbytes ndim output_nr requires_grad retains_grad shape _backward_hooks
    _post_accumulate_grad_hooks _version
"""
_METHODS = """
    element_size get_device is_contiguous is_floating_point ndimension nelement numel
    register_hook register_post_accumulate_grad_hook requires_grad_ size storage_offset stride
"""

_HARMLESS = {getattr(Tensor, name) for name in _METHODS.split()} | {
    function
    for name in _ATTRIBUTES.split()
    for kind in ("__get__", "__set__", "__delete__")
    if (function := getattr(getattr(Tensor, name), kind, None)) is not None
}
"""Attributes and methods that do not depend on a parameter's values."""


class PendingParam(nn.Parameter):
    """A parameter whose buckets are in flight; see [Note: in flight]."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Wait for all such arguments, unless ``func`` does not read them."""
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        found = [*_find(args), *_find(kwargs)]
        for param in found:
            wait_for(param)
        if not found:
            # It is in a container that only func can open: an iterator would be empty then. Or
            # another thread has waited for it meanwhile.
            REGISTRY.finish()
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Wait, and copy."""
        wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Wait, and pickle."""
        wait_for(self)
        return self.__reduce_ex__(protocol)


def _find(value: Any) -> Iterator[Tensor]:
    """Yield the PendingParams in nested arguments; iterators are left as they are."""
    if type(value) is PendingParam:
        yield value
    elif isinstance(value, list | tuple | set | frozenset | deque):
        for item in value:
            yield from _find(item)
    elif isinstance(value, dict):
        for item in (*value, *value.values()):
            yield from _find(item)


def wait_for(param: Tensor) -> None:
    """Wait for ``param`` if it is in flight; its class is Parameter then.

    Parameters of one bucket become ready together, and other threads wait as well. So ``param`` may
    be a Parameter again by now.
    """
    with LOCK:
        if type(param) is not PendingParam:
            return
        wait = param.__dict__.get("_shardfuse_wait")
        if wait is None:  # made by type(param)(data), from values that were read
            mark_ready(param)
            return
    wait()


def mark_pending(param: Tensor, wait: Callable[[], None]) -> bool:
    """Have ``wait`` called when ``param`` is read; return False if it is of another class.

    The caller holds LOCK.
    """
    if type(param) is not nn.Parameter:
        return False
    param.__dict__["_shardfuse_wait"] = wait
    cast(Any, param).__class__ = PendingParam
    return True


def mark_ready(param: Tensor) -> None:
    """Make ``param`` a Parameter again. The caller holds LOCK."""
    if type(param) is PendingParam:
        param.__dict__.pop("_shardfuse_wait", None)
        cast(Any, param).__class__ = nn.Parameter


def count_tensors(param: Tensor) -> int:
    """Return a number that grows with each tensor that has the storage of ``param``."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(param.untyped_storage()._cdata))


def is_shared(param: Tensor) -> bool:
    """Return whether another tensor has the memory of ``param``, if it has its own storage."""
    return has_own_storage(param) and not 0 < count_tensors(param) <= _NOT_SHARED


def _count_of_fresh() -> int:
    fresh = nn.Parameter(torch.empty(1))
    fresh.data = torch.empty(1)
    return count_tensors(fresh)


_NOT_SHARED = _count_of_fresh()


_NEVER_ASK = [
    ("torch", "to_dlpack"),
    ("torch.utils.dlpack", "to_dlpack"),
    ("torch._functorch.eager_transforms", "_wrap_for_grad"),  # grad(), vjp(), jvp() and the like
    ("torch._C.ScriptFunction", "__call__"),
    ("torch._C.ScriptMethod", "__call__"),
]


def _waiting(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``function`` that waits for its arguments before it reads them."""

    @functools.wraps(function)
    def wait_and_call(*args: Any, **kwargs: Any) -> Any:
        for param in [*_find(args), *_find(kwargs)]:
            wait_for(param)
        return function(*args, **kwargs)

    return wait_and_call


class _PatchedFunctions:
    """Replaces the functions of _NEVER_ASK by waiting ones, from start() to stop()."""

    def __init__(self) -> None:
        self._originals: list[tuple[Any, str, Any]] = []
        self._made: dict[tuple[str, str], Any] = {}  # once, not in every step()

    def start(self) -> None:
        for path, name in _NEVER_ASK:
            module, _, attribute = path.rpartition(".")
            owner: Any = sys.modules.get(path) or getattr(sys.modules.get(module), attribute, None)
            original = vars(owner).get(name) if owner is not None else None
            if original is not None:
                self._originals.append((owner, name, original))
                made = self._made.get((path, name))
                if made is None or made.__wrapped__ is not original:
                    made = self._made[path, name] = _waiting(original)
                setattr(owner, name, made)

    def stop(self) -> None:
        for owner, name, original in self._originals:
            setattr(owner, name, original)
        self._originals.clear()


class PendingRegistry:
    """The gatherers of this process that have something in flight."""

    def __init__(self) -> None:
        self._gatherers: weakref.WeakSet[ParamGatherer] = weakref.WeakSet()
        self._hook: Any = None
        self._replaced = _PatchedFunctions()
        self._held: list[ParamGatherer] = []  # their locks are held during a fork
        self.are_compiled = False
        """Whether a function was compiled that may read parameters in flight."""

    def add(self, gatherer: ParamGatherer) -> None:
        """Take note that ``gatherer`` has something in flight.

        The caller holds LOCK.
        """
        self._gatherers.add(gatherer)
        if self._hook is None:
            self._hook = nn.modules.module.register_module_forward_pre_hook(_before_forward)
            self._replaced.start()
        before_tracing(_before_compiling)

    def finish_for_compiled(self) -> None:
        """Wait for everything, and leave nothing in flight from now on."""
        if self._gatherers and not self.are_compiled:
            self.are_compiled = True
            logger.warning(
                "torch.compile has compiled a function while parameters were under way, or one "
                "that calls step(). From now on step() waits for them (overlap_param_sync), "
                "because compiled functions may read them. To overlap, compile modules, not "
                "functions."
            )
        self.finish()

    def discard(self, gatherer: ParamGatherer) -> None:
        """Take note that it has nothing in flight."""
        with LOCK:
            self._gatherers.discard(gatherer)
            if not self._gatherers and self._hook is not None:
                self._hook.remove()
                self._hook = None
                self._replaced.stop()

    def finish(self) -> None:
        """Wait for everything."""
        with LOCK:
            waiting = list(self._gatherers)
        for gatherer in waiting:
            gatherer.wait_deferred()

    def before_fork(self) -> None:
        """Wait for everything, and hold all locks until after_fork()."""
        while True:
            LOCK.acquire()
            new = [gatherer for gatherer in self._gatherers if gatherer not in self._held]
            if not new:
                return
            LOCK.release()
            for gatherer in new:
                gatherer.lock.acquire()
                self._held.append(gatherer)
                with suppress(Exception):  # raised where a parameter is read, here and in the child
                    gatherer.wait_deferred()

    def after_fork(self) -> None:
        """Release the locks, in the parent and in the child."""
        LOCK.release()
        while self._held:
            self._held.pop().lock.release()


REGISTRY = PendingRegistry()
atexit.register(REGISTRY.finish)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=REGISTRY.before_fork,
        after_in_parent=REGISTRY.after_fork,
        after_in_child=REGISTRY.after_fork,
    )


def _before_compiling(_: bool) -> None:
    """Restore classes before torch.compile guards on them."""
    REGISTRY.finish_for_compiled()


@untraced
def _before_forward(module: nn.Module, _: Any) -> None:
    """Wait for parameters that ``module`` may read without __torch_function__."""
    if _is_opaque(module):
        REGISTRY.finish()
        for param in module.parameters():
            wait_for(param)  # raises, for one that was lost
        return
    params: list[Any] = [param for param in module._parameters.values() if param is not None]
    for param in params:
        if type(param) is PendingParam:
            wait_for(param)
        elif not isinstance(param, nn.Parameter):
            REGISTRY.finish()  # as torch.func.functional_call() sets them
            return


_FASTER_WITHOUT_OVERRIDES = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
)
"""In evaluation these take another path, of other rounding, for tensors with torch functions."""


def _is_opaque(module: nn.Module) -> bool:
    """Return whether ``module`` runs code that Python does not see, or that looks at classes."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if not module.training and isinstance(module, _FASTER_WITHOUT_OVERRIDES):
        return True
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
