"""Parameters in flight in one process: the library's ParamGatherer over a stand-in for the link.

Each bucket is NaN until its all-gather is waited for, so that whoever reads too early shows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardfuse.buffers import CombinedBuffers
from shardfuse.comm.transport import AsyncModel, Completion, Label, SingleRank
from shardfuse.engine.gather import ParamGatherer, PendingParam
from shardfuse.engine.params import FlatState
from shardfuse.layout import BLOCK, FlatLayout, ParamSpec

PLACEMENTS = ("one bucket", "two buckets", "cut by a bucket's end")

_ALIGN = 16  # elements: a slot of fp32 on the CPU


class _OnItsWay:
    """A transfer whose wait() brings what other ranks sent."""

    def __init__(self, output: Tensor) -> None:
        self._output, self._sent = output, output.clone()
        output.fill_(float("nan"))

    def wait(self) -> None:
        """Deliver."""
        self._output.copy_(self._sent)


class _Wire(SingleRank):
    """All-gathers that arrive when they are waited for."""

    async_model = AsyncModel.UNORDERED

    def all_gather(
        self, output: Tensor, input: Tensor, *, label: Label | None = None
    ) -> Completion[None]:
        return Completion(_OnItsWay(output).wait)


class InFlight:
    """``tensors`` (fp32, dense) as parameters in flight.

    Args:
        tensors: the values that arrive.
        placement: one of PLACEMENTS.
    """

    def __init__(self, tensors: Sequence[Tensor], placement: str = PLACEMENTS[0]) -> None:
        self.params = [nn.Parameter(tensor.detach().clone()) for tensor in tensors]
        members: list[tuple[Tensor, int]] = []  # in the order of flats, with their number
        start = 0
        for number, param in enumerate(self.params):
            if placement.startswith("cut"):
                stop = (start + _ALIGN) // BLOCK * BLOCK + BLOCK - _ALIGN
                members.append((nn.Parameter(torch.zeros(stop - start)), 0))
                start = stop + -(-param.numel() // _ALIGN) * _ALIGN
            members.append((param, number % 2 if placement == "two buckets" else 0))
        members.append((nn.Parameter(torch.zeros(3)), 0))
        members.append((nn.Parameter(torch.zeros(3)), 1))  # one bucket alone would be waited for
        members.reverse()
        specs = [
            ParamSpec(f"p{i}", tuple(p.shape), p.stride(), "float32", "cpu", 0, frozen=bool(flat))
            for i, (p, flat) in enumerate(members)
        ]
        cap = BLOCK * 4 if placement.startswith("cut") else 25 << 20
        layout = FlatLayout(1, cap, "element").extended(specs)
        everything = [param for param, _ in members]
        self._sync = ParamGatherer(_Wire(), overlaps=[AsyncModel.UNORDERED])
        states = []
        for buffer in CombinedBuffers().add(layout.flats, torch.device("cpu")):
            slots = [slot.param for slot in buffer.flat.slots]
            states.append(
                FlatState(
                    buffer,
                    [everything[i] for i in slots],
                    [specs[i] for i in slots],
                    fragments=layout.fragments(buffer.flat, 0),
                    rank=0,
                )
            )
        self._sync.plan(states)
        for state in states:
            for bucket in state.flat.buckets:
                self._sync.launch(bucket, state.params)
        self._sync.defer()
        self._everything = everything

    @property
    def is_whole(self) -> bool:
        """Whether all parameters that have elements are in flight."""
        return all(type(p) is PendingParam for p in self.params if p.numel())

    def land(self) -> None:
        """Wait for everything, and check that nothing is left in flight."""
        self._sync.wait_all()
        assert {type(param) for param in self._everything} == {nn.Parameter}
