"""Checks that all ranks run together on their devices, with the optimizers themselves.

torch_npu is never imported here: torch does that where it is installed. Nothing here was run on an
NPU; the tests put a stand-in in its place.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardfuse import checkpoint, optim
from shardfuse.buffers import PLAIN_FORMATS
from shardfuse.comm import Communicator
from shardfuse.comm.native import IN_PLACE_VARIABLE, ProcessGroupCommunicator, traits_of
from shardfuse.comm.session import unreadable
from shardfuse.comm.transport import add_up
from shardfuse.doctor.host import Finding, buffer_mb
from shardfuse.layout import SLOT_NBYTES
from shardfuse.scaling import ShardedGradScaler

_SIZES_MIB = (1, 25)
_LARGE_MIB = 200
_LEAST_REPEATS = 3
_WARM_MIB = 20
_KINDS = ("reduce-scatter", "all-gather")

_BROKEN = (
    "A device, its link or its driver is broken: train on none of this. Run with fewer ranks to "
    "find which."
)


def bandwidth(comm: Communicator, device: torch.device, *, is_full: bool = False) -> Finding:
    """Bytes per second of reduce-scatter and all-gather; shows a slow link.

    200 MiB, the size of HCCL's own buffer, are measured on accelerators or with ``is_full`` only.
    """
    return _bandwidth(comm, device, is_full=is_full, offset=0)


def bandwidth_misaligned(
    comm: Communicator, device: torch.device, *, is_full: bool = False
) -> Finding:
    """The same for buffers that begin 4 bytes off, as shardfuse's own never do.

    HCCL's all-gather fell to 0.1 GB/s then (MindStudio 8.3). After a transport that refuses such
    buffers nothing more is sent in this process group.
    """
    try:
        return _bandwidth(comm, device, is_full=is_full, offset=1)
    except RuntimeError as error:
        text = f"the transport refuses such buffers: {str(error).splitlines()[0][:300]}"
        remedy = "Nothing, if the check of alignment is well: buffers here are never such."
        return Finding("", "warning", text, remedy)


def _bandwidth(comm: Communicator, device: torch.device, *, is_full: bool, offset: int) -> Finding:
    if comm.world_size == 1:
        return Finding("", "not run", "one rank sends nothing")
    sizes = [*_SIZES_MIB, *([_LARGE_MIB] if is_full or device.type != "cpu" else [])]
    found: dict[str, float] = {}
    rates: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for mib in sizes:
        with comm.session.region("doctor: bandwidth"):
            of_size, wrong = _measure_rates(comm, device, mib, offset)
        if wrong:
            text = f"{' and '.join(wrong)} of {mib} MiB: wrong values"
            return Finding("", "failed", text, _BROKEN, found)
        for kind, rate in of_size.items():
            rates[kind].append(rate)
            found[f"{kind} of {mib} MiB{', 4 bytes off' * offset}, GB/s"] = rate
    shown = "; ".join(
        f"{kind} {', '.join(f'{rate:.2f}' for rate in of_kind)}" for kind, of_kind in rates.items()
    )
    return Finding("", "ok", f"GB/s at {', '.join(map(str, sizes))} MiB: {shown}", values=found)


def _measure_rates(
    comm: Communicator, device: torch.device, mib: int, offset: int
) -> tuple[dict[str, float], list[str]]:
    """Return GB/s of each collective, and the kinds that give wrong values.

    Args:
        offset: of the element at which buffers begin.
    """
    numel = (mib << 20) // 4 // (512 * comm.world_size) * 512 * comm.world_size
    whole = torch.full((numel + offset,), comm.rank + 1.0, device=device)[offset:]
    out = torch.zeros(numel + offset, device=device)[offset:]
    own = out.chunk(comm.world_size)[comm.rank].fill_(comm.rank + 1.0)
    moved = whole.nbytes * (comm.world_size - 1) / comm.world_size
    calls: list[Callable[[], object]] = [
        lambda: comm.reduce_scatter(whole).wait(),
        lambda: comm.all_gather(out, own).wait(),
    ]
    repeats = max(_LEAST_REPEATS, _WARM_MIB // mib)
    found = {}
    for kind, call in zip(_KINDS, calls, strict=True):
        for _ in range(repeats):
            call()
        _synchronize(device)
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        _synchronize(device)
        found[kind] = moved * repeats / (time.perf_counter() - started) / 1e9
    whole.fill_(comm.rank + 1.0)  # zero-copy changes inputs
    total = torch.stack(comm.reduce_scatter(whole).wait()).sum(0)
    wanted = [float(rank + 1) for rank in range(comm.world_size)]
    is_right = {
        "reduce-scatter": bool((total == sum(wanted)).all()),
        "all-gather": all(
            bool((part == value).all())
            for part, value in zip(out.chunk(comm.world_size), wanted, strict=True)
        ),
    }
    return found, [kind for kind in _KINDS if not is_right[kind]]


def all_gather_in_place(comm: Communicator, device: torch.device) -> Finding:
    """An all-gather whose input lies in its output gives the bits of one from a copy.

    shardfuse sends copies where that is not known: 1 / world_size of the params more at the peak.
    """
    if not isinstance(comm, ProcessGroupCommunicator):
        return Finding("", "not run", "one rank gathers nothing")
    is_used, refusal, are_equal = traits_of(comm.backend).in_place_all_gather, "", True
    sizes = [*_SIZES_MIB, *([_LARGE_MIB] if device.type != "cpu" else [])]
    with comm.session.region("doctor: all-gather in place"):
        for mib in sizes:
            numel = (mib << 20) // 4 // (512 * comm.world_size) * 512
            # Other integers on each rank, which fp32 holds.
            own = torch.arange(numel, device=device, dtype=torch.float32).remainder_(4093)
            own += 4093 * (comm.rank % 4096)
            expected = torch.empty(numel * comm.world_size, device=device)
            comm.all_gather(expected, own).wait()
            out = torch.full_like(expected, -1.0)
            out.chunk(comm.world_size)[comm.rank].copy_(own)
            try:
                comm.try_all_gather_in_place(out).wait()
            except RuntimeError as error:
                refusal = str(error).splitlines()[0][:300]
                break
            are_equal &= torch.equal(out, expected)
    if not refusal and are_equal:
        text = f"right at {', '.join(map(str, sizes))} MiB"
        if not is_used:
            text += f"; copies are sent all the same, unless {IN_PLACE_VARIABLE}=1 is set"
        return Finding("", "ok", text)
    text = f"refused: {refusal}" if refusal else "wrong values"
    if is_used:
        return Finding("", "failed", text, f"Unset {IN_PLACE_VARIABLE}.")
    return Finding("", "ok", f"not used, and not possible: {text}")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # not run on hardware
        torch.accelerator.synchronize(device)


Device = torch.device


_MANY_COMMUNICATORS = 3
"""Communicators of hybrid sharding: all ranks, a row and a column."""

_ABSENT = "no torch_npu: formats and settings are those of an Ascend NPU"


def loaded_torch_npu() -> Any:
    """Return torch_npu if torch has loaded it, or None."""
    return sys.modules.get("torch_npu")


def format_of(tensor: torch.Tensor, torch_npu: Any) -> int:
    """Return the number of the memory format of an NPU tensor."""
    return int(torch_npu.get_npu_format(tensor))


def memory_formats(comm: Communicator, device: Device, torch_npu: Any = None) -> Finding:
    """Params have plain memory formats before and after they move into a flat buffer."""
    torch_npu = torch_npu or loaded_torch_npu()
    if torch_npu is None:
        return Finding("", "not run", _ABSENT)
    layer = nn.Linear(64, 32).to(device)
    layer(torch.ones(2, 64, device=device))
    found = {"before": _formats_of(layer, torch_npu)}
    if not _internal_formats(found):  # else the optimizer refuses them
        sharding = {"process_group": "alone", "kernel": "eager"}
        optim.ShardedAdam(layer.named_parameters(), sharding=sharding)
        found["after"] = _formats_of(layer, torch_npu)
    own = _internal_formats(found)
    if own:
        return Finding(
            "",
            "failed",
            f"parameters lie in Ascend's internal formats {', '.join(map(str, own))}: a flat "
            "buffer would be of another order",
            "Set torch.npu.config.allow_internal_format = False before the model is built.",
            found,
        )
    names = sorted({PLAIN_FORMATS[n] for numbers in found.values() for n in numbers})
    return Finding(
        "", "ok", f"parameters lie as {' and '.join(names)}, before and after", "", found
    )


def _internal_formats(found: Mapping[str, Sequence[int]]) -> list[int]:
    return sorted({n for numbers in found.values() for n in numbers} - set(PLAIN_FORMATS))


def _formats_of(module: nn.Module, torch_npu: Any) -> list[int]:
    return [format_of(param.data, torch_npu) for param in module.parameters()]


def npu_settings(comm: Communicator, device: Device, torch_npu: Any = None) -> Finding:
    """Operators are not compiled one by one, and no internal formats are created."""
    torch_npu = torch_npu or loaded_torch_npu()
    if torch_npu is None:
        return Finding("", "not run", _ABSENT)
    options = {
        "jit_compile": _ask(lambda: not torch_npu.npu.is_jit_compile_false()),
        "allow_internal_format": _ask(lambda: _allows_internal_formats(torch_npu)),
    }
    text = ", ".join(f"{name}={value}" for name, value in options.items())
    remedies = {
        "jit_compile": "torch.npu.set_compile_mode(jit_compile=False)",
        "allow_internal_format": "torch.npu.config.allow_internal_format = False",
    }
    wanted = [remedies[name] for name, value in options.items() if value]
    if wanted:
        remedy = f"Call {' and '.join(wanted)} before the model is built."
        return Finding("", "warning", text, remedy, options)
    return Finding("", "ok", text, "", options)


def _allows_internal_formats(torch_npu: Any) -> bool:
    value = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    return value is not None and value.decode() == "enable"


def _ask(ask: Any) -> bool | None:
    """Return the answer; None if this torch_npu lacks the option."""
    try:
        return bool(ask())
    except (AttributeError, RuntimeError):
        return None


def communicator_memory(
    comm: Communicator,
    device: Device,
    free_nbytes: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Finding:
    """HCCL's communicators, of twice HCCL_BUFFSIZE each, fit into free memory.

    Args:
        free_nbytes: free memory of the device; None: query it.
    """
    if device.type != "npu":
        return Finding("", "not run", f"no HCCL on {device.type}: buffers of its communicators")
    if free_nbytes is None:
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        if ask is None:
            return Finding("", "not run", "torch does not tell this device's free memory")
        free_nbytes = int(ask(device)[0])
    each = 2 * buffer_mb(environment) << 20
    number = free_nbytes // each
    text = f"{free_nbytes / 2**30:.1f} GiB are free; a communicator takes {each >> 20} MiB"
    values = {"free_nbytes": free_nbytes, "nbytes_each": each, "communicators": number}
    remedy = "End what else runs on this device (npu-smi info), or set HCCL_BUFFSIZE lower."
    if number < 1:
        return Finding("", "failed", f"{text}: not one fits", remedy, values)
    if number < _MANY_COMMUNICATORS:
        text = f"{text}: hybrid sharding has {_MANY_COMMUNICATORS}, {number} fit"
        return Finding("", "warning", text, remedy, values)
    return Finding("", "ok", text, "", values)


_NORM_ERROR = 1e-5
"""Largest relative error of fp32 norms after three steps."""

_ALIGNMENT = 512
"""Bytes; HCCL's all-gather fell to 0.1 GB/s for misaligned buffers (MindStudio 8.3)."""

