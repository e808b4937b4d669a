"""What DistributedDataParallel does for a model, if it wraps it, and what is done if it does not.

[Note: search for modules] A parameter does not refer to its module, nor to a wrapper of that. A
script that passes parameters may still have the model in DistributedDataParallel, which averages
the gradients; the model may have buffers that nothing keeps equal; and the parameters may be parts
of sharded ones. Owners finds the modules among the objects that Python's garbage collector tracks,
twice per optimizer: when it is built, and when it gets its first gradient.

[Note: buffers] DistributedDataParallel broadcasts the first rank's buffers before a forward in
training, if a gradient was reduced since the last one. Here step() does so, and the next forward
finds them. The two are the same if a step has one forward, or several of which all but the last run
inside no_sync(). No forward communicates, so one rank alone may run the model for an evaluation.
"""

from __future__ import annotations

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
    """The modules alive that hold any of ``params``, as found when this is built.

    It refers to them, so it should be short-lived.

    Args:
        params: of an optimizer.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
        dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        found = _instances(nn.Module, *([] if dtensor is None else [dtensor]))
        self._dtensors = [one for one in found if dtensor is not None and isinstance(one, dtensor)]
        # A module whose constructor has not finished has no such attributes yet.
        modules: list[nn.Module] = [
            one
            for one in found
            if isinstance(one, nn.Module) and {"_modules", "_parameters"} <= vars(one).keys()
        ]
        self._ddps = [m for m in modules if isinstance(m, DistributedDataParallel)]
        self._fsdps = [m for m in modules if fsdp is not None and isinstance(m, fsdp)]
        self._modules = modules

    def is_averaged(self) -> bool:
        """Return whether DistributedDataParallel averages the gradients of the parameters.

        Raises:
            ValueError: of some, but not of all that are trained.
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
        """Return the position of a parameter that is a part of a sharded one, and whose; or None.

        Of a DTensor by its memory: to_local() and detach() give other tensors that share it.
        """
        wrapped = {id(param) for module in self._fsdps for param in module.parameters()}
        storages = {_address(getattr(d, "_local_tensor", None)) for d in self._dtensors} - {None}
        for position, param in enumerate(self._params):
            if id(param) in wrapped:
                return position, "FullyShardedDataParallel"
            if storages and _address(param) in storages:
                return position, "a DTensor (FSDP2, or tensor parallelism)"
        return None

    def roots(self) -> list[nn.Module]:
        """Return the outermost modules that hold any of the parameters."""
        own = {id(param) for param in self._params}
        holders = [m for m in self._modules if any(id(p) in own for p in m._parameters.values())]
        parents: dict[int, list[nn.Module]] = {}
        for module in self._modules:
            for child in module._modules.values():
                if child is not None:
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


def _num_averaged(ddp: DistributedDataParallel) -> float:
    """Return of how many parameters ``ddp`` averages gradients: those trained when it was built."""
    look = getattr(ddp, "_get_ddp_logging_data", None)
    data = {} if look is None else look()
    return float(data.get("num_parameter_tensors", "inf"))


def _address(tensor: Any) -> int | None:
    """Return where the memory of ``tensor`` begins; None where it has none of its own."""
    if not isinstance(tensor, Tensor) or tensor.numel() == 0:
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a wrapper subclass; of a sparse tensor
        return None


