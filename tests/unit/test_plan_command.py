"""python -m shardfuse plan: its table, JSON and picture, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForPreTraining

from shardfuse import ShardConfig, ShardedAdam, ShardedLamb, ShardedMuon
from shardfuse.__main__ import main
from shardfuse.comm.transport import AsyncModel, bucket_nbytes
from shardfuse.plan import Speeds, plan, predict, shapes_of
from shardfuse.plan.command import installed_device
from shardfuse.plan.models import count_elements, shapes_of_module


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    assert main(["plan", *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_bert_is_that_of_transformers() -> None:
    """Names, shapes and order, so that buckets are the same."""
    config = BertConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512
    )
    with torch.device("meta"):
        model = BertForPreTraining(config)
    assert shapes_of("bert-tiny") == shapes_of_module(model)
    assert count_elements(shapes_of("bert-large")) == 336_226_108


def small() -> nn.Module:
    """Return a model for the import path."""
    return nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 3))


def test_a_model_by_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", f"{__name__}:small", "--world-size", "2")
    assert (found["num_params"], found["numel"]) == (4, 100 * 200 + 200 + 600 + 3)


def test_ten_billion_on_four_thousand(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a mesh, too: sums over rows are 2 (R - 1) / R of a shard in and out of each rank."""
    options = ("--model", "10b", "--world-size", "4096", "--dtype", "bf16")
    flat, mesh = planned(capsys, *options), planned(capsys, *options, "--replicas", "8")
    for found, shards in ((flat, 4096), (mesh, 512)):
        assert found["numel"] == pytest.approx(10e9, rel=0.01)
        assert found["num_shards"] == shards
        states = found["memory"]["optimizer states and masters"]
        assert states == pytest.approx(12 * found["numel"] / shards, rel=0.01)
    kinds = {call["kind"]: call for call in mesh["collectives"]}
    assert kinds["sums over rows"]["axis"] == "replicate"
    whole = kinds["reduce-scatter of gradients"]["payload_nbytes"]
    assert kinds["sums over rows"]["sent_nbytes"] == pytest.approx(
        2 * whole / 512 * 7 / 8, rel=0.01
    )


def test_published_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    """2 + 2 + 12 bytes for mixed precision and Adam, as in the paper's figure 1: 120 GB of 7.5b."""
    options = ("--model", "7.5b", "--world-size", "64", "--dtype", "bf16")
    found = planned(capsys, *options)
    gb = {name: nbytes / found["numel"] * 7.5 for name, nbytes in found["published"].items()}
    assert gb == {
        "replicated (DDP)": pytest.approx(120),
        "ZeRO-1": pytest.approx(31.4, abs=0.05),
        "ZeRO-2": pytest.approx(16.6, abs=0.05),
        "ZeRO-3": pytest.approx(1.9, abs=0.05),
    }


