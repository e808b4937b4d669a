"""Kernels: runs a rule over the tiles of a shard: eagerly, by torch's fused operators, compiled.

Eager passes go tile by tile: a rule makes temporaries, and in tiles that fit the cache these cost
no memory traffic. On accelerators tiles only bound the temporaries. Some updates are one operator
of torch's, such as ``torch._fused_adamw_``. Compiled passes fuse the temporaries away and take all
rows at once.

[Note: no host waits] torch.tensor(value, device=cuda) copies from pageable memory, for which the
host waits, and then for all that the stream has to do before. Values reach compiled passes as
tensors that torch.full() makes: a kernel takes the number as an argument. They are kept by value,
so that a step makes those that a schedule changes, once for all units.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.buffers import return_freed_memory
from shardfuse.rules import (
    ElementwiseRule,
    MatrixRule,
    NormRule,
    ReducingRule,
    Settings,
    UpdateRule,
)
from shardfuse.rules.base import Fused, Group
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

    def in_rows(self, row: int) -> Tile:
        """Return the tile in rows of ``row`` elements; ``aux`` as it is."""
        return Tile(
            tuple(grad.view(-1, row) for grad in self.grad),
            None if self.p is None else self.p.view(-1, row),
            None if self.low is None else self.low.view(-1, row),
            tuple(state.view(-1, row) for state in self.states),
            self.aux,
        )


def ascending(scale: Scale, group: Group) -> Scale:
    """Return ``scale``, negated where ``group`` has ``maximize``: descent along -g is ascent.

    Rules then see the negative gradient, as in torch.optim; norms are taken before.
    """
    if not group.get("maximize"):
        return scale
    return -1.0 if scale is None else -scale


def refresh_master(p: Tensor, low: Tensor) -> None:
    """Overwrite elements of ``p`` whose rounding is no longer ``low``: code has edited these."""
    _with_edits(p, low, out=p)


def _with_edits(p: Tensor, low: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``p``, or ``low`` where the rounding of ``p`` is another; in ``out`` if given.

    A compiler is free to compare without rounding ``p`` first, and then every master would lose its
    low half in each step: so the compiled kernel compares bits. NPUs compare int16 on their AI CPU,
    which is slow: eager kernels compare numbers there. Then an edit from 0.0 to -0.0 is not seen,
    and a NaN is written anew.
    """
    rounded = p.to(low.dtype)
    if torch.compiler.is_compiling() or p.device.type == "cpu":
        edited = rounded.view(torch.int16) != low.view(torch.int16)
    else:
        edited = rounded != low
    return torch.where(edited, low, p, out=out)


def mean_of(grad: tuple[Tensor, ...], scale: Scale, dtype: torch.dtype) -> Tensor:
    """Return the sum of ``grad``, each (rows, n), times ``scale``: the mean gradient to use."""
    g = grad[0]
    if len(grad) == 1 and isinstance(scale, Tensor) and g.dtype != dtype:
        # One pass: tensors of one dimension or more promote each other, unlike numbers.
        return torch.mul(g, scale if scale.dim() else scale.view(1, 1))
    if g.dtype != dtype:
        g = g.to(dtype)
    for part in grad[1:]:
        g = g + part
    return g if scale is None else g * scale


def mean_into(out: Tensor, grad: tuple[Tensor, ...], scale: Scale) -> None:
    """Write the sum of ``grad``, each (n,), times ``scale`` to ``out`` (n,), as mean_of() does."""
    first, *others = grad
    if others and first.dtype == out.dtype:
        torch.add(first, others.pop(0), out=out)
    else:
        out.copy_(first)  # first: others are added in the dtype of ``out``
    for part in others:
        out.add_(part)
    if scale is not None:
        out.mul_(scale)


