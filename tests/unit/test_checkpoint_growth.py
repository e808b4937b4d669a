"""How a checkpoint's index and its planning grow with ranks and tensors: counted, not timed.

``python -m tests.unit.test_checkpoint_growth 4096 1000 65536`` plans and saves for every rank of a
simulated world in one process, merges as the first rank does, and prints the seconds.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedAdam
from shardfuse.buffers import CombinedBuffers
from shardfuse.checkpoint import index as index_module
from shardfuse.checkpoint import load, save
from shardfuse.checkpoint.index import Manifest, ShardIndex, checksum_of
from shardfuse.checkpoint.saving import _write_manifest
from shardfuse.checkpoint.storage import ShardWriter
from shardfuse.engine.params import FlatState
from shardfuse.engine.sharded_state import LocalCheckpointState
from shardfuse.engine.torch_state import OptimizerState
from shardfuse.files import FolderHandle
from shardfuse.fragments import FragmentTensor
from shardfuse.layout import FlatLayout, ParamSpec
from shardfuse.rules.elementwise import AdamRule
from tests.support.harness import run_threads
from tests.unit.test_checkpoint_planning import OneOfMany

NUMEL = 16


class Simulated:
    """A world of ranks in one process, with an optimizer of equal tensors."""

    def __init__(self, num_ranks: int, num_tensors: int, numel: int = NUMEL) -> None:
        self.num_ranks = num_ranks
        specs = [
            ParamSpec(f"layers.{i}.weight", (numel,), (1,), "float32", "cpu", 0)
            for i in range(num_tensors)
        ]
        self.layout = FlatLayout.build(specs, world_size=num_ranks, granularity="block")
        self.params = [nn.Parameter(torch.ones(numel)) for _ in specs]
        (self.buffer,) = CombinedBuffers().add(self.layout.flats, torch.device("cpu"))
        members = [slot.param for slot in self.buffer.flat.slots]
        self.state = FlatState(
            self.buffer,
            [self.params[param] for param in members],
            [specs[param] for param in members],
            fragments=(),
            rank=0,
        )
        self.by_rank = [self._fragments(rank) for rank in range(num_ranks)]
        self.state.allocate({"exp_avg": 0.0, "exp_avg_sq": 0.0}, 0)

    def _fragments(self, rank: int) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {bucket.index: [] for bucket in self.buffer.flat.buckets}
        for fragment in self.layout.fragments(self.buffer.flat, rank):
            found[fragment.bucket].append(fragment)
        return found

    def parts_of(self, rank: int) -> LocalCheckpointState:
        """Return the state of one rank; that of another is no longer valid."""
        self.state.rank, self.state.fragments = rank, self.by_rank[rank]
        groups = [{"params": self.params, "lr": 0.1}]
        comm = OneOfMany(rank, self.num_ranks)
        held = OptimizerState(comm, self.layout, [self.state], groups, AdamRule())
        return LocalCheckpointState(held, lambda: None)

    def save(self, folder: Path) -> list[ShardIndex]:
        """Plan and write every rank's part; return their indices."""
        found = []
        for rank in range(self.num_ranks):
            values = {f"{i}": (i,) for i in range(4)}  # which the first rank alone writes
            state = {"optimizer": self.parts_of(rank).to_write(), "values": values}
            found.append(ShardWriter(folder, rank, state).write())
        return found


def merge(folder: Path, indices: list[ShardIndex]) -> Manifest:
    """Write the indices, and merge them as the first rank does."""
    checksums = []
    with FolderHandle(folder) as handle:
        for index in indices:
            data = index.to_bytes()
            (folder / index.name).write_bytes(data)
            checksums.append(checksum_of(data))
        manifest = Manifest(len(indices), [], {})
        _write_manifest(handle, checksums, manifest)
    return manifest


@pytest.mark.cpu_only("one rank of many is simulated")
@pytest.mark.parametrize("num_ranks", [2, 16, 64])
def test_index_has_own_keys_only(num_ranks: int, tmp_path: Path) -> None:
    num_tensors = 128
    indices = Simulated(num_ranks, num_tensors).save(tmp_path)
    for index in indices:
        own = {entry.key for entry in index.entries}
        assert set(index.paths) == own
        assert set(index.tensors) == {entry.key for entry in index.entries if entry.sizes} | {
            key for key in own if key.endswith(".step")
        }
        # Two states and a step of each, and the groups' values on the first rank.
        if index.rank:
            assert len(own) == 3 * num_tensors // num_ranks
    entries = sum(len(index.entries) for index in indices)
    values = len([entry for entry in indices[0].entries if entry.offsets is None])
    assert entries - values == 3 * num_tensors
    # A part has bytes for its fragments, not for all tensors or all ranks.
    for index in indices[1:]:
        assert len(index.to_bytes()) < 200 + 300 * len(index.entries)
    manifest = merge(tmp_path, indices)
    assert len(manifest.tensors) == 3 * num_tensors


