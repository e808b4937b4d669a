"""What the doctor says of an NPU's formats, settings and memory; something else is in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfuse.comm.base import SingleRank
from shardfuse.doctor import checks
from shardfuse.doctor.devices import formats, room, settings

CPU = torch.device("cpu")
NPU: Any = SimpleNamespace(type="npu")  # torch knows the name only where torch_npu gives it


def torch_npu(
    format_of_matrices: int = 2, jit: bool = False, internal: bytes | None = b"disable"
) -> Any:
    """Return what stands for torch_npu."""

    def get_npu_format(tensor: torch.Tensor) -> int:
        return format_of_matrices if tensor.dim() == 2 else 2

    return SimpleNamespace(
        get_npu_format=get_npu_format,
        npu=SimpleNamespace(is_jit_compile_false=lambda: not jit),
        _C=SimpleNamespace(_npu_getOption=lambda name: internal),
    )


def test_without_torch_npu_nothing_is_run() -> None:
    for check in (formats, settings, room):
        assert check(SingleRank(), CPU).verdict == "not run"


@pytest.mark.parametrize(
    ("number", "verdict"), [(0, "ok"), (2, "ok"), (29, "failed"), (3, "failed")]
)
def test_formats(number: int, verdict: str) -> None:
    found = formats(SingleRank(), CPU, torch_npu(number))
    assert found.verdict == verdict
    assert found.values == {"before": [number, 2], "after": [number, 2]}
    if verdict == "failed":
        assert str(number) in found.text
        assert "allow_internal_format = False" in found.remedy


@pytest.mark.parametrize(
    ("jit", "internal", "words"),
    [
        (False, b"disable", []),
        (True, b"disable", ["set_compile_mode(jit_compile=False)"]),
        (False, b"enable", ["allow_internal_format = False"]),
        (True, b"enable", ["jit_compile=False", "allow_internal_format"]),
    ],
)
def test_settings(jit: bool, internal: bytes, words: list[str]) -> None:
    found = settings(SingleRank(), CPU, torch_npu(jit=jit, internal=internal))
    assert found.verdict == ("warning" if words else "ok")
    assert found.values == {"jit_compile": jit, "allow_internal_format": internal == b"enable"}
    assert all(word in found.remedy for word in words)


def test_settings_that_this_torch_npu_does_not_tell() -> None:
    found = settings(SingleRank(), CPU, SimpleNamespace())
    assert (found.verdict, set(found.values.values())) == ("ok", {None})


@pytest.mark.parametrize(
    ("free_mib", "verdict", "number"),
    [(60_000, "ok", 150), (1000, "warning", 2), (399, "failed", 0)],
)
def test_room(free_mib: int, verdict: str, number: int) -> None:
    """A communicator takes twice HCCL_BUFFSIZE, 200 MB."""
    found = room(SingleRank(), NPU, free_mib << 20, {})
    assert (found.verdict, found.values["communicators"]) == (verdict, number)
    assert bool(found.remedy) == (verdict != "ok")


def test_room_with_smaller_buffers() -> None:
    found = room(SingleRank(), NPU, 1000 << 20, {"HCCL_BUFFSIZE": "100"})
    assert (found.verdict, found.values["communicators"]) == ("ok", 5)


def test_norms_of_parts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of LAMB's norms fails where ratios are a little off."""
    right = checks.lamb_norms(SingleRank(), CPU)
    assert right.verdict == "ok", right
    ratios = checks.optim.ShardedLamb.trust_ratios
    monkeypatch.setattr(
        checks.optim.ShardedLamb,
        "trust_ratios",
        lambda self: {name: 1.0001 * ratio for name, ratio in ratios(self).items()},
    )
    wrong = checks.lamb_norms(SingleRank(), CPU)
    assert wrong.verdict == "failed"
    assert wrong.values["trust ratios"] == pytest.approx(1e-4, rel=0.1)
    assert wrong.values["global norm"] < 1e-6
