"""The gradients the other tests feed have the properties those tests rely on."""

from __future__ import annotations

import pytest
import torch

from tests.support.models import MIXED, ParamSet, mean_grads, rank_grads


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_integer_means_are_exact(world_size: int) -> None:
    """Sum and mean of integer gradients are integers that even bfloat16 holds exactly."""
    for step in range(3):
        for mean in mean_grads("integers", world_size, step):
            if mean is not None:
                assert torch.equal(mean, mean.round())
                total = mean * world_size
                assert torch.equal(total, total.to(torch.bfloat16).double())


def test_roles() -> None:
    """Every role is present, and has a gradient on the ranks and steps its description says."""
    position = {entry.role: index for index, entry in enumerate(MIXED)}
    assert set(position) == {"used", "frozen", "unused", "late", "some"}

    def present(role: str, rank: int, step: int) -> bool:
        return rank_grads("floats", 2, rank, step)[position[role]] is not None

    assert not present("frozen", 0, 2)
    assert not present("unused", 0, 2)
    assert [present("late", 1, step) for step in range(4)] == [False, False, True, True]
    assert [present("some", 0, step) for step in range(4)] == [True, False, True, False]
    assert not present("some", 1, 0)
    assert mean_grads("floats", 2, 1)[position["some"]] is None


def test_ranks_draw_different_gradients() -> None:
    """Two ranks never feed the same gradient, so a rank that is left out changes the mean."""
    first, second = (rank_grads("floats", 2, rank, 0)[0] for rank in range(2))
    assert first is not None
    assert second is not None
    assert not torch.equal(first, second)
    assert torch.equal(ParamSet().params[0], ParamSet().params[0])
