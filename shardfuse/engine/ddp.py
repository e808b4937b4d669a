"""Models in DistributedDataParallel, and the duties of that wrapper for models without it.

[Note: search for modules] A parameter does not refer to its module, nor to a wrapper of that. A
script that passes parameters may still have the model in DistributedDataParallel, which averages
the gradients; the model may have buffers that nothing keeps equal; and the parameters may be parts
of sharded ones. When an optimizer is built, Owners finds the modules among the objects that
Python's garbage collector tracks, which takes time for each object of the process. From then to the
first gradient, torch reports each module that gets a child or a parameter, as a wrapper does when
it is built (ModuleWatch). So the first step looks at modules alone.

[Note: buffers] DistributedDataParallel broadcasts the first rank's buffers before a forward in
training, if a gradient was reduced since the last one. Here step() broadcasts them for the next
forward. The two are the same if a step has one forward, or several of which all but the last run
inside no_sync(). No forward communicates, so one rank alone may run the model for an evaluation.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardfuse.comm import Communicator, Completion
from shardfuse.layout import round_up


class Owners:
    """The modules that have any of ``params``, found when this object is built.

    The object keeps them alive, so it should be short-lived.

    Args:
        params: parameters of an optimizer.
        modules: search these alone; None: all objects of the process.
    """

    def __init__(
        self, params: Sequence[Tensor], modules: Sequence[nn.Module] | None = None
    ) -> None:
        self._params = params
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        found: Sequence[Any] = modules or ()
        if modules is None:
            found = _instances(nn.Module, *([] if dtensor is None else [dtensor]))
        self._dtensors = [one for one in found if dtensor is not None and isinstance(one, dtensor)]
        # Before its constructor has finished, a module may lack these attributes.
        self.modules: list[nn.Module] = [
            one
            for one in found
            if isinstance(one, nn.Module) and {"_modules", "_parameters"} <= vars(one).keys()
        ]
        self._ddps = [m for m in self.modules if isinstance(m, DistributedDataParallel)]
        self._fsdps = [m for m in self.modules if fsdp is not None and isinstance(m, fsdp)]

    def is_averaged(self) -> bool:
        """Return whether DistributedDataParallel averages the gradients of the parameters.

        Raises:
            ValueError: it averages those of some trained parameters, but not of all.
        """
        averaged: set[int] = set()
        own = list(map(id, self._params))
        for ddp in self._ddps:
            held = vars(ddp).get("_module_parameters", ())
            averaged.update(map(id, held))
            num_built = _num_averaged(ddp)
            num_trained = sum(param.requires_grad for param in held)
            if num_trained > num_built and any(map({id(p) for p in held}.__contains__, own)):
                raise ValueError(
                    f"DistributedDataParallel averages the gradients of {num_built} parameters, "
                    f"but {num_trained} of its module are trained: it does not average those that "
                    "were unfrozen after it was built. Wrap the model anew after unfreezing, or "
                    "train it without the wrapper."
                )
        trained = [param for param in self._params if param.requires_grad]
        covered = [id(param) in averaged for param in trained]
        if any(covered) and not all(covered):
            missing = tuple(trained[covered.index(False)].shape)
            raise ValueError(
                f"DistributedDataParallel averages the gradients of {sum(covered)} of the "
                f"{len(covered)} parameters of this optimizer, but not, for example, that of shape "
                f"{missing}. Give the wrapped ones and the others an optimizer each, or wrap no "
                "module in DistributedDataParallel."
            )
        return any(covered)

    def sharded_by(self) -> tuple[int, str] | None:
        """Return (position, sharding API) of a parameter that is a part of a sharded one, or None.

        A part of a DTensor is found by its memory: to_local() and detach() return new tensors.
        """
        wrapped = {
            id(p) for top in self._fsdps for m in _modules_of(top) for p in _direct_params(m)
        }
        storages = {_address(getattr(d, "_local_tensor", None)) for d in self._dtensors} - {None}
        for position, param in enumerate(self._params):
            if id(param) in wrapped:
                return position, "FullyShardedDataParallel"
            if storages and _address(param) in storages:
                return position, "a DTensor (FSDP2, or tensor parallelism)"
        return None

    @functools.cached_property
    def roots(self) -> list[nn.Module]:
        """The outermost modules that hold any of the parameters."""
        own = {id(param) for param in self._params}
        holders = [m for m in self.modules if any(id(p) in own for p in _direct_params(m))]
        parents: dict[int, list[nn.Module]] = {}
        for module in self.modules:
            for child in _children(module):
                parents.setdefault(id(child), []).append(module)
        found: dict[int, nn.Module] = {}
        seen: set[int] = set()
        while holders:
            module = holders.pop()
            if id(module) not in seen:
                seen.add(id(module))
                above = parents.get(id(module), [])
                holders += above
                if not above:
                    found[id(module)] = module
        return list(found.values())

    def params_by_root(self) -> list[tuple[nn.Module, set[int]]]:
        """Return each of the roots, and the positions of the parameters that its modules hold."""
        found = []
        for root in self.roots:
            held = {id(param) for module in _modules_of(root) for param in _direct_params(module)}
            found.append((root, {i for i, param in enumerate(self._params) if id(param) in held}))
        return found


# Another thread may be building or changing any of the modules of the process, so that a loop over
# the values of its dicts would raise. One call of a C function copies them, as list() is.


def _direct_params(module: nn.Module) -> list[Tensor]:
    return [param for param in list(module._parameters.values()) if param is not None]


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in list(module._modules.values()) if child is not None]


def _modules_of(module: nn.Module) -> list[nn.Module]:
    found = {id(module): module}
    new = [module]
    while new:
        inner = {id(child): child for child in _children(new.pop()) if id(child) not in found}
        found |= inner
        new += inner.values()
    return list(found.values())


def gathered_by_fsdp2(params: Sequence[Tensor]) -> int | None:
    """Return the position of a parameter that is the copy FSDP2 gathers for a forward, or None."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if kind is None or not kind.__subclasses__():  # fully_shard() makes one
        return None
    gathered: set[int] = set()
    for module in _instances(kind):
        state = module._get_fsdp_state()
        several = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was one
        for group in [state._fsdp_param_group] if several is None else several:
            shards = () if group is None else group.fsdp_params
            gathered.update(id(getattr(shard, "_unsharded_param", None)) for shard in shards)
    return next((i for i, param in enumerate(params) if id(param) in gathered), None)


