"""Kernels: runs a rule over the tiles of a shard, eagerly or through torch.compile.

Eager passes go tile by tile: a rule makes temporaries, and in tiles that fit the cache these cost
no memory traffic. On accelerators tiles only bound the temporaries. Compiled passes fuse the
temporaries away and take all rows at once.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import return_freed_memory
from shardfuse.rules import ElementwiseRule, ReducingRule, UpdateRule
from shardfuse.rules.base import Group
from shardfuse.runtime import compiling_kernels

logger = logging.getLogger("shardfuse")

Scale = float | Tensor | None


class Tile(NamedTuple):
    """Rows of elements that one call reads and writes; None where it needs none.

    ``grad`` are tensors in any dtype that add up to the summed gradient, as they came from the
    ranks: adding them here saves a pass over memory.
    """

    grad: tuple[Tensor, ...]
    """Each (rows, n); () where a second pass needs none."""
    p: Tensor | None = None
    """(rows, n), the fp32 master, updated in place."""
    low: Tensor | None = None
    """(rows, n), the parameter itself where it is of lower precision. An edit made to it since the
    last step (by a loaded model, say) wins over the master; the second pass writes it anew."""
    states: tuple[Tensor, ...] = ()
    """Each (rows, n) fp32, updated in place by the first pass."""
    aux: Tensor | None = None
    """The first pass writes sums to it, (k, rows) over rows or (k, rows, n); the second reads
    factors from it, of the same shapes."""


def ascending(scale: Scale, group: Group) -> Scale:
    """Return ``scale``, negated where ``group`` has ``maximize``: descent along -g is ascent.

    Rules then see the negative gradient, as in torch.optim; norms are taken before.
    """
    if not group.get("maximize"):
        return scale
    return -1.0 if scale is None else -scale


def refresh_master(p: Tensor, low: Tensor) -> None:
    """Overwrite elements of ``p`` whose rounding is no longer ``low``.

    Compares bits: a compiler is free to compare without rounding ``p`` first, and then every master
    would lose its low half in each step.
    """
    edited = p.to(low.dtype).view(torch.int16) != low.view(torch.int16)
    torch.where(edited, low.to(p.dtype), p, out=p)


def _mean(grad: tuple[Tensor, ...], scale: Scale, dtype: torch.dtype) -> Tensor:
    g = grad[0].to(dtype)
    for part in grad[1:]:
        g = g + part
    return g if scale is None else g * scale


def only_pass(rule: ElementwiseRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update a tile by an elementwise rule.

    ``scale``, one factor or (rows, 1), turns the summed gradient into the clipped mean; None is 1.
    """
    p, low = tile.p, tile.low
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    rule.update(flags, h, p, _mean(tile.grad, scale, p.dtype), *tile.states)
    if low is not None:
        low.copy_(p)


