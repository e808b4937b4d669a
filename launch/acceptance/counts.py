"""Counts what a step costs a device, on one of 8 ranks of torch's fake process group.

    python -m launch.acceptance.counts > launch/acceptance/results/counts.md

A dispatch mode counts the operators of step() that touch data, and the bytes that they read and
write: on an accelerator each is a kernel (torch's ``where`` and ``mul`` of two dtypes may be two).
What inductor has generated is read off its own metrics. Counts per launch unit are the difference
between two sizes of a parameter, divided by the units between them. Nothing is timed, no collective
is carried out, and no accelerator is used.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardfuse
from shardfuse.plan.budget import plan
from shardfuse.plan.models import shapes_of

WORLD_SIZE = 8
SHARD = 4096
"""Elements of a launch unit; operators on fewer than a block count as small."""

OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(shardfuse.ShardedSGD, lr=0.1),
    "SGD, momentum": partial(shardfuse.ShardedSGD, lr=0.1, momentum=0.9),
    "Adam": partial(shardfuse.ShardedAdam, lr=1e-3, weight_decay=0.01),
    "AdamW": partial(shardfuse.ShardedAdamW, lr=1e-3, weight_decay=0.01),
    "LAMB": partial(shardfuse.ShardedLamb, lr=1e-3, weight_decay=0.01, variant="nvlamb"),
    "BertAdam": partial(shardfuse.ShardedBertAdam, lr=1e-3, max_grad_norm=-1),
    "RMSprop": partial(shardfuse.ShardedRMSprop, lr=1e-3),
    "RMSpropTF": partial(shardfuse.ShardedRMSpropTF, lr=1e-3),
    "Adadelta": partial(shardfuse.ShardedAdadelta, lr=1e-3),
    "AdamP": partial(shardfuse.ShardedAdamP, lr=1e-3, weight_decay=0.01),
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = {"eager": "eager", "fused": "auto", "compiled": "compile"}
MODELS = {"BERT-base": "bert-base", "BERT-large": "bert-large", "7B": "6.74b"}

_FREE = frozenset(
    {
        "view",
        "slice",
        "narrow",
        "as_strided",
        "alias",
        "detach",
        "select",
        "unbind",
        "split",
        "split_with_sizes",
        "t",
        "transpose",
        "expand",
        "unsqueeze",
        "squeeze",
        "_unsafe_view",
        "unfold",
        "reshape",
        "permute",
        "chunk",
        "lift_fresh",
        "empty",
        "new_empty",
        "empty_like",
        "empty_strided",
        "new_empty_strided",
        "is_pinned",
        "set_",
    }
)
"""Operators that start no kernel."""

_WAITS = frozenset({"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero"})
"""Operators whose result the host reads."""

_ONLY_WRITTEN = frozenset({"copy_", "fill_", "zero_"})


class CountingMode(TorchDispatchMode):
    """Counts kernels, bytes and waits of what runs in the block."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []  # those on SHARD elements or a block of them
        self.nbytes = 0  # of these
        self.small: list[str] = []
        self.waits: list[str] = []
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self.collectives.append(name)
        if name in _WAITS or name == "lift_fresh":
            # torch.tensor(..., device=) of an accelerator is a copy that the host waits for.
            self.waits.append(name)
        if space == "aten" and name not in _FREE and name.rstrip("_") not in _FREE:
            self._count(name, args, kwargs or {}, out)
        return out

    def _count(self, name: str, args: Any, kwargs: Any, out: Any) -> None:
        read = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        if name in _ONLY_WRITTEN:
            read.pop(id(args[0]), None)
        target = kwargs.get("out")
        if target is not None and not any(arg is target for arg in args):
            read.pop(id(target), None)
        written = {id(t): t for t in tree_leaves(out) if isinstance(t, Tensor)}
        if name.startswith("_fused_"):  # writes its lists: all but the gradients and the step
            lists = [args[0], *args[2:5]] if "adam" in name else [args[0], args[2]]
            written = {id(t): t for t in tree_leaves(lists)}
        tensors = [*read.values(), *written.values()]
        if max((t.numel() for t in tensors), default=0) < 512:
            self.small.append(name)
            return
        self.kernels.append(name)
        self.nbytes += sum(t.nbytes for t in tensors)


@dataclass(frozen=True)
class Counts:
    """What a launch unit costs, and each step on top."""

    optimizer: str
    dtype: str
    kernel: str
    stage: int
    kernels: float  # per unit, of all its elements
    small: float  # per unit, of less than a block
    per_step: float  # all kernels beyond those of units
    bytes_per_element: float  # of the shard, read and written
    waits: float  # of the host, per step
    collectives: float  # per unit
    collectives_per_step: float


def count(name: str, dtype: str, kernel: str, stage: int) -> Counts:
    """Return the counts of one optimizer; of "compiled", what inductor generated."""
    few, many = 2, 6
    generated, first = _step(name, dtype, kernel, stage, few)
    _, second = _step(name, dtype, kernel, stage, many)
    units = many - few

    def slope(a: Sequence[Any], b: Sequence[Any]) -> float:
        return (len(b) - len(a)) / units

    big, nbytes = slope(first.kernels, second.kernels), (second.nbytes - first.nbytes)
    per_element = nbytes / (units * SHARD)
    small, sent = slope(first.small, second.small), slope(first.collectives, second.collectives)
    per_step = len(first.kernels) + len(first.small) - (big + small) * few
    if generated is not None:
        big, per_element = generated
    return Counts(
        name, dtype, kernel, stage, big, small, per_step, per_element,
        max(len(first.waits), len(second.waits)), sent, len(first.collectives) - sent * few,
    )  # fmt: skip


_generated: dict[Any, tuple[float, float]] = {}
"""{function: (kernels, bytes per element) that inductor made of it}"""