def only_pass(rule: ElementwiseRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update a tile by an elementwise rule.

    ``scale``, one factor or (rows, 1), turns the summed gradient into the clipped mean; None is 1.
    """
    p, low = tile.p, tile.low
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    rule.update(flags, h, p, mean_of(tile.grad, scale, p.dtype), *tile.states)
    if low is not None:
        low.copy_(p)


class _FusedUpdate(NamedTuple):
    """An operator of torch's, in place of a pass's flags."""

    flags: Any  # of the rule
    fused: Fused
    step: Tensor  # () fp32

    def update(self, p: Tensor, g: Tensor, states: Sequence[Tensor]) -> None:
        """Call the operator on tensors (rows, n)."""
        missing = -p.numel() % FUSED_WIDTH
        if not missing:
            self.fused.call(p, g, states, self.step)
            return
        own = [torch.nn.functional.pad(t.flatten(), (0, missing)) for t in (p, g, *states)]
        self.fused.call(own[0], own[1], own[2:], self.step)
        for tensor, padded in zip((p, *states), (own[0], *own[2:]), strict=True):
            tensor.copy_(padded[: p.numel()].view_as(tensor))


def fused_pass(
    rule: ElementwiseRule, operator: _FusedUpdate, h: Any, scale: Scale, tile: Tile
) -> None:
    """Do as only_pass(), by one operator of torch's."""
    p, low = tile.p, tile.low
    assert p is not None
    if low is not None:
        refresh_master(p, low)
    operator.update(p, mean_of(tile.grad, scale, p.dtype), tile.states)
    if low is not None:
        low.copy_(p)


FUSED_WIDTH = 16
"""Elements of a vector of AVX-512, and of torch's tasks for threads.

Elements behind the last full vector are rounded otherwise by fused operators on the CPU, so there
must be none: a shard has none, and an odd tail is padded.
"""


def first_pass(rule: ReducingRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the states of a tile, and write the products to be summed, if there are any."""
    p, sums = tile.p, tile.aux
    assert p is not None
    if tile.low is not None:
        # A compiled kernel that writes p takes a pass more, so the second one finds edits again.
        p = _with_edits(p, tile.low, out=None if torch.compiler.is_compiling() else p)
    g = mean_of(tile.grad, scale, p.dtype)
    rule.moments(flags, h, p, g, *tile.states)
    if sums is not None:
        u = rule.direction(flags, h, p, g, *tile.states)
        _write_products(rule, flags, h, p, g, u, sums)


def fused_first_pass(
    rule: ReducingRule, operator: _FusedUpdate, h: Any, scale: Scale, tile: Tile
) -> None:
    """Do as first_pass(), the states and the direction by one operator of torch's."""
    p = tile.p
    assert p is not None
    if tile.low is not None:
        refresh_master(p, tile.low)
    g, u = mean_of(tile.grad, scale, p.dtype), p.clone()
    operator.update(u, g, tile.states)
    if tile.aux is not None:
        _write_products(rule, operator.flags, h, p, g, u, tile.aux)


def _write_products(
    rule: ReducingRule, flags: Any, h: Any, p: Tensor, g: Tensor, u: Tensor, sums: Tensor
) -> None:
    """Write what a rule sums to ``sums``, as the first pass does; ``u`` is the direction."""
    if isinstance(rule, NormRule):
        for out, (vector, factor) in zip(sums, rule.vectors(flags, h, p, u), strict=True):
            _sum_squares(vector, factor, out)
        return
    for out, product in zip(sums, rule.products(p, g, u), strict=True):
        if isinstance(product, Tensor):
            out.copy_(product)
        else:
            torch.mul(*product, out=out)


def second_pass(rule: ReducingRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the parameters of a tile along the direction, by its factors."""
    p, factors = tile.p, tile.aux
    assert p is not None
    g = mean_of(tile.grad, scale, p.dtype) if tile.grad else None
    if factors is not None and factors.dim() == 2:
        factors = factors[:, :, None]
    if tile.low is None or not torch.compiler.is_compiling():
        rule.move(flags, h, p, g, factors, *tile.states)
    else:
        moved = _with_edits(p, tile.low)
        rule.move(flags, h, moved, g, factors, *tile.states)
        p.copy_(moved)
    if tile.low is not None:
        tile.low.copy_(p)


def matrix_first_pass(rule: MatrixRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the states of a tile, and write its part of the direction to ``aux`` (1, rows, n)."""
    p, out = tile.p, tile.aux
    assert p is not None
    assert out is not None
    if tile.low is not None:
        refresh_master(p, tile.low)
    u = rule.direction(flags, h, p, mean_of(tile.grad, scale, p.dtype), *tile.states)
    out[0].copy_(u.view_as(out[0]))


def matrix_second_pass(rule: MatrixRule, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Update the parameters of a tile along the transformed direction, ``aux`` (1, rows, n)."""
    p, u = tile.p, tile.aux
    assert p is not None
    assert u is not None
    rule.apply(flags, h, p, u[0].view_as(p))
    if tile.low is not None:
        tile.low.copy_(p)


def square_sum_pass(rule: None, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
    """Write the row sums of squares of the gradient to ``aux`` (1, rows), in fp32."""
    sums = tile.aux
    assert sums is not None
    _sum_squares(mean_of(tile.grad, scale, sums.dtype), None, sums[0])


def _sum_squares(x: Tensor, factor: Any, out: Tensor) -> None:
    """Write the row sums of squares of x * factor, a number or (rows, 1), to ``out`` (rows,)."""
    if torch.compiler.is_compiling():  # which joins this loop with the one that makes x
        x = x if factor is None else x * factor
        out.copy_((x * x).sum(1))
        return
    if x.dtype == out.dtype:
        torch.linalg.vector_norm(x, dim=1, out=out)
    else:
        out.copy_(torch.linalg.vector_norm(x, dim=1))
    if factor is not None:
        out.mul_(factor[:, 0] if isinstance(factor, Tensor) and factor.dim() else factor)
    out.square_()


# The choice of how to run them


CPU_TILE = 256 << 10
DEVICE_TILE = 16 << 20
"""Elements per eager tile."""

MOST_CONSTANTS = 1024
"""Values that are kept on the device; then all are made anew."""

COMPILE_MIN_NUMEL = 2 << 20
"""Smaller shards repay a compilation only after a thousand steps or more.

Adam's step in ms of one thread, eager and compiled, on 2026-11-25 (x86-64, no cache): 0.8 and 0.7
at 64 thousand elements, 7.9 and 2.9 at 1 million, 21 and 7 at 2 million, 69 and 18 at 8 million. A
compilation took 11 to 13 s of CPU time, so it is repaid after 120,000, 2,100, 900 and 250 steps.
"""

Pass = Callable[[Any, Any, Any, Scale, Tile], None]

_FUSED: dict[Pass, Pass] = {only_pass: fused_pass, first_pass: fused_first_pass}
"""The passes that an operator of torch's may do, as the functions that call it."""


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
        self._constants: dict[tuple[float, int | None, torch.dtype], Tensor] = {}
        self.choice, self.reason = "", ""
        self._has_compiled = False  # since tidy()
        self._operators: set[str] = set()
        self._has_fused = False
        self._leaves_edits = False  # of masters, to the second pass; see first_pass()
        self._has_two_passes = isinstance(rule, ReducingRule)

    def choose(self, shard_numel: int, *, num_units: int = 1) -> None:
        """Choose how to run on shards of so many elements together; compiled kernels are kept.

        Where torch has an operator, small units take it: of a small AdamW, a compiled call takes
        94 us and one of the operator 25 us (x86-64, 2026-11-26).

        Args:
            num_units: of a model whose parameters are units of their own.
        """
        if f" {_FAILED}: " in self.reason:
            return
        self.choice, self.reason = _choose(self._kernel, self._device, shard_numel)
        names = self._rule.fused_operators
        self._operators = {name for name in names if _has_kernel(name, self._device)}
        if self._kernel == "auto" and self._operators:
            is_small = shard_numel < COMPILE_MIN_NUMEL * num_units
            if self.choice == "compile" and is_small and not self._has_two_passes:
                self.reason = f"{shard_numel} elements are {num_units} units"
                self.choice = "eager"
            if self.choice == "eager":
                self.choice = "fused"
        logger.info("kernel=%s on %s: %s", self.choice, self._device, self.reason)

    def tidy(self) -> None:
        """Return memory that a compilation has freed; called when gradients are cleared.

        The compiler's small allocations lie between those gradients, so the next do not fit where
        they were: a process then took all gradients' memory once more.
        """
        if self._has_compiled:
            self._has_compiled = False
            return_freed_memory()

    @property
    def batches_all_sets(self) -> bool:
        """Whether sets of any size share calls, if there are many sets.

        A compiled call that reads a table of the sets' numbers takes about the time of one with
        numbers. A step of 150 sets of 133,000 elements took 1.00 to 1.15 times that of one set, and
        1.24 to 1.38 by an operator of torch's for each (two ranks, x86-64, 2026-11-28).
        """
        return self.choice == "compile"

    def takes_operator(self, settings: Settings) -> bool:
        """Return whether the update of a set of parameters is an operator of torch's on the CPU.

        On a device each call is a launch. However ranks cut a set, its elements take the same way.
        """
        if self._kernel != "auto" or self._device.type != "cpu" or self._has_two_passes:
            return False
        return self.choice == "fused" and self._has_operator(settings.fused)

    def run(
        self,
        function: Pass,
        settings: Settings,
        scale: Scale,
        tile: Tile,
        *,
        is_tail: bool,
        by_operator: bool = False,
    ) -> None:
        """Run ``function`` on the rows of ``tile``.

        ``scale`` is one factor, or of norm rules (rows, 1). ``is_tail``: rows of a length that
        occurs nowhere else, not worth a compilation.
        """
        flags, h, fused = settings.flags, settings.h, settings.fused
        if self.choice == "compile" and not is_tail and not by_operator:
            if function is first_pass and self._rule.granularity == "block":
                scale = self._per_row(scale, _shape(tile)[0])
            if self._run_compiled(function, flags, h, scale, tile):
                self._leaves_edits |= function is first_pass
                return
        if self._leaves_edits and self.choice != "compile" and tile.low is not None:
            # The compiler failed after a first pass, which had left edits to the second one. It may
            # have failed in the first pass of another unit, so every pass refreshes from then on.
            assert tile.p is not None
            refresh_master(tile.p, tile.low)
        is_fused = self.choice == "fused" or by_operator
        if function in _FUSED and is_fused and self._has_operator(fused):
            assert fused is not None
            if self._run_fused(function, flags, fused, h, scale, tile):
                return
        if function is only_pass and isinstance(scale, float):
            h, scale = self._absorbed(flags, h, scale)
        self._run_tiles(function, flags, h, scale, tile)

    def run_operators(self, operators: Sequence[Fused], sizes: Sequence[int], tile: Tile) -> None:
        """Update a tile of the CPU all of whose sets pass takes_operator(), without a scale.

        Args:
            operators: one for each part of the tile.
            sizes: elements of each part, multiples of FUSED_WIDTH.
            tile: of (n,) tensors.
        """
        p, low, (grad,) = tile.p, tile.low, tile.grad
        assert p is not None
        if low is not None:
            refresh_master(p, low)
        parts = [tensor.split_with_sizes(sizes) for tensor in (p, grad, *tile.states)]
        for fused, own_p, own_grad, *states in zip(operators, *parts, strict=True):
            fused.call(own_p, own_grad, states, self._constant(fused.step))
        if low is not None:
            low.copy_(p)

    def _run_tiles(self, function: Pass, flags: Any, h: Any, scale: Scale, tile: Tile) -> None:
        """Run ``function`` on a few rows of ``tile`` at a time."""
        if isinstance(scale, float) and [part.dtype.itemsize for part in tile.grad] == [2]:
            scale = self._constant(scale)  # see mean_of()
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
            own_h: Any = h
            if isinstance(h, tuple):  # of numbers, or of tables
                make: Any = type(h)
                own_h = make(*(_narrow(v, start, length) for v in h))
            function(self._rule, flags, own_h, _narrow(scale, start, length), part)

    def _absorbed(self, flags: Any, h: Any, scale: float) -> tuple[Any, Scale]:
        """Return h and scale, with scale in h if that changes no rounding and saves its pass."""
        assert isinstance(self._rule, ElementwiseRule)
        is_power_of_two = abs(math.frexp(scale)[0]) == 0.5
        absorbed = self._rule.absorb(flags, h, scale) if is_power_of_two else None
        return (h, scale) if absorbed is None else (absorbed, None)

    def _has_operator(self, fused: Fused | None) -> bool:
        return fused is not None and fused.name in self._operators

    def _run_fused(
        self, function: Pass, flags: Any, fused: Fused, h: Any, scale: Scale, tile: Tile
    ) -> bool:
        """Run an operator of torch's; if the device refuses the first call, go eager for good."""
        own = _FusedUpdate(flags, fused, self._constant(fused.step))
        try:
            self._run_tiles(_FUSED[function], own, h, scale, tile)
        except RuntimeError as error:
            if self._has_fused or self._device.type == "cpu":
                raise
            # It is refused before anything is written, so an eager run can take over.
            self.choice, self.reason = "eager", f"{fused.name} {_FAILED}: {error}"
            logger.warning("kernel=eager on %s: %s", self._device, self.reason)
            return False
        self._has_fused = True
        return True

    def _constant(
        self, value: float, *, rows: int | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return ``value`` as a kept tensor, () or (rows, 1); see [Note: no host waits]."""
        key = (value, rows, dtype)
        kept = self._constants.get(key)
        if kept is None:
            if len(self._constants) >= MOST_CONSTANTS:
                self._constants.clear()
            shape = () if rows is None else (rows, 1)
            kept = torch.full(shape, value, dtype=dtype, device=self._device)
            self._constants[key] = kept
        return kept

    def _run_compiled(self, function: Pass, flags: Any, h: Any, scale: Scale, tile: Tile) -> bool:
        """Run ``function`` compiled; on a compiler's failure, log it and go eager for good."""
        tensors = [*tile.grad, tile.p, tile.low, *tile.states, tile.aux]
        has = tuple(tensor is None for tensor in tensors)
        has_table = any(isinstance(v, Tensor) and v.dim() > 0 for v in h or ())
        key = (function, flags, len(tile.grad), len(tile.states), has, has_table)
        compiled = self._compiled.get(key)
        if compiled is None:
            if self._tells and not self._compiled:
                logger.info(
                    "The first step compiles the update, once, which takes some seconds. To leave "
                    'that out: sharding={"kernel": "eager"}.'
                )
            compiled = self._compiled[key] = torch.compile(_copy(function), dynamic=True)
            self._has_compiled = True
        dtype = torch.float32 if tile.p is None else tile.p.dtype
        if isinstance(scale, float):
            scale = self._constant(scale)
        if h:
            h = type(h)(
                *(
                    v.to(dtype) if isinstance(v, Tensor) else self._constant(v, dtype=dtype)
                    for v in h
                )
            )
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
            self.choice, self.reason = "eager", f"torch.compile {_FAILED}: {error}"
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
        if isinstance(scale, Tensor):
            return scale.expand(num_rows, 1).contiguous()
        return self._constant(1.0 if scale is None else scale, rows=num_rows)


_FAILED = "failed"


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


def _narrow(value: Scale, start: int, length: int) -> Scale:
    """Return the part of ``value`` for some rows: itself, unless it has a number per row."""
    per_row = isinstance(value, Tensor) and value.dim() > 0
    return value.narrow(0, start, length) if per_row else value  # type: ignore[union-attr]


def _has_kernel(name: str, device: torch.device) -> bool:
    """Return whether torch has the operator for ``device``, and not by way of the CPU."""
    key = torch._C._dispatch_key_for_device(device.type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


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