class ModuleWatch:
    """Modules that are known, and those that get a child or a parameter from now on; held weakly.

    Args:
        modules: those that are known.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.has_changed = False  # a module has got a child or a parameter
        # By id, and not in a WeakSet: a module's own class may compare it, or have no hash.
        self._by_id = weakref.WeakValueDictionary({id(module): module for module in modules})
        _register_hooks()
        _watches.append(weakref.ref(self, _watches.remove))

    def modules(self) -> list[nn.Module]:
        """Return those that are alive, each once."""
        found = [ref() for ref in self._by_id.valuerefs()]
        return [module for module in found if module is not None]

    def note(self, module: nn.Module) -> None:
        """Add a module."""
        self._by_id[id(module)] = module
        self.has_changed = True

    def held(self, params: Sequence[Tensor]) -> list[bool]:
        """Return for each of ``params`` whether any of the modules has it."""
        found = {id(param) for module in self.modules() for param in _direct_params(module)}
        return [id(param) in found for param in params]


_watches: list[weakref.ref[ModuleWatch]] = []


def _note_module(module: nn.Module, name: str, member: Any) -> None:
    for ref in tuple(_watches):
        watch = ref()
        if watch is not None:
            watch.note(module)


@functools.cache  # once
def _register_hooks() -> None:
    # Never removed: a watch may end inside torch's loop over these hooks.
    nn.modules.module.register_module_module_registration_hook(_note_module)
    nn.modules.module.register_module_parameter_registration_hook(_note_module)


def _num_averaged(ddp: DistributedDataParallel) -> float:
    """Return the number of parameters that ``ddp`` averages: those that were trained at first."""
    look = getattr(ddp, "_get_ddp_logging_data", None)
    data = {} if look is None else look()
    return float(data.get("num_parameter_tensors", "inf"))


def _address(tensor: Any) -> int | None:
    """Return the address of the storage of ``tensor``; None if it has no storage of its own."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a wrapper subclass; a sparse tensor
        return None


