"""What a measurement was made on, written into every result."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = ("torch", "deepspeed", "timm", "pytorch_optimizer", "matplotlib")


def version_of(package: str) -> str | None:
    """Return a package's version; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def hardware(device: torch.device) -> str:
    """Return processor, cores in use, memory and, if the device is one, the accelerator."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    text = f"{_cpu_name()}, {cores} cores, {memory:.0f} GiB"
    if device.type == "cpu":
        return text
    return f"{torch.get_device_module(device).get_device_name(device)}; {text}"


def versions() -> str:
    """Return the versions of Python and of the packages compared, missing ones left out."""
    found = [(package, version_of(package)) for package in PACKAGES]
    named = [f"{package} {version}" for package, version in found if version is not None]
    return ", ".join([f"Python {platform.python_version()}", *named])


def commit() -> str:
    """Return the commit of this checkout, with "+" where files differ from it."""
    run = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.run(
            [*run, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        # Results are what a run writes: they do not make the code another one.
        others = [f":!launch/{folder}/results" for folder in ("bench", "npu", "gpu")]
        changed = subprocess.run(
            [*run, "status", "--porcelain", "--", ".", *others], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def describe(device: torch.device, command: str) -> dict[str, str]:
    """Return the columns that say where, when and how a row was measured."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "hardware": hardware(device),
        "versions": versions(),
        "command": command,
    }
