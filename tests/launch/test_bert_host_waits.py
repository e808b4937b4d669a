"""The BERT job on an accelerator: the host launches a step while the device computes the last one.

On the stand-in of tests/support/npu, which notes what the host waits for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import jobs
from tests.launch.test_acceptance import stand_in
from tests.support import npu

NUM_STEPS = 7

NOTING = f"""
import json, sys
from pathlib import Path

sys.path.insert(0, {str(jobs.SCRIPT.parent)!r})
from pretraining import training
from tests.support.npu import host_syncs

noted = []
train_step, finish_step = training.Trainer._train_step, training.Trainer._finish_step

def noting(name, native):
    def call(self, *args):
        with host_syncs() as found:
            result = native(self, *args)
        noted.append([name, found])
        return result
    return call

training.Trainer._train_step = noting("launch", train_step)
training.Trainer._finish_step = noting("finish", finish_step)
training.Trainer._agree = noting("agree", training.Trainer._agree)
import pretrain
code = pretrain.main(sys.argv[2:])
Path(sys.argv[1]).with_suffix("." + __import__("os").environ["RANK"]).write_text(json.dumps(noted))
sys.exit(code)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="a C++ compiler builds the stand-in")
@pytest.mark.timeout(200)
def test_a_step_waits_for_the_one_before_only(tmp_path: Path, inputs: list[str]) -> None:
    """Its losses are read once the next one is launched; nothing else waits for the device."""
    pytest.importorskip("ninja")
    script = tmp_path / "noting.py"
    script.write_text(NOTING)
    options = [
        *inputs,
        *jobs.SMALL,
        "--steps",
        str(NUM_STEPS),
        "--device",
        "auto",
        "--optimizer",
        "lamb",
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc-per-node=2", str(script), str(tmp_path / "noted.json"), *options],
        cwd=tmp_path,
        env=os.environ
        | stand_in(tmp_path)
        | {npu.LIBRARY_VARIABLE: npu.build(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "on npu:0" in result.stdout
    for rank in range(2):
        noted = json.loads((tmp_path / f"noted.{rank}").read_text())
        # The first steps make tables, and the optimizer compares what the ranks do.
        launches = [found for name, found in noted if name == "launch"]
        assert len(launches) == NUM_STEPS
        # One bucket: the owner of a tensor that may lack a gradient looks at what has arrived.
        assert all(found in ([], ["copy to the host"]) for found in launches[3:])
        assert all(found == [] for name, found in noted if name == "agree")
        finishes = [found for name, found in noted if name == "finish" and found]
        assert finishes == [["Event.synchronize"]] * NUM_STEPS
    (metrics,) = tmp_path.glob("**/metrics.jsonl")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "train"]
    assert steps == list(range(1, NUM_STEPS + 1))