def _instances(*bases: type) -> list[Any]:
    """Return all objects of ``bases`` and their subclasses that the garbage collector tracks."""
    kinds: set[type] = set()
    new: list[type] = [*bases]
    while new:
        kind = new.pop()
        if kind not in kinds:
            kinds.add(kind)
            new += type.__subclasses__(kind)
    # A list of all objects would add a reference to each of them. A thread that is still building
    # one of them, a tuple, would fail because of that reference (SystemError), as the documentation
    # of gc.get_referrers() warns. So one call of a C function, during which no other thread runs,
    # collects the types of all objects, and a second call the few objects of the types of interest.
    # type() in place of isinstance(): that reads __class__, and a lazy object would import or
    # compute something.
    once = islice(iter(gc.get_objects, None), 1)
    # By id of a type: its hash may be a Python function, during which another thread may run.
    types = set(map(id, map(type, chain.from_iterable(once))))
    present = [kind for kind in kinds if id(kind) in types]
    return [found for found in gc.get_referrers(*present) if type(found) in kinds]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile, which has the names."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


# Buffers of modules, equal on all ranks


_ALIGN = 16
"""The buffers of a dtype begin at multiples of so many bytes: the size of complex128."""


class BufferRef(NamedTuple):
    """A buffer by module and key: the module may replace the tensor."""

    name: str
    module: nn.Module
    key: str


# Not a WeakSet: a loop over that is Python code, and raises if another thread adds one.
_live = set[weakref.ref["ModuleBuffers"]]()


def buffers_of_all() -> list[Tensor]:
    """Return the buffers that any optimizer of this process keeps equal on all ranks."""
    live = [buffers for ref in tuple(_live) if (buffers := ref()) is not None]
    refs = [ref for buffers in live for ref in tuple(buffers._refs)]
    found = [ref.module._buffers.get(ref.key) for ref in refs]
    return [buffer for buffer in found if buffer is not None]


class ModuleBuffers:
    """Broadcasts the buffers of modules from the first rank, all in one message.

    Args:
        comm: the ranks.
        device: of the message.
    """

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self._comm = comm
        self._device = device
        self._refs: list[BufferRef] = []
        self._tensors: list[Tensor] = []  # the buffers that _runs refers to
        self._addresses: list[int] = []  # of their memory; a script may assign buffer.data
        self._runs: list[tuple[list[Tensor], list[Tensor]]] = []  # by dtype: buffers, their copies
        self._message: Tensor | None = None
        self._in_flight: Completion[None] | None = None
        self._src = 0

    def add(self, refs: Iterable[BufferRef]) -> None:
        """Broadcast these, too, from now on."""
        _live.add(weakref.ref(self, _live.discard))
        held = {(id(ref.module), ref.key) for ref in self._refs}
        self._refs += [s for s in refs if (id(s.module), s.key) not in held]

    def launch(self, src: int = 0) -> None:
        """Launch the broadcast from group rank ``src``, if there are any buffers. Collective."""
        if not self._refs:
            return
        found = [ref.module._buffers.get(ref.key) for ref in self._refs]
        tensors = [buffer for buffer in found if buffer is not None and buffer.numel() > 0]
        if not tensors:
            return
        is_same = len(tensors) == len(self._tensors) and all(
            map(operator.is_, tensors, self._tensors)
        )
        addresses = list(map(Tensor.data_ptr, tensors))
        # gloo may still write to the message of a failed broadcast, so it is not reused.
        if not is_same or addresses != self._addresses or self._in_flight is not None:
            self._lay_out(tensors)
            self._addresses = addresses
        self._src = src
        if self._comm.world.rank == src:
            for buffers, copies in self._runs:
                torch._foreach_copy_(copies, buffers)
        assert self._message is not None
        self._in_flight = self._comm.broadcast(self._message, src)

    def wait(self) -> None:
        """Wait for the broadcast; copy the message into the buffers of the receiving ranks."""
        if self._in_flight is None:
            return
        self._in_flight.wait()
        self._in_flight = None
        if self._comm.world.rank != self._src:
            for buffers, copies in self._runs:
                torch._foreach_copy_(buffers, copies)

    def _lay_out(self, tensors: list[Tensor]) -> None:
        """Allocate a message with a range for every buffer, grouped by dtype."""
        self._tensors, self._runs = tensors, []
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(_without_repeats(tensor.detach()))
        sizes = {dtype: sum(b.nbytes for b in buffers) for dtype, buffers in by_dtype.items()}
        total = sum(round_up(size, _ALIGN) for size in sizes.values())
        message = self._message = torch.zeros(total, dtype=torch.uint8, device=self._device)
        start = 0
        for dtype, buffers in by_dtype.items():
            section = message[start : start + sizes[dtype]].view(dtype)
            parts = torch.split(section, [buffer.numel() for buffer in buffers])
            copies = [part.view(b.shape) for part, b in zip(parts, buffers, strict=True)]
            self._runs.append((buffers, copies))
            start += round_up(sizes[dtype], _ALIGN)


