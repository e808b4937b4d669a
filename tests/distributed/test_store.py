"""What ranks do with a store that is gone, or has under their keys what no rank has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.checkpoint import CheckpointError, async_save
from shardfuse.checkpoint.asynchronous import AsyncSave
from shardfuse.checkpoint.report import verify
from tests.support.harness import run_threads

pytestmark = pytest.mark.timeout(120)


class Gone:
    """A store whose process has ended."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Broken pipe")


def save_beside(folder: Path, told: list[str | None] | None) -> str:
    """Save with a store that is gone, or that has other words than what was told."""
    model = nn.Linear(30, 4)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding={"kernel": "eager"})
    model(torch.ones(1, 30)).sum().backward()
    optimizer.step()
    comm: Any = optimizer.communicator.everyone
    if told is None:
        comm._board.store = Gone()
    else:
        comm._board.told = lambda topic: told
    saving: AsyncSave = async_save({"model": model, "optimizer": optimizer}, folder)
    try:
        saving.wait()
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_save_beside_training_needs_no_store(tmp_path: Path) -> None:
    """As after the death of torchrun's agent: wait() once waited for a thread that never ends."""
    assert run_threads(2, save_beside, tmp_path / "saved", None) == ["", ""]
    (verdict,) = verify(tmp_path / "saved")
    assert not verdict.faults


@pytest.mark.parametrize("text", ["nonsense", "[true, '']", '[1e99, ""]', "[" * 100_000, "[0]"])
def test_words_of_a_save_that_nobody_has_written(text: str, tmp_path: Path) -> None:
    """An error on all ranks, that names the key; nothing is published."""
    for told in run_threads(2, save_beside, tmp_path / "saved", [text, None]):
        assert f"store has {text[:80]!r} under 'saves/" in told
    assert not (tmp_path / "saved").exists()
