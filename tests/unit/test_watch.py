"""What is said of an error of a transport, where no other rank has told what it does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardfuse.comm import session
from shardfuse.comm.session import GroupState
from shardfuse.comm.watchdog import Watchdog

REMEDY = "as many backward() before each"


@pytest.mark.parametrize(
    ("code", "error", "is_named"),
    [
        ("EI0005", "EI0005: The arguments for collective communication are inconsistent.", True),
        ("EI0005", "EI0006: Getting socket times out.", False),
        (None, "EI0005: of a transport that compares nothing.", False),
    ],
)
def test_remedy_of_a_mismatch(
    code: str | None, error: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named where the transport says that collectives differ, and nowhere else."""
    monkeypatch.setattr(session, "RESOLVE_S", 0.0)
    board = GroupState(dist.HashStore(), rank=0, world_size=2)
    watch = Watchdog(board, lambda: None, device=torch.device("cuda", 0), mismatch_code=code)
    with board.region("step()"):
        text = str(watch.attribute_error(RuntimeError(error), failed="hccl"))
    assert text.startswith(f"[rank 0] step(): rank 1 ended or did not answer: {error}")
    assert (REMEDY in text) == is_named


def test_the_part_that_failed_is_named_where_all_ranks_answer() -> None:
    store = dist.HashStore()
    board, peer = (GroupState(store, rank, world_size=2) for rank in range(2))
    watch = Watchdog(board, lambda: None, device=torch.device("cpu"))
    peer._roll_call.answer(0)
    with board.region("step()"):
        text = str(watch.attribute_error(RuntimeError("EI0006: Getting socket times out.")))
    assert text == (
        "[rank 0] step(): the connection to another rank failed: EI0006: Getting socket times out."
    )
