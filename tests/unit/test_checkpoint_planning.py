"""Planning a checkpoint at scale: 10 billion parameters, one of 4,096 ranks, and no collective."""

from __future__ import annotations

import json
import time
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from shardfuse.buffers import CombinedBuffers
from shardfuse.checkpoint.loading import ranks_overlapping
from shardfuse.checkpoint.state import TrainingState
from shardfuse.checkpoint.storage import _SavePlanner
from shardfuse.comm.transport import SingleRank
from shardfuse.engine.params import FlatState
from shardfuse.engine.sharded_state import LocalCheckpointState
from shardfuse.engine.torch_state import OptimizerState
from shardfuse.layout import FlatLayout, ParamSpec
from shardfuse.rules.elementwise import AdamRule

META = torch.device("meta")
HIDDEN = 4096


class OneOfMany(SingleRank):
    """One rank of many, which must not be asked to communicate."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size  # type: ignore[misc]

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError("a collective before the commit")

    reduce_scatter = all_gather = all_reduce = broadcast = _refuse


def gpt(num_layers: int) -> nn.Module:
    """Return a model without memory, of 12 tensors a layer."""
    h = HIDDEN
    with META:
        layers = [
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(h, 3 * h),
                    "out": nn.Linear(h, h),
                    "up": nn.Linear(h, 4 * h),
                    "down": nn.Linear(4 * h, h),
                    "norm1": nn.LayerNorm(h),
                    "norm2": nn.LayerNorm(h),
                }
            )
            for _ in range(num_layers)
        ]
        return nn.ModuleList([nn.Embedding(50304, h), *layers])


def parts_of(
    model: nn.Module, rank: int, world_size: int, bucket_nbytes: int
) -> LocalCheckpointState:
    """Return what one rank has, all of it from names and shapes."""
    named = list(model.named_parameters())
    specs = [ParamSpec(name, tuple(p.shape), p.stride(), "float32", "meta", 0) for name, p in named]
    layout = FlatLayout.build(
        specs, world_size=world_size, bucket_nbytes=bucket_nbytes, granularity="element"
    )
    flats = []
    for buffer in CombinedBuffers().add(layout.flats, META):
        members = [slot.param for slot in buffer.flat.slots]
        state = FlatState(
            buffer,
            [named[param][1] for param in members],
            [specs[param] for param in members],
            fragments=layout.fragments(buffer.flat, rank),
            rank=rank,
        )
        state.allocate({"exp_avg": 0.0, "exp_avg_sq": 0.0}, 0)
        flats.append(state)
    groups = [{"params": [param for _, param in named], "lr": 0.1}]
    held = OptimizerState(OneOfMany(rank, world_size), layout, flats, groups, AdamRule())
    return LocalCheckpointState(held, lambda: None)


def plan(model: nn.Module, rank: int, world_size: int, bucket_nbytes: int) -> list[Any]:
    """Return what one rank would write."""
    state = TrainingState({"model": model}, 0)
    state.parts["optimizer"] = parts_of(model, rank, world_size, bucket_nbytes)
    state.objects = {"model": model, "optimizer": None}
    planner = _SavePlanner(rank, None, ())
    planner.set_up_planner(state.to_write(), None, rank == 0)
    return list(planner.create_local_plan().items)


@pytest.mark.parametrize("rank", [0, 4095])
def test_ten_billion_on_four_thousand(rank: int) -> None:
    """Every rank plans its part alone; the time is printed, and bounded at many times of it."""
    model = gpt(48)
    assert sum(param.numel() for param in model.parameters()) > 9.8e9
    started = time.process_time()
    items = plan(model, rank, 4096, 25 << 20)
    print(f"{len(items)} items in {time.process_time() - started:.1f} s")
    # The weight itself and two states, of about a 4096-th.
    numel = sum(item.tensor_data.chunk.sizes.numel() for item in items if item.tensor_data)
    assert numel == pytest.approx(3 * 9.87e9 / 4096, rel=0.02)


@pytest.mark.parametrize(
    ("world_size", "bucket_nbytes", "most"),
    [(4096, 25 << 20, 1), (2048, 25 << 20, 32), (8192, 25 << 20, 8), (2048, 40 << 20, 64)],
)
def test_who_loads_ten_billion_needs_few_indices(
    world_size: int, bucket_nbytes: int, most: int
) -> None:
    """Of 4,096 ranks, by what the manifest has of their layout: some kB."""
    model = gpt(48)
    geometry = parts_of(model, 0, 4096, 25 << 20).geometry()
    assert len(json.dumps(geometry)) < 100_000
    for rank in (0, world_size // 3, world_size - 1):
        ranges = parts_of(model, rank, world_size, bucket_nbytes).ranges()
        started = time.process_time()
        found = ranks_overlapping(geometry, ranges)
        print(f"rank {rank} needs {len(found)} in {time.process_time() - started:.2f} s")
        assert 1 <= len(found) <= most
        if (world_size, bucket_nbytes) == (4096, 25 << 20):
            assert found == {rank}


def test_all_ranks_together_plan_everything_once() -> None:
    """Of a small model: no element is missing, none is there twice."""
    model = gpt(0)
    found: dict[str, int] = {}
    for rank in range(64):
        for item in plan(model, rank, 64, 25 << 20):
            if item.tensor_data and item.tensor_data.size:
                count = item.tensor_data.chunk.sizes.numel()
                found[item.index.fqn] = found.get(item.index.fqn, 0) + count
    numel = 50304 * HIDDEN
    keys = ["model.0.weight", "optimizer.state.0.weight.exp_avg"]
    assert found == dict.fromkeys([*keys, "optimizer.state.0.weight.exp_avg_sq"], numel)
