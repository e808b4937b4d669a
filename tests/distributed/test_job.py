"""shardfuse.training: a job that is stopped, killed and started again by the same line."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedAdamW
from shardfuse.checkpoint import CheckpointError, PerRank
from shardfuse.checkpoint.collective import CheckpointGroup
from shardfuse.optim import stateful
from shardfuse.training import FolderLock, Job, RandomState
from shardfuse.training import job as job_module
from shardfuse.training.job import CoordinatedStop
from tests.support import contract
from tests.support.harness import log_of_shardfuse, run_procs
from tests.support.placing import on_device
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(120)

NUM_STEPS = 12
REPOSITORY = Path(__file__).parents[2]


class Loader:
    """Every rank draws its own numbers, one after the other."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return a form that grows with the position."""
        return {"seen": list(range(self.position))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = len(state["seen"])

    def draw(self) -> Tensor:
        self.position += 1 + dist.get_rank()
        return torch.full((64,), float(self.position))


def train(
    folder: str,
    stop_at: int | None = None,
    on_resize: Any = None,
    **options: Any,
) -> tuple[int, bool, list[Tensor]]:
    """Train, with random numbers of every rank; rank 1 is told to stop in one step."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    random.seed(rank)
    model, loader = nn.Linear(64, 8), Loader()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding={"kernel": "eager"})
    state = {
        "model": model,
        "optimizer": optimizer,
        "loader": PerRank(loader, on_resize=on_resize),
        "note": "none",
    }
    with Job(folder, state, save_every=5, **options) as job:
        for step in job.steps(NUM_STEPS):
            noise = torch.randn(4, 64) * random.random()
            model(noise + loader.draw()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == stop_at and rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    return job.step, job.is_stopped, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("async_save", [False, True])
def test_a_job_that_is_stopped_ends_as_if_it_had_not_been(async_save: bool, tmp_path: Path) -> None:
    """One rank is told in step 3 and 4; all stop after the same one, and go on bit for bit."""
    options = {"async_save": async_save}
    expected = run_procs(2, train, str(tmp_path / "whole"))
    for stop_at, last in ((3, 6), (7, 10), (10, NUM_STEPS)):
        for step, is_stopped, _ in run_procs(2, _train, str(tmp_path / "cut"), stop_at, options):
            assert (step, is_stopped) == (last, last < NUM_STEPS)
    again = run_procs(2, train, str(tmp_path / "cut"))
    for found, other in zip(again, expected, strict=True):
        assert found[:2] == (NUM_STEPS, False)
        assert_bitwise(found[2], other[2])
    assert (tmp_path / "cut" / "latest").read_text() == f"step-{NUM_STEPS}"


def _train(folder: str, stop_at: int, options: dict[str, Any]) -> Any:
    return train(folder, stop_at, **options)


def train_resized(folder: str, has_hook: bool) -> tuple[str, list[tuple[int, int]], list[str]]:
    told: list[tuple[int, int]] = []
    warned: list[str] = []
    job_module.logger.warning = lambda text, *args: warned.append(text % args)  # type: ignore[method-assign,assignment]
    hook = (lambda saved, present: told.append((saved, present))) if has_hook else None
    try:
        train(folder, on_resize=hook)
    except CheckpointError as error:
        return str(error), told, warned
    return "", told, warned


def test_another_number_of_ranks(tmp_path: Path) -> None:
    """What every rank has its own of is not handed to others: a hook is called, or all raise."""
    run_procs(2, train, str(tmp_path), 3)
    for text, told, _ in run_procs(3, train_resized, str(tmp_path), False):
        assert "each of 2 ranks saved its own 'loader', and there are 3" in text
        assert "on_resize" in text
        assert told == []
    for text, told, warned in run_procs(3, train_resized, str(tmp_path), True):
        assert (text, told) == ("", [(2, 3)])
        assert any("random generators start afresh" in line for line in warned)


def enter(folder: str) -> str:
    job_module._LOCK_TIMEOUT_S = 0.1  # type: ignore[misc]
    try:
        train(folder)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_second_job_is_kept_out(tmp_path: Path) -> None:
    """On all ranks, in words that name the process; and it changes nothing."""
    with FolderLock() as lock:
        lock.take(tmp_path)
        for text in run_procs(2, enter, str(tmp_path)):
            assert f"is in use by process {os.getpid()}" in text
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    assert run_procs(2, enter, str(tmp_path)) == ["", ""]


class BadLoader(Loader):
    """One rank cannot read what it has saved."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("position")
        super().load_state_dict(state)


LOOPS: list[tuple[type[Loader], int]] = [(Loader, 3), (BadLoader, 0), (Loader, 9)]
"""Rank 1 alone fails in the loop's step of that number; where it enters; nowhere."""


def errors_alone(folder: str, loops: list[tuple[type[Loader], int]]) -> list[tuple[str, str]]:
    """Return what this rank is told of each loop."""
    model, told = nn.Linear(64, 8), []
    options: dict[str, Any] = {"sharding": {"kernel": "eager"}}
    for build_loader, last in loops:
        loader = build_loader()
        optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, **options)
        state = {"model": model, "optimizer": optimizer, "loader": PerRank(loader)}
        try:
            with Job(folder, state, save_every=2) as job:
                for step in job.steps(6):
                    if step == last and dist.get_rank() == 1:
                        raise ValueError("no more data")
                    model(loader.draw()).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            told.append(("", str(job.step)))
        except (ValueError, RuntimeError) as error:
            told.append((type(error).__name__, str(error)))
    return told


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_fails_alone(world_size: int, tmp_path: Path) -> None:
    """In the loop, or where it is to load: all ranks are told of it, and may start again.

    By new processes, where the transport had to be aborted to end the others' waits.
    """
    launches = [LOOPS] if contract.chosen() == "gloo" else [[loop] for loop in LOOPS]
    told_in = [
        run_procs(world_size, errors_alone, str(tmp_path), loops, timeout=40) for loops in launches
    ]
    for rank in range(world_size):
        in_loop, entering, again = [told for launch in told_in for told in launch[rank]]
        if rank == 1:
            assert in_loop == ("ValueError", "no more data")
        else:
            assert in_loop[0] == "PeerError"
            assert "rank 1 failed in the loop of a Job: ValueError: no more data" in in_loop[1]
        assert entering[0] == "CheckpointError"
        assert "loader" in entering[1]
        assert "rank 1" in entering[1]
        assert again == ("", "6")


