"""A step on an accelerator launches and waits for nothing, so that the host runs ahead.

On the stand-in of `pytest --device npu`, which notes what the host waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardfuse
from shardfuse import ShardedGradScaler
from shardfuse.optim import npu as optim_npu
from shardfuse.optim import paddle
from shardfuse.training import StepMonitor
from tests.support import npu, placing
from tests.support.harness import run_threads

pytestmark = [
    pytest.mark.skipif(not placing.on_device(), reason="the CPU computes where it is called"),
    pytest.mark.timeout(100),
]

NUM_STEPS = 4

BUILDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    **{
        name: (getattr(shardfuse, f"Sharded{name}"), {"lr": 1e-3})
        for name in ("SGD", "Adam", "AdamW", "BertAdam", "Lamb", "RMSprop", "RMSpropTF")
    },
    "Adadelta": (shardfuse.ShardedAdadelta, {"lr": 1e-3}),
    "AdamP": (shardfuse.ShardedAdamP, {"lr": 1e-3}),
    "Lamb google": (shardfuse.ShardedLamb, {"lr": 1e-3, "variant": "google"}),
    "Lamb global norm": (shardfuse.ShardedLamb, {"lr": 1e-3, "use_global_grad_norm": True}),
    "Muon": (shardfuse.ShardedMuon, {"lr": 1e-3}),
    "NpuFusedAdamW": (optim_npu.NpuFusedAdamW, {"lr": 1e-3}),
    "Paddle's Lamb": (paddle.Lamb, {"learning_rate": 1e-3}),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "buckets": {"bucket_cap_mb": 0.01},
    "clip": {"clip_grad_norm": 1.0},
    "bf16 wires": {"grad_sync_dtype": "bfloat16", "param_sync_dtype": "bfloat16"},
    "8-bit gradients": {"grad_sync_bits": 8},
    "8-bit params": {"param_sync_bits": 8, "bucket_cap_mb": 0.01},
    "8 and 4 bits": {"grad_sync_bits": 8, "param_sync_bits": 4, "bucket_cap_mb": 0.01},
}


AGREEMENT = ["copy to the host"]
"""What ranks must know of each other where gradients leave under backward: a wait for peers' hosts,
on a stream of its own."""


def train(
    build: Callable[..., Any],
    options: dict[str, Any],
    sharding: dict[str, Any],
    dtype: torch.dtype,
    *,
    lr: Callable[[int], Any] | None = None,
) -> list[list[str]]:
    """Return what this rank's host has waited for in each step, its backward included.

    A layer has no gradient on any rank. ``lr`` returns the learning rate of a step.
    """
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 300), torch.nn.LayerNorm(300), torch.nn.Linear(300, 50)
    ).to(dtype)
    unused = torch.nn.Linear(50, 50).to(dtype)
    key = "parameters" if build is paddle.Lamb else "params"
    named = {key: [*model.named_parameters(), *unused.named_parameters("unused")]}
    optimizer = build(**named, **options, sharding={"kernel": "eager", **sharding})
    batch, syncs = torch.ones(8, 40, dtype=dtype), []
    for step in range(NUM_STEPS):
        if lr is not None:
            optimizer.param_groups[0]["lr"] = lr(step)
        with npu.host_syncs() as found:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        syncs.append(found)
    return syncs


def check(sharding: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """No host waits, alone or of two ranks, from the second step on; but for the agreement.

    At first ranks agree on what they do, and tables are made.
    """
    build, options, dtype = args
    run = partial(train, **kwargs)
    assert run(build, options, sharding, dtype)[1:] == [[]] * (NUM_STEPS - 1)
    for syncs in run_threads(2, run, build, options, sharding, dtype):
        assert syncs[1:] == [AGREEMENT] * (NUM_STEPS - 1)


@pytest.fixture(params=["eager", "compile"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the update runs; compiled by no compiler, as none knows the stand-in.

    What is left is what Kernels does for each call of a compiled function.
    """
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILDS)
def test_no_optimizer_waits(name: str, dtype: torch.dtype, kernel: str) -> None:
    check({"kernel": kernel, "bucket_cap_mb": 0.04}, *BUILDS[name], dtype)


@pytest.mark.parametrize("name", BUILDS)
def test_no_update_waits_at_stage_2(name: str, kernel: str) -> None:
    """But for the agreement."""
    sharding = {"kernel": kernel, "stage": 2, "overlap_grad_sync": False, "bucket_cap_mb": 0.01}
    most = Counter(AGREEMENT)
    for syncs in run_threads(2, train, *BUILDS[name], sharding, torch.float32):
        assert all(Counter(found) <= most for found in syncs[1:]), syncs


