"""Runs passes over the spans of a shard and chooses how.

Eager passes go tile by tile: a rule makes temporaries, and in tiles that fit the cache these cost
no memory traffic. On accelerators tiles only bound the temporaries. Compiled passes fuse the
temporaries away and take the span whole.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.engine.kernels import passes
from shardfuse.engine.kernels.passes import Grad, Scale, Tensors
from shardfuse.rules import ElementwiseRule, NormRule, RowRule

logger = logging.getLogger("shardfuse")

CPU_TILE = 256 << 10
DEVICE_TILE = 16 << 20
"""Elements per eager tile."""

COMPILE_MIN_NUMEL = 2 << 20
"""Smaller shards repay the seconds that a compilation takes only after thousands of steps."""

Floats = tuple[float, ...]
Pass = Callable[[Any, Any, Any, Scale, Grad, Tensors], None]


class Span(NamedTuple):
    """Elements [start, stop) of a bucket's shard, all at the same step; whole rows of a tile."""

    start: int
    stop: int
    step: int


class Kernels:
    """The passes of one rule on one device.

    A ``scale`` is one factor; for norm rules also a tensor (rows, 1) over the bucket's shard.

    Args:
        rule: the math.
        row: elements per row of a tile; of norm rules, a block.
        kernel: "eager", "compile" or "auto".
        device: where the shards are.
        shard_numel: elements of this rank's shards together; "auto" compiles large ones only.
    """

    def __init__(
        self,
        rule: ElementwiseRule | NormRule | RowRule,
        *,
        row: int,
        kernel: str,
        device: torch.device,
        shard_numel: int,
    ) -> None:
        self._rule = rule
        self._row = row
        self._tile_numel = CPU_TILE if device.type == "cpu" else DEVICE_TILE
        self._device = device
        self.choice, self.reason = _choose(kernel, device, shard_numel)
        logger.info("kernel=%s on %s: %s", self.choice, device, self.reason)
        self._compiled: dict[tuple[Any, ...], Callable[..., None]] = {}

    def elementwise(
        self, flags: Any, h: Floats, scale: Scale, span: Span, grad: Grad, tensors: Tensors
    ) -> None:
        """Run elementwise_pass on ``tensors`` = (p, low, *state), each 1-D, over ``span``."""
        rows = self._rows(span, tensors)
        self._run(passes.elementwise_pass, flags, h, scale, self._parts(span, grad), rows)

    def direction(
        self, flags: Any, h: Floats, scale: Scale, span: Span, grad: Grad, tensors: Tensors
    ) -> None:
        """Run direction_pass on ``tensors`` = (sums (k, blocks) or None, p, low, *state)."""
        sums, *flat = tensors
        first, last = span.start // self._row, span.stop // self._row
        sums = None if sums is None else sums[:, first:last]
        rows = (sums, *self._rows(span, flat))
        scale = _narrow(scale, first, last - first)
        if self.choice == "compile":
            scale = self._per_row(scale, last - first)
        parts = self._parts(span, grad)
        self._run(passes.direction_pass, flags, h, scale, parts, rows, first_dim=1)

    def apply(self, flags: Any, h: Floats, span: Span, tensors: Tensors) -> None:
        """Run apply_pass on ``tensors`` = (ratio (blocks,) or None, p, low, *state)."""
        ratio, *flat = tensors
        first, last = span.start // self._row, span.stop // self._row
        ratio = None if ratio is None else ratio[first:last]
        self._run(passes.apply_pass, flags, h, None, (), (ratio, *self._rows(span, flat)))

    def row_direction(
        self, flags: Any, h: Floats, scale: Scale, span: Span, grad: Grad, tensors: Tensors
    ) -> None:
        """Run row_direction_pass on (products (k, numel) or None, p, low, *state)."""
        rows, parts = self._with_planes(span, tensors), self._parts(span, grad)
        self._run(passes.row_direction_pass, flags, h, scale, parts, rows, first_dim=1)

    def row_apply(
        self, flags: Any, h: Floats, scale: Scale, span: Span, grad: Grad, tensors: Tensors
    ) -> None:
        """Run row_apply_pass on (factors (k, numel) or None, p, low, *state); no ``grad`` is ()."""
        rows, parts = self._with_planes(span, tensors), self._parts(span, grad)
        self._run(passes.row_apply_pass, flags, h, scale, parts, rows, first_dim=1)

    def _with_planes(self, span: Span, tensors: Tensors) -> Tensors:
        planes, *flat = tensors
        if planes is not None:
            planes = planes[:, span.start : span.stop].view(len(planes), -1, self._row)
        return (planes, *self._rows(span, flat))

    def square_sum(self, scale: Scale, sums: Tensor, grad: Grad) -> None:
        """Write the sum of squares of every block of ``grad`` into ``sums`` (blocks,)."""
        parts = tuple(part.view(len(sums), -1) for part in grad)
        self._run(passes.square_sum_pass, None, (), scale, parts, (sums,))

    def _parts(self, span: Span, grad: Grad) -> Grad:
        return tuple(part[span.start : span.stop].view(-1, self._row) for part in grad)

    def _rows(self, span: Span, tensors: Iterable[Tensor | None]) -> Tensors:
        return tuple(
            None if tensor is None else tensor[span.start : span.stop].view(-1, self._row)
            for tensor in tensors
        )

    def _run(
        self,
        function: Pass,
        flags: Any,
        h: Floats,
        scale: Scale,
        grad: Grad,
        tensors: Tensors,
        first_dim: int = 0,
    ) -> None:
        """Run ``function``; rows are along dimension 0, but ``first_dim`` in the first tensor."""
        if self.choice == "compile" and self._run_compiled(
            function, flags, h, scale, grad, tensors
        ):
            return
        num_rows, row = _shape(grad, tensors)
        tile_rows = max(1, self._tile_numel // row)
        for start in range(0, num_rows, tile_rows):
            length = min(tile_rows, num_rows - start)
            tile = tuple(
                None if t is None else t.narrow(first_dim if i == 0 else 0, start, length)
                for i, t in enumerate(tensors)
            )
            parts = tuple(part.narrow(0, start, length) for part in grad)
            function(self._rule, flags, h, _narrow(scale, start, length), parts, tile)

    def _run_compiled(
        self,
        function: Pass,
        flags: Any,
        h: Floats,
        scale: Scale,
        grad: Grad,
        tensors: Tensors,
    ) -> bool:
        """Run ``function`` compiled; on a compiler's failure, log it and go eager for good."""
        key = (function, flags, len(grad), tuple(tensor is None for tensor in tensors))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = torch.compile(_copy(function), dynamic=True)
        if isinstance(scale, float):
            scale = torch.tensor(scale, dtype=torch.float32, device=self._device)
        scalars = torch.tensor(h, dtype=torch.float32, device=self._device).unbind()
        row = _shape(grad, tensors)[1]
        for tensor in (*grad, *tensors):
            if tensor is not None and tensor.shape[-1] == row:
                torch._dynamo.mark_static(tensor, tensor.dim() - 1)
        try:
            compiled(self._rule, flags, scalars, scale, grad, tensors)
        except Exception as error:
            # Compilation happens before anything is written, so an eager run can take over.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            self.choice, self.reason = "eager", f"torch.compile failed: {error}"
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


def _copy(function: Pass) -> Pass:
    """Return ``function`` with a code object of its own.

    torch.compile counts recompilations per code object, over all callers in the process, and after
    eight of them silently runs the function uncompiled: over whole shards, with full temporaries.
    """
    assert isinstance(function, FunctionType)
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)


def _shape(grad: Grad, tensors: Tensors) -> tuple[int, int]:
    """Return (rows, elements per row) of what a pass is run on; the first tensor may be sums."""
    num_rows, row = next(t.shape for t in (*grad, *tensors[1:]) if t is not None)
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
