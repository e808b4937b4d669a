"""Where one rank and the reference differ, in words."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.local import LocalModel
from tests.fuzz.reference import Norm, Reference, magnitude

# Of a parameter's largest value so far, per element: fp32 rounding of up to twenty updates, and
# norms that are summed in another order. What is exact is compared bit by bit instead.
TOLERANCE = 2e-6
NORM_TOLERANCE = 1e-5
# Operations after which there is nothing to compare.
QUIET = ("delay", "check_state", "set_option", "decay_lr", "hook_step", "hook_grad")
# Half a unit in the last place of a number's power of two, and as much again for a tie.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# Half of the distance between neighbours near zero.
SUBNORMAL = {"float16": 2.0**-25}


def difference(actor: Any, got: Any, expected: Any) -> str:
    """Return where ``actor`` differs from its reference after an operation; "" if nowhere.

    Args:
        actor: one rank.
        got, expected: what the operation returned there and in the reference.
    """
    if isinstance(got, str):
        return got
    given = got if isinstance(got, list) else [got]
    wanted = expected if isinstance(expected, list) else [expected]
    for own, other in zip(given, wanted, strict=True):
        if not isinstance(other, Norm) or not math.isfinite(other.value):
            continue
        if not abs(own.value - other.value) <= NORM_TOLERANCE * max(other.value, 1e-30):
            return f"the norm is {own.value!r}, not {other.value!r}"
    model = actor.reference.ranks[actor.rank]
    if actor.local.scale != model.scale:
        return f"the loss scale is {actor.local.scale}, not {model.scale}"
    if actor.calls != [actor.expected_calls] * 2:
        return f"hooks were called {actor.calls} times, not {actor.expected_calls}"
    has_gradients = actor.sharding.get("stage") != 2
    has_gradients &= not (actor.reference.is_spoiled or actor.is_broken)
    text = _gradients(actor.local, model) if has_gradients else ""
    return text or value_difference(actor.local, actor.reference) or _report(actor)


def _gradients(local: LocalModel, model: LocalModel) -> str:
    for (name, own), other in zip(local.grads().items(), model.grads().values(), strict=True):
        if own is None or other is None:
            if own is not other:
                return f"the gradient of {name} is {'' if own is None else 'not '}None"
        elif differs_in_bits(own, other):
            return f"the gradient of {name}: {differs_in_bits(own, other)}"
    for index, (own, other) in enumerate(zip(local.kept, model.kept, strict=True)):
        if differs_in_bits(own, other):
            return f"the gradient kept as number {index}: {differs_in_bits(own, other)}"
    return ""


def value_difference(local: Any, reference: Reference) -> str:
    """Return where the parameters of a model differ from the reference's."""
    for index, (name, param) in enumerate(local.params.items()):
        expected, value = reference.visible(index), param.detach()
        if reference.exact is not None:
            text = differs_in_bits(value, expected)
        else:
            rounding = ROUNDING.get(local.specs[name].dtype, 0.0)
            limit = TOLERANCE * reference.largest[index]
            limit += SUBNORMAL.get(local.specs[name].dtype, 0.0)
            text = differs(value, expected, limit + unknown(reference, index), rounding)
        if text:
            return f"{name}: {text}"
    return ""


def _report(actor: Any) -> str:
    if not (actor.program.named and actor.sharding.get("report_overflow")):
        return ""
    own, other = actor.optimizer.last_overflow, actor.reference.overflow
    return "" if own == other else f"last_overflow is {own}, not {other}"


def state_difference(saved: Mapping[int, Mapping[str, Any]], reference: Reference) -> str:
    """Return where a full state, by number of parameter, differs from the reference's."""
    for index, name in enumerate(reference.names):
        text = _state(index, saved.get(index, {}), reference)
        if text:
            return f"the state of {name}: {text}"
    return ""


def _state(index: int, own: Mapping[str, Any], reference: Reference) -> str:
    """Compare the state of one parameter that has elements.

    Whether any rank has a gradient is known to the owners of a parameter's elements alone, so that
    the step of one without any may be too low, and it has no place in a sharded state.
    """
    if reference.specs[index].numel == 0:
        return ""
    other = reference.engine.states()[index]
    names = {n for n, value in other.items() if n != "step" and value is not None}
    found = {n for n in own if n not in ("step", "param")}
    if found != names:
        return f"has {sorted(found)}, not {sorted(names)}"
    if "step" in own and int(own["step"]) != int(other["step"]):
        return f"step is {own['step']}, not {other['step']}"
    for n in sorted(names):
        if reference.exact is not None:
            text = differs_in_bits(own[n], reference.exact.states()[index][n])
        else:
            # Where a decayed gradient nearly vanishes, so does what it is divided by.
            limit = 1e-6 * (1.0 + reference.largest_grad**2) + 1e-5 * magnitude(other[n])
            text = differs(own[n], other[n], limit + unknown(reference, index))
        if text:
            return f"{n}: {text}"
    if "param" not in own or reference.names[index] in reference.edited:
        return ""
    if reference.exact is not None:
        return differs_in_bits(own["param"], reference.exact.values()[index])
    limit = TOLERANCE * reference.largest[index]
    expected = reference.engine.values()[index]
    return differs(own["param"], expected, limit + unknown(reference, index))


def digest(local: LocalModel) -> int:
    """Return a number that differs where any bit of a parameter does."""
    result = 0
    for param in local.params.values():
        data = param.detach().flatten().clone(memory_format=torch.contiguous_format)
        data = data.view(torch.uint8)
        result = zlib.crc32(data.numpy().tobytes(), result)
    return result


def differs_in_bits(own: Tensor, other: Tensor) -> str:
    """Return where two tensors are not equal; NaN equals NaN."""
    if own.shape != other.shape or own.dtype != other.dtype:
        return f"{tuple(own.shape)} {own.dtype}, not {tuple(other.shape)} {other.dtype}"
    if own.layout != other.layout:
        return f"{own.layout}, not {other.layout}"
    own, other = own.to_dense(), other.to_dense()
    if torch.equal(own, other):
        return ""
    differs = (own != other) & ~(own.isnan() & other.isnan())
    return _first(differs, own, other)


def unknown(reference: Reference, index: int) -> Tensor:
    """Return an infinite tolerance for elements whose update was ill-defined, 0 for others."""
    cancelled = reference.cancelled[index]
    return torch.zeros(cancelled.shape).masked_fill_(cancelled, math.inf)


def differs(own: Tensor, other: Tensor, limit: float | Tensor, rounding: float = 0.0) -> str:
    """Return where ``own`` is further from the fp64 ``other`` than ``limit`` and rounding."""
    if own.shape != other.shape:
        return f"{tuple(own.shape)}, not {tuple(other.shape)}"
    a, b = own.detach().double(), other.detach().double()
    bound = limit + rounding * b.abs() + 1e-30
    # NaN compares false with everything; it must pass only where it is expected.
    return _first(~((a - b).abs() <= bound) & ~(a.isnan() & b.isnan()), own, other)


def _first(differs: Tensor, own: Tensor, other: Tensor) -> str:
    if not differs.any():
        return ""
    where = tuple(differs.nonzero()[0].tolist())
    count = f"{int(differs.sum())} of {differs.numel()} elements differ"
    return f"{count}, first at {where}: {float(own[where])!r}, not {float(other[where])!r}"