BUILDS: dict[str, Callable[..., Any]] = {
    "SGD": lambda params, **options: optim.ShardedSGD(params, lr=0.1, momentum=0.9, **options),
    "Adam": optim.ShardedAdam,
    "AdamW": optim.ShardedAdamW,
    "BertAdam": lambda params, **options: optim.ShardedBertAdam(params, lr=1e-3, **options),
    "LAMB": optim.ShardedLamb,
    "RMSprop": optim.ShardedRMSprop,
    "RMSpropTF": optim.ShardedRMSpropTF,
    "Adadelta": optim.ShardedAdadelta,
    "AdamP": optim.ShardedAdamP,
    "Muon": lambda params, **options: optim.ShardedMuon(params, lr=1e-2, **options),
}
"""Builds each optimizer from (params, sharding=...)."""


def sums(comm: Communicator, device: Device) -> Finding:
    """Reduce-scatter and all-gather are right and deterministic, and leave inputs unchanged."""
    numel = 4096
    whole = _integers(numel * comm.world_size, comm.rank, device)
    before, results = whole.clone(), []
    # Integers: fp32 sums are exact, and NPUs need no fp64.
    expected = torch.zeros_like(whole)
    for rank in range(comm.world_size):
        expected += _integers(whole.numel(), rank, device)
    with comm.session.region("doctor: sums over ranks"):
        for _ in range(2):
            own = torch.stack(comm.reduce_scatter(whole).wait()).sum(0)
            out = torch.zeros_like(whole)
            mine = out.chunk(comm.world_size)[comm.rank]
            mine.copy_(own)
            comm.all_gather(out, mine).wait()
            results.append(out)
    if not torch.equal(results[0], expected):
        return Finding("", "failed", "sums over ranks are wrong", _BROKEN)
    if not torch.equal(results[0], results[1]) or not _is_deterministic(comm, device):
        return Finding("", "failed", "two equal sums differ", "Set HCCL_DETERMINISTIC=true.")
    if not torch.equal(whole, before):
        return Finding(
            "",
            "warning",
            "a reduce-scatter changes its input (zero-copy)",
            "Do not read gradients after step(), or unset TORCH_HCCL_ZERO_COPY.",
        )
    return Finding("", "ok", "right, the same bits twice, inputs unchanged")


