"""One command line for the first start and every restart, whoever is killed, and when."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pretraining.prepared import PreparedCorpus

from shardfuse.checkpoint import Checkpoints
from tests.launch import jobs, kills

pytestmark = [pytest.mark.timeout(280)]

AUTO = (*jobs.SMALL, "--steps", "12", "--save-every", "2", "--run-dir", "run", "--resume", "auto")


def contents(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, whole."""
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    import torch.distributed.checkpoint as dcp

    _load_state_dict(
        state,
        storage_reader=dcp.FileSystemReader(run / "checkpoints" / f"step-{step}"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return {
        f"{part}.{key}": value
        for part in ("model", "optimizer")
        for key, value in _flat(state[part]).items()
    }


def _flat(values: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return {prefix: values}
    pairs = values.items() if isinstance(values, dict) else ()
    found: dict[str, torch.Tensor] = {}
    for key, value in pairs:
        found |= _flat(value, f"{prefix}.{key}")
    return found


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path, corpus: PreparedCorpus
) -> Path:
    """Return the run that nobody has killed."""
    folder: Path = tmp_path_factory.mktemp("whole")
    inputs = ["--corpus", str(text_file), "--data-dir", str(corpus.folder.parent)]
    jobs.run(folder, [*inputs, *AUTO], 2)
    return folder / "run"


def assert_same_run(run: Path, whole: Path) -> None:
    assert jobs.losses(run) == jobs.losses(whole)
    found, expected = contents(run, 12), contents(whole, 12)
    assert found.keys() == expected.keys()
    assert len(found) > 50
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


# A hundred in all; the first few are those of every run.
NUM_KILLS = {seed: 4 if seed == 0 else 11 if seed <= 6 else 10 for seed in range(10)}


@pytest.mark.parametrize("seed", NUM_KILLS)
def test_killed_again_and_again(tmp_path: Path, inputs: list[str], whole: Path, seed: int) -> None:
    """Each time: in the course of a save, a clean-up or a load, or of all ranks at any time."""
    rng, last, said = random.Random(seed), 0, list[str]()
    while len(said) < NUM_KILLS[seed]:
        text, fault = kills.draw(rng, 2)
        is_any_time = rng.random() < 0.3
        beside = ["--async-save"] if rng.random() < 0.5 else []  # then in the thread that writes
        job = jobs.start(tmp_path, [*inputs, *AUTO, *beside], 2, None if is_any_time else fault)
        if is_any_time:
            delay = rng.uniform(0.2, 2.5)
            text = f"all at {delay:.2f} s"
            time.sleep(delay)
            job.signal(signal.SIGKILL)
        codes = job.wait()
        assert None not in codes, (text, job.output())
        step = kills.newest(tmp_path / "run" / "checkpoints")
        if codes == [0, 0]:  # too late
            assert_same_run(tmp_path / "run", whole)
            shutil.rmtree(tmp_path / "run")
            last = 0
            continue
        said.append(f"{text} {beside}: {codes}, step {last} -> {step}")
        assert -signal.SIGKILL in codes, (said, job.output())
        assert step >= last, said
        last = step
    jobs.run(tmp_path, [*inputs, *AUTO], 2)
    assert_same_run(tmp_path / "run", whole)
    print("\n".join(said))


KILLS_ITSELF = """
import os
kills = {kills}
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", len(kills)))
if attempt < len(kills) and int(os.environ["RANK"]) == kills[attempt][0]:
    from tests.launch.kills import at
    at(*kills[attempt][1:])
"""

# (rank, moment, number of the call in the process, whether after it), one of each attempt.
SEQUENCES = {
    "saving": [(1, "written", 2, True), (0, "manifest", 5, False), (0, "replacing", 2, True)],
    "loading": [(0, "naming", 3, False), (1, "loading", 1, True), (0, "reading", 1, False)],
}


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_torchrun_restarts_it(
    tmp_path: Path, inputs: list[str], whole: Path, sequence: str
) -> None:
    """By the real command with --max-restarts: no hand has to be laid on it."""
    (tmp_path / "sitecustomize.py").write_text(KILLS_ITSELF.format(kills=SEQUENCES[sequence]))
    environ = {"PYTHONPATH": f"{tmp_path}:{jobs.REPOSITORY}"}
    launching = ["--max-restarts", str(len(SEQUENCES[sequence]))]
    command = jobs.start_command(tmp_path, [*inputs, *AUTO], 2, environ, launching)
    out, err = command.communicate(timeout=250)
    assert command.returncode == 0, out + err
    introduced = [line for line in out.splitlines() if line.startswith("run: ")]
    assert len(introduced) >= len(SEQUENCES[sequence]) - 1, out
    assert_same_run(tmp_path / "run", whole)


def test_torchrun_itself_is_killed(tmp_path: Path, inputs: list[str], whole: Path) -> None:
    """Its ranks may go on for a while; the same command waits for them, and then goes on."""
    arguments = [*inputs, *AUTO]
    command = jobs.start_command(tmp_path, arguments, 2)
    folder = tmp_path / "run" / "checkpoints"
    jobs.wait_until(lambda: Checkpoints(folder).steps()[:1] >= [4], "a checkpoint", 100)
    command.kill()
    command.communicate()
    command = jobs.start_command(tmp_path, arguments, 2)
    out, err = command.communicate(timeout=150)
    assert command.returncode == 0, out + err
    assert_same_run(tmp_path / "run", whole)


def test_fewer_ranks_go_on(tmp_path: Path, inputs: list[str], whole: Path) -> None:
    """One of three is killed; two take over, one of those is killed; one ends it."""
    for world_size, step in ((3, 4), (2, 6)):

        def fault(own: int, number: int = step // 2 if world_size == 3 else 1) -> None:
            if own == 0:
                kills.at("naming", number, is_after=False)

        codes = jobs.start(tmp_path, [*inputs, *AUTO], world_size, fault).wait()
        assert codes[0] == -signal.SIGKILL
        assert kills.newest(tmp_path / "run" / "checkpoints") == step
    jobs.run(tmp_path, [*inputs, *AUTO], 1)
    assert jobs.losses(tmp_path / "run") == pytest.approx(jobs.losses(whole), rel=1e-4)
