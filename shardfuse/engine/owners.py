"""Modules that hold an optimizer's parameters, found among all objects of this process.

A parameter does not refer to its module, nor to a wrapper of that. A script that passes parameters
may still have the model in DistributedDataParallel, which averages the gradients; it may have
buffers that nobody keeps equal; and what it passes may be parts of sharded parameters. All of this
is looked up among the objects that Python's garbage collector knows, twice per optimizer: when it
is built, and when it sees its first gradient.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


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
