"""What the doctor says of environment variables."""

from __future__ import annotations

import socket

import pytest

from shardfuse.__main__ import main
from shardfuse.doctor.host import buffer_mb, check_environment
from shardfuse.doctor.world import World

HOST = ["lo", "eth0", "eth1", "enp3s0"]


def ascend(package: str) -> str | None:
    return "2.12.0" if package == "torch-npu" else None


def nothing(package: str) -> str | None:
    return None


def test_nothing_is_wrong() -> None:
    assert check_environment({"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}, HOST, ascend) == []


def test_several_at_once() -> None:
    environment = {"WORLD_SIZE": "2", "TORCH_HCCL_ZERO_COPY": "1", "HCCL_BUFFSIZE": "200M"}
    found = check_environment(environment, HOST, nothing)
    names = {finding.name: finding.verdict for finding in found}
    assert names == {"threads": "warning", "zero-copy": "warning", "HCCL_BUFFSIZE": "failed"}


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"INF_NAN_MODE_ENABLE": "0"}, "INF_NAN_MODE_ENABLE"),
        ({"INF_NAN_MODE_FORCE_DISABLE": "1"}, "INF_NAN_MODE_FORCE_DISABLE"),
        ({"INF_NAN_MODE_ENABLE": "1", "INF_NAN_MODE_FORCE_DISABLE": "1"}, "FORCE_DISABLE=1"),
    ],
)
def test_saturation(environment: dict[str, str], name: str) -> None:
    """Only where there is an NPU, whose overflows then go unnoticed."""
    assert check_environment(environment, HOST, nothing) == []
    (found,) = check_environment(environment, HOST, ascend)
    assert (found.name, found.verdict) == ("INF/NaN mode", "failed")
    assert name in found.text
    assert name.split("=")[0] in found.remedy


def test_inf_nan_mode_is_on() -> None:
    environment = {"INF_NAN_MODE_ENABLE": "1", "INF_NAN_MODE_FORCE_DISABLE": "0"}
    assert check_environment(environment, HOST, ascend) == []


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("HCCL_CONNECT_TIMEOUT", "3600", None),
        ("HCCL_CONNECT_TIMEOUT", "120", None),
        ("HCCL_CONNECT_TIMEOUT", "60", "failed"),
        ("HCCL_CONNECT_TIMEOUT", "7201", "failed"),
        ("HCCL_CONNECT_TIMEOUT", "1h", "failed"),
        ("HCCL_EXEC_TIMEOUT", "1836", None),
        ("HCCL_EXEC_TIMEOUT", "0", "warning"),
        ("HCCL_EXEC_TIMEOUT", "30", "warning"),
        ("HCCL_EXEC_TIMEOUT", "-1", "failed"),
    ],
)
def test_timeouts(name: str, value: str, verdict: str | None) -> None:
    found = check_environment({name: value}, HOST, nothing)
    assert [finding.verdict for finding in found] == ([] if verdict is None else [verdict])
    assert all(f"{name}={value}" in f.text.replace("'", "") and f.remedy for f in found)


@pytest.mark.parametrize(
    ("name", "value", "is_there"),
    [
        ("HCCL_SOCKET_IFNAME", "eth", True),
        ("HCCL_SOCKET_IFNAME", "ib,enp", True),
        ("HCCL_SOCKET_IFNAME", "=eth1", True),
        ("HCCL_SOCKET_IFNAME", "=eth", False),
        ("HCCL_SOCKET_IFNAME", "ib0", False),
        ("HCCL_SOCKET_IFNAME", "^lo", True),
        ("HCCL_SOCKET_IFNAME", "^=lo,eth0,eth1,enp3s0", False),
        ("NCCL_SOCKET_IFNAME", "=eth0:12345", True),
        ("NCCL_SOCKET_IFNAME", "bond", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth1", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
    ],
)
def test_interfaces(name: str, value: str, is_there: bool) -> None:
    """A name that this host does not have is an error, and what it has is listed."""
    found = check_environment({name: value}, HOST, nothing)
    if is_there:
        assert found == []
        return
    (finding,) = found
    assert (finding.name, finding.verdict) == (name, "failed")
    assert f"{name}={value}" in finding.text
    assert all(interface in finding.remedy for interface in HOST)


def test_interfaces_of_this_host() -> None:
    """They are looked up where none are given."""
    (finding,) = check_environment({"GLOO_SOCKET_IFNAME": "no such one"}, find=nothing)
    assert all(name in finding.remedy for _, name in socket.if_nameindex())


@pytest.mark.parametrize(("value", "number"), [(None, 200), ("64", 64), ("0", 200), ("x", 200)])
def test_buffers(value: str | None, number: int) -> None:
    assert buffer_mb({} if value is None else {"HCCL_BUFFSIZE": value}) == number


@pytest.mark.parametrize(
    ("rank", "size"), [("x", "2"), ("5", "2"), ("0", "-2"), ("1", "1"), ("0", "x")]
)
def test_no_rank_of_so_many(
    rank: str, size: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A launcher's slip is a finding; it was a traceback, or a wait for others."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    world = World(1.0, "cpu")
    found = world.join()
    assert found.verdict == "failed"
    assert not world.has_joined
    assert f"RANK={rank}, WORLD_SIZE={size}" in found.text
    assert main(["doctor"]) == 1
    assert f"RANK={rank}, WORLD_SIZE={size}" in capsys.readouterr().out


def test_tasks_that_torchrun_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun python -m shardfuse doctor: each looks at itself alone, which is said."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    found = World(1.0, "cpu").join()
    assert found.verdict == "warning"
    assert "srun has started 2 processes" in found.text
    assert "torchrun" in found.remedy
