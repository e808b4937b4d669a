"""Collectives alone: gloo's own, whole, against an optimizer's, in buckets of 25 MiB.

"sockets only" is ``ShardConfig(collectives="pairwise")``: between hosts, or where ranks may not
read each other's memory. The sums of a reduce-scatter are included, though an update makes them in
passing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from launch.bench.drivers import BUCKET_NUMEL
from launch.bench.launches import LaunchError, run_ranks
from launch.bench.options import Options, Row, interleaved
from launch.bench.timing import bytes_written, median, time_ms
from shardfuse.comm import Communicator, communicator_for
from shardfuse.comm.native import all_gather_single, reduce_scatter_single
from shardfuse.comm.transport import Completion, PartialSums
from shardfuse.grads.full import IN_FLIGHT

SIZES = (1 << 20, 25 << 20, 110 << 20)
WORLDS = (2, 3, 4, 8)
ROUNDS = 2
UNIT = "gloo all_reduce"
REPEATS = {SIZES[0]: 9, SIZES[1]: 3, SIZES[2]: 2}
"""Timed repeats by size, after one that is checked; the large ones take seconds."""


class Buffers:
    """What the collectives of one size work on: (numel,) in and out, and this rank's shard.

    Inputs are small integers, so that every sum is exact.
    """

    def __init__(self, numel: int, comms: dict[str, Communicator]) -> None:
        self.comms = comms
        self.comm = comm = next(iter(comms.values()))
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
        own = self.own()
        assert reduce_scatter_single is not None
        assert all_gather_single is not None
        operations: dict[str, Callable[[], object]] = {
            UNIT: lambda: dist.all_reduce(self.full),
            "gloo reduce_scatter": partial(reduce_scatter_single, self.shard, self.full),
            "gloo all_gather": partial(all_gather_single, self.gathered, own),
        }
        for name, comm in self.comms.items():
            operations[f"{name} reduce_scatter"] = partial(self._reduce_scatter, comm)
            operations[f"{name} all_gather"] = partial(self._all_gather, comm)
        return operations

    def is_right(self, name: str) -> bool:
        """Return whether the collective left what it should."""
        world_size = self.comm.world_size
        if "all_gather" in name:
            values = torch.arange(1.0, world_size + 1)
            parts = [self.gathered] if name.startswith("gloo") else self._buckets(self.gathered)
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

    def _reduce_scatter(self, comm: Communicator) -> None:
        """As an optimizer does it: two buckets in flight."""
        waiting: list[Callable[[], None]] = []
        start = 0
        for number, bucket in enumerate(self._buckets(self.full)):
            size = bucket.numel() // comm.world_size
            output = self.shard[start : start + size]
            if len(waiting) == IN_FLIGHT:
                waiting.pop(0)()
            launched = comm.reduce_scatter(bucket, output, slot=number % IN_FLIGHT)
            waiting.append(partial(_add_up, launched, output))
            start += size
        for wait in waiting:
            wait()
        # Until others have read this rank's memory too, as in a step.
        comm.all_reduce(torch.zeros(1)).wait()

    def _all_gather(self, comm: Communicator) -> None:
        """As an optimizer does it: all buckets launched, then waited for."""
        buckets = self._buckets(self.gathered)
        handles = [comm.all_gather(bucket, self._part(bucket)) for bucket in buckets]
        for handle in handles:
            handle.wait()

    def fill_bucket_inputs(self) -> None:
        """Write the inputs of the bucketed all-gather, whose parts lie within each bucket."""
        self.gathered.fill_(0.0)
        for bucket in self._buckets(self.gathered):
            self._part(bucket).fill_(1.0 + self.comm.rank)


def _add_up(handle: Completion[PartialSums], output: Tensor) -> None:
    parts = handle.wait()
    if len(parts) > 1:
        torch.add(parts[0], parts[1], out=output)
    for part in parts[2:]:
        output.add_(part)


def measure(sizes: list[int]) -> list[Row]:
    """Run on every rank of a launch: return times and bytes sent by size and collective.

    Raises:
        AssertionError: a collective gave a wrong result.
    """
    cpu = torch.device("cpu")
    comms = {
        "shardfuse": communicator_for(None, cpu),
        "shardfuse, sockets only,": communicator_for(None, cpu, "pairwise"),
    }
    results = []
    for numel in sizes:
        buffers = Buffers(numel, comms)
        operations = buffers.operations()
        rows: dict[str, Row] = {name: {"ms": [], "sent_nbytes": []} for name in operations}
        for repeat in range(1 + REPEATS.get(numel, 3)):
            for name, operation in operations.items():
                buffers.reset()
                if name.startswith("shardfuse") and name.endswith("all_gather"):
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
