"""The table in DeepSpeed's manual: stage x precision x optimizer, parity or the refusal."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs
from tests.support.runs import max_relative_error

README = Path(__file__).parents[2] / "shardfuse" / "deepspeed" / "README.md"
STAGES = (0, 1, 2)
NAMES = tuple(runs.ORACLES)

REFUSED = "refused"

# Integers are exact in 16 bits: what differs then is the optimizer, not the gradient.
CELLS = {
    (stage, name, mode): Job(
        stage=stage,
        name=name,
        mode=mode,
        clip=0.5,
        gas=2,
        steps=5,
        kind="floats" if mode == "fp32" else "integers",
    )
    for stage in STAGES
    for name in NAMES
    for mode in runs.MODES
}


def stated() -> dict[tuple[int, str, str], str]:
    """Return the cells of the table."""
    text = README.read_text().split("<!-- deepspeed -->")[1]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in rows[0][2:]]
    cells = {}
    for stage, name, *values in rows[2:]:
        for mode, value in zip(columns, values, strict=True):
            cells[int(stage), name.strip(" `"), mode] = value.strip()
    return cells


def test_the_table_has_every_cell() -> None:
    """Each combination is a bound below 1e-5, or refused."""
    cells = stated()
    assert cells.keys() == CELLS.keys()
    for value in cells.values():
        assert value == REFUSED or float(value.removeprefix("< ")) <= 1e-5


@pytest.fixture(scope="module")
def results() -> dict[tuple[int, str, str], list[dict[str, Any]]]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    found: dict[tuple[int, str, str], list[dict[str, Any]]] = {}
    # Autocast by itself: DeepSpeed keeps in the process that it was asked for.
    for modes in (("fp32", "bf16", "fp16"), ("autocast",)):
        keys = [key for key in CELLS if key[2] in modes]
        jobs = [CELLS[key] for key in keys]
        ranks = run_procs(runs.WORLD, runs.run_all, jobs, timeout=200.0)
        found.update(zip(keys, map(list, zip(*ranks, strict=True)), strict=True))
    return found


@pytest.mark.parametrize("key", CELLS, ids=lambda key: "-".join(map(str, key)))
def test_the_table_is_true(
    results: dict[tuple[int, str, str], list[dict[str, Any]]], key: tuple[int, str, str]
) -> None:
    """5 steps, two groups, accumulation over 2, clipping: within the bound of fp64, or refused."""
    job, cell = CELLS[key], stated()[key]
    for result in results[key]:
        if cell == REFUSED:
            assert re.search(r"cannot be driven by .* (Remove|Set) ", result.get("refusal", ""))
            continue
        assert "refusal" not in result, result
        start = [param.detach() for param in runs.Weights(job.entries).members]
        error = max_relative_error(result["values"], runs.reference(job), start)
        assert error < float(cell.removeprefix("< "))
