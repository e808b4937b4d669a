"""shardfuse.checkpoint: what any number of ranks saves, any number loads, bit for bit."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb
from shardfuse.checkpoint import load, save
from shardfuse.checkpoint.index import CheckpointReader, Manifest
from tests.distributed.test_overlap import OPTIMIZERS
from tests.support.checkpoints import Everything, Job, assert_same
from tests.support.harness import count_c10d_calls, run_procs, run_threads
from tests.support.placing import device_type

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fewer than two dimensions.*:UserWarning"),
]

# The schedule's and the trust ratios' arithmetic is the same at every world by exact sums; LAMB's
# norms are not sums of integers, so that its updates are compared at one world only.
BUILDS: dict[str, Any] = OPTIMIZERS | {
    "bert_schedule": functools.partial(ShardedBertAdam, warmup=0.25, t_total=20, max_grad_norm=-1),
    "amsgrad": functools.partial(ShardedAdamW, amsgrad=True),
}


def saved(job: Job, folder: Path) -> dict[str, Any]:
    save(job.objects, folder, info={"step": job.step})
    return job.values()


def first_half(build: Any, folder: Path, sharding: dict[str, Any] | None = None) -> Any:
    """Train, save, go on; return all values at both points."""
    job = Job(build, sharding)
    job.train(3)
    half = saved(job, folder)
    job.train(3)
    return half, job.values()


def loaded(
    build: Any, folder: Path, sharding: dict[str, Any] | None = None, to: Path | None = None
) -> Any:
    """Load into other values; return all, save again if asked to, then go on."""
    job = Job(build, sharding, seed=1)
    state = job.objects
    assert load(state, folder)["step"] == 3
    job.step = state["step"]
    assert state["list"][1]["a"].item() == 3
    half = job.values()
    if to is not None:
        save(job.objects, to, info={"step": job.step})
    job.train(3)
    return half, job.values()


@pytest.mark.parametrize("name", BUILDS)
def test_two_to_three_to_one_four_two(name: str, tmp_path: Path) -> None:
    """States, masters, params, buffers, schedules and scaler; training goes on at two the same."""
    build, first, second = BUILDS[name], tmp_path / "first", tmp_path / "second"
    (half, end), _ = run_threads(2, lambda: first_half(build, first))
    for found, _ in run_threads(3, lambda: loaded(build, first, to=second)):
        assert_same(found, half)
    for world_size in (1, 4, 2):
        for found, went_on in run_threads(world_size, lambda: loaded(build, second)):
            assert_same(found, half)
            if world_size == 2:
                assert_same(went_on, end)


ACCUMULATED: dict[str, dict[str, Any]] = {
    "overlap": {"overlap_grad_sync": True, "overlap_param_sync": True},
    "stage 2": {"stage": 2},
}


@pytest.mark.parametrize("way", ACCUMULATED)
@pytest.mark.parametrize("name", ["ShardedAdamW", "ShardedLamb", "bert_schedule"])
def test_accumulated_gradients(name: str, way: str, tmp_path: Path) -> None:
    """Three steps and three are six, of three backward() each; nothing else tells them apart."""

    def train(from_step: int, to_step: int) -> dict[str, Any]:
        job = Job(BUILDS[name], ACCUMULATED[way], seed=from_step, num_micro=3)
        state = job.objects
        if from_step:
            load(state, tmp_path / "a")
            job.step = state["step"]
        job.train(to_step - job.step)
        if to_step == 3:
            save(job.objects, tmp_path / "a")
        return job.values()

    straight = run_threads(2, lambda: train(0, 6))
    half = run_threads(2, lambda: train(0, 3))
    key = "model.body.0.weight"
    assert not torch.equal(half[0][key], straight[0][key])
    for found, expected in zip(run_threads(2, lambda: train(3, 6)), straight, strict=True):
        assert_same(found, expected)


ONE_BUCKET = {"bucket_cap_mb": 1.0}

SHARDINGS: dict[str, dict[str, Any]] = {
    "larger buckets": {"bucket_cap_mb": 1.0},
    "stage 2": {"stage": 2},
    "bf16 wires": {"grad_sync_dtype": "bfloat16"},
    "8-bit gradients": {"grad_sync_bits": 8},
}


@pytest.mark.parametrize("to", SHARDINGS)
def test_other_configurations(to: str, tmp_path: Path) -> None:
    """Another stage, size of buckets or wire loads the same state."""
    (half, _), _ = run_threads(2, lambda: first_half(ShardedAdam, tmp_path / "a"))
    for found, _ in run_threads(3, lambda: loaded(ShardedAdam, tmp_path / "a", SHARDINGS[to])):
        assert_same(found, half)
    run_threads(3, lambda: loaded(ShardedAdam, tmp_path / "a", SHARDINGS[to], to=tmp_path / "b"))
    for found, _ in run_threads(2, lambda: loaded(ShardedAdam, tmp_path / "b")):
        assert_same(found, half)


def differences(folder: Path, to: Path) -> Any:
    return loaded(ShardedAdam, folder, {"param_sync_bits": 8}, to=to)


def test_differences_go_on_as_if_not_stopped(tmp_path: Path) -> None:
    """What a parameter lacks of its value is a state, and saved."""
    bits = {"param_sync_bits": 8}
    (half, end), _ = run_threads(2, lambda: first_half(ShardedAdam, tmp_path / "a", bits))
    for found, went_on in run_threads(2, lambda: loaded(ShardedAdam, tmp_path / "a", bits)):
        assert_same(found, half)
        assert_same(went_on, end)


def test_few_indices_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight ranks' only those that overlap a rank's own part, and its share of all others."""
    folder, opened = tmp_path / "a", dict[int, list[str]]()
    (half, _), *_ = run_threads(8, lambda: first_half(ShardedAdam, folder, ONE_BUCKET))
    original = Manifest.read_file

    def noted(self: Manifest, source: CheckpointReader, file: Any) -> bytes:
        opened.setdefault(dist.get_rank(), []).append(file.name)
        return original(self, source, file)

    monkeypatch.setattr(Manifest, "read_file", noted)

    def opened_by(world_size: int, what: Any) -> list[set[str]]:
        opened.clear()
        for found in run_threads(world_size, what):
            assert_same(found[0] if isinstance(found, tuple) else found, half)
        return [{n for n in opened[rank] if n != ".metadata"} for rank in range(world_size)]

    def parts(*ranks: int) -> set[str]:
        return {f"part-{rank}.json" for rank in ranks}

    assert opened_by(8, lambda: loaded(ShardedAdam, folder, ONE_BUCKET)) == [
        parts(0, rank) for rank in range(8)
    ]
    found = opened_by(4, lambda: loaded(ShardedAdam, folder, ONE_BUCKET))
    assert set.union(*found) == parts(*range(8))
    assert all(len(names) < 7 for names in found), found
    # Without the optimizer, of which the manifest knows the cuts, a rank reads all.
    model = {k: v for k, v in half.items() if k.startswith("model.")}

    def of_model() -> dict[str, Any]:
        job = Job(ShardedAdam, ONE_BUCKET, seed=1)
        load({"model": job.model}, folder)
        return half | {k: v for k, v in job.values().items() if k in model}

    assert opened_by(2, of_model) == [parts(*range(8))] * 2


