"""Checks of the numbers on a device, against one process on the CPU that keeps params in fp32.

All gradients are small integers / 8, whose sums over up to 28 ranks are exact in fp32 and bf16. So
a rank's params are those of the reference but for the rounding of the update itself, and bf16
params are the reference's, rounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardfuse.comm import Communicator
from shardfuse.doctor import Finding
from shardfuse.doctor.checks import BUILDS

SHAPES = ((40, 30), (30,), (999,), (300, 40), (3,))
STEPS = 5
_CPU = torch.device("cpu")

_FP32_ERROR = 2e-5
"""Largest difference of fp32 params, as a share of a tensor's largest magnitude."""

_FLIPS = 0.01
"""Share of bf16 params that may be the neighbour of the reference's rounded ones."""

Absent = Callable[[int, int, int], bool]
"""Whether a rank has no gradient: (step, index of the param, rank)."""


@dataclass(frozen=True)
class Case:
    """A training of five steps.

    Attributes:
        sharding: a ShardConfig's keys.
        settings: of the optimizer, beside its defaults.
        absent: of gradients; None: all are there.
        tolerance: of fp32 params, for options that round what is sent.
    """

    rule: str
    dtype: torch.dtype = torch.float32
    sharding: Mapping[str, Any] = field(default_factory=lambda: {"kernel": "eager"})
    settings: tuple[tuple[str, float], ...] = ()
    absent: Absent | None = None
    tolerance: float = _FP32_ERROR

    def name(self) -> str:
        """Return what a report calls it."""
        return f"{self.rule} {str(self.dtype).removeprefix('torch.')}"


def bf16_params(comm: Communicator, device: torch.device) -> Finding:
    """Every optimizer keeps fp32 masters of bf16 params: five steps are the reference's, rounded.

    A master that loses its low half would not move by less than half a bf16 ulp.
    """
    cases = {rule: Case(rule, torch.bfloat16) for rule in BUILDS}
    return _judged(comm, device, cases, "bf16 params are those of fp32 masters")


def kernels(comm: Communicator, device: torch.device, *, compiled: Sequence[str]) -> Finding:
    """Kernels that are not eager, torch's fused operators among them, make the same steps.

    Args:
        compiled: rules that are compiled, in fp32 and bf16; each takes seconds.
    """
    found, ran, reasons = {}, {}, {}
    wanted = {"auto": BUILDS.keys(), "compile": compiled}
    for kernel, rules in wanted.items():
        for case in [
            Case(rule, dtype, {"kernel": kernel})
            for rule in rules
            for dtype in (torch.float32, torch.bfloat16)
        ]:
            params, optimizer = train(case, device, comm)
            own = optimizer._kernels
            if own.choice == "eager":
                reasons[kernel] = own.reason
                continue
            ran[f"{case.name()}, {own.choice}"] = own.choice
            found[f"{case.name()}, {own.choice}"] = _error(case, params, reference(case, comm))
    values = {"errors": found, "not run": reasons}
    wrong = {name: error for name, error in found.items() if error}
    if wrong:
        return _wrong(wrong, values)
    counts = {choice: list(ran.values()).count(choice) for choice in ran.values()}
    text = ", ".join(f"{number} {choice}" for choice, number in counts.items())
    fell_back = reasons.get("compile")
    if fell_back is not None and device.type in ("cpu", "cuda"):
        remedy = "Training goes on without it. Mend the compiler, or set ShardConfig(kernel=...)."
        text = f"{text or 'none'} right; no compiled kernel: {fell_back.splitlines()[0][:120]}"
        return Finding("", "warning", text, remedy, values)
    if not found:
        return Finding("", "not run", "only eager kernels run here", values=values)
    return Finding("", "ok", f"make the reference's steps: {text}", values=values)


def _some_are_absent(step: int, index: int, rank: int) -> bool:
    """Param 2 has a gradient on one rank alone, 3 in odd steps, 4 never; param 0 always."""
    return {2: rank != step % 2, 3: step % 2 == 0, 4: True}.get(index, False)


def absent_gradients(comm: Communicator, device: torch.device) -> Finding:
    """A gradient that some ranks lack counts as zero there; without any, a param does not change.

    Weight decay would change it, here by more than bf16 rounds off.
    """
    settings = (("lr", 0.02), ("weight_decay", 0.5))
    cases = {
        f"{rule} {str(dtype).removeprefix('torch.')}, stage {stage}": Case(
            rule, dtype, {"kernel": "eager", "stage": stage}, settings, _some_are_absent
        )
        for rule in ("AdamW", "LAMB")
        for dtype in (torch.float32, torch.bfloat16)
        for stage in (1, 2)
    }
    return _judged(comm, device, cases, "params without a gradient on any rank stay as they are")


