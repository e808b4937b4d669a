"""Hugging Face's Trainer on two gloo ranks, driven by DeepSpeed from a JSON file with our names."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.support import trainer_runs as runs
from tests.support.trainer_runs import GAS, LR, MICRO, Job

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
    ),
]

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "ShardedLamb",
        "params": {
            "lr": "auto",
            "betas": "auto",
            "eps": "auto",
            "weight_decay": "auto",
            "variant": "google",
        },
    },
}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
PLAIN = {
    **AUTO,
    "train_batch_size": runs.WORLD * MICRO * GAS,
    "gradient_clipping": 1.0,
    "optimizer": {
        "type": "ShardedLamb",
        "params": {"lr": LR, **runs.OPTIONS, "variant": "google"},
    },
}
EVERY_TWO = {"save_strategy": "steps", "save_steps": 2}


def make(name: str, stage: int, config: dict[str, Any], **kwargs: Any) -> Job:
    return Job(
        name, how="deepspeed", config={**config, "zero_optimization": {"stage": stage}}, **kwargs
    )


JOBS = {
    job.name: job
    for stage in (0, 1, 2)
    for job in (
        make(f"auto-{stage}", stage, AUTO, arguments=EVERY_TWO),
        make(f"resumed-{stage}", stage, AUTO, resume=f"auto-{stage}/checkpoint-4"),
        make(f"plain-{stage}", stage, PLAIN),
        make(f"schedule-{stage}", stage, {**AUTO, "scheduler": SCHEDULER}),
    )
}
# fp32 rounding of six steps, gradients through BERT included.
TOLERANCE = 5e-6


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return runs.launch(list(JOBS.values()), tmp_path_factory.mktemp("deepspeed-trainer"))


def rates(name: str) -> list[float]:
    """Return the rates that steps are taken with.

    DeepSpeed's own schedules stand still for one step: its engine makes the first step with the
    rate of step 0, and so the second.
    """
    return [0.0, *runs.rates()[:-1]] if name.startswith("schedule") else runs.rates()


@pytest.mark.parametrize("name", [name for name in JOBS if not name.startswith("resumed")])
def test_equals_fp64_math_on_all_samples(name: str, ranks: list[dict[str, Any]]) -> None:
    """Params, logged gradient norms and learning rates are those of one large batch."""
    result = ranks[0][name]
    assert result["wrapper"] == "DeepSpeedEngine"
    assert result["optimizer"] == (
        "ShardedLamb" if name.endswith("0") else "DeepSpeedZeroOptimizer"
    )
    assert result["used"] == pytest.approx(rates(name))
    # In transformers 5.23 the engine has moved the schedule on when Trainer reads it, so that the
    # next step's rate is logged.
    logged = result["logged"]
    assert logged == pytest.approx(rates(name)) or logged[:-1] == pytest.approx(rates(name)[1:])
    expected, norms = runs.reference(JOBS[name], rates(name))
    assert result["norms"] == pytest.approx(norms, rel=1e-6)
    assert runs.error(result["params"], expected) < TOLERANCE


@pytest.mark.parametrize("name", JOBS)
def test_ranks_agree(name: str, ranks: list[dict[str, Any]]) -> None:
    """Bitwise."""
    for param, other in zip(ranks[0][name]["params"], ranks[1][name]["params"], strict=True):
        assert torch.equal(param, other)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resumed_run_is_uninterrupted_one(stage: int, ranks: list[dict[str, Any]]) -> None:
    """From a checkpoint that Trainer had the engine save and load: two steps, the same bits."""
    for rank in ranks:
        resumed, straight = rank[f"resumed-{stage}"], rank[f"auto-{stage}"]
        assert resumed["used"] == pytest.approx(runs.rates()[4:])
        pairs = zip(resumed["params"], straight["params"], strict=True)
        assert all(torch.equal(param, other) for param, other in pairs)