@pytest.mark.cpu_only("one rank of many is simulated")
def test_merge_parses_each_entry_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = Simulated(16, 64).save(tmp_path)
    counts = {"entries": 0, "indices": 0}
    parse, parse_entry = ShardIndex.from_bytes, index_module._as_entry

    def counted(content: Any, tensors: Any) -> Any:
        counts["entries"] += 1
        return parse_entry(content, tensors)

    def counted_index(data: bytes, name: str) -> ShardIndex:
        counts["indices"] += 1
        return parse(data, name)

    monkeypatch.setattr("shardfuse.checkpoint.index._as_entry", counted)
    monkeypatch.setattr(ShardIndex, "from_bytes", counted_index)
    merge(tmp_path, indices)
    assert counts == {"entries": sum(len(index.entries) for index in indices), "indices": 16}


class Made:
    """Counts the FragmentTensors that each thread makes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_thread = Counter[int]()
        make = FragmentTensor.__new__

        def counted(*args: Any) -> FragmentTensor:
            self.by_thread[threading.get_ident()] += 1
            return make(*args)

        monkeypatch.setattr(FragmentTensor, "__new__", staticmethod(counted))


@pytest.mark.parametrize("num_tensors", [8, 64])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_tensors_are_visited_once(
    num_ranks: int, num_tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save or load makes one FragmentTensor of each state and param that this rank has."""

    def rank_main() -> tuple[int, int, int, int]:
        model = nn.ParameterList(nn.Parameter(torch.ones(NUMEL)) for _ in range(num_tensors))
        optimizer = ShardedAdam(model.named_parameters(), lr=0.1)
        for param in model:
            param.grad = torch.ones(NUMEL)
        optimizer.step()
        state = {"model": model, "optimizer": optimizer}
        own = len(optimizer.parts().param_fragments(to_write=False))
        steps = len([key for key in optimizer.parts().to_write() if key.endswith(".step")])
        made.by_thread[threading.get_ident()] = 0
        save(state, tmp_path / "step-1")
        num_saved = made.by_thread[threading.get_ident()]
        load(state, tmp_path / "step-1")
        num_loaded = made.by_thread[threading.get_ident()] - num_saved
        return own, steps, num_saved, num_loaded

    made = Made(monkeypatch)
    results = run_threads(num_ranks, rank_main)
    assert sum(steps for _, steps, _, _ in results) == num_tensors
    for own, steps, num_saved, num_loaded in results:
        assert num_saved == 3 * own + steps
        assert num_loaded == 3 * own


def test_names_as_expected_are_unpickled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of plain data, which Python code unpickles, are so only where they are others."""

    def built(prefix: str) -> ShardedAdam:
        params = [(f"{prefix}.{i}", nn.Parameter(torch.ones(NUMEL))) for i in range(100)]
        return ShardedAdam(params, lr=0.1, sharding={"process_group": "alone"})

    def unpickled(optimizer: ShardedAdam) -> list[Any]:
        found: list[Any] = []
        plain = torch.load

        def spy(file: Any, *args: Any, weights_only: bool) -> Any:
            value = plain(file, *args, weights_only=weights_only)
            found.extend([value] if weights_only else [])
            return value

        with monkeypatch.context() as patch:
            patch.setattr(torch, "load", spy)
            load({"optimizer": optimizer}, tmp_path / "step-1")
        return [value for value in found if isinstance(value, list)]

    one = built("layers")
    save({"optimizer": one}, tmp_path / "step-1")
    assert unpickled(one) == []
    assert unpickled(built("layers")) == []
    one.param_groups[0]["note"] = ["new", 1]
    save({"optimizer": one}, tmp_path / "step-1")
    other = built("layers")
    other.param_groups[0]["note"] = ["old", 1]
    assert unpickled(other) == [["new", 1]]
    assert other.param_groups[0]["note"] == ["new", 1]


if __name__ == "__main__":
    num_ranks, num_tensors, numel = map(int, sys.argv[1:])
    in_memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # else disks are measured
    with tempfile.TemporaryDirectory(dir=in_memory) as name:
        world = Simulated(num_ranks, num_tensors, numel)
        started = time.perf_counter()
        saved = world.save(Path(name))
        saved_at = time.perf_counter()
        merged = merge(Path(name), saved)
        ended = time.perf_counter()
        nbytes = sum(path.stat().st_size for path in Path(name).glob("part-*.json"))
        print(
            f"{num_ranks} ranks, {num_tensors} tensors of {numel}: planned and saved in "
            f"{saved_at - started:.2f} s, merged in {ended - saved_at:.2f} s; "
            f"{sum(len(index.entries) for index in saved)} entries, {nbytes:,} bytes of parts"
        )
