"""Findings on one host, without other ranks: versions and environment variables.

Versions of torch, torch_npu, CANN and the driver must match. Sources: torch_npu's release notes and
its compatibility table (TorchNPU 26.1.1 and 26.0.0, and the packages 2.13.0 and 2.14.0), as of
2026-10. Ranges and patterns of variables are those of CANN 8.5's and torch_npu's documents, as of
2026-10. Nothing here was run on an NPU.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Verdict = Literal["ok", "warning", "failed", "not run"]

VERDICTS = get_args(Verdict)

_MARKS = {"ok": "ok", "warning": "WARNING", "failed": "FAILED", "not run": "not run"}


@dataclass(frozen=True)
class Finding:
    """Result of one check, on all ranks.

    Attributes:
        name: name of the check.
        verdict: "failed": training would be wrong, or would not start.
        text: description.
        remedy: the action to take; empty if none.
        values: measured values.
    """

    name: str
    verdict: Verdict
    text: str
    remedy: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the finding in JSON types."""
        return asdict(self)

    def describe(self) -> str:
        """Return a line, and one for the remedy."""
        line = f"{_MARKS[self.verdict]:<8} {self.name:<26} {self.text}"
        return f"{line}\n{'':<36}-> {self.remedy}" if self.remedy else line


def merge_findings(name: str, of_ranks: Sequence[Finding | None]) -> Finding:
    """Return the worst finding of all ranks; None: a rank has not answered."""
    silent = [rank for rank, finding in enumerate(of_ranks) if finding is None]
    if silent:
        return Finding(
            name,
            "failed",
            f"rank {', '.join(map(str, silent[:8]))} did not answer in time",
            "Look at what that rank has printed, and whether its process lives and its host can "
            "be reached.",
        )
    found = [finding for finding in of_ranks if finding is not None]
    order = ("failed", "warning", "not run", "ok")
    worst = min(found, key=lambda finding: order.index(finding.verdict))
    if worst.verdict == "ok":
        return found[0]
    by_text: dict[str, list[str]] = {}
    for rank, finding in enumerate(found):
        if finding.verdict == worst.verdict:
            by_text.setdefault(finding.text, []).append(str(rank))
    if by_text.keys() == {worst.text} and len(by_text[worst.text]) == len(found):
        return worst
    text = "; ".join(f"rank {', '.join(r[:8])}: {t}" for t, r in list(by_text.items())[:4])
    return Finding(name, worst.verdict, text, worst.remedy, worst.values)


TESTED_TORCH = ("2.7", "2.9", "2.12", "2.13", "2.14", "2.15")
"""Releases with which all tests of this version have been run."""