def _step(
    name: str, dtype: str, kernel: str, stage: int, num_units: int
) -> tuple[tuple[float, float] | None, CountingMode]:
    """Return what inductor made, (kernels, bytes per element), and the counts of a fourth step."""
    numel = num_units * WORLD_SIZE * SHARD
    param = nn.Parameter(torch.randn(numel // 64, 64).to(DTYPES[dtype]))
    cap = WORLD_SIZE * SHARD * param.element_size() / 2**20
    sharding = {"kernel": KERNELS[kernel], "bucket_cap_mb": cap, "stage": stage}
    # On the CPU overlap compares checksums of what was sent, which no accelerator computes.
    sharding |= {"overlap_grad_sync": False, "overlap_param_sync": False}
    optimizer = OPTIMIZERS[name]([("weight", param)], sharding=sharding)
    assert len(optimizer.layout.buckets) == num_units
    _generated.clear()
    for _ in range(3):
        param.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    made = None
    if kernel == "compiled":
        kernels, nbytes = zip(*_generated.values(), strict=True)
        made = sum(kernels), sum(nbytes)
        assert optimizer._kernels.choice == "compile", optimizer._kernels.reason
    param.square().sum().backward()
    with CountingMode() as mode:
        optimizer.step()
    return made, mode


def join() -> None:
    """Make this process one of 8 ranks whose collectives do nothing, and compile under no mode."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend)
    from torch.utils._python_dispatch import _disable_current_modes

    from shardfuse.comm import native

    importlib.import_module("torch._inductor.compile_fx")  # makes the logger that counts bytes
    torch._logging.set_logs(inductor_metrics=True)  # type: ignore[attr-defined]
    from torch._inductor import metrics

    inductor: Any = importlib.import_module("torch._inductor.config")
    inductor.force_disable_caches = True  # uncounted
    native._TRAITS["fake"] = native._TRAITS["nccl"]
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD_SIZE)  # type: ignore[attr-defined]
    compile_really: Any = torch.compile

    def compile_outside(function: Any, **options: Any) -> Any:
        compiled = compile_really(function, **options)

        def run(*args: Any) -> None:
            metrics.reset()
            with _disable_current_modes():
                compiled(*args)
            if metrics.generated_kernel_count:  # the last graph, where it was compiled again
                found = metrics.generated_kernel_count, metrics.num_bytes_accessed / SHARD
                _generated[function] = found

        return run

    torch.compile = compile_outside  # type: ignore[assignment]


def selected(arguments: argparse.Namespace) -> list[tuple[str, str, str, int]]:
    """Return the cases (optimizer, dtype, kernel, stage) that the options leave."""
    return [
        (name, dtype, kernel, stage)
        for name in arguments.optimizer or OPTIMIZERS
        for dtype in DTYPES
        for kernel in arguments.kernel or KERNELS
        for stage in arguments.stage or (1, 2)
        if kernel != "fused" or name in ("SGD, momentum", "Adam", "AdamW", "LAMB", "BertAdam")
        if kernel != "compiled" or (stage == 1 and name in ("AdamW", "LAMB"))  # takes minutes
    ]


def table(rows: Sequence[Counts]) -> list[str]:
    """Return the counts per launch unit as lines of Markdown."""
    lines = [
        "| optimizer | params | kernel | stage | kernels a unit | small ones a unit | bytes per "
        "element of the shard | kernels a step besides | host waits a step | collectives a unit, "
        "a step besides |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {r.optimizer} | {r.dtype} | {r.kernel} | {r.stage} | {r.kernels:g} | {r.small:g} | "
        f"{r.bytes_per_element:.0f} | {r.per_step:g} | {r.waits:g} | "
        f"{r.collectives:g}, {r.collectives_per_step:g} |"
        for r in rows
    ]


def totals(rows: Sequence[Counts]) -> list[str]:
    """Return the counts per step of whole models as lines of Markdown, at stage 1."""
    lines = [
        "| model | params | optimizer | kernel | units | kernels a step | host waits | "
        "collectives | MiB read and written by the update on a rank |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, spec in MODELS.items():
        shapes = shapes_of(spec)
        for row in rows:
            if row.stage == 2 or (model == "7B") != (row.dtype == "bf16"):
                continue
            build = OPTIMIZERS[row.optimizer]
            budget = plan(
                shapes, build, world_size=WORLD_SIZE, dtype=DTYPES[row.dtype], device="cuda"
            )
            units, shard = budget.num_buckets, budget.padded_numel / WORLD_SIZE
            kernels = (row.kernels + row.small) * units + row.per_step
            collectives = row.collectives * units + row.collectives_per_step
            lines.append(
                f"| {model} | {row.dtype} | {row.optimizer} | {row.kernel} | {units} | "
                f"{kernels:,.0f} | {row.waits:g} | {collectives:,.0f} | "
                f"{row.bytes_per_element * shard / 2**20:,.0f} |"
            )
    return lines


def main() -> None:
    """Print the tables, or with --json the counts per unit."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.acceptance.counts", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--optimizer", action="append", choices=OPTIMIZERS, help="only these")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only these")
    parser.add_argument("--stage", action="append", type=int, choices=(1, 2), help="only these")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args()
    join()
    rows = [count(*case) for case in selected(arguments)]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print("# Kernels, bytes and host waits of a step\n")
    print(
        f"Counted by `python -m launch.acceptance.counts` with torch {torch.__version__}, on one of"
        f" {WORLD_SIZE} ranks of a fake\nprocess group on the CPU. Nothing was run on an "
        "accelerator. At stage 2 what backward does is not in it.\n"
    )
    print("\n".join([*table(rows), "", *totals(rows)]))


if __name__ == "__main__":
    main()