@pytest.mark.parametrize("name", OPTIONS)
def test_no_option_waits(name: str, kernel: str) -> None:
    sharding = {"bucket_cap_mb": 0.04, "kernel": kernel, **OPTIONS[name]}
    check(sharding, *BUILDS["BertAdam"], torch.float32)


@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("name", BUILDS)
def test_no_schedule_waits(name: str, is_tensor: bool, kernel: str) -> None:
    """Another learning rate in every step, as a number or as a tensor on the device."""

    def lr(step: int) -> Any:
        return torch.full((), 1e-3 / (step + 1)) if is_tensor else 1e-3 / (step + 1)

    check({"kernel": kernel, "bucket_cap_mb": 0.04}, *BUILDS[name], torch.float32, lr=lr)


def test_one_bucket_needs_no_agreement() -> None:
    """Nothing is sent early, and the owner of an unused layer looks at what has arrived, once."""
    build, options = BUILDS["Adam"]
    ranks = run_threads(2, train, build, options, {}, torch.float32)
    for found in list(zip(*ranks, strict=True))[1:]:
        assert sorted(map(len, found)) == [0, 1]


@pytest.mark.parametrize(
    ("sharding", "most"),
    [
        # Whether a gradient came late on some rank decides what is sent again.
        ({"stage": 2}, {"copy to the host": 1}),
        ({"stage": 2, "bucket_cap_mb": 0.01}, {"copy to the host": 1}),
    ],
    ids=["stage 2", "stage 2, buckets"],
)
def test_what_ranks_must_know_is_waited_for_once(
    sharding: dict[str, Any], most: dict[str, int]
) -> None:
    build, options = BUILDS["Adam"]
    for syncs in run_threads(2, train, build, options, sharding, torch.float32):
        assert all(Counter(found) <= Counter(most) for found in syncs[1:]), syncs


def train_scaled(has_scaler: bool, sharding: dict[str, Any]) -> list[list[str]]:
    model = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 30))
    optimizer = shardfuse.ShardedAdam(model.named_parameters(), sharding=sharding)
    scaler = ShardedGradScaler("npu", init_scale=4.0)
    syncs = []
    for _ in range(NUM_STEPS):
        loss = model(torch.ones(8, 40)).square().mean()
        with npu.host_syncs() as found, nullcontext():
            (scaler.scale(loss) if has_scaler else loss).backward()
            scaler.step(optimizer) if has_scaler else optimizer.step()
            if has_scaler:
                scaler.update()
        optimizer.zero_grad()
        syncs.append(found)
    assert dist.is_initialized()
    return syncs


@pytest.mark.parametrize(
    ("sharding", "num_waits"),
    [({}, 0), ({"bucket_cap_mb": 0.01}, 1), ({"stage": 2, "bucket_cap_mb": 0.01}, 1)],
    ids=["one bucket", "buckets", "stage 2"],
)
def test_a_scaler_waits_for_its_decision(
    sharding: dict[str, Any], num_waits: int, kernel: str
) -> None:
    """Whether a step is skipped is read by the host: torch's own scaler does so, too.

    At stage 2 it also finds out which gradients overflow, which are in no p.grad.
    """
    sharding = {"kernel": kernel, **sharding}
    for syncs in run_threads(2, train_scaled, False, sharding):
        assert [len(found) for found in syncs[1:]] == [num_waits] * (NUM_STEPS - 1)
    for syncs in run_threads(2, train_scaled, True, sharding):
        most = num_waits + (2 if sharding.get("stage") == 2 else 1)
        assert len(syncs[-1]) <= most, syncs


def monitor(kernel: str) -> list[list[str]]:
    """Return what the host waits for in steps of which every second is watched, and taken."""
    model = torch.nn.Linear(40, 300)
    optimizer = shardfuse.ShardedLamb(
        model.parameters(), lr=1e-3, use_global_grad_norm=True, sharding={"kernel": kernel}
    )
    records, syncs, watch = [], [], StepMonitor(optimizer, every=2)
    batch = torch.ones(8, 40)
    for _ in range(8):
        with npu.host_syncs() as found:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            records += watch.take()
        syncs.append(found)
    records += watch.close()
    assert [record.step for record in records] == [2, 4, 6, 8]
    assert all(record.grad_norm > 0 for record in records)
    return syncs


def test_a_watched_step_does_not_wait(kernel: str) -> None:
    for syncs in [monitor(kernel), *run_threads(2, monitor, kernel)]:
        assert syncs[2:] == [[]] * 6
