"""What ranks remember of each other across an error: two boards of one store, without a transport."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse.comm.base import PeerError
from shardfuse.comm.board import Board


def two_boards() -> list[Board]:
    store = dist.HashStore()
    return [Board(store, rank, world_size=2) for rank in range(2)]


def together(*acts: Callable[[], Any]) -> None:
    """Call each in a thread of its own, as ranks do that meet."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def make_call(board: Board, name: str = "step()") -> None:
    with board.call(name):
        pass


def fail(board: Board) -> None:
    with pytest.raises(ArithmeticError), board.call("step()"):
        raise ArithmeticError("of this rank")


def test_gradients_sent_before_an_error_do_not_count() -> None:
    """A rank that had sent fewer took a slow one for one that runs more backward()."""
    one, other = two_boards()
    for board, num_sent in ((one, 1), (other, 3)):
        with pytest.raises(ArithmeticError), board.call("step()"):
            for _ in range(num_sent):
                board.begin_sending("a bucket")
            raise ArithmeticError("of this rank")
    together(lambda: make_call(one), lambda: make_call(other))
    for board in (one, other):
        board.begin_sending("a bucket")
    other._find_difference(lambda: True)  # it waits under backward, and tells what it does
    with one.call("step()"):
        one.present.declare(["lr = 0.1"])
        one.look()


def test_gradients_sent_after_an_error_count_before_the_ranks_meet() -> None:
    """Under backward: the rank that lacks one has sent them in no call yet."""
    one, other = two_boards()
    for board in (one, other):
        fail(board)
    for _ in range(2):
        other.begin_sending("a bucket")
    one.begin_sending("a bucket")
    together(lambda: make_call(one), lambda: make_call(other))
    other._find_difference(lambda: True)
    with pytest.raises(PeerError, match="rank 1 is under backward"), one.call("step()"):
        one.present.declare(["lr = 0.1"])
        one.look()
