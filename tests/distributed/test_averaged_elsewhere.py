"""What is said where gradients are averaged elsewhere and that was not declared, or the reverse."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardfuse import ShardedSGD
from shardfuse.comm.session import PeerError
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(120)


def train(wrapped: bool, declared: bool, same_data: bool) -> tuple[list[str], str]:
    """Train three steps; return the warnings and the error."""
    model = torch.nn.Linear(8, 8)
    with torch.no_grad():
        model.weight.copy_(torch.eye(8))
        model.bias.zero_()
    forward: Any = DistributedDataParallel(model) if wrapped else model
    optimizer = ShardedSGD(
        model.named_parameters(), lr=0.01, sharding={"grads_are_reduced": declared}
    )
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for step in range(3):
                scale = step + 1 if same_data else step + 1 + 3 * dist.get_rank()
                forward(torch.ones(2, 8) * scale).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except PeerError as failure:
            error = str(failure)
    return [str(warning.message) for warning in caught], error


@pytest.mark.parametrize("same_data", [True, False])
@pytest.mark.parametrize(("wrapped", "declared"), [(True, True), (True, False), (False, False)])
def test_what_is_said(wrapped: bool, declared: bool, same_data: bool) -> None:
    """A wrapper that was not declared gets one warning, on the first rank; all else is quiet."""
    for rank, (texts, error) in enumerate(run_procs(2, train, wrapped, declared, same_data)):
        assert error == ""
        found = [text for text in texts if "wrapped in DistributedDataParallel" in text]
        assert len(found) == int(rank == 0 and wrapped and not declared)


def test_declared_but_not_averaged() -> None:
    """Gradients that differ between ranks cannot be the mean: an error on all of them."""
    for _, error in run_procs(2, train, False, True, False):
        assert "a gradient of weight that sums to" in error
        assert "grads_are_reduced=True is for gradients that DistributedDataParallel" in error