_SUMS_NUMEL = 1 << 18
_NUM_SUMS = 4


def _is_deterministic(comm: Communicator, device: Device) -> bool:
    """Return whether sums of random numbers, which depend on the order, are the same bits."""
    generator = torch.Generator().manual_seed(comm.rank)
    values = torch.randn(_SUMS_NUMEL * comm.world_size, generator=generator).to(device)
    sums = []
    with comm.session.region("doctor: sums of random numbers"):
        for _ in range(_NUM_SUMS):
            sums.append(torch.stack(comm.reduce_scatter(values.clone()).wait()).sum(0))
    return all(torch.equal(total, sums[0]) for total in sums)


def non_finite(comm: Communicator, device: Device) -> Finding:
    """inf and nan survive an all-reduce; gradient scalers depend on it."""
    values = torch.tensor([float("inf"), float("nan"), 1.0], device=device)
    values[:2] *= float(comm.rank == comm.world_size - 1)
    if comm.rank != comm.world_size - 1:
        values[:2] = 0.0
    with comm.session.region("doctor: inf and nan"):
        comm.all_reduce(values).wait()
    if torch.isinf(values[0]) and torch.isnan(values[1]) and torch.isfinite(values[2]):
        return Finding("", "ok", "inf and nan travel as they are")
    return Finding(
        "",
        "failed",
        f"inf and nan arrive as {values[:2].tolist()}",
        "Set INF_NAN_MODE_ENABLE=1 on Ascend; without it overflows go unnoticed.",
    )


