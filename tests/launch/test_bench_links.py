"""Hosts with slow links are what they claim to be, and steps between them are measured."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.bench import bench_links, hosts, launches, report, trace
from launch.bench.__main__ import main
from launch.bench.environment import ROOT, version_of
from launch.bench.hosts import Hosts, HostsError
from launch.bench.launches import LaunchError
from launch.bench.options import Options
from launch.bench.training import ADAM, COMPUTE, DDP, FEW_BITS, LAMB, METHODS
from launch.bench.transformer import FORWARD_S, SIZES, Transformer, numel_of
from shardfuse.comm import communicator_for, gloo

pytestmark = pytest.mark.timeout(240)

REASON = hosts.reason_unavailable()
needs_hosts = pytest.mark.skipif(REASON is not None, reason=f"no hosts here: {REASON}")

MIB = 1 << 20
BITS_PER_S = 200e6
BURST_NBYTES = 256 << 10


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout


@needs_hosts
def test_hosts_are_removed_at_the_end_and_after_an_error() -> None:
    """Every namespace is there inside the block and gone after it, whatever ended it."""

    def stop(there: str, names: list[str]) -> None:
        assert all(name in there for name in names)
        raise KeyError

    made = Hosts(2, "1gbit")
    with pytest.raises(KeyError), made:
        stop(namespaces(), made.namespaces())
    assert not any(name in namespaces() for name in made.namespaces())


@needs_hosts
def test_hosts_that_cannot_be_limited_leave_nothing_behind() -> None:
    """A rate that tc does not know is an error with its words, and no namespace stays."""
    made = Hosts(1, "fast")
    with pytest.raises(HostsError, match=r"tc -n .* rate fast .*: .*rate"):
        made.__enter__()
    assert not any(name in namespaces() for name in made.namespaces())


KILLED = """
import subprocess
from launch.bench.hosts import Hosts
with Hosts(2, "1gbit") as hosts:
    names = " ".join(hosts.namespaces())
    child = subprocess.Popen([*hosts.command(0), "sh", "-c", f"echo {names}; exec sleep 600"])
    child.wait()