def test_fsdp(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers are found by their numbers; parameters in bf16 travel in half the bytes."""
    options = ("--model", "bert-large", "--world-size", "64", "--fsdp")
    found, half = planned(capsys, *options), planned(capsys, *options, "bf16")
    assert found["num_buckets"] == 25  # 24 layers and the root
    for own, other in zip(found["collectives"], half["collectives"], strict=True):
        assert own["payload_nbytes"] == 2 * other["payload_nbytes"]
    assert found["memory"] == half["memory"]
    assert main(["plan", *options]) == 0
    assert "25 layers of FSDP2 of at most 129.9 MiB" in capsys.readouterr().out
    assert main(["plan", *options, "--forward-ms", "1", "--backward-ms", "2"]) != 0
    assert "Times under --fsdp are not modelled" in capsys.readouterr().err


TIMES = ("--forward-ms", "10", "--backward-ms", "20", "--link-gbit", "1")
SLOW = ("plan", "--model", "bert-large", "--world-size", "8", "--device", "cuda", *TIMES)
NO_OVERLAP = '{"overlap_grad_sync": false}'


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--replicas", "2"), "overlap_grad_sync and overlap_param_sync are off over a mesh"),
        (("--sharding", NO_OVERLAP), "overlap_grad_sync are off by --sharding"),
        (("--optimizer", "lamb", "--memory-gb", "1"), "the norms of this optimizer need all"),
    ],
)
def test_a_step_that_is_slower_than_ddp_says_why(
    options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SLOW, *options]) == 0
    text = capsys.readouterr().out
    assert ("of DDP's time, because" in text) == (reason in text)
    assert main(["plan", "--model", "bert-tiny", "--world-size", "8", *TIMES]) == 0
    assert "because" not in capsys.readouterr().out


def test_the_device_is_that_of_the_installed_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(torch.version, "cuda", None)
    assert installed_device() == "cpu"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert installed_device() == "cuda"
    names = {"torch_npu": find_spec("torch")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: names.get(name))
    assert installed_device() == "npu"


def test_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "bert-tiny", "--world-size", "8", "--optimizer", "lamb"]
    times = ["--forward-ms", "10", "--backward-ms", "20"]
    assert main(["plan", *options, *times, "--png", str(tmp_path / "plan.png")]) == 0
    text = capsys.readouterr().out
    for word in ("8 ranks", "ZeRO-2", "all-gather of parameters", "exposed", "padding"):
        assert word in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *options]) == 0
    assert "Seconds" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "bert-huge"], "Invalid model: 'bert-huge'"),
        (["--model", "nowhere:build"], "No module named 'nowhere'"),
        (["--replicas", "3"], "8 ranks in 3 rows"),
        (["--sharding", '{"stage": 7}'], "stage"),
        (["--sharding", '{"stge": 1}'], "stge"),
        (["--options", '{"lr": -1}'], "learning rate: -1"),
        (["--options", '{"sharding": {"stage": 2}}'], "an option of its own, --sharding"),
        (["--sharding", '{"grads_are_reduced": true}'], "grads_are_reduced: True"),
        (["--sharding", '{"grad_sync_bits": 8}', "--replicas", "2"], "8 with a mesh"),
        (["--replicas", "8"], "8 rows of one rank"),
        (["--model", "infb"], "Invalid model: 'infb'"),
        (["--model=-1b"], "Invalid model: '-1b'. Must be 1 or more"),
        (["--png", "nowhere/plan.png"], "No such file or directory: 'nowhere/plan.png'"),
        (["--forward-ms", "1", "--backward-ms", "1", "--link-gbit", "0"], "Invalid link"),
        (["--forward-ms", "1", "--backward-ms", "1", "--latency-us", "nan"], "Invalid latency_s"),
        (["--forward-ms", "1", "--backward-ms", "1", "--latency-us", "inf"], "Invalid latency_s"),
        (
            ["--forward-ms", "1", "--backward-ms", "1", "--tokens", "8", "--tflops", "1"],
            "Give --tokens and --tflops, or --forward-ms and --backward-ms",
        ),
        (["--forward-ms", "1"], "Give --forward-ms and --backward-ms together"),
        (["--forward-ms", "-1", "--backward-ms", "1"], "Invalid time of forward: -1.0 ms"),
        (["--forward-ms", "nan", "--backward-ms", "1"], "Invalid time of forward: nan ms"),
        (["--tokens", "8"], "Give --tokens and --tflops together"),
        (["--tokens", "8", "--tflops", "0"], "Invalid --tflops: 0.0"),
    ],
)
def test_wrong_options(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line that says which."""
    assert main(["plan", "--model", "bert-tiny", "--world-size", "8", *options]) == 2
    assert message in capsys.readouterr().err


def test_one_rank_has_no_masters(capsys: pytest.CaptureFixture[str]) -> None:
    """A single rank rounds nothing, and was planned to keep what it would have rounded off."""
    options = ["--model", "bert-tiny", "--world-size", "1"]
    plain = planned(capsys, *options)
    for sharding in ({"param_sync_dtype": "bfloat16"}, {"param_sync_bits": 4, "grad_sync_bits": 8}):
        assert planned(capsys, *options, "--sharding", json.dumps(sharding)) == plain


def test_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Keys without quotes are shown how they are written."""
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", "bert-tiny", "--world-size", "8", "--sharding", "{stage: 2}"])
    assert """'{stage: 2}' is no JSON, such as '{"stage": 2}': """ in capsys.readouterr().err


def test_times_follow_the_speeds() -> None:
    """Nothing is hidden at first; all but the ends is where the link is fast enough."""
    shapes = shapes_of("bert-small")
    for build in (ShardedAdam, ShardedLamb):
        budget = plan(shapes, build, world_size=4, device="cpu")
        assert budget.overlaps == (True, True)
        slow, fast = (predict(budget, Speeds(link=s), 0.1, 0.2) for s in (1e8, 1e10))
        assert slow.step == pytest.approx(max(slow.traffic, slow.compute), rel=0.25)
        assert fast.exposed < 0.15 * fast.compute
        for times in (slow, fast):
            assert times.compute <= times.step <= times.without_overlap
            assert times.step >= times.traffic * 0.99


def test_exchange_takes_time() -> None:
    """Two all-to-alls, and between them the products of the rank that has most."""
    shapes = [("a", (256, 128)), ("b", (128, 256)), ("c", (64, 64)), ("d", (999,))]
    budget = plan(shapes, ShardedMuon, world_size=2, device="cpu")
    large, small = (2 * 5 * n * n * (2 * m + n) for n, m in ((128, 256), (64, 64)))
    exchange = budget.exchange
    assert exchange is not None
    assert (exchange.flops, exchange.total_flops) == (large + small, 2 * large + small)
    assert exchange.sent_nbytes == 2 * 2 * (2 * 256 * 128 + 64 * 64) // 4
    plain = predict(budget, Speeds(link=1e9), 0.1, 0.2)
    slow = predict(budget, Speeds(link=1e9, flops=1e9), 0.1, 0.2)
    assert slow.traffic == plain.traffic
    assert slow.step - plain.step == pytest.approx(exchange.flops / 1e9)
    assert slow.ddp - plain.ddp == pytest.approx(exchange.total_flops / 1e9)
    none = predict(replace(budget, exchange=None), Speeds(link=1e9), 0.1, 0.2)
    sent_s = exchange.sent_nbytes / 1e9 + 2 * 20e-6
    assert plain.step - none.step == pytest.approx(sent_s)
    assert plain.traffic - none.traffic == pytest.approx(sent_s)


def test_products_are_balanced(capsys: pytest.CaptureFixture[str]) -> None:
    """Of BERT-large on 8 ranks; the table has them, too."""
    options = ["--model", "bert-large", "--world-size", "8", "--optimizer", "muon"]
    exchange = planned(capsys, *options)["exchange"]
    assert exchange["flops"] <= 1.15 * exchange["total_flops"] / 8
    assert main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert f"the rank that has most{exchange['flops'] / 1e12:34,.4f}" in text


@pytest.mark.parametrize("world_size", [2, 4, 8, 64, 512, 4096])
@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_messages_stay_large(world_size: int, device: str) -> None:
    """A rank's message to a peer does not shrink as ranks are added, or it is all of the model.

    The two buckets' parts that arrive at a time, without overlap, are in the memory of the plan.
    """
    budget = plan(
        shapes_of("1b"),
        ShardedAdam,
        world_size=world_size,
        device=device,
        dtype=torch.bfloat16,
        sharding=ShardConfig(overlap_grad_sync=False, overlap_param_sync=False),
    )
    least = (512 if device == "cpu" else 256) << 10
    assert budget.num_buckets == 1 or budget.bucket_nbytes >= world_size * least
    # Equal in size, but for rounding to whole blocks of all ranks.
    smallest = min(bucket.share for bucket in budget.buckets) * budget.padded_numel * 2
    assert budget.num_buckets == 1 or smallest >= world_size * least
    assert budget.bucket_nbytes <= max(
        (256 if device == "npu" else 8) << 20, 2 * world_size * least
    )
    if device == "npu" and budget.num_buckets > 1:
        arriving = 2 * budget.bucket_nbytes // world_size
        assert budget.memory["gradients that arrive"] == arriving


@pytest.mark.parametrize(
    ("options", "mib"),
    [
        ({"device_type": "cpu", "overlaps": True, "world_size": 2}, 25),
        ({"device_type": "cpu", "overlaps": True, "world_size": 4}, 25),
        ({"device_type": "npu", "overlaps": True, "world_size": 8}, 50),
        ({"device_type": "cuda", "overlaps": False, "world_size": 8}, 256),
        ({"device_type": "cuda", "overlaps": False, "world_size": 1024}, 512),
        (
            {"device_type": "npu", "overlaps": True, "world_size": 8, "payload_nbytes": 32 << 30},
            1024,
        ),
        ({"device_type": "cpu", "overlaps": True, "world_size": 4, "payload_nbytes": 32 << 30}, 25),
    ],
)
def test_automatic_buckets(options: dict[str, Any], mib: int) -> None:
    """The bound follows from device, overlap, ranks and parameters; a number given wins."""
    options = {"payload_nbytes": 1 << 20, **options}
    assert bucket_nbytes("auto", AsyncModel.BLOCKING, **options) == mib << 20
    assert bucket_nbytes(3, AsyncModel.BLOCKING, **options) == 3 << 20


@pytest.mark.parametrize(("device", "is_copied"), [("npu", True), ("cpu", False)])
def test_zero_copy_takes_copies(
    device: str, is_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HCCL's may change what it sends: each bucket under way is there once more, as it is sent."""

    def memory() -> dict[str, int]:
        return plan(
            shapes_of_module(small()),
            lambda params, sharding: ShardedAdam(params, sharding=sharding),
            world_size=4,
            device=device,
            sharding=ShardConfig(bucket_cap_mb=0.01),
        ).memory

    monkeypatch.delenv("TORCH_HCCL_ZERO_COPY", raising=False)
    plain = memory()
    monkeypatch.setenv("TORCH_HCCL_ZERO_COPY", "1")
    copies = {key: value for key, value in memory().items() if key not in plain}
    # What arrives is a quarter of each.
    sent = {"copies of gradients, for zero-copy": 4 * plain["gradients that arrive"]}
    assert copies == (sent if is_copied else {})


@pytest.mark.parametrize(("device", "copied"), [("npu", 1 / 4), ("cuda", 0), ("cpu", 0)])
def test_an_all_gather_in_place_takes_no_copies(
    device: str, copied: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HCCL's gets a copy of a rank's part of all params, unless the variable says otherwise."""

    def found() -> tuple[int, int]:
        budget = plan(
            shapes_of_module(small()),
            lambda params, sharding: ShardedAdam(params, sharding=sharding),
            world_size=4,
            device=device,
        )
        copies = budget.for_a_time.get("step: copies that HCCL gathers from", 0)
        return copies, budget.memory["parameters"]

    monkeypatch.delenv("SHARDFUSE_IN_PLACE_ALL_GATHER", raising=False)
    copies, params = found()
    assert copies == copied * params
    monkeypatch.setenv("SHARDFUSE_IN_PLACE_ALL_GATHER", "1")
    assert found() == (0, params)
