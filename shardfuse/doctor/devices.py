"""What is looked at on this rank's own device: memory, formats and settings of an Ascend NPU.

torch_npu is never imported here: torch does that where it is installed. Nothing here was run on an
NPU; the tests put something in its place.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardfuse import optim
from shardfuse.buffers import PLAIN_FORMATS
from shardfuse.comm import Communicator
from shardfuse.doctor.environment import buffer_mb
from shardfuse.doctor.findings import Finding

Device = torch.device


_MANY_COMMUNICATORS = 3
"""Of hybrid sharding: all ranks, a row and a column."""

_ABSENT = "no torch_npu: formats and settings are those of an Ascend NPU"


def loaded_torch_npu() -> Any:
    """Return torch_npu where torch has loaded it, or None."""
    return sys.modules.get("torch_npu")


def format_of(tensor: torch.Tensor, torch_npu: Any) -> int:
    """Return the number of the format in which ``tensor`` lies in an NPU's memory."""
    return int(torch_npu.get_npu_format(tensor))


def formats(comm: Communicator, device: Device, torch_npu: Any = None) -> Finding:
    """Params lie as torch says, before and after they are moved into a flat buffer."""
    torch_npu = torch_npu or loaded_torch_npu()
    if torch_npu is None:
        return Finding("", "not run", _ABSENT)
    layer = nn.Linear(64, 32).to(device)
    layer(torch.ones(2, 64, device=device))
    found = {"before": _formats_of(layer, torch_npu)}
    if not _internal(found):  # else the optimizer refuses them
        sharding = {"process_group": "alone", "kernel": "eager"}
        optim.ShardedAdam(layer.named_parameters(), sharding=sharding)
        found["after"] = _formats_of(layer, torch_npu)
    own = _internal(found)
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


def _internal(found: Mapping[str, Sequence[int]]) -> list[int]:
    return sorted({n for numbers in found.values() for n in numbers} - set(PLAIN_FORMATS))


def _formats_of(module: nn.Module, torch_npu: Any) -> list[int]:
    return [format_of(param.data, torch_npu) for param in module.parameters()]


def settings(comm: Communicator, device: Device, torch_npu: Any = None) -> Finding:
    """Operators are not compiled as they are met, and no internal formats are made."""
    torch_npu = torch_npu or loaded_torch_npu()
    if torch_npu is None:
        return Finding("", "not run", _ABSENT)
    held = {
        "jit_compile": _asked(lambda: not torch_npu.npu.is_jit_compile_false()),
        "allow_internal_format": _asked(lambda: _allows_internal_formats(torch_npu)),
    }
    text = ", ".join(f"{name}={value}" for name, value in held.items())
    remedies = {
        "jit_compile": "torch.npu.set_compile_mode(jit_compile=False)",
        "allow_internal_format": "torch.npu.config.allow_internal_format = False",
    }
    wanted = [remedies[name] for name, value in held.items() if value]
    if wanted:
        remedy = f"Call {' and '.join(wanted)} before the model is built."
        return Finding("", "warning", text, remedy, held)
    return Finding("", "ok", text, "", held)


def _allows_internal_formats(torch_npu: Any) -> bool:
    value = torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT")
    return value is not None and value.decode() == "enable"


def _asked(ask: Any) -> bool | None:
    """Return the answer; None where this torch_npu has no such question."""
    try:
        return bool(ask())
    except (AttributeError, RuntimeError):
        return None


def room(
    comm: Communicator,
    device: Device,
    free_nbytes: int | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Finding:
    """HCCL's communicators, which take twice HCCL_BUFFSIZE each, fit beside what is there.

    Args:
        free_nbytes: of the device; None: ask it.
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