def minus_zero(comm: Communicator, device: Device) -> Finding:
    """Sums of -0.0 keep the sign, and one +0.0 shows: -0.0 marks gradients that no rank has."""
    lost = []
    for dtype in (torch.float32, torch.bfloat16):
        whole = torch.empty(1024 * comm.world_size, dtype=dtype, device=device).fill_(-0.0)
        if comm.rank == comm.world_size - 1:
            whole[1::2] = 0.0
        own, reduced = torch.empty_like(whole[:1024]), whole.clone()
        with comm.session.region("doctor: minus zero"):
            add_up(comm.reduce_scatter(whole.clone()).wait(), own)
            comm.all_reduce(reduced).wait()
        for name, found in (("reduce-scatter", own), ("all-reduce", reduced)):
            is_marked = (found.signbit() & (found == 0)).view(-1, 2)
            if not is_marked[:, 0].all() or is_marked[:, 1].any():
                lost.append(f"{name} of {str(dtype).removeprefix('torch.')}")
    if not lost:
        return Finding("", "ok", "sums of -0.0 alone are -0.0, and +0.0 shows in them")
    return Finding(
        "",
        "failed",
        f"the sign of zero is wrong after {', '.join(lost)}",
        "Report this device. Until then give each parameter a gradient in every step, or freeze "
        "it: without one it is updated as if its gradient were zero, or not at all.",
    )


