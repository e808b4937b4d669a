"""Versions that belong together: torch, torch_npu, CANN and the driver.

Sources: torch_npu's release notes and its compatibility table (TorchNPU 26.1.1 and 26.0.0, and the
packages 2.13.0 and 2.14.0), as of 2026-10. Nothing here was run on an NPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from shardfuse.doctor.findings import Finding

TESTED_TORCH = ("2.7", "2.9", "2.12", "2.13", "2.14", "2.15")
"""Releases with which all tests of this version have been run."""

CANN = {
    "2.7": ("8.5", "9.0", "9.1"),
    "2.8": ("8.5", "9.0"),
    "2.9": ("8.5", "9.0", "9.1"),
    "2.10": ("9.0", "9.1"),
    "2.11": ("9.1",),
    "2.12": ("9.1",),
    "2.14": ("9.2",),
}
"""CANN releases for torch_npu of a release; others are not known here. 8.5 is TorchNPU 7.3.0's."""

_CANN_FILES = (
    *("*-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info"),
    *("*-linux/ascend_*_install.info", "ascend_*_install.info", "version.cfg", "version.info"),
)
"""In a toolkit's folder; packages write theirs to that of an architecture, aarch64-linux."""

_CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_VERSION = re.compile(r"(?im)^\s*(?:package_)?version[ \t]*=[ \t]*\[?[^0-9\n]*([0-9][^\s,\]]*)")


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed. Imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cann_version(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the version of the CANN toolkit that the environment names, or None."""
    for home in _homes(environment):
        for path in (path for name in _CANN_FILES for path in sorted(home.glob(name))):
            if path.is_file() and (match := _VERSION.search(path.read_text(errors="replace"))):
                return match[1]
    return None


def _homes(environment: Mapping[str, str]) -> list[Path]:
    """Return the folders of CANN that the environment names and that are there."""
    named = map(Path, filter(None, map(environment.get, _CANN_HOMES)))
    return [home for home in named if home.is_dir()]


def driver_version() -> str | None:
    """Return the version of the NPU's driver, or None."""
    if not _DRIVER.is_file():
        return None
    match = _VERSION.search(_DRIVER.read_text(errors="replace"))
    return match[1] if match else None


def check_versions(
    find: Callable[[str], str | None] = installed, environment: Mapping[str, str] = os.environ
) -> list[Finding]:
    """Return what is wrong with the versions of this host. Local."""
    torch, npu = find("torch"), find("torch-npu") or find("torch_npu")
    cann, driver = cann_version(environment), driver_version()
    if cann is None and _homes(environment):
        cann = "of unknown version"
    held = {"torch": torch, "torch_npu": npu, "cann": cann, "driver": driver}
    return [_check_torch(torch), _check_npu(torch, npu, cann, held)]


def _release(version: str | None) -> str:
    """Return "2.13" of "2.13.0+cpu"."""
    return ".".join((version or "").split("+")[0].split(".")[:2])


def _check_torch(torch: str | None) -> Finding:
    if _release(torch) in TESTED_TORCH:
        return Finding("torch", "ok", f"{torch}")
    return Finding(
        "torch",
        "warning",
        f"{torch} is none of the tested releases: {', '.join(TESTED_TORCH)}",
        "Run shardfuse's tests with it, or install one of those.",
    )


def _check_npu(
    torch: str | None, npu: str | None, cann: str | None, held: dict[str, str | None]
) -> Finding:
    name = "torch_npu and CANN"
    if npu is None:
        return Finding(name, "ok", "no torch_npu: no Ascend NPU is used", values=held)
    if _release(npu) != _release(torch):
        return Finding(
            name,
            "failed",
            f"torch_npu {npu} is of another release than torch {torch}",
            f"pip install torch-npu=={_release(torch)}.*, or torch=={_release(npu)}.*.",
            held,
        )
    if cann is None:
        return Finding(
            name,
            "failed",
            f"torch_npu {npu} is installed, and no CANN toolkit was found; importing torch fails",
            "Install CANN and source its set_env.sh, which sets ASCEND_TOOLKIT_HOME.",
            held,
        )
    known = CANN.get(_release(npu))
    if known is not None and _release(cann) not in known:
        return Finding(
            name,
            "warning",  # later packages of a release are for other CANN: the checks below tell
            f"torch_npu {npu} is known for CANN {' or '.join(known)}; there is CANN {cann}",
            f"If a check fails, install CANN {known[-1]}; see torch_npu's release notes.",
            held,
        )
    if known is None:
        text = f"no CANN release is known here for torch_npu {npu}; there is {cann}"
        return Finding(name, "warning", text, "See torch_npu's release notes.", held)
    return Finding(name, "ok", f"torch_npu {npu}, CANN {cann}, driver {held['driver']}", "", held)