def first_pass(rule: ReducingRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the states of a tile, and write the products to be summed, if there are any."""
    p, sums = tile.p, tile.aux
    assert p is not None
    if tile.low is not None:
        refresh_master(p, tile.low)
    g = _mean(tile.grad, scale, p.dtype)
    rule.moments(flags, h, p, g, *tile.states)
    if sums is None:
        return
    u = rule.direction(flags, h, p, g, *tile.states)
    for out, product in zip(sums, rule.products(p, g, u), strict=True):
        out.copy_(product.sum(1) if out.dim() == 1 else product)


def second_pass(rule: ReducingRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the parameters of a tile along the direction, by its factors."""
    p, factors = tile.p, tile.aux
    assert p is not None
    g = _mean(tile.grad, scale, p.dtype) if tile.grad else None
    if factors is not None and factors.dim() == 2:
        factors = factors[:, :, None]
    rule.apply(flags, h, p, rule.direction(flags, h, p, g, *tile.states), factors)
    if tile.low is not None:
        tile.low.copy_(p)


def square_sum_pass(rule: None, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Write the row sums of squares of the gradient to ``aux`` (1, rows), in fp32."""
    sums = tile.aux
    assert sums is not None
    g = _mean(tile.grad, scale, sums.dtype)
    sums[0].copy_((g * g).sum(1))


# The choice of how to run them


CPU_TILE = 256 << 10
DEVICE_TILE = 16 << 20
"""Elements per eager tile."""

COMPILE_MIN_NUMEL = 2 << 20
"""Smaller shards repay a compilation only after a thousand steps or more.

Adam's step in ms of one thread, eager and compiled, on 2026-11-25 (x86-64, no cache): 0.8 and 0.7
at 64 thousand elements, 7.9 and 2.9 at 1 million, 21 and 7 at 2 million, 69 and 18 at 8 million. A
compilation took 11 to 13 s of CPU time, so it is repaid after 120,000, 2,100, 900 and 250 steps.
"""

Pass = Callable[[Any, Any, Any, Scale, Tile], None]


class Kernels:
    """The passes of one rule on one device.

    Args:
        rule: the math.
        kernel: "eager", "compile" or "auto"; see choose().
        device: where the shards are.
        tells: log before the first compilation, as one rank does.
    """

    def __init__(
        self, rule: UpdateRule, kernel: str, device: torch.device, *, tells: bool = True
    ) -> None:
        self._rule = rule
        self._kernel = kernel
        self._tile_numel = CPU_TILE if device.type == "cpu" else DEVICE_TILE
        self._device = device
        self._tells = tells
        self._compiled: dict[tuple[Any, ...], Callable[..., None]] = {}
        self.choice, self.reason = "", ""
        self._has_compiled = False  # since tidy()

    def choose(self, shard_numel: int) -> None:
        """Choose how to run on shards of so many elements together; compiled kernels are kept."""
        if self.reason.startswith(_FAILED):
            return
        self.choice, self.reason = _choose(self._kernel, self._device, shard_numel)
        logger.info("kernel=%s on %s: %s", self.choice, self._device, self.reason)

    def tidy(self) -> None:
        """Return memory that a compilation has freed; called when gradients are cleared.

        The compiler's small allocations lie between those gradients, so the next do not fit where
        they were: a process then took all gradients' memory once more.
        """
        if self._has_compiled:
            self._has_compiled = False
            return_freed_memory()

    def run(
        self, function: Pass, flags: Any, h: Any, scale: Scale, tile: Tile, *, is_tail: bool
    ) -> None:
        """Run ``function`` on the rows of ``tile``.

        ``scale`` is one factor, or of norm rules (rows, 1). ``is_tail``: rows of a length that
        occurs nowhere else, not worth a compilation.
        """
        if self.choice == "compile" and not is_tail:
            if function is first_pass and self._rule.granularity == "block":
                scale = self._per_row(scale, _shape(tile)[0])
            if self._run_compiled(function, flags, h, scale, tile):
                return
        num_rows, row = _shape(tile)
        tile_rows = max(1, self._tile_numel // row)
        if num_rows <= tile_rows:
            function(self._rule, flags, h, scale, tile)
            return
        for start in range(0, num_rows, tile_rows):
            length = min(tile_rows, num_rows - start)
            part = Tile(
                tuple(g.narrow(0, start, length) for g in tile.grad),
                None if tile.p is None else tile.p.narrow(0, start, length),
                None if tile.low is None else tile.low.narrow(0, start, length),
                tuple(state.narrow(0, start, length) for state in tile.states),
                None if tile.aux is None else tile.aux.narrow(1, start, length),
            )
            function(self._rule, flags, h, _narrow(scale, start, length), part)

    def _run_compiled(self, function: Pass, flags: Any, h: Any, scale: Scale, tile: Tile) -> bool:
        """Run ``function`` compiled; on a compiler's failure, log it and go eager for good."""
        tensors = [*tile.grad, tile.p, tile.low, *tile.states, tile.aux]
        has = tuple(tensor is None for tensor in tensors)
        key = (function, flags, len(tile.grad), len(tile.states), has)
        compiled = self._compiled.get(key)
        if compiled is None:
            if self._tells and not self._compiled:
                logger.info(
                    "The first step compiles the update, once, which takes some seconds. To leave "
                    'that out: sharding={"kernel": "eager"}.'
                )
            compiled = self._compiled[key] = torch.compile(_copy(function), dynamic=True)
            self._has_compiled = True
        if isinstance(scale, float):
            scale = torch.tensor(scale, dtype=torch.float32, device=self._device)
        values = torch.tensor(h, dtype=torch.float32, device=self._device).unbind()
        h = type(h)(*values) if h else h
        row = _shape(tile)[1]
        for tensor in tensors:
            if tensor is not None and tensor.shape[-1] == row:
                torch._dynamo.mark_static(tensor, tensor.dim() - 1)
        try:
            with compiling_kernels():
                compiled(self._rule, flags, h, scale, tile)
        except Exception as error:
            # Compilation happens before anything is written, so an eager run can take over.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self.choice, self.reason = "eager", f"{_FAILED}: {error}"
            logger.warning("kernel=eager on %s: %s", self._device, self.reason)
            return False
        return True

    def _per_row(self, scale: Scale, num_rows: int) -> Tensor:
        """Return ``scale`` as (num_rows, 1), one value per row also where all are equal.

        [Note: fused sums] Inductor joins a pointwise loop and a row reduction only where both are
        loops over rows and columns. Without an operand per row it flattens the pointwise one, and
        then writes the moments to full-size temporaries and reads them again for the sums.
        """
        if isinstance(scale, Tensor) and scale.dim() > 0:
            return scale
        rows = torch.empty(num_rows, 1, dtype=torch.float32, device=self._device)
        return rows.fill_(1.0 if scale is None else scale)


_FAILED = "torch.compile failed"


def _copy(function: Pass) -> Pass:
    """Return ``function`` with a code object of its own.

    torch.compile counts recompilations per code object, over all callers in the process, and after
    eight of them silently runs the function uncompiled: over whole shards, with full temporaries.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _shape(tile: Tile) -> tuple[int, int]:
    """Return (rows, elements per row) of a tile."""
    tensor = tile.p if tile.p is not None else tile.grad[0]
    num_rows, row = tensor.shape
    return num_rows, row


def _narrow(scale: Scale, start: int, length: int) -> Scale:
    """Return the part of ``scale`` for some rows: itself, unless it has a factor per row."""
    per_row = isinstance(scale, Tensor) and scale.dim() > 0
    return scale.narrow(0, start, length) if per_row else scale  # type: ignore[union-attr]


def _choose(kernel: str, device: torch.device, shard_numel: int) -> tuple[str, str]:
    """Return ("eager" or "compile", the reason)."""
    if kernel != "auto":
        return kernel, "as configured"
    if shard_numel < COMPILE_MIN_NUMEL:
        return "eager", f"{shard_numel} elements do not repay a compilation"
    if device.type == "cpu" and shutil.which("g++") is None and shutil.which("clang++") is None:
        return "eager", "no C++ compiler found"
    if device.type not in ("cpu", "cuda"):
        return "eager", f"torch.compile is not verified on {device.type}"
    if device.type == "cuda" and not torch.utils._triton.has_triton():
        return "eager", "triton is not installed"
    return "compile", f"{shard_numel} elements in a shard"
