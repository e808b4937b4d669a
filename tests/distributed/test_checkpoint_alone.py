"""One rank alone saves, loads, waits or fails in it: an error on both, by name, within seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardfuse import ShardedAdam
from shardfuse.checkpoint import Checkpoints, integrity, load, loading, save
from tests.support.checkpoints import Job
from tests.support.harness import STAYING, run_procs

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]

WORDS = {
    "saves": "Checkpoints.save()",
    "saves to a folder": "checkpoint.save()",
    "loads": "Checkpoints.load_latest()",
    "asynchronous saves": "checkpoint.async_save()",
    "waits": "checkpoint.wait()",
    "fails in load": "division by zero",
    "fails in clean-up": "division by zero",
}


def fail(*_: Any) -> None:
    raise ZeroDivisionError("division by zero")


def act(case: str, path: Path, job: Job, checkpoints: Checkpoints, is_odd: bool) -> None:
    if case == "asynchronous saves":
        checkpoints.save(job.objects, 2, async_save=is_odd)
    elif case == "waits":
        checkpoints.save(job.objects, 2, async_save=True)
        if is_odd:
            checkpoints.wait()
    elif case == "fails in load":
        if is_odd:
            loading._LoadOperation.finish = fail  # type: ignore[method-assign,assignment]
        load(job.objects, path / "step-1")
    elif case == "fails in clean-up":
        if is_odd:
            integrity._share_faults = fail  # type: ignore[assignment]
        checkpoints.save(job.objects, 2)
    elif is_odd and case == "saves":
        checkpoints.save(job.objects, 2)
    elif is_odd and case == "saves to a folder":
        save(job.objects, path / "step-2")
    elif is_odd:
        checkpoints.load_latest(job.objects)
    job.train(1)


def alone(case: str, collectives: str, path: Path) -> str:
    """Return what this rank is told; nothing else could tell, because both keep what they have."""
    job, checkpoints = Job(ShardedAdam, {"collectives": collectives}), Checkpoints(path)
    job.train(1)
    checkpoints.save(job.objects, 1)
    try:
        act(case, path, job, checkpoints, dist.get_rank() == 1)
    except Exception as error:
        STAYING.append(error)
        return str(error)
    return ""


@pytest.mark.parametrize("collectives", ["auto", "native"])
@pytest.mark.parametrize("case", WORDS)
def test_one_rank_alone(case: str, collectives: str, tmp_path: Path) -> None:
    for text in run_procs(2, alone, case, collectives, tmp_path, timeout=25):
        assert WORDS[case] in text
