"""One flat partition that DeepSpeed made: where tensors lie in it, and a rule's step over it.

A partition cuts tensors anywhere, so that the blocks of shardfuse's own layout do not exist in it.
A segment, the part of one tensor in the partition, is run as rows of BLOCK elements and one shorter
row: the rules and passes are those of stage 0, and so are the sums per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.engine.kernels import Kernels, SegmentSum, Span, passes
from shardfuse.layout import BLOCK
from shardfuse.rules import Clip, ElementwiseRule, NormRule


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, start + numel) of a partition, all of one parameter."""

    param: int  # position among the parameters of the group
    start: int
    numel: int
    policy: str

    @property
    def num_rows(self) -> int:
        """Rows of BLOCK elements, the last one possibly shorter."""
        return -(-self.numel // BLOCK)


class PartitionStep:
    """Updates one partition, (numel,) fp32.

    Args:
        rule: the math.
        flat: the partition; its ``grad`` is the mean gradient, clipped.
        segments: the tensors in it, in order; padding is in none.
        policies: the policy of every parameter of the group, on this rank or not.
        comm: the ranks that share the group.
        comm_device: where their collectives take tensors.
        global_norm: returns the norm of the gradients of all groups, as they are now, ().
        kernel: as in ShardConfig.
    """

    def __init__(
        self,
        rule: ElementwiseRule | NormRule,
        flat: Tensor,
        segments: Sequence[Segment],
        *,
        policies: Sequence[str],
        comm: Communicator,
        comm_device: torch.device,
        global_norm: Callable[[], Tensor],
        kernel: str = "auto",
    ) -> None:
        self._rule = rule
        self._flat = flat
        self._segments = segments
        self._policies = policies
        self._comm = comm
        self._comm_device = comm_device
        self._global_norm = global_norm
        self._kernels = Kernels(
            rule, row=BLOCK, kernel=kernel, device=flat.device, shard_numel=flat.numel()
        )
        self._rows: list[int] = []
        num_rows = 0
        owners = []
        for segment in segments:
            self._rows.append(num_rows)
            owners.append((segment.param, num_rows, num_rows + segment.num_rows))
            num_rows += segment.num_rows
        self._num_rows = num_rows
        self._tree = SegmentSum(
            owners, num_values=num_rows, num_segments=len(policies), device=flat.device
        )
        owner = [param for param, start, stop in owners for _ in range(start, stop)]
        self._owner = torch.tensor(owner, dtype=torch.int64, device=flat.device)
        self._whole = Segment(0, 0, flat.numel(), policies[0])

    def run(self, group: Mapping[str, Any], state: Sequence[Tensor], step: int) -> Tensor | None:
        """Do the ``step``-th update; return the ratio of every parameter of the group, if taken.

        Args:
            group: hyper-parameters.
            state: the rule's states, each (numel,).
        """
        assert self._flat.grad is not None
        scale = passes.ascending(self._factor(self._rule.clip(group)), group)
        if isinstance(self._rule, NormRule):
            return self._by_norms(self._rule, group, state, step, scale)
        one_policy = len(set(self._policies)) == 1
        for segment in (self._whole,) if one_policy else self._segments:
            flags, h = self._settings(group, segment.policy, step)
            for cut in _cuts(segment, 0):
                p, grad, *states = self._views(cut, state)
                tensors = (p, None, *states)
                if cut.is_tail:
                    passes.elementwise_pass(self._rule, flags, h, scale, (grad,), tensors)
                else:
                    span = Span(0, cut.stop - cut.start, step)
                    self._kernels.elementwise(flags, h, scale, span, (grad,), tensors)
        return None

    def _by_norms(
        self,
        rule: NormRule,
        group: Mapping[str, Any],
        state: Sequence[Tensor],
        step: int,
        scale: passes.Scale,
    ) -> Tensor | None:
        # Of all parameters of the group, so that all ranks agree on whether to communicate.
        adapted = {policy for policy in self._policies if rule.adapts(group, policy)}
        sums = torch.zeros(rule.num_sums, self._num_rows, device=self._flat.device)
        for segment, first_row in zip(self._segments, self._rows, strict=True):
            flags, h = self._settings(group, segment.policy, step)
            for cut in _cuts(segment, first_row):
                p, grad, *states = self._views(cut, state)
                rows = sums[:, cut.row : cut.row + cut.num_rows]
                tensors = (rows if segment.policy in adapted else None, p, None, *states)
                if cut.is_tail:
                    passes.direction_pass(rule, flags, h, _of_rows(scale, cut), (grad,), tensors)
                else:
                    span = Span(0, cut.stop - cut.start, step)
                    factor = _of_rows(scale, cut)
                    self._kernels.direction(flags, h, factor, span, (grad,), tensors)
        ratio = rule.ratio(self._total(self._tree(sums))) if adapted else None
        spread = None if ratio is None else ratio[self._owner]
        for segment, first_row in zip(self._segments, self._rows, strict=True):
            flags, h = self._settings(group, segment.policy, step)
            for cut in _cuts(segment, first_row):
                p, _, *states = self._views(cut, state)
                factor = None
                if spread is not None and segment.policy in adapted:
                    factor = spread[cut.row : cut.row + cut.num_rows]
                tensors = (factor, p, None, *states)
                if cut.is_tail:
                    passes.apply_pass(rule, flags, h, None, (), tensors)
                else:
                    self._kernels.apply(flags, h, Span(0, cut.stop - cut.start, step), tensors)
        return ratio

    def _settings(self, group: Mapping[str, Any], policy: str, step: int) -> tuple[Any, Any]:
        return self._rule.flags(group, policy), self._rule.scalars(group, policy, step)

    def _views(self, cut: _Cut, state: Sequence[Tensor]) -> list[Tensor]:
        """Return (partition, gradient, *states) over ``cut``: 1-D, or one row if a tail."""
        assert self._flat.grad is not None
        tensors = (self._flat.detach(), self._flat.grad, *state)
        views = [tensor[cut.start : cut.stop] for tensor in tensors]
        return [view[None] for view in views] if cut.is_tail else views

    def _factor(self, clip: Clip | None) -> Tensor | None:
        """Return what the rule itself multiplies gradients by. At most one all-reduce.

        That is one factor (); where every tensor is clipped by its own norm, one per row of the
        segments, (rows, 1). There is one dtype per group here, so that a group is a flat.
        """
        if clip is None:
            return None
        if clip.scope == "global":
            norm = self._global_norm()
        elif clip.scope == "tensor":
            # Every rank has a sum, maybe zero, for every tensor of the group: whole norms come out.
            squares = self._total(self._tree(self._square_sums(self._segments, self._num_rows)))
            norm = squares[0].sqrt()[self._owner][:, None]
        else:
            squares = self._square_sums([self._whole], self._whole.num_rows)
            norm = self._total(squares.sum()[None]).sqrt()[0]
        return (clip.max_norm / (norm + clip.eps)).clamp(max=1.0).to(self._flat.device)

    def _square_sums(self, segments: Sequence[Segment], num_rows: int) -> Tensor:
        """Return the sum of squares of the gradient over every row of ``segments``, (1, rows)."""
        squares = torch.zeros(1, num_rows, device=self._flat.device)
        first_row = 0
        for segment in segments:
            for cut in _cuts(segment, first_row):
                _, grad = self._views(cut, ())
                rows = squares[0, cut.row : cut.row + cut.num_rows]
                if cut.is_tail:
                    passes.square_sum_pass(None, None, (), None, (grad,), (rows,))
                else:
                    self._kernels.square_sum(None, rows, (grad,))
            first_row += segment.num_rows
        return squares

    def _total(self, sums: Tensor) -> Tensor:
        """Return ``sums`` added up over the ranks; made where the collectives are, if elsewhere."""
        total = sums.contiguous().to(self._comm_device)
        self._comm.all_reduce(total.view(-1)).wait()
        return total.to(sums.device)


class _Cut(NamedTuple):
    """Elements [start, stop) of a partition that are ``num_rows`` rows, the first being ``row``."""

    start: int
    stop: int
    row: int
    num_rows: int

    @property
    def is_tail(self) -> bool:
        return self.stop - self.start < self.num_rows * BLOCK


def _of_rows(scale: passes.Scale, cut: _Cut) -> passes.Scale:
    """Return the factors of the rows of ``cut``; the one factor itself, where there is one."""
    if not isinstance(scale, Tensor) or scale.dim() == 0:
        return scale
    return scale[cut.row : cut.row + cut.num_rows]


def _cuts(segment: Segment, first_row: int) -> Iterator[_Cut]:
    """Yield the rows of a segment: the full ones, then the shorter one."""
    num_full = segment.numel // BLOCK
    middle = segment.start + num_full * BLOCK
    if num_full:
        yield _Cut(segment.start, middle, first_row, num_full)
    if segment.numel % BLOCK:
        yield _Cut(middle, segment.start + segment.numel, first_row + num_full, 1)