def overflow(comm: Communicator, device: Device) -> Finding:
    """An overflow on one rank skips the step of all ranks."""
    param = nn.Parameter(torch.ones(2000, device=device))
    optimizer = optim.ShardedAdam([param], sharding=_sharding())
    scaler = ShardedGradScaler(device.type, init_scale=4.0)
    scaler.scale(torch.ones((), device=device))
    param.grad = torch.full_like(param, float("inf") if comm.rank == comm.world_size - 1 else 1.0)
    scaler.step(optimizer)
    scaler.update()
    if bool((param == 1.0).all()) and scaler.get_scale() == 2.0:
        return Finding("", "ok", "a poisoned gradient on one rank skips the step of all")
    return Finding(
        "",
        "failed",
        "a step was made from an overflow of one rank",
        "Use shardfuse.ShardedGradScaler; see the check of inf and nan.",
    )


def alignment(comm: Communicator, device: Device) -> Finding:
    """Slots and shards start at multiples of 512 bytes, on accelerators."""
    shapes = ((3, 5), (1,), (7777,), (64, 64), (513,))
    params = [nn.Parameter(torch.ones(shape, device=device)) for shape in shapes]
    optimizer = optim.ShardedAdam(params, sharding={**_sharding(), "bucket_cap_mb": 0.02})
    wanted = SLOT_NBYTES.get(device.type, _ALIGNMENT)
    base = min(param.data_ptr() for param in params)
    off = [str(tuple(p.shape)) for p in params if (p.data_ptr() - base) % wanted]
    for bucket in optimizer.layout.buckets:
        if bucket.shard_numel * 4 % _ALIGNMENT or bucket.start * 4 % _ALIGNMENT:
            off.append(f"bucket {bucket.index}")
    if off:
        text = f"{', '.join(off[:3])} do not start at multiples of {wanted} bytes"
        return Finding("", "failed", text, "Report this: it is a fault of shardfuse.")
    return Finding("", "ok", f"slots at multiples of {wanted} bytes, shards of {_ALIGNMENT}")