def _instances(*bases: type) -> list[Any]:
    """Return all objects of ``bases`` and their subclasses that the garbage collector knows."""
    kinds: set[type] = set()
    new: list[type] = [*bases]
    while new:
        kind = new.pop()
        if kind not in kinds:
            kinds.add(kind)
            new += type.__subclasses__(kind)
    # A list of all objects would have one more reference to each. If another thread is making one
    # of these, a tuple, that is fatal there (SystemError), as the documentation of
    # gc.get_referrers() warns. So one call of a C function, in which no other thread runs, finds
    # the types of all objects, and another one the few objects that refer to those of interest.
    # By type(), not isinstance(), which asks an object for its class: some are lazy, and would
    # import or compute something.
    once = islice(iter(gc.get_objects, None), 1)
    # By the id of a type: its hash may be a function of Python's, during which threads change.
    types = set(map(id, map(type, chain.from_iterable(once))))
    present = [kind for kind in kinds if id(kind) in types]
    return [found for found in gc.get_referrers(*present) if type(found) in kinds]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return what DistributedDataParallel and torch.compile have wrapped: names are those of it."""
    while True:
        inner = model._modules.get("_orig_mod")
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


# Buffers of modules, equal on all ranks


_ALIGN = 16
"""Bytes at whose multiples a dtype begins in the message: the largest element, complex128."""


class Source(NamedTuple):
    """Where a buffer is found: modules may replace the tensor."""

    name: str
    module: nn.Module
    key: str


_live: weakref.WeakSet[ModuleBuffers] = weakref.WeakSet()


def buffers_of_all() -> list[Tensor]:
    """Return the buffers that any optimizer of this process keeps equal on all ranks."""
    sources = [source for buffers in list(_live) for source in buffers._sources]
    found = [source.module._buffers.get(source.key) for source in sources]
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
        self._sources: list[Source] = []
        self._tensors: list[Tensor] = []  # the buffers that the views below were made for
        self._addresses: list[int] = []  # of their memory, which may be set, too
        self._runs: list[tuple[list[Tensor], list[Tensor]]] = []  # by dtype: buffers, their copies
        self._message: Tensor | None = None
        self._in_flight: Completion[None] | None = None
        self._src = 0

    def add(self, sources: Iterable[Source]) -> None:
        """Broadcast these, too, from now on."""
        _live.add(self)
        held = {(id(source.module), source.key) for source in self._sources}
        self._sources += [s for s in sources if (id(s.module), s.key) not in held]

    def launch(self, src: int = 0) -> None:
        """Launch the broadcast from group rank ``src``, if there are any buffers. Collective."""
        if not self._sources:
            return
        found = [source.module._buffers.get(source.key) for source in self._sources]
        tensors = [buffer for buffer in found if buffer is not None and buffer.numel() > 0]
        if not tensors:
            return
        is_same = len(tensors) == len(self._tensors) and all(
            map(operator.is_, tensors, self._tensors)
        )
        addresses = list(map(Tensor.data_ptr, tensors))
        # A message that failed may still arrive, so its memory is not used again.
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
        """Write the buffers that launch() has sent, on the ranks that have received them."""
        if self._in_flight is None:
            return
        self._in_flight.wait()
        self._in_flight = None
        if self._comm.world.rank != self._src:
            for buffers, copies in self._runs:
                torch._foreach_copy_(buffers, copies)

    def _lay_out(self, tensors: list[Tensor]) -> None:
        """Give every buffer a place in a new message, those of a dtype side by side."""
        self._tensors, self._runs = tensors, []
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(_without_repeats(tensor.detach()))
        sizes = {dtype: sum(b.nbytes for b in buffers) for dtype, buffers in by_dtype.items()}
        total = sum(round_up(size, _ALIGN) for size in sizes.values())
        message = self._message = torch.zeros(total, dtype=torch.uint8, device=self._device)
        start = 0
        for dtype, buffers in by_dtype.items():
            whole = message[start : start + sizes[dtype]].view(dtype)
            pieces = torch.split(whole, [buffer.numel() for buffer in buffers])
            copies = [piece.view(b.shape) for piece, b in zip(pieces, buffers, strict=True)]
            self._runs.append((buffers, copies))
            start += round_up(sizes[dtype], _ALIGN)


def buffers_of(model: nn.Module) -> list[Source]:
    """Return where the buffers of ``model`` are, each tensor once.

    Those that the model names for DistributedDataParallel to ignore are left out.

    Raises:
        TypeError: one is not a dense tensor with values.
    """
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    sources = [source for source in _walk(model) if source.name not in ignored]
    for source in sources:
        buffer = source.module._buffers[source.key]
        if buffer is None:
            continue
        _check(f"Buffer {source.name}", buffer)
    return sources


def _check(name: str, tensor: Tensor) -> None:
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
    """Return (name, parameter) of those of ``model`` that are not among ``without``.

    Raises:
        TypeError: one is not a dense tensor with values.
    """
    own = set(map(id, without))
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    named = [(name, param) for name, param in model.named_parameters() if id(param) not in own]
    named = [(name, param) for name, param in named if name not in ignored]
    for name, param in named:
        _check(f"Parameter {name}", param)
    return named


def describe(sources: Sequence[Source], params: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return lines that must be equal on all ranks, one per buffer and parameter."""
    buffers = [(source.name, source.module._buffers[source.key]) for source in sources]
    named = [(f"buffer {name}", buffer) for name, buffer in buffers if buffer is not None]
    named += [(f"parameter {name}", param) for name, param in params]
    return [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]


@torch.no_grad()
def broadcast(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Overwrite tensors by the first rank's, one after the other. Collective."""
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1)
        comm.broadcast(flat).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))


def _walk(model: nn.Module) -> Iterator[Source]:
    """Yield where the buffers of ``model`` and its submodules are, each tensor once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if id(buffer) not in seen or buffer is None:
                seen.add(id(buffer))
                yield Source(f"{prefix}.{key}" if prefix else key, module, key)


def _without_repeats(buffer: Tensor) -> Tensor:
    """Return a view in which an expanded dimension has one element: no memory is written twice."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.size(dim) > 1:
            buffer = buffer.narrow(dim, 0, 1)
    return buffer