OPTIONS: dict[str, tuple[dict[str, Any], float]] = {
    "small buckets": ({"bucket_cap_mb": 0.02}, _FP32_ERROR),
    "stage 2": ({"stage": 2, "bucket_cap_mb": 0.02}, _FP32_ERROR),
    "overlap": (
        {"overlap_grad_sync": True, "overlap_param_sync": True, "bucket_cap_mb": 0.02},
        _FP32_ERROR,
    ),
    "clip": ({"clip_grad_norm": 1.0}, _FP32_ERROR),
    "bf16 wires": ({"grad_sync_dtype": "bfloat16", "param_sync_dtype": "bfloat16"}, 1e-2),
    "8-bit gradients": ({"grad_sync_bits": 8}, 2e-2),
    "8 and 4 bits": ({"grad_sync_bits": 8, "param_sync_bits": 4}, 5e-2),
}
"""Sharding options, and the error that what they send may cause."""


def options(comm: Communicator, device: torch.device) -> Finding:
    """Options of sharding make the steps of one process, up to what they round."""
    cases = {
        name: Case("SGD", sharding={"kernel": "eager", **sharding}, tolerance=tolerance)
        for name, (sharding, tolerance) in OPTIONS.items()
    }
    return _judged(comm, device, cases, "options make the steps of one process")


def _judged(
    comm: Communicator, device: torch.device, cases: Mapping[str, Case], text: str
) -> Finding:
    errors = {
        name: _error(case, train(case, device, comm)[0], reference(case, comm))
        for name, case in cases.items()
    }
    wrong = {name: error for name, error in errors.items() if error}
    if wrong:
        return _wrong(wrong, errors)
    return Finding("", "ok", f"{len(cases)} cases: {text}", values=errors)


def _wrong(wrong: Mapping[str, str], values: dict[str, Any]) -> Finding:
    name, error = next(iter(wrong.items()))
    text = f"{len(wrong)} of {len(values.get('errors', values))} cases differ; {name}: {error}"
    remedy = "Do not train with these. Report them, with this report's values."
    return Finding("", "failed", text, remedy, values)


def train(
    case: Case, device: torch.device, comm: Communicator | None, world_size: int = 1
) -> tuple[list[Tensor], Any]:
    """Return parameters after five steps, and the optimizer.

    Args:
        comm: of these ranks. None: one process makes the steps of ``world_size`` ranks.
    """
    params = [nn.Parameter(value.to(device, case.dtype)) for value in _start()]
    sharding = {**case.sharding, "consolidate_every": 0}
    if comm is None:
        sharding["process_group"] = "alone"
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    optimizer = BUILDS[case.rule](named, **dict(case.settings), sharding=sharding)
    ranks = range(world_size) if comm is None else [comm.rank]
    for step in range(STEPS):
        terms = []
        for index, param in enumerate(params):
            there = [r for r in ranks if case.absent is None or not case.absent(step, index, r)]
            if there:
                total = torch.stack([_grad(param.numel(), step, index, r) for r in there]).sum(0)
                grad = (total / len(ranks)).view_as(param).to(device, case.dtype)
                terms.append((param * grad).sum())
        torch.stack(terms).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [param.detach().cpu() for param in params], optimizer


def reference(case: Case, comm: Communicator) -> list[Tensor]:
    """Return the parameters that one process on the CPU has, in fp32, by the mean gradients."""
    clip = case.sharding.get("clip_grad_norm")
    return _alone(case.rule, clip, case.settings, case.absent, comm.world_size)


@functools.lru_cache(maxsize=32)
def _alone(
    rule: str,
    clip: float | None,
    settings: tuple[tuple[str, float], ...],
    absent: Absent | None,
    world_size: int,
) -> list[Tensor]:
    sharding = {"kernel": "eager", "clip_grad_norm": clip}
    case = Case(rule, sharding=sharding, settings=settings, absent=absent)
    return train(case, _CPU, None, world_size)[0]


def _error(case: Case, own: Sequence[Tensor], wanted: Sequence[Tensor]) -> str:
    """Return what is wrong with a training's parameters; "" if they are right."""
    for index, (param, right) in enumerate(zip(own, wanted, strict=True)):
        if case.absent is not None and index == len(SHAPES) - 1:
            if not torch.equal(param.float(), _start()[index]):
                return f"param {index}, which has no gradient, has changed"
            continue
        if case.dtype != torch.float32:
            rounded = right.to(case.dtype).float()
            off = (param.float() - rounded).abs()
            flips = int((off > 0).sum())
            if not bool((off <= rounded.abs() / 128).all()):
                return f"param {index} is off by more than one rounding, {float(off.max()):.1e}"
            if flips > max(1, math.ceil(_FLIPS * off.numel())):
                return f"{flips} of {off.numel()} elements of param {index} are rounded otherwise"
            continue
        error = float((param - right).abs().max() / right.abs().max())
        if not error <= case.tolerance:
            return f"param {index} is off by {error:.1e} of its largest, more than allowed"
    return ""


def _start() -> list[Tensor]:
    """Return parameters from 0.5 to 1.5 that bf16 holds."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.rand(shape, generator=generator) + 0.5).to(torch.bfloat16).float()
        for shape in SHAPES
    ]


def _grad(numel: int, step: int, index: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100_000 * rank + 100 * step + index)
    return torch.randint(-9, 10, (numel,), generator=generator) / 8