"""


@needs_hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_hosts_are_removed_when_their_process_is_killed(number: int) -> None:
    """What ran on a host ends as well."""
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    names = process.stdout.readline().decode().split()
    assert len(names) == 3
    process.send_signal(number)
    process.wait()
    deadline = time.monotonic() + 30
    while any(name in namespaces() for name in names) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(name in namespaces() for name in names)
    process.stdout.read()  # ends only when the sleeper, which holds the other end, has ended
    process.stdout.close()


def use_the_link() -> dict[str, Any]:
    """Run on every rank: what it sends and how long it takes, and what its host is."""
    buffer = torch.ones(16 * MIB // 4)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(buffer)
    seconds = time.perf_counter() - start
    comm = communicator_for(None, torch.device("cpu"), "auto")
    before = hosts.sent_nbytes()
    comm.reduce_scatter(buffer).wait()
    dist.barrier()
    sent = hosts.sent_nbytes() - before
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        "control": control,
        "seconds": seconds,
        "host": gloo.host_id(),
        "sent": sent,
        "sum": buffer[0].item(),
    }


@pytest.fixture(scope="module")
def used() -> list[dict[str, Any]]:
    with Hosts(2, "200mbit") as made:
        target = "tests.launch.test_bench_links:use_the_link"
        return launches.run_ranks(target, {}, world_size=2, timeout_s=120, hosts=made)


@needs_hosts
def test_link_is_limited(used: list[dict[str, Any]]) -> None:
    """16 MiB each way cannot arrive sooner than the rate allows, a burst aside."""
    least = (16 * MIB - BURST_NBYTES) * 8 / BITS_PER_S
    assert all(rank["sum"] == 2 for rank in used)
    assert all(rank["seconds"] >= least for rank in used)


@needs_hosts
def test_hosts_control_congestion_alike_on_every_machine(used: list[dict[str, Any]]) -> None:
    """BBR, which some have, would stop sending for a fifth of a second every ten seconds."""
    assert [rank["control"] for rank in used] == ["reno", "reno"]


@needs_hosts
def test_hosts_do_not_read_each_other_s_memory(used: list[dict[str, Any]]) -> None:
    """Ranks see different processes, and our collectives send everything over the link."""
    assert used[0]["host"] != used[1]["host"]
    assert all(rank["sent"] >= 8 * MIB for rank in used)


def test_reasons_are_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool, another user and a refusal are told apart."""

    def refuse(*command: str) -> None:
        raise HostsError(f"{command[0]}: Operation not permitted")

    monkeypatch.setattr(hosts, "_run", refuse)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: f"/bin/{tool}")
    refused = "namespaces are not allowed: ip: Operation not permitted"
    assert hosts.reason_unavailable() == refused
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    assert hosts.reason_unavailable() == "not root"
    monkeypatch.setattr(hosts.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert hosts.reason_unavailable() == "tc not installed"


@pytest.mark.parametrize("part", ["links", "trace"])
def test_parts_are_skipped_with_the_reason(
    part: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where hosts cannot be made the command succeeds, and its only row says why."""
    module = {"links": bench_links, "trace": trace}[part]
    monkeypatch.setattr(module, "reason_unavailable", lambda: "not root")
    assert main([part, "--out", str(tmp_path)]) == 0
    (row,) = report.read_csv(tmp_path / f"{part}.csv")
    assert row["note"] == "not measured: not root"


@needs_hosts
def test_quick_run_has_all_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every installed method has numbers, and trains as plain DDP does."""
    assert main(["links", "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = {row["method"]: row for row in report.read_csv(tmp_path / "links.csv")}
    assert set(rows) == {name for name, method in METHODS.items() if method.is_default}
    for name, method in METHODS.items():
        if not method.is_default:
            continue
        if method.package is not None and version_of(method.package) is None:
            assert rows[name]["note"] == "not installed"
            continue
        assert rows[name]["step_s"] > 0
        assert rows[name]["core_s"] > 0
        if name != COMPUTE:
            assert rows[name]["sent_p"] > (0.1 if name == FEW_BITS else 0.4)
        if name not in (COMPUTE, LAMB):
            assert rows[name]["loss"] == pytest.approx(rows[DDP]["loss"], abs=2e-3)
    assert rows[ADAM]["peak_p"] > 0
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


@needs_hosts
def test_quick_run_with_compute_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same rows and tables, of a model that leaves the cores free; ranks end alike."""
    options = ["--quick", "--only", ADAM, LAMB, "--out", str(tmp_path)]
    assert main(["accelerator", *options]) == 0, capsys.readouterr().out
    rows = {row["method"]: row for row in report.read_csv(tmp_path / "accelerator.csv")}
    assert {COMPUTE, DDP, ADAM, LAMB, FEW_BITS} <= set(rows)
    assert all(row["note"] == "" for row in rows.values())
    assert rows[ADAM]["sent_p"] > 0.4
    assert "computes elsewhere" in (tmp_path / "accelerator.md").read_text()


def test_elsewhere_takes_its_time_and_gives_every_gradient() -> None:
    """A layer's forward takes 13 ms per million weights and backward twice that."""
    model = Transformer(replace(SIZES["tiny elsewhere"], hidden=512, heads=8))
    begin = time.perf_counter()
    model(torch.ones(2, 9)).backward()
    weights = sum(p.numel() for p in model.parameters()) - 512 * 108  # less the embeddings
    assert time.perf_counter() - begin >= 3 * FORWARD_S * weights
    for param in model.parameters():
        torch.testing.assert_close(param.grad, torch.full_like(param, 1e-3))


def test_cpu_time_between_layers_is_part_of_the_next_where_the_host_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not that of the optimizer's step before forward, and no layer ends before it begins."""
    cpu_s, slept = [5.0], list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: cpu_s[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    size = replace(SIZES["tiny elsewhere, host ahead"], hidden=512, heads=8, layers=1)
    model = Transformer(size)
    spends = iter([0.01, 0.0, 9.0, 0.0])
    for layer in (*model.blocks, model.norm):
        for param in layer.parameters():
            param.register_hook(lambda grad: cpu_s.__setitem__(0, cpu_s[0] + next(spends, 0.0)))
    cpu_s[0] += 7.0
    model(torch.ones(2, 9)).backward()
    block = sum(p.numel() for p in model.blocks[0].parameters()) * FORWARD_S
    head = (sum(p.numel() for p in model.norm.parameters()) + model.head.weight.numel()) * FORWARD_S
    expected = [0.0, block, head, 2 * head, 2 * block - 0.01, 0.0]
    assert slept == pytest.approx(expected)
    for param in model.parameters():
        torch.testing.assert_close(param.grad, torch.full_like(param, 1e-3))


@needs_hosts
def test_quick_trace_has_all_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step of real ranks has ranges of every kind; the picture is drawn from them."""
    assert main(["trace", "--quick", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    rows = report.read_csv(tmp_path / "trace.csv")
    assert {row["lane"] for row in rows} == set(trace.LANES.values())
    assert len([row for row in rows if row["lane"] == "forward"]) == 2
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_trace_is_of_one_step_and_the_next_forward() -> None:
    """What comes before the second forward or after the third is not in it."""

    def event(name: str, start: float, end: float) -> SimpleNamespace:
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end))

    events = [
        event("train::forward", 0, 1000),
        event("shardfuse::wait_all_gather", 500, 600),
        event("train::forward", 2000, 3000),
        event("aten::mm", 2100, 2200),
        event("shardfuse::reduce_scatter b7", 3500, 3600),
        event("train::forward", 5000, 6000),
        event("train::backward", 6500, 7000),
    ]
    found = [(row["lane"], row["start_ms"], row["ms"]) for row in trace.ranges(events)]
    assert found == [
        ("forward", 0.0, 1.0),
        ("launch reduce-scatter", 1.5, 0.1),
        ("forward", 3.0, 1.0),
    ]


def test_size_is_that_of_the_model() -> None:
    """33.4 M parameters."""
    assert numel_of(SIZES["33M"]) == numel_of(SIZES["33M elsewhere"]) == 33_444_864


def rank_result(methods: dict[str, list[float]], checksum: int = 1) -> dict[str, Any]:
    """Return what measure() gives on one rank: seconds per step of each round."""
    turns = [
        {
            **{"method": name, "round": index, "step_s": value, "core_s": 0.9 * value},
            **{"sent_nbytes": 80.0, "loss": 5.0},
        }
        for name, found in methods.items()
        for index, value in enumerate(found)
    ]
    checksums = {name: checksum if name == ADAM else 0 for name in methods}
    return {"turns": turns, "checksums": checksums, "param_nbytes": 100}


def test_rows_are_of_the_slowest_rank_against_the_same_round() -> None:
    """Ratio and exposed time are those of a round, not of medians."""
    fast = rank_result({COMPUTE: [1.0, 1.0], DDP: [2.0, 4.0], ADAM: [1.0, 1.0]})
    slow = rank_result({COMPUTE: [0.5, 1.5], DDP: [2.0, 4.0], ADAM: [1.5, 3.0]})
    rows = {(row["method"], row["round"]): row for row in bench_links.combine([fast, slow])}
    found = [[rows[ADAM, i][key] for key in ("step_s", "ratio", "exposed_s")] for i in range(2)]
    assert found == [[1.5, 0.75, 0.5], [3.0, 0.75, 1.5]]
    assert rows[ADAM, 0]["sent_p"] == 0.8
    assert rows[ADAM, 1]["core_s"] == 0.9 * 3.0
    assert not {"ratio", "exposed_s", "loss"} & set(rows[COMPUTE, 0])


def test_ranks_that_differ_have_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """A method whose ranks ended apart has failed; the others keep their rows."""
    turns = {COMPUTE: [1.0], DDP: [2.0], ADAM: [1.0]}
    rows = bench_links.combine([rank_result(turns, 1), rank_result(turns, 2)])
    assert rows[2] == {"method": ADAM, "round": 0, "note": "failed"}
    assert [row["note"] for row in rows[:2]] == ["", ""]
    assert "shardfuse adam: ranks ended with different parameters" in capsys.readouterr().out


def test_method_that_fails_is_left_out_of_a_second_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad method costs its own row and a launch, not the table."""
    launched = []

    def on_hosts(function: str, arguments: dict[str, Any], *where: Any) -> list[Any]:
        launched.append(arguments["methods"])
        if LAMB in arguments["methods"]:
            code = "raise RuntimeError([method {method} failed])"
            raise LaunchError(f"{code}: [method {LAMB} failed] no")
        return [rank_result({name: [1.0] for name in arguments["methods"]})] * 2

    monkeypatch.setattr(bench_links, "_on_hosts", on_hosts)
    methods = [COMPUTE, DDP, LAMB, ADAM]
    rows = list(bench_links._launch(bench_links.TABLES[0], methods, Options()))
    assert [(row["method"], row["note"]) for row in rows] == [
        (LAMB, "failed"),
        (COMPUTE, ""),
        (DDP, ""),
        (ADAM, ""),
    ]
    assert launched == [methods, [COMPUTE, DDP, ADAM]]


def test_launch_that_fails_for_no_method_loses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is launched twice without a reason to hope."""

    def on_hosts(*arguments: Any) -> list[Any]:
        raise LaunchError("no rank said anything")

    monkeypatch.setattr(bench_links, "_on_hosts", on_hosts)
    rows = list(bench_links._launch(bench_links.TABLES[0], [COMPUTE, DDP], Options()))
    assert rows == [{"method": name, "note": "failed"} for name in (COMPUTE, DDP)]


def test_only_chooses_tables_and_methods() -> None:
    """A rate limits tables alone; what methods are held against is always there."""
    tables, methods = bench_links.wanted(Options(only=("4gbit",)))
    assert [str(table) for table in tables] == ["4gbit, 2 hosts"]
    assert methods == [name for name, method in METHODS.items() if method.is_default]
    tables, methods = bench_links.wanted(Options(only=("lamb",)))
    assert tables == bench_links.TABLES
    assert methods == [COMPUTE, DDP, LAMB, f"{LAMB}, bf16 wire"]
    tables, methods = bench_links.wanted(Options(only=("1gbit, 2", "fsdp")))
    assert [str(table) for table in tables] == ["1gbit, 2 hosts"]
    assert methods == [COMPUTE, DDP, "FSDP2 Adam fused"]
    _, methods = bench_links.wanted(Options(only=("MiB",)))
    assert len(methods) == 8