class Mortal:
    """A store that is gone from when a file is there, to all ranks at once."""

    def __init__(self, store: Any, end: Path) -> None:
        self._store, self._end = store, end

    def __getattr__(self, name: str) -> Any:
        if self._end.exists():
            raise RuntimeError("Broken pipe")
        return getattr(self._store, name)


def stop_at_random(seed: int, folder: Path, dies: bool) -> list[int]:
    """Return after which step this rank stops, of several runs."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own, ends = random.Random(100 * seed + rank), []
    ranks = CheckpointGroup({}, None, "")
    board: Any = ranks.comm.session.group  # type: ignore[attr-defined]
    store, death = board.store, random.Random(seed)
    for number in range(12):
        stop = CoordinatedStop(ranks, folder, number)
        end, dies_at = folder / f"end-{number}", death.randrange(9)
        board.store, board.is_store_gone = Mortal(store, end), False
        told_at = own.choice([own.randrange(6), 10**6]) if rank else own.randrange(6)
        for step in range(1, 100):
            time.sleep(own.choice([0.0, 0.0, 0.001, 0.004]))
            if dies and rank == 0 and step > dies_at:
                end.touch()
            dist.all_reduce(torch.ones(world_size))  # what step() waits for
            if on_device():
                torch.accelerator.synchronize()  # as Job does
            if stop.should_stop_after(step, is_requested=step > told_at):
                ends.append(step)
                break
        dist.barrier()
        stop.remove_request()
    return ends


@pytest.mark.parametrize(("seed", "dies"), [(0, False), (1, True)])
def test_all_stop_after_the_same_step(seed: int, dies: bool, tmp_path: Path) -> None:
    """Whoever is told, whenever, however late some of them look, and also if the store is lost."""
    first, *others = run_procs(3, stop_at_random, seed, tmp_path, dies)
    assert len(first) == 12
    assert all(ends == first for ends in others)
    assert not list(tmp_path.glob(".stop-*"))


def stopped_and_entered_again(folder: str) -> list[tuple[int, bool]]:
    """Return the steps of a job that is told to stop, and of two later ones that are not."""
    optimizer = ShardedAdamW(nn.Linear(4, 2).named_parameters(), lr=0.5)
    found = []
    for name, stops in (("first", True), ("second", False), ("first", False)):
        with Job(Path(folder, name, "saved"), {"optimizer": optimizer}, save_every=9) as job:
            for step in job.steps(9):
                if stops and step == 2 and dist.get_rank() == 0:
                    os.kill(os.getpid(), signal.SIGUSR1)
                optimizer.step()
        found.append((job.step, job.is_stopped))
    return found


def test_a_stop_ends_no_later_job_of_the_process(tmp_path: Path) -> None:
    for found in run_procs(2, stopped_and_entered_again, str(tmp_path)):
        assert found == [(5, True), (9, False), (9, False)]


def test_one_process_needs_no_group(tmp_path: Path) -> None:
    """A save at every step and after the last; the value that was saved comes back."""
    model = nn.Linear(4, 2)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.5)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "seen": 0}
    for first, last in ((0, 3), (3, 5), (5, 5)):
        state["seen"] = 0
        with Job(tmp_path, state, save_every=1) as job:
            assert (job.step, state["seen"]) == (first, first)
            for step in job.steps(last):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                state["seen"] = step + 1
    assert job.checkpoints.steps() == [5, 4]
    with pytest.raises(ValueError, match="save_every"):
        Job(tmp_path, state, save_every=0)


def test_numbers_of_numpy_are_plain_data(tmp_path: Path) -> None:
    """A schedule's formula returns them; an array is loaded where the job is told to trust it."""
    numpy = pytest.importorskip("numpy")
    for first, last in ((0, 3), (3, 5)):
        optimizer = ShardedAdamW(nn.Linear(4, 2).named_parameters(), lr=0.5)
        optimizer.param_groups[0]["betas"] = (numpy.float64(0.9), 0.99)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: numpy.cos(step / 9))
        best = [numpy.float32(0.1), numpy.int64(3)]
        state: dict[str, Any] = {"optimizer": optimizer, "schedule": schedule, "best": best}
        with Job(tmp_path / "numbers", state, save_every=1) as job:
            assert job.step == first
            for _ in job.steps(last):
                optimizer.step()
                schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.5 * numpy.cos(last / 9)
        assert state["best"] == best

    state = {"order": numpy.arange(4)}
    with Job(tmp_path / "arrays", state, save_every=1) as job:
        list(job.steps(1))
    with pytest.raises(CheckpointError, match="trusted=True"):
        Job(tmp_path / "arrays", {"order": 0}, save_every=1).__enter__()
    with Job(tmp_path / "arrays", state := {"order": 0}, save_every=1, trusted=True):
        assert state["order"].tolist() == [0, 1, 2, 3]


