"""Which device a rank computes on."""

from __future__ import annotations

import pytest
import torch

from shardfuse.training import set_device


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have this host show two devices, and return which become the current one."""
    found: list[int] = []
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", found.append)
    return found


@pytest.mark.cpu_only("there is an accelerator")
def test_the_cpu_where_there_is_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rank."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    assert set_device() == torch.device("cpu")


def test_the_device_of_the_local_rank(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's, the first without it, or the one that is named."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert set_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert set_device() == torch.device("cuda", 1)
    assert set_device(0) == torch.device("cuda", 0)
    assert taken == [0, 1, 0]


@pytest.mark.parametrize("local_rank", [2, -1])
def test_a_rank_without_one_is_refused(local_rank: int, taken: list[int]) -> None:
    """Before two ranks share a device unawares; the remedies are named."""
    message = f"local rank {local_rank} has no device of its own: .* sees 2 .*local_rank=0"
    with pytest.raises(ValueError, match=message):
        set_device(local_rank)
    assert taken == []
