"""The pauses of `pytest --late` come, are repeated by their seed, and are nowhere else."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import lateness

NUM_DRAWS = 2000


def pauses(monkeypatch: pytest.MonkeyPatch, seed: str, name: str = "rank") -> list[float]:
    """Return how long a new thread of that name sleeps, in order."""
    slept: list[float] = []
    monkeypatch.setenv(lateness.VARIABLE, seed)
    monkeypatch.setattr(lateness.time, "sleep", slept.append)

    def draw() -> None:
        for _ in range(NUM_DRAWS):
            lateness.pause()

    thread = threading.Thread(target=draw, name=name)
    thread.start()
    thread.join()
    return slept


def test_a_seed_repeats_its_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones are common, long ones rare; other threads and seeds have others."""
    first = pauses(monkeypatch, "7")
    assert first == pauses(monkeypatch, "7")
    assert first != pauses(monkeypatch, "8")
    assert first != pauses(monkeypatch, "7", "another rank")
    assert NUM_DRAWS / 20 < len(first) < NUM_DRAWS / 5
    assert any(seconds > 0.1 for seconds in first)


def test_without_a_seed_nothing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses(monkeypatch, "0") == []


BEGUN = """
from shardfuse.comm.gloo import MessageRing
from shardfuse.comm.native import ProcessGroupCommunicator as Communicator
from shardfuse.comm.session import GroupSession
from tests.support import lateness
lateness.begin()
lateness.begin()
for function in (GroupSession.region, Communicator._launch, MessageRing.read_part):
    names = []
    while function is not None:
        names.append(function.__code__.co_name)
        function = getattr(function, "__wrapped__", None)
    print(names)
"""


@pytest.mark.parametrize("seed", ["0", "7"])
def test_calls_and_collectives_pause_once(seed: str) -> None:
    """In a process of its own, as what begins stays."""
    done = subprocess.run(
        [sys.executable, "-c", BEGUN],
        cwd=Path(__file__).parents[2],
        env=os.environ | {lateness.VARIABLE: seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    late = seed != "0"
    call, launch, fetch = map(ast.literal_eval, done.stdout.splitlines())
    assert call == [*["late_call"] * late, "helper", "region"]  # helper: of contextmanager
    assert launch == [*["late_launch"] * late, "_launch"]
    assert fetch == [*["late_fetch"] * late, "read_part"]
