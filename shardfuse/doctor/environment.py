"""What environment variables say that is wrong, before anything is started by them.

Ranges and patterns are those of CANN 8.5's and torch_npu's documents, as of 2026-10. Nothing here
was run on an NPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence

from shardfuse.doctor.findings import Finding
from shardfuse.doctor.versions import installed

HCCL_BUFFSIZE_MB = 200
"""What a communicator of HCCL's takes twice, unless HCCL_BUFFSIZE says otherwise."""

_CONNECT_S = (120, 7200)
_EXEC_S = (0, 2147483647)
_PATIENT_S = 120
_PATTERNS = ("HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_environment(
    environment: Mapping[str, str] = os.environ,
    interfaces: Sequence[str] | None = None,
    find: Callable[[str], str | None] = installed,
) -> list[Finding]:
    """Return what is wrong with the environment variables of this rank. Local.

    Args:
        interfaces: names of this host's network interfaces; None: look.
        find: as of check_versions().
    """
    if interfaces is None:
        interfaces = [name for _, name in socket.if_nameindex()]
    found = [*_threads(environment), *_hccl(environment), *_timeouts(environment)]
    if find("torch-npu") or find("torch_npu"):
        found += _saturation(environment)
    return [*found, *_interfaces(environment, interfaces)]


def buffer_mb(environment: Mapping[str, str] = os.environ) -> int:
    """Return HCCL_BUFFSIZE, which a communicator takes twice; the default where it is no number."""
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
    """Where INF/NaN mode is off an overflow is a large number: a gradient scaler is blind."""
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
    # NCCL takes a port, too, which says nothing of the interface.
    wanted = [name.split(":")[0] for name in wanted]

    def matches(name: str) -> bool:
        return name in wanted if is_exact else any(name.startswith(prefix) for prefix in wanted)

    return any(matches(name) != excludes for name in interfaces)