def warned(folder: str, uses_job: bool) -> list[str]:
    """Return what the first steps log about state_dict() on one rank."""
    stateful.may_save_on_one_rank = lambda: True  # this module imports shardfuse.checkpoint
    logged = log_of_shardfuse()
    model = nn.Linear(8, 2)
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.01)
    with Job(folder, {"optimizer": optimizer}, save_every=9) if uses_job else nullcontext():
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
    return [line for line in logged if "state_dict() on rank 0" in line]


def test_a_job_saves_so_that_no_line_asks_for_it(tmp_path: Path) -> None:
    """Without one the first step says what saving on one rank needs, on rank 0."""
    assert run_procs(2, warned, str(tmp_path / "job"), True) == [[], []]
    assert [len(lines) for lines in run_procs(2, warned, str(tmp_path / "none"), False)] == [1, 0]


def test_random_numbers_go_on() -> None:
    numpy = pytest.importorskip("numpy")
    states = RandomState()

    def draw() -> list[float]:
        return [float(torch.rand(())), random.random(), float(numpy.random.rand())]

    draw()
    saved = states.state_dict()
    expected = draw()
    states.load_state_dict(saved)
    assert draw() == expected


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from shardfuse import ShardedAdamW
from shardfuse.training import Job, init_process_group

init_process_group()
rank, folder, kills = dist.get_rank(), Path(sys.argv[1]), sys.argv[2:]
torch.manual_seed(rank)
model = torch.nn.Linear(64, 8)
with torch.no_grad():
    for param in model.parameters():
        param.fill_(0.25)
optimizer = ShardedAdamW(model.named_parameters(), lr=0.01, sharding={"kernel": "eager"})
with Job(folder, {"model": model, "optimizer": optimizer}, save_every=2) as job:
    for step in job.steps(12):
        if f"{step}/{rank}" in kills and not (folder / f"killed {step}").exists():
            (folder / f"killed {step}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
if rank == 0:
    optimizer.synchronize()
    torch.save(model.state_dict(), folder / "last.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("optimizer", ["ShardedAdamW", "ShardedMuon"])
def test_torchrun_restarts_it(optimizer: str, tmp_path: Path) -> None:
    """A rank is killed, and in the restarted run the other one; the same line goes on each time."""
    script = tmp_path / "job.py"
    script.write_text(SCRIPT.replace("ShardedAdamW", optimizer))
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    results = []
    for name, kills in (("whole", []), ("killed", ["5/1", "9/0"])):
        folder = tmp_path / name
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.2"]
        result = subprocess.run(
            [*command, str(script), str(folder), *kills],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert result.returncode == 0, result.stderr
        results.append(torch.load(folder / "last.pt"))
    assert len(list((tmp_path / "killed").glob("killed *"))) == 2
    assert_bitwise(list(results[1].values()), list(results[0].values()))


ORPHAN = SCRIPT.replace(
    "model(torch.randn", "(folder / f'{step} {rank}').touch(); model(torch.randn"
)
ORPHAN = ORPHAN.replace("steps(12)", "steps(100_000)")


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_ranks_that_outlive_torchrun_save_and_end(collectives: str, tmp_path: Path) -> None:
    """The store is torchrun's, and ends with it."""
    script = tmp_path / "job.py"
    script.write_text(ORPHAN.replace('"eager"}', f'"eager", "collectives": "{collectives}"}}'))
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    (tmp_path / "run").mkdir()
    with (tmp_path / "log").open("wb") as log:
        torchrun = subprocess.Popen(
            [*command, "--nproc-per-node", "2", str(script), str(tmp_path / "run")],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        _await(lambda: (tmp_path / "run" / "9 1").exists())
    finally:
        torchrun.kill()
        torchrun.wait()
    _await((tmp_path / "run" / "last.pt").exists)
    assert "torchrun's agent" in (tmp_path / "log").read_text(errors="replace")
    assert not list((tmp_path / "run").glob(".stop-*"))


def _await(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)
