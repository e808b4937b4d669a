"""Bytes per second between the ranks, for buffers that are aligned and for such that are not."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from shardfuse.comm import Communicator
from shardfuse.doctor.findings import Finding

_SIZES_MIB = (1, 25)
_LARGE_MIB = 200
_LEAST_REPEATS = 3
_WARM_MIB = 20
_KINDS = ("reduce-scatter", "all-gather")


def bandwidth(comm: Communicator, device: torch.device, *, is_full: bool = False) -> Finding:
    """Bytes per second of reduce-scatter and all-gather; a slow link shows here.

    At 200 MiB, HCCL's own buffer, only on accelerators or with ``is_full``.
    """
    return _bandwidth(comm, device, is_full=is_full, offset=0)


def bandwidth_misaligned(
    comm: Communicator, device: torch.device, *, is_full: bool = False
) -> Finding:
    """The same of buffers that begin 4 bytes off, which shardfuse's own never do.

    HCCL's all-gather fell to 0.1 GB/s so (MindStudio 8.3). After a transport that refuses such
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
            of_size = _rates(comm, device, mib, offset)
        for kind, rate in of_size.items():
            rates[kind].append(rate)
            found[f"{kind} of {mib} MiB{', 4 bytes off' * offset}, GB/s"] = rate
    shown = "; ".join(
        f"{kind} {', '.join(f'{rate:.2f}' for rate in of_kind)}" for kind, of_kind in rates.items()
    )
    return Finding("", "ok", f"GB/s at {', '.join(map(str, sizes))} MiB: {shown}", values=found)


def _rates(comm: Communicator, device: torch.device, mib: int, offset: int) -> dict[str, float]:
    """Return GB/s of each kind, of buffers that begin at element ``offset`` of aligned ones."""
    numel = (mib << 20) // 4 // (512 * comm.world_size) * 512 * comm.world_size
    whole = torch.ones(numel + offset, device=device)[offset:]
    out = torch.ones(numel + offset, device=device)[offset:]
    own = out.chunk(comm.world_size)[comm.rank]
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
    return found


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":  # not run on hardware
        torch.accelerator.synchronize(device)