def optimizers(comm: Communicator, device: Device) -> Finding:
    """Five steps of every optimizer on all ranks and devices equal those of one CPU process."""
    worst: dict[str, float] = {}
    for name, build in BUILDS.items():
        ours = _train_five_steps(build, device, _sharding(), comm.world_size, comm.rank)
        alone = _train_five_steps(
            build, Device("cpu"), {"process_group": "alone"}, comm.world_size, None
        )
        pairs = zip(ours, alone, strict=True)
        worst[name] = max(
            float((a.cpu() - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs
        )
    # Devices round Muon's products in bf16 each in their way; a step that is missing is above 1e-3.
    bounds = {"Muon": 1e-3}
    wrong = {name: error for name, error in worst.items() if not error < bounds.get(name, 1e-4)}
    if wrong:
        return Finding(
            "",
            "failed",
            f"{', '.join(wrong)} differ from the CPU's by up to {max(wrong.values()):.1e}",
            "Compare them with ShardConfig(kernel='eager'); report what differs.",
            worst,
        )
    text = f"{len(worst)} make the steps of the CPU, within {max(worst.values()):.0e}"
    return Finding("", "ok", text, values=worst)


_CUT_SHAPES = ((300, 40), (40,), (7777,))
"""Shapes that buckets of a few KiB cut across ranks."""


def lamb_norms(comm: Communicator, device: Device) -> Finding:
    """LAMB's trust ratios and the global norm are those of full tensors, by fp64 on the CPU."""
    start = [
        _integers(math.prod(s), 9000 + i, Device("cpu")) / 16 for i, s in enumerate(_CUT_SHAPES)
    ]
    params = [
        nn.Parameter(values.view(shape).to(device))
        for values, shape in zip(start, _CUT_SHAPES, strict=True)
    ]
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    sharding = {**_sharding(), "bucket_cap_mb": 0.02}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one parameter is a vector, on purpose
        optimizer = optim.ShardedLamb(named, lr=0.01, variant="nvlamb", sharding=sharding)
    reference = _LambReference(start, optimizer.param_groups[0])
    worst = {"trust ratios": 0.0, "global norm": 0.0}
    for step in range(3):
        for index, param in enumerate(params):
            param.grad = (
                _integer_grad(param.numel(), step, index, comm.rank).view_as(param).to(device)
            )
        norm = float(optimizer.grad_norm())
        optimizer.step()
        means = [
            torch.stack([_integer_grad(p.numel(), step, i, r) for r in range(comm.world_size)])
            .double()
            .mean(0)
            for i, p in enumerate(params)
        ]
        ratios, wanted = reference.step(means)
        worst["global norm"] = max(worst["global norm"], abs(norm / wanted - 1))
        for ratio, right in zip(optimizer.trust_ratios().values(), ratios, strict=True):
            worst["trust ratios"] = max(worst["trust ratios"], abs(ratio / right - 1))
    optimizer.synchronize()
    text = ", ".join(f"{name} within {error:.1e}" for name, error in worst.items())
    if all(error < _NORM_ERROR for error in worst.values()):
        return Finding("", "ok", f"of whole tensors: {text}", values=worst)
    remedy = "Compare with ShardConfig(kernel='eager'); report what differs."
    return Finding("", "failed", f"differ from fp64: {text}", remedy, worst)


class _LambReference:
    """LAMB (variant nvlamb) of full tensors in fp64, on the CPU."""

    def __init__(self, params: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        self._params = [param.double() for param in params]
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._params]
        self._group, self._num_steps = group, 0

    def step(self, grads: Sequence[Tensor]) -> tuple[list[float], float]:
        """Return the trust ratios, and the norm of all gradients."""
        self._num_steps += 1
        group, ratios = self._group, []
        (beta1, beta2), t = group["betas"], self._num_steps
        for param, grad, (m, v) in zip(self._params, grads, self._moments, strict=True):
            m.mul_(beta1).add_(grad, alpha=1 - beta1)
            v.mul_(beta2).add_(grad * grad, alpha=1 - beta2)
            u = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + group["eps"])
            u += group["weight_decay"] * param
            ratios.append(float(param.norm() / u.norm()))
            param.sub_(u, alpha=group["lr"] * ratios[-1])
        return ratios, float(torch.cat(list(grads)).norm())


def _integer_grad(numel: int, step: int, index: int, rank: int) -> Tensor:
    return _integers(numel, 100 * step + 10 * index + 1000 * rank, Device("cpu")) / 8


_PREFIX = "shardfuse-doctor-"


@contextmanager
def _common_folder(comm: Communicator, device: Device) -> Iterator[Path]:
    """Yield a folder of the first rank's host, which is there until all ranks have left."""
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as own:
        told = f"{own}/checkpoint"
        with comm.session.region("doctor: a folder in common"):
            comm.session.publish("doctor's folder", told)
            _barrier(comm, device)
        folder = Path(comm.session.read("doctor's folder")[0] or told)
        if not folder.parent.name.startswith(_PREFIX):
            raise unreadable("doctor's folder", str(folder))
        yield folder
        with comm.session.region("doctor: all have read it"):
            _barrier(comm, device)


def _layer(seed: int, device: Device, num_inputs: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(num_inputs, num_inputs // 2).to(device)
    optimizer = optim.ShardedAdamW(model.named_parameters(), sharding=_sharding())
    return {"model": model, "optimizer": optimizer}


def _make_steps(state: Mapping[str, Any], number: int) -> list[Tensor]:
    """Make steps by gradients of one; return the parameters then."""
    model, optimizer = state["model"], state["optimizer"]
    for _ in range(number):
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def _are_equal(own: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(own, other, strict=True))


def save_and_load(comm: Communicator, device: Device) -> Finding:
    """A checkpoint that all ranks write is read back; in a folder of the first rank's host."""
    first, second = (_layer(seed, device, 300) for seed in (0, 1))
    with _common_folder(comm, device) as folder:
        saved = _make_steps(first, 1)
        checkpoint.save(first, folder)
        checkpoint.load(second, folder)
        loaded = _make_steps(second, 0)
    if _are_equal(saved, loaded):
        return Finding("", "ok", "a checkpoint comes back bit for bit")
    return Finding("", "failed", "a checkpoint came back different", "Check the file system.")


_STEPS_DURING_SAVE = 3


def async_save(comm: Communicator, device: Device) -> Finding:
    """An asynchronous save during steps has the parameters and states of its start.

    The same steps after a load lead to the same parameters, which shows the states.
    """
    first, second = (_layer(seed, device, 2048) for seed in (0, 1))
    with _common_folder(comm, device) as folder:
        saved = _make_steps(first, 1)
        saving = checkpoint.async_save(first, folder)
        started = time.perf_counter()
        later = _make_steps(first, _STEPS_DURING_SAVE)
        stepped_s = time.perf_counter() - started
        saving.wait()
        checkpoint.load(second, folder)
        loaded, again = _make_steps(second, 0), _make_steps(second, _STEPS_DURING_SAVE)
    values = {"steps_beside_s": stepped_s, "copied_nbytes": saving.extra_nbytes}
    remedy = "Report this, and use checkpoint.save() until then."
    if not _are_equal(saved, loaded):
        text = "parameters in it are not those of its start"
        return Finding("", "failed", text, remedy, values)
    if not _are_equal(later, again):
        text = "states in it are not those of its start: steps after a load differ"
        return Finding("", "failed", text, remedy, values)
    return Finding(
        "", "ok", f"is bitwise the state of its start, after {_STEPS_DURING_SAVE} steps", "", values
    )


def _integers(numel: int, rank: int, device: Device) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-9, 10, (numel,), generator=generator).float().to(device)


def _barrier(comm: Communicator, device: Device) -> None:
    """Wait for all ranks: item() blocks the host, while a device's wait() does not."""
    total = torch.zeros(1, device=device)
    comm.all_reduce(total).wait()
    total.item()


def _sharding() -> dict[str, Any]:
    """Return options for the default process group; no optimizer consolidates."""
    return {"kernel": "eager", "consolidate_every": 0}


def _train_five_steps(
    build: Callable[..., Any],
    device: Device,
    sharding: dict[str, Any],
    world_size: int,
    rank: int | None,
) -> list[Tensor]:
    """Return parameters after five steps by the mean of all ranks' gradients.

    ``rank`` None: in one process, by the mean itself.
    """
    params = [nn.Parameter(torch.ones(shape, device=device)) for shape in ((40, 30), (30,), (999,))]
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    optimizer = build(named, sharding=sharding)
    for step in range(5):
        ranks = range(world_size) if rank is None else [rank]
        for index, param in enumerate(params):
            grads = [
                _integers(param.numel(), 100 * step + 10 * index + 1000 * r, device) for r in ranks
            ]
            param.grad = (torch.stack(grads).sum(0) / len(ranks)).view_as(param) / 8
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return [param.detach() for param in params]


Check = Callable[[Communicator, Device], Finding]

CHECKS: dict[str, Check] = {
    "sums over ranks": sums,
    "inf and nan": non_finite,
    "minus zero": minus_zero,
    "overflow of one rank": overflow,
    "alignment": alignment,
    "formats": memory_formats,
    "NPU settings": npu_settings,
    "room for communicators": communicator_memory,
    "optimizers": optimizers,
    "LAMB's norms": lamb_norms,
    "save and load": save_and_load,
    "async save": async_save,
    "bandwidth": bandwidth,
    "all-gather in place": all_gather_in_place,
    "bandwidth, 4 bytes off": bandwidth_misaligned,
}
"""Run in this order, each on all ranks."""

FULL_CHECKS = CHECKS | {
    "bandwidth": functools.partial(bandwidth, is_full=True),
    "bandwidth, 4 bytes off": functools.partial(bandwidth_misaligned, is_full=True),
}
"""The same, with the measurements that take memory and time on the CPU."""