def test_a_manifest_that_says_less(tmp_path: Path) -> None:
    """The first ones of this format have no layouts: all indices are read."""
    folder = tmp_path / "a"
    (half, _), _ = run_threads(2, lambda: first_half(ShardedAdam, folder))
    with CheckpointReader(folder) as source:
        manifest = Manifest.read(source)
    manifest.layouts, manifest.tensors, manifest.counts = {}, {}, {}
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    for found, _ in run_threads(3, lambda: loaded(ShardedAdam, folder)):
        assert_same(found, half)


def in_processes(folder: Path, shape: tuple[int, int] | None, is_first: bool) -> Any:
    """Save or load over a mesh; return half and end, and the bytes that this rank wrote."""
    mesh = None if shape is None else init_device_mesh(device_type(), shape)
    job = Job(ShardedAdam, {"mesh": mesh}, seed=int(not is_first))
    if is_first:
        job.train(3)
        save(job.objects, folder, info={"step": 3})
        return job.values(), (folder / f"__{dist.get_rank()}_0.distcp").stat().st_size
    state = job.objects
    load(state, folder)
    job.step = state["step"]
    return job.values(), 0


def test_meshes(tmp_path: Path) -> None:
    """Copies share the writing; what they wrote loads without a mesh, and over another."""
    results = run_procs(4, in_processes, tmp_path / "a", (2, 2), True)
    half, sizes = results[0][0], [size for _, size in results]
    assert min(sizes) > 20_000, sizes  # the first has what is whole, too
    for world_size, shape in ((2, None), (6, (2, 3))):
        for found, _ in run_procs(world_size, in_processes, tmp_path / "a", shape, False):
            assert_same(found, half)


def test_tied_parameters_are_written_once(tmp_path: Path) -> None:
    """Both names lead to the same bytes."""
    run_threads(2, lambda: first_half(ShardedAdam, tmp_path / "a"))
    with CheckpointReader(tmp_path / "a") as source:
        parts = Manifest.read(source).read_indices(source)
    places: dict[str, set[Any]] = {"model.tied.weight": set(), "model.body.0.weight": set()}
    for item in (item for part in parts for item in part.entries if item.key in places):
        places[item.key].add((item.offsets, item.sizes, item.file, item.start))
    assert len(places["model.tied.weight"]) > 1
    assert places["model.tied.weight"] == places["model.body.0.weight"]


def test_plain_dcp_loads_it(tmp_path: Path) -> None:
    """The model into a whole state_dict(), the optimizer into its own sharded one."""
    (half, _), _ = run_threads(2, lambda: first_half(ShardedAdam, tmp_path / "a"))
    model = Everything(seed=1)
    tensors = {k: v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load({"model": tensors}, checkpoint_id=tmp_path / "a")
    assert_same(
        {f"model.{key}": value for key, value in tensors.items()},
        {k: v for k, v in half.items() if k.startswith("model.") and k != "model._extra_state"},
    )


def test_no_planning_collective(tmp_path: Path) -> None:
    """Of three ranks: all is written; the folder has its name. Two small all-reduces, no more."""
    made: list[Counter[str]] = []

    def counted() -> None:
        job = Job(ShardedLamb)
        job.train(1)
        for act in (lambda: None, lambda: save(job.objects, tmp_path / "a")):
            act()
            dist.barrier()
            if dist.get_rank() == 0:
                made.append(Counter(calls))
            dist.barrier()

    with count_c10d_calls() as calls:
        run_threads(3, counted)
    before, after = made
    after.subtract(before)
    rest = {name: n for name, n in after.items() if n and name != "barrier"}
    assert rest == {"allreduce": 6}  # calls are compared in the store
