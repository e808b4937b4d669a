"""What the doctor says of an NPU's formats, settings and memory; something else is in its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardfuse.comm.transport import AsyncModel, SingleRank, completed
from shardfuse.doctor import checks
from shardfuse.doctor.checks import (
    bandwidth,
    bandwidth_misaligned,
    communicator_memory,
    memory_formats,
    npu_settings,
)
from shardfuse.doctor.world import World
from shardfuse.plan.budget import CountingCommunicator

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
    for check in (memory_formats, npu_settings, communicator_memory):
        assert check(SingleRank(), CPU).verdict == "not run"


@pytest.mark.parametrize(
    ("number", "verdict"), [(0, "ok"), (2, "ok"), (29, "failed"), (3, "failed")]
)
def test_formats(number: int, verdict: str) -> None:
    found = memory_formats(SingleRank(), CPU, torch_npu(number))
    assert found.verdict == verdict
    before = {"before": [number, 2]}
    if verdict == "failed":  # the optimizer is not built: it would refuse them
        assert found.values == before
        assert str(number) in found.text
        assert "allow_internal_format = False" in found.remedy
    else:
        assert found.values == {**before, "after": [number, 2]}


@pytest.mark.parametrize("ill", ["reduce-scatter", "the sum that is there, too", ""])
def test_minus_zero(ill: str) -> None:
    """A sum that loses the sign is found, and so is one that keeps it where a rank has +0.0."""

    class Sums(SingleRank):
        def reduce_scatter(self, input: torch.Tensor, *args: Any, **options: Any) -> Any:
            if ill == "reduce-scatter":
                input = input + 0.0
            elif ill:
                input = torch.full_like(input, -0.0)
            return super().reduce_scatter(input, *args, **options)

    found = checks.minus_zero(Sums(), CPU)
    assert found.verdict == ("failed" if ill else "ok")
    if ill:
        assert "after reduce-scatter of float32, reduce-scatter of bfloat16" in found.text


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
    found = npu_settings(SingleRank(), CPU, torch_npu(jit=jit, internal=internal))
    assert found.verdict == ("warning" if words else "ok")
    assert found.values == {"jit_compile": jit, "allow_internal_format": internal == b"enable"}
    assert all(word in found.remedy for word in words)


def test_settings_that_this_torch_npu_does_not_tell() -> None:
    found = npu_settings(SingleRank(), CPU, SimpleNamespace())
    assert (found.verdict, set(found.values.values())) == ("ok", {None})


@pytest.mark.parametrize(
    ("free_mib", "verdict", "number"),
    [(60_000, "ok", 150), (1000, "warning", 2), (399, "failed", 0)],
)
def test_room(free_mib: int, verdict: str, number: int) -> None:
    """A communicator takes twice HCCL_BUFFSIZE, 200 MB."""
    found = communicator_memory(SingleRank(), NPU, free_mib << 20, {})
    assert (found.verdict, found.values["communicators"]) == (verdict, number)
    assert bool(found.remedy) == (verdict != "ok")


def test_room_with_smaller_buffers() -> None:
    found = communicator_memory(SingleRank(), NPU, 1000 << 20, {"HCCL_BUFFSIZE": "100"})
    assert (found.verdict, found.values["communicators"]) == ("ok", 5)


class Recording(CountingCommunicator):
    """The first of two ranks, alone; notes the buffers that it is given.

    The second one would send twice as much as this one.
    """

    def __init__(self) -> None:
        super().__init__(2, AsyncModel.ORDERED)
        self.given: list[tuple[int, int]] = []  # (bytes, address)

    def reduce_scatter(self, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.given.append((input.nbytes, input.data_ptr()))
        return completed((input.chunk(2)[0], 2 * input.chunk(2)[0]))

    def all_gather(self, output: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.given.append((output.nbytes, output.data_ptr()))
        output.chunk(2)[1].copy_(2 * output.chunk(2)[0])
        return completed(None)


@pytest.mark.parametrize(("is_full", "sizes"), [(False, (1, 25)), (True, (1, 25, 200))])
@pytest.mark.parametrize(("check", "offset"), [(bandwidth, 0), (bandwidth_misaligned, 4)])
def test_bandwidth_is_of_these_sizes(
    check: Any, offset: int, is_full: bool, sizes: tuple[int, ...]
) -> None:
    """Of each, both kinds, from aligned buffers or from such that begin 4 bytes later."""
    comm = Recording()
    found = check(comm, CPU, is_full=is_full)
    assert len(found.values) == 2 * len(sizes)
    assert all(rate > 0 for rate in found.values.values())
    for mib in sizes:
        for kind in ("reduce-scatter", "all-gather"):
            assert any(key.startswith(f"{kind} of {mib} MiB") for key in found.values)
    assert {nbytes for nbytes, _ in comm.given} == {mib << 20 for mib in sizes}
    assert {address % 64 for _, address in comm.given} == {offset}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("reduce-scatter", lambda self, input: completed((input.chunk(2)[0],))),
        ("all-gather", lambda self, output, input: completed(None)),
    ],
)
def test_bandwidth_of_wrong_values(kind: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fast and wrong has failed."""
    monkeypatch.setattr(Recording, kind.replace("-", "_"), wrong)
    found = bandwidth(Recording(), CPU)
    assert (found.verdict, found.text) == ("failed", f"{kind} of 1 MiB: wrong values")


def test_a_transport_that_refuses_such_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no fault: nothing of ours is such."""

    def refuse(*args: Any, **options: Any) -> Any:
        raise RuntimeError("begins 4 bytes into its storage\nmore")

    monkeypatch.setattr(Recording, "all_gather", refuse)
    found = bandwidth_misaligned(Recording(), CPU)
    assert found.verdict == "warning"
    assert "refuses such buffers: begins 4 bytes into its storage" in found.text
    with pytest.raises(RuntimeError, match="begins 4 bytes"):
        bandwidth(Recording(), CPU)


def test_a_rank_without_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than devices are found out before anything lies on one."""
    world, taken = World(1.0, "cpu"), []
    assert world.select_device().verdict == "ok"
    world.device = torch.device("cuda", 2)
    accelerator = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: accelerator)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    found = world.select_device()
    assert (found.verdict, taken) == ("failed", [])
    assert "local rank 2 has no device of its own: this process sees 2" in found.text
    assert found.remedy.startswith("Start as many ranks as devices (--nproc-per-node)")
    world.device = torch.device("cuda", 1)
    assert (world.select_device().verdict, taken) == ("ok", [1])


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
