"""Where a report was made: hardware and versions."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from shardfuse.doctor.host import cann_version, driver_version, installed_version

_NVIDIA = Path("/proc/driver/nvidia/version")
_PACKAGES = ("torch", "torch-npu", "transformers")


def versions() -> dict[str, str | None]:
    """Return versions by name; None: there is none."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    found |= {name.replace("-", "_"): installed_version(name) for name in _PACKAGES}
    found |= {"cann": cann_version(), "driver": driver_version() or nvidia_driver()}
    found |= {"cuda": torch.version.cuda, "nccl": _nccl()}
    return found


def nvidia_driver(path: Path = _NVIDIA) -> str | None:
    """Return the version of the GPUs' driver, or None."""
    if not path.is_file():
        return None
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)*)\s", path.read_text(errors="replace"))
    return match[1] if match else None


def _nccl() -> str | None:
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # not run on hardware
