"""What ranks do with a store that is gone, or has under their keys what no rank has written."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.checkpoint import CheckpointError, async_save
from shardfuse.checkpoint.export import verify
from shardfuse.checkpoint.saving import AsyncSave
from shardfuse.comm.session import GroupState, PeerError
from shardfuse.doctor.world import World
from shardfuse.training.attempts import attempt_store
from shardfuse.training.job import CoordinatedStop
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
    comm: Any = optimizer.communicator.world
    if told is None:
        comm.session.group.store = Gone()
    else:
        comm.session.group.read = lambda topic: told
    saving: AsyncSave = async_save({"model": model, "optimizer": optimizer}, folder)
    try:
        saving.wait()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.gloo_only("messages of HCCL carry no digest, so calls are compared in the store")
def test_an_async_save_needs_no_store(tmp_path: Path) -> None:
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


GARBAGE = [
    "",
    "nonsense",
    "3",
    "null",
    "[1]",
    "[{}]",
    '[{"number": "x"}]',
    "[true, 1]",
    "[" * 99_999,
]


@pytest.mark.parametrize("text", GARBAGE)
def test_what_another_rank_does(text: str) -> None:
    """One that waits reads it, and stops; whoever has an error to tell passes it by."""
    store = dist.HashStore()
    boards = [GroupState(store, rank, world_size=2) for rank in range(2)]
    store.set("doing/1", text)
    store.set("at/1", text)
    with (
        pytest.raises(PeerError, match=r"store has .* under 'doing/1'"),
        boards[0].region("step()"),
    ):
        boards[0].poll_peers()
    with pytest.raises(PeerError, match=r"rank 0 stopped: .*under"), boards[1].region("step()"):
        boards[1].poll_peers()


@pytest.mark.parametrize("text", GARBAGE)
def test_ranks_that_meet_after_an_error(text: str) -> None:
    store = dist.HashStore()
    board = GroupState(store, 0, world_size=2)
    with pytest.raises(ArithmeticError), board.region("step()"):
        raise ArithmeticError
    store.set("again/0/1", text)
    with pytest.raises(PeerError, match=r"store has .* under 'again/0/1'"), board.region("step()"):
        pass


@pytest.mark.parametrize("text", GARBAGE)
def test_an_alarm_that_no_rank_has_raised(text: str) -> None:
    store = dist.HashStore()
    board = GroupState(store, 0, world_size=2)
    store.set("alarm/1", text)
    store.set("first alarm/0", text)
    with pytest.raises(PeerError, match=r"store has .* under 'alarm/1'"), board.region("step()"):
        board.poll_peers()


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "\u00b2", "9" * 5000])
def test_a_word_to_stop(text: str, tmp_path: Path) -> None:
    """In the store, and in the folder that replaces it."""
    for is_store_gone in (False, True):
        session = SimpleNamespace(generation=0, is_store_gone=is_store_gone)
        session.read = lambda topic, told=text, gone=is_store_gone: [None, None if gone else told]
        comm = SimpleNamespace(world_size=2, session=session)
        stop = CoordinatedStop(_ranks(comm), tmp_path, 7)
        if is_store_gone and len(text) < 100:
            (tmp_path / f".stop-{7:012x}-{text}").touch()
        elif is_store_gone:
            continue
        with pytest.raises(PeerError, match=r"store has .* under"):
            stop.should_stop_after(1, is_requested=False)


def _ranks(comm: Any) -> Any:
    class Comm(SimpleNamespace):
        __hash__ = object.__hash__

    return SimpleNamespace(comm=Comm(**vars(comm)))


@pytest.mark.parametrize("text", ["nonsense", "3", "[" * 100_000])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_start_of_an_attempt(rank: int, text: str) -> None:
    """Whoever answers rank 0, and what rank 0 answers."""
    store, limit = dist.HashStore(), timedelta(seconds=20)
    ended: list[str] = []

    def begin() -> None:
        try:
            attempt_store(store, rank, 2, limit)
        except PeerError as error:
            ended.append(str(error))

    if rank == 1:
        store.set("shardfuse/lead", "0123456789abcdef")
        store.set("shardfuse/0123456789abcdef/go", text)
    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    if rank == 0:
        store.wait(["shardfuse/lead"])
        store.set(f"shardfuse/{store.get('shardfuse/lead').decode()}/1", text)
    thread.join(30)
    (told,) = ended
    assert f"store has {text[:80]!r} under 'shardfuse/" in told


@pytest.mark.parametrize("text", ["nonsense", "3", "{}", '{"finding": {}}', "[" * 100_000])
def test_the_doctor_finds_it(text: str) -> None:
    world = World(5.0)
    world._store = dist.HashStore()
    world._store.set("1/1", text)
    answer = world._receive("1/1")
    assert answer is not None
    assert answer["has_raised"]
    assert "under '1/1'" in answer["finding"]["text"]
