"""What ranks remember of each other across an error: boards of one store, without a transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse.comm import session as session_module
from shardfuse.comm.session import GroupState, PeerError


def two_boards() -> list[GroupState]:
    store = dist.HashStore()
    return [GroupState(store, rank, world_size=2) for rank in range(2)]


def together(*acts: Callable[[], Any]) -> None:
    """Call each in a thread of its own, as ranks do that meet."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def make_call(board: GroupState, name: str = "step()") -> None:
    with board.region(name):
        pass


def fail(board: GroupState, num_sent: int = 0) -> None:
    """Fail in a call that has sent some buckets."""

    def send_and_fail() -> None:
        for _ in range(num_sent):
            board.begin_send(is_labelled=True)
        raise ArithmeticError("of this rank")

    with pytest.raises(ArithmeticError), board.region("step()"):
        send_and_fail()


def look(board: GroupState) -> None:
    """Look, as a rank that waits in a call does."""
    with board.region("step()"):
        board.current.declare(["lr = 0.1"])
        board.poll_peers()


def test_gradients_sent_before_an_error_do_not_count() -> None:
    """A rank that had sent fewer took a slow one for one that runs more backward()."""
    one, other = two_boards()
    fail(one, num_sent=1)
    fail(other, num_sent=3)
    together(lambda: make_call(one), lambda: make_call(other))
    for board in (one, other):
        board.begin_send(is_labelled=True)
    other._find_mismatch(lambda: True)  # it waits under backward, and tells what it does
    look(one)


def test_gradients_sent_after_an_error_count_before_the_ranks_meet() -> None:
    """Under backward: the rank that lacks one has sent them in no call yet."""
    one, other = two_boards()
    for board in (one, other):
        fail(board)
    for _ in range(2):
        other.begin_send(is_labelled=True)
    one.begin_send(is_labelled=True)
    together(lambda: make_call(one), lambda: make_call(other))
    other._find_mismatch(lambda: True)
    with pytest.raises(PeerError, match="rank 1 is under backward"):
        look(one)


def test_a_rank_that_is_interrupted_while_it_waits_for_the_others_meets_them_in_its_next_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As by a signal: it went on by itself, numbered its calls otherwise, and all hung."""
    one, other = two_boards()
    make_call(other)
    for board in (one, other):
        fail(board)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GroupState, "_wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_call(one)
    make_call_of_other = threading.Thread(target=make_call, args=[other], daemon=True)
    make_call_of_other.start()
    make_call(one)  # its numbers are those that it has written the first time
    make_call_of_other.join(10)
    assert one.generation == other.generation == 1
    assert one.current.number == other.current.number


def test_a_rank_that_has_given_up_waiting_tells_who_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That one went on alone, and waited for it in its next collective."""
    monkeypatch.setattr(session_module, "_REJOIN_S", 0.0)
    one, other = two_boards()
    for board in (one, other):
        fail(board)
    with pytest.raises(PeerError, match="rank 1 has not come back"):
        make_call(one)
    with pytest.raises(PeerError, match="rank 1 has not come back"):
        make_call(other)
