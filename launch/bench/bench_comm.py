"""Collectives alone: gloo's own against those an optimizer uses (``optimizer.communicator``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from launch.bench.drivers import BUCKET_NUMEL
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row, interleaved
from launch.bench.timing import bytes_written, median, time_ms
from shardfuse.comm import Communicator, communicator_for

# torch 2.13 renamed these and warns on the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SIZES = (1 << 20, 25 << 20, 110 << 20)
WORLDS = (2, 3, 4)
ROUNDS = 2
UNIT = "gloo all_reduce"
REPEATS = {SIZES[0]: 9, SIZES[1]: 3, SIZES[2]: 2}
"""Timed repeats by size, after one that is checked; the large ones take seconds."""

_IN_FLIGHT = 2


class Buffers:
    """What the collectives of one size work on: (numel,) in and out, and this rank's shard.

    Inputs are small integers, so that every sum is exact.
    """

    def __init__(self, numel: int, comm: Communicator) -> None:
        self.comm = comm
        self.shard_numel = numel // comm.world_size
        self.full = torch.zeros(self.shard_numel * comm.world_size)
        self.gathered = torch.zeros_like(self.full)
        self.shard = torch.zeros(self.shard_numel)

    def own(self) -> Tensor:
        """Return the slice of ``gathered`` that this rank owns."""
        start = self.comm.rank * self.shard_numel
        return self.gathered[start : start + self.shard_numel]

    def reset(self) -> None:
        """Write the inputs of the next collective."""
        self.full.fill_(1.0 + self.comm.rank)
        self.gathered.fill_(0.0)
        self.own().fill_(1.0 + self.comm.rank)

    def operations(self) -> dict[str, Callable[[], object]]:
        """Return the collectives by name."""
        comm, own = self.comm, self.own()
        return {
            UNIT: lambda: dist.all_reduce(self.full),
            "gloo reduce_scatter": lambda: _reduce_scatter(self.shard, self.full),
            "gloo all_gather": lambda: _all_gather(self.gathered, own),
            "shardfuse reduce_scatter": lambda: comm.reduce_scatter(self.shard, self.full).wait(),
            "shardfuse all_gather": lambda: comm.all_gather(self.gathered, own).wait(),
            "shardfuse reduce_scatter, 25 MiB buckets": self._reduce_scatter_buckets,
            "shardfuse all_gather, 25 MiB buckets": self._all_gather_buckets,
        }

    def is_right(self, name: str) -> bool:
        """Return whether the collective left what it should."""
        world_size = self.comm.world_size
        if "all_gather" in name:
            values = torch.arange(1.0, world_size + 1)
            parts = self._buckets(self.gathered) if name.endswith("buckets") else [self.gathered]
            return all(
                torch.equal(part, values.repeat_interleave(part.numel() // world_size))
                for part in parts
            )
        total = self.full if name == UNIT else self.shard
        return bool((total == world_size * (world_size + 1) / 2).all())

    def _buckets(self, flat: Tensor) -> list[Tensor]:
        step = BUCKET_NUMEL // self.comm.world_size * self.comm.world_size
        return [flat[start : start + step] for start in range(0, flat.numel(), step)]

    def _part(self, bucket: Tensor) -> Tensor:
        size = bucket.numel() // self.comm.world_size
        return bucket[self.comm.rank * size :][:size]

    def _reduce_scatter_buckets(self) -> None:
        """As an optimizer does it: two buckets in flight."""
        handles: list[Any] = []
        start = 0
        for bucket in self._buckets(self.full):
            size = bucket.numel() // self.comm.world_size
            handles.append(self.comm.reduce_scatter(self.shard[start : start + size], bucket))
            start += size
            if len(handles) > _IN_FLIGHT:
                handles.pop(0).wait()
        for handle in handles:
            handle.wait()

    def _all_gather_buckets(self) -> None:
        """As an optimizer does it: all buckets launched, then waited for."""
        buckets = self._buckets(self.gathered)
        handles = [self.comm.all_gather(bucket, self._part(bucket)) for bucket in buckets]
        for handle in handles:
            handle.wait()

    def fill_bucket_inputs(self) -> None:
        """Write the inputs of the bucketed all-gather, whose parts lie within each bucket."""
        self.gathered.fill_(0.0)
        for bucket in self._buckets(self.gathered):
            self._part(bucket).fill_(1.0 + self.comm.rank)


def measure(sizes: list[int]) -> list[Row]:
    """Run on every rank of a launch: return times and bytes sent by size and collective.

    Raises:
        AssertionError: a collective gave a wrong result.
    """
    comm = communicator_for(None, torch.device("cpu"))
    results = []
    for numel in sizes:
        buffers = Buffers(numel, comm)
        operations = buffers.operations()
        rows: dict[str, Row] = {name: {"ms": [], "sent_nbytes": []} for name in operations}
        for repeat in range(1 + REPEATS.get(numel, 3)):
            for name, operation in operations.items():
                buffers.reset()
                if name == "shardfuse all_gather, 25 MiB buckets":
                    buffers.fill_bucket_inputs()
                dist.barrier()
                before = bytes_written()
                elapsed = time_ms(operation)
                if repeat > 0:
                    rows[name]["ms"].append(elapsed)
                    rows[name]["sent_nbytes"].append(bytes_written() - before)
                else:
                    assert buffers.is_right(name), name
        results += [{"numel": numel, "collective": name, **row} for name, row in rows.items()]
    return results


def combine(ranks: list[list[Row]]) -> Iterator[Row]:
    """Yield a row per size and collective of one launch: the slowest rank of every repeat."""
    unit_ms = 0.0
    for same in zip(*ranks, strict=True):
        first = same[0]
        elapsed = median([max(values) for values in zip(*(row["ms"] for row in same), strict=True)])
        if first["collective"] == UNIT:
            unit_ms = elapsed
        sent = max(median(row["sent_nbytes"]) for row in same)
        yield {
            "collective": first["collective"],
            "numel": first["numel"],
            "ms": round(elapsed, 4),
            "ratio": round(elapsed / unit_ms, 4),
            "sent_p": round(sent / (4 * first["numel"]), 4),
            "note": "",
        }


def run(options: Options) -> Iterator[Row]:
    """Yield rows of every world size, one launch per world size and round."""
    sizes = [1 << 14] if options.quick else list(SIZES)
    worlds = (2,) if options.quick else WORLDS
    for index, world_size in interleaved(worlds, options.num_rounds(ROUNDS)):
        where = {"world_size": world_size, "round": index}
        arguments = {"sizes": sizes}
        try:
            ranks = run_ranks("launch.bench.bench_comm:measure", arguments, world_size=world_size)
        except LaunchError as error:
            print(error, flush=True)
            yield {**where, "collective": "all", "note": "failed"}
            continue
        yield from ({**where, **row} for row in combine(ranks))
