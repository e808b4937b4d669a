"""A ledger of bits: digests of parameters and states after 20 steps, for every combination.

python -m tests.ledger --write FILE              all rows, some 15 minutes on two cores
python -m tests.ledger --compare FILE            the same, and name the rows that differ
python -m tests.ledger --compare FILE --share 0/8  every eighth row

It is written before the code is rearranged, and compared afterwards, on the same machine: other
CPUs and other versions of torch round otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import platform
import sys
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardfuse
from shardfuse import ShardedGradScaler, ShardedOptimizer
from tests.support.harness import run_procs

NUM_STEPS = 20
OVERFLOW_STEP = 7
MAX_NORM = 0.02

RULES: dict[str, dict[str, Any]] = {
    "ShardedSGD": {"lr": 0.05, "momentum": 0.9},
    "ShardedAdam": {"lr": 0.01, "amsgrad": True},
    "ShardedAdamW": {"lr": 0.01},
    "ShardedBertAdam": {"lr": 0.01, "warmup": 0.1, "t_total": 40},
    "ShardedLamb": {"lr": 0.01, "use_global_grad_norm": True},
    "ShardedAdamP": {"lr": 0.01},
    "ShardedRMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "ShardedRMSpropTF": {"lr": 0.01},
    "ShardedAdadelta": {"lr": 0.5},
}
GRADS = ("stage 1", "stage 2", "reduced")
TRANSPORTS = {"memory": "auto", "sockets": "pairwise", "native": "native", "mesh": "auto"}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {},
    "8 bits": {"grad_sync_bits": 8, "param_sync_bits": 8},
    "4 bits": {"grad_sync_bits": 8, "param_sync_bits": 4},
}
EXTRAS = ("plain", "clip", "scaler")


class Row(NamedTuple):
    """One combination."""

    world_size: int
    transport: str
    rule: str
    grads: str
    precision: str
    overlap: bool
    extra: str

    def __str__(self) -> str:
        overlap = "overlap" if self.overlap else "no overlap"
        return " | ".join([*map(str, self[:5]), overlap, self.extra])


def rows() -> list[Row]:
    """Return all combinations; a single rank has no transport, and a mesh has four."""
    found = []
    for world_size, transport in itertools.product((1, 2, 3, 4), TRANSPORTS):
        is_whole = transport == "memory" if world_size == 1 else transport != "mesh"
        if is_whole or (transport == "mesh" and world_size == 4):
            rest = itertools.product(RULES, GRADS, PRECISIONS, (True, False), EXTRAS)
            found += [Row(world_size, transport, *one) for one in rest]
    return found


def model_of(row: Row) -> nn.Module:
    """Return a model whose tensors are cut by shards and by buckets; one layer is not used."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "first": nn.Linear(24, 40),
            "norm": nn.LayerNorm(40),
            "middle": nn.Linear(40, 40, bias=False),
            "unused": nn.Linear(8, 8),
            "last": nn.Linear(40, 6),
        }
    )
    return model.bfloat16() if row.precision == "bf16" else model


def loss_of(model: Any, inputs: Tensor) -> Tensor:
    """Return a loss; the middle layer is used twice."""
    hidden = model["norm"](model["first"](inputs)).tanh()
    hidden = model["middle"](model["middle"](hidden).tanh())
    return model["last"](hidden).float().square().mean()  # type: ignore[no-any-return]


def optimizer_of(row: Row, model: nn.Module, mesh: Any) -> ShardedOptimizer:
    """Return the optimizer of a row."""
    sharding: dict[str, Any] = {
        "stage": 2 if row.grads == "stage 2" else 1,
        "grads_are_reduced": row.grads == "reduced",
        "collectives": TRANSPORTS[row.transport],
        "overlap_grad_sync": row.overlap,
        "overlap_param_sync": row.overlap,
        "bucket_cap_mb": 0.004,
        "kernel": "eager",
        "consolidate_every": 0,
        **PRECISIONS[row.precision],
    }
    if row.grads == "reduced":
        sharding.pop("grad_sync_bits", None)  # nothing is sent
    if row.transport == "mesh":
        sharding["mesh"] = mesh
    kind = getattr(shardfuse, row.rule)
    optimizer = kind(model.named_parameters(), sharding=sharding, **RULES[row.rule])
    assert isinstance(optimizer, ShardedOptimizer)
    return optimizer


def train(row: Row, mesh: Any) -> str:
    """Return the digest of a row on this rank."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if row.world_size > 1 else (0, 1)
    model = model_of(row)
    optimizer = optimizer_of(row, model, mesh)
    scaler = ShardedGradScaler(init_scale=2.0**8, growth_interval=5)
    draw = torch.Generator().manual_seed(17 + rank)
    for step in range(NUM_STEPS):
        inputs = torch.randn(4, 24, generator=draw).to(next(model.parameters()).dtype)
        loss = loss_of(model, inputs)
        if row.extra == "scaler":
            loss = scaler.scale(loss * float("inf") if step == OVERFLOW_STEP else loss)
        loss.backward()
        if row.grads == "reduced" and world_size > 1:
            for param in model.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
                    param.grad /= world_size
        if row.extra == "clip":
            optimizer.clip_grad_norm(MAX_NORM)
        if row.extra == "scaler":
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
    optimizer.consolidate_state_dict()
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(bytes_of(param.detach()))
    entries = optimizer.state_dict()["state"] if rank == 0 else {}
    for number in sorted(entries):
        for name, value in sorted(entries[number].items()):
            digest.update(name.encode() + bytes_of(torch.as_tensor(value)))
    return digest.hexdigest()[:16]


def bytes_of(value: Tensor) -> bytes:
    """Return the memory of a tensor."""
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def train_all(part: Sequence[Row]) -> list[str]:
    """Return the first rank's digest of each row, or what was refused."""
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (2, 2)) if part[0].transport == "mesh" else None
    found = []
    for row in part:
        try:
            found.append(train(row, mesh))
        except ValueError as error:
            found.append("refused: " + str(error).split(". ")[0][:60])
    return found


def ledger(chosen: Sequence[Row]) -> dict[str, str]:
    """Return {row: digest}."""
    by_world: dict[Any, list[Row]] = defaultdict(list)
    for row in chosen:
        by_world[row.world_size, row.transport].append(row)
    found = {}
    for (world_size, _), part in by_world.items():
        for start in range(0, len(part), 200):
            some = part[start : start + 200]
            digests = run_procs(world_size, train_all, some, timeout=1200.0)[0]
            found.update(zip(map(str, some), digests, strict=True))
            print(f"{len(found):,} of {len(chosen):,} rows", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Return 1 if a row differs from the file, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m tests.ledger")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE")
    parser.add_argument("--share", default="0/1", help="I/N: rows I, I + N, I + 2 N, ...")
    given = parser.parse_args()
    index, count = map(int, given.share.split("/"))
    found = ledger(rows()[index::count])
    if given.write is not None:
        head = f"# torch {torch.__version__}, Python {platform.python_version()}, "
        head += f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
        lines = [f"{digest}  {row}" for row, digest in found.items()]
        given.write.write_text("\n".join([head, *lines]) + "\n")
    if given.compare is None:
        return 0
    lines = given.compare.read_text().splitlines()[1:]
    old = {row: digest for digest, row in (line.split("  ", 1) for line in lines)}
    others = [row for row in found if old.get(row) != found[row]]
    for row in others:
        print(f"{row}: {found[row]}, was {old.get(row, 'not there')}")
    print(f"{len(found) - len(others):,} rows are equal, {len(others):,} differ")
    return int(bool(others))


if __name__ == "__main__":
    sys.exit(main())