CANN_RELEASES = {
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
"""Version files in a toolkit's folder, or in that of an architecture such as aarch64-linux."""

_CANN_HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_DRIVER = Path("/usr/local/Ascend/driver/version.info")
_VERSION = re.compile(r"(?im)^\s*(?:package_)?version[ \t]*=[ \t]*\[?[^0-9\n]*([0-9][^\s,\]]*)")


def installed_version(package: str) -> str | None:
    """Return the version of a package, None if it is not installed; imports nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cann_version(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the version of the CANN toolkit that the environment names, or None."""
    for home in _cann_homes(environment):
        for path in (path for name in _CANN_FILES for path in sorted(home.glob(name))):
            if path.is_file() and (match := _VERSION.search(path.read_text(errors="replace"))):
                return match[1]
    return None


def _cann_homes(environment: Mapping[str, str]) -> list[Path]:
    """Return the existing folders of CANN that the environment names."""
    named = map(Path, filter(None, map(environment.get, _CANN_HOMES)))
    return [home for home in named if home.is_dir()]


def driver_version() -> str | None:
    """Return the version of the NPU's driver, or None."""
    if not _DRIVER.is_file():
        return None
    match = _VERSION.search(_DRIVER.read_text(errors="replace"))
    return match[1] if match else None


def check_versions(
    find: Callable[[str], str | None] = installed_version,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Return findings on the versions of this host. Local."""
    torch, npu = find("torch"), find("torch-npu") or find("torch_npu")
    cann, driver = cann_version(environment), driver_version()
    if cann is None and _cann_homes(environment):
        cann = "of unknown version"
    versions = {"torch": torch, "torch_npu": npu, "cann": cann, "driver": driver}
    return [_check_torch(torch), _check_npu(torch, npu, cann, versions)]


def _minor_release(version: str | None) -> str:
    """Return "2.13" of "2.13.0+cpu"."""
    return ".".join((version or "").split("+")[0].split(".")[:2])


def _check_torch(torch: str | None) -> Finding:
    if _minor_release(torch) in TESTED_TORCH:
        return Finding("torch", "ok", f"{torch}")
    return Finding(
        "torch",
        "warning",
        f"{torch} is none of the tested releases: {', '.join(TESTED_TORCH)}",
        "Run shardfuse's tests with it, or install one of those.",
    )


def _check_npu(
    torch: str | None, npu: str | None, cann: str | None, versions: dict[str, str | None]
) -> Finding:
    name = "torch_npu and CANN"
    if npu is None:
        return Finding(name, "ok", "no torch_npu: no Ascend NPU is used", values=versions)
    if _minor_release(npu) != _minor_release(torch):
        return Finding(
            name,
            "failed",
            f"torch_npu {npu} is of another release than torch {torch}",
            f"pip install torch-npu=={_minor_release(torch)}.*, or torch=={_minor_release(npu)}.*.",
            versions,
        )
    if cann is None:
        return Finding(
            name,
            "failed",
            f"torch_npu {npu} is installed, and no CANN toolkit was found; importing torch fails",
            "Install CANN and source its set_env.sh, which sets ASCEND_TOOLKIT_HOME.",
            versions,
        )
    known = CANN_RELEASES.get(_minor_release(npu))
    if known is not None and _minor_release(cann) not in known:
        return Finding(
            name,
            "warning",  # later packages of a release are for other CANN: the checks below tell
            f"torch_npu {npu} is known for CANN {' or '.join(known)}; there is CANN {cann}",
            f"If a check fails, install CANN {known[-1]}; see torch_npu's release notes.",
            versions,
        )
    if known is None:
        text = f"no CANN release is known here for torch_npu {npu}; there is {cann}"
        return Finding(name, "warning", text, "See torch_npu's release notes.", versions)
    return Finding(
        name, "ok", f"torch_npu {npu}, CANN {cann}, driver {versions['driver']}", "", versions
    )


HCCL_BUFFSIZE_MB = 200
"""Default of HCCL_BUFFSIZE; a communicator takes twice this."""

_CONNECT_S = (120, 7200)
_EXEC_S = (0, 2147483647)
_PATIENT_S = 120
_PATTERNS = ("HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_environment(
    environment: Mapping[str, str] = os.environ,
    interfaces: Sequence[str] | None = None,
    find: Callable[[str], str | None] = installed_version,
) -> list[Finding]:
    """Return findings on the environment variables of this rank. Local.

    Args:
        interfaces: names of this host's network interfaces; None: query them.
        find: as for check_versions().
    """
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    found = [*_threads(environment), *_hccl(environment), *_timeouts(environment)]
    if find("torch-npu") or find("torch_npu"):
        found += _saturation(environment)
    return [*found, *_interfaces(environment, interfaces)]


def buffer_mb(environment: Mapping[str, str] = os.environ) -> int:
    """Return HCCL_BUFFSIZE, the default if it is no number; a communicator takes twice this."""
    value = environment.get("HCCL_BUFFSIZE", "")
    return int(value) if value.isdigit() and int(value) else HCCL_BUFFSIZE_MB


def _threads(environment: Mapping[str, str]) -> Iterator[Finding]:
    size = environment.get("WORLD_SIZE", "1")
    if size.isdecimal() and int(size) > 1 and "OMP_NUM_THREADS" not in environment:
        yield Finding(
            "threads",
            "warning",
            "OMP_NUM_THREADS is not set: ranks of one host take each other's cores",
            "Set it to the host's cores divided by its ranks.",
        )


def _hccl(environment: Mapping[str, str]) -> Iterator[Finding]:
    if environment.get("TORCH_HCCL_ZERO_COPY", "0") not in ("", "0"):
        yield Finding(
            "zero-copy",
            "warning",
            "TORCH_HCCL_ZERO_COPY is set: HCCL may write to what it sends",
            "See the check of inputs below; unset it where gradients are read after step().",
        )
    buffers = environment.get("HCCL_BUFFSIZE")
    if buffers is not None and (not buffers.isdigit() or int(buffers) < 1):
        yield Finding(
            "HCCL_BUFFSIZE",
            "failed",
            f"HCCL_BUFFSIZE={buffers!r} is no number of MB",
            f"Unset it ({HCCL_BUFFSIZE_MB}), or set a whole number; every communicator takes "
            "twice that.",
        )


def _timeouts(environment: Mapping[str, str]) -> Iterator[Finding]:
    for name, (least, most) in (
        ("HCCL_CONNECT_TIMEOUT", _CONNECT_S),
        ("HCCL_EXEC_TIMEOUT", _EXEC_S),
    ):
        value = environment.get(name)
        if value is None:
            continue
        if not value.isdigit() or not least <= int(value) <= most:
            yield Finding(
                name,
                "failed",
                f"{name}={value!r} is no whole number of seconds from {least} to {most}",
                "Unset it, or set such a number; large jobs take 3600 to connect.",
            )
        elif name == "HCCL_EXEC_TIMEOUT" and int(value) < _PATIENT_S:
            text = "a rank that saves a checkpoint is not waited for any longer"
            text = "a rank that hangs is waited for without end" if value == "0" else text
            yield Finding(
                name,
                "warning",
                f"{name}={value}: {text}",
                "Unset it (1836), or give ranks the time that a checkpoint takes.",
            )


def _saturation(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Find a disabled INF/NaN mode: an overflow then saturates, and gradient scalers miss it."""
    is_forced = environment.get("INF_NAN_MODE_FORCE_DISABLE", "0") not in ("", "0")
    name = "INF_NAN_MODE_FORCE_DISABLE" if is_forced else "INF_NAN_MODE_ENABLE"
    if is_forced or environment.get("INF_NAN_MODE_ENABLE", "1") == "0":
        yield Finding(
            "INF/NaN mode",
            "failed",
            f"{name}={environment[name]}: inf becomes the largest number and nan becomes 0, so "
            "that no rank sees an overflow",
            f"Unset {name}; INF/NaN mode is what A2 and A3 have by default.",
        )


def _interfaces(environment: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Finding]:
    for name in (*_PATTERNS, "GLOO_SOCKET_IFNAME"):
        value = environment.get(name, "")
        if not value:
            continue
        if name in _PATTERNS:
            is_there = _matches_any(value, interfaces)
        else:
            is_there = set(value.split(",")) <= set(interfaces)
        if not is_there:
            yield Finding(
                name,
                "failed",
                f"{name}={value} names no interface of host {socket.gethostname()}",
                f"Name one of these: {', '.join(interfaces)}.",
            )


def _matches_any(pattern: str, interfaces: Sequence[str]) -> bool:
    """Return whether HCCL and NCCL find an interface: "eth" is a prefix, "=" exact, "^" not."""
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_exact = pattern.startswith("=")
    wanted = pattern.removeprefix("=").split(",")
    # NCCL also accepts a port after the name.
    wanted = [name.split(":")[0] for name in wanted]

    def matches(name: str) -> bool:
        return name in wanted if is_exact else any(name.startswith(prefix) for prefix in wanted)

    return any(matches(name) != excludes for name in interfaces)
