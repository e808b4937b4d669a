"""Signals: which a Job takes, what it leaves alone, and how it hears that torchrun has ended."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardfuse.training import Job
from shardfuse.training.job import StopSignals


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([9], "9. No process can catch SIGKILL"),
        ([signal.SIGKILL], "No process can catch SIGKILL"),
        ([signal.SIGTERM, signal.SIGSTOP], "No process can catch SIGSTOP"),
        ([signal.SIGSEGV], "After SIGSEGV this process cannot save"),
        ([0], "0. This system has no signal of that number"),
        ([-15], "-15. This system has no"),
        ([10**30], "This system has no"),
        ([15.0], "15.0. Must be a number, such as signal.SIGTERM"),
        (["SIGTERM"], "'SIGTERM'. Must be a number"),
        ([None], "None. Must be a number"),
        ([True], "True. Must be a number"),
        (None, "Invalid signals: None"),
        (signal.SIGTERM, "Invalid signals: <Signals.SIGTERM"),
    ],
)
def test_what_cannot_stop_a_run_is_refused(given: Any, text: str, tmp_path: Path) -> None:
    """At construction, before anything is made in the folder."""
    with pytest.raises(ValueError, match="signal") as caught:
        Job(tmp_path / "run", {}, save_every=1, signals=given)
    assert text in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("save_every", [True, 0, -1, 1.5, None])
def test_save_every_is_a_number(save_every: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Invalid save_every"):
        Job(tmp_path, {}, save_every=save_every)


@pytest.fixture
def hang_up() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hang_up")
def test_a_terminal_that_hangs_up_stops_a_run(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with Job(tmp_path, {"model": torch.nn.Linear(2, 2)}, save_every=100) as job:
        for step in job.steps(50):
            if step == 3:
                os.kill(os.getpid(), signal.SIGHUP)
    assert job.is_stopped
    assert job.checkpoints.steps() == [job.step]
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.usefixtures("hang_up")
def test_nohup_is_kept(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Job(tmp_path, {"model": torch.nn.Linear(2, 2)}, save_every=100) as job:
        for _ in job.steps(5):
            os.kill(os.getpid(), signal.SIGHUP)
    assert (job.step, job.is_stopped) == (5, False)


def test_a_signal_that_is_given_twice_is_given_back() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    signals = StopSignals([signal.SIGUSR2, signal.SIGUSR2])
    signals.install()
    signals.restore()
    assert signal.getsignal(signal.SIGUSR2) == before


@pytest.mark.parametrize("launcher", ["torchrun", "a shell"])
def test_another_parent(
    launcher: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torchrun's end is a signal to stop, said once; that of a shell is not."""
    if launcher == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(os, "getppid", lambda: 77)
    signals = StopSignals(())
    signals.install()
    assert not signals.is_requested
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with caplog.at_level(logging.WARNING, "shardfuse"):
        told = [signals.is_requested for _ in range(3)]
    assert told == [launcher == "torchrun"] * 3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == int(launcher == "torchrun")
    assert all("torchrun's agent, process 77, has ended" in line for line in lines)