def buffers_of(model: nn.Module) -> list[BufferRef]:
    """Return references to the buffers of ``model``, each tensor once.

    Buffers that the model names for DistributedDataParallel to ignore are excluded.

    Raises:
        TypeError: one is not a dense tensor with values.
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    refs = [ref for ref in _walk(model) if ref.name not in ignored]
    for ref in refs:
        buffer = ref.module._buffers[ref.key]
        if buffer is None:
            continue
        _check_sendable(f"Buffer {ref.name}", buffer)
    return refs


def _check_sendable(name: str, tensor: Tensor) -> None:
    """Raise TypeError if ``tensor`` cannot be sent as it is."""
    why = "a DTensor" if hasattr(tensor, "device_mesh") else None
    if tensor.layout != torch.strided or tensor.is_quantized:
        why = "quantized" if tensor.is_quantized else str(tensor.layout)
    if tensor.device.type == "meta":
        why = "on the meta device"
    if why is not None:
        raise TypeError(
            f"{name} is {why}, and cannot be broadcast to the ranks. Pass the model's "
            "named_parameters() in place of the model, and keep its other tensors equal yourself."
        )


def params_of(model: nn.Module, *, without: Sequence[Tensor]) -> Sequence[tuple[str, Tensor]]:
    """Return (name, parameter) of the parameters of ``model`` that are not among ``without``.

    Raises:
        TypeError: one is not a dense tensor with values.
    """
    own = set(map(id, without))
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    named = [(name, param) for name, param in model.named_parameters() if id(param) not in own]
    named = [(name, param) for name, param in named if name not in ignored]
    for name, param in named:
        _check_sendable(f"Parameter {name}", param)
    return named


def describe(refs: Sequence[BufferRef], params: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return lines that must be equal on all ranks, one per buffer and parameter."""
    buffers = [(ref.name, ref.module._buffers[ref.key]) for ref in refs]
    named = [(f"buffer {name}", buffer) for name, buffer in buffers if buffer is not None]
    named += [(f"parameter {name}", param) for name, param in params]
    return [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]


@torch.no_grad()
def broadcast(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors by the first rank's, one broadcast each. Collective."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        comm.broadcast(flat).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def _walk(model: nn.Module) -> Iterator[BufferRef]:
    """Yield references to the buffers of ``model`` and its submodules, each tensor once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if id(buffer) not in seen or buffer is None:
                seen.add(id(buffer))
                yield BufferRef(f"{prefix}.{key}" if prefix else key, module, key)


def _without_repeats(buffer: Tensor) -> Tensor:
    """Return a view in which an expanded dimension has one element: no memory is written twice."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.size(dim) > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
