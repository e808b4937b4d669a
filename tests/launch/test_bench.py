"""The benchmarks run, check what they measure, and write what they measured."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch

from launch.bench import bench_step, environment, launches, ours, shapes, synthetic
from launch.bench.__main__ import main, parse
from launch.bench.drivers import ByHand, Driver, Method
from launch.bench.options import Options, interleaved
from launch.bench.synthetic import Model
from tests.support.harness import RanksFailedError, run_procs

TINY = "5x3000"
CPU = torch.device("cpu")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_step_leaves_tables_and_picture_that_say_where_and_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two real ranks, one method of ours and one peer: CSV, Markdown and PNG with provenance."""
    options = ["step", "--quick", "--only", "shardfuse sgd", "replicated torch Adam"]
    assert main([*options, "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    assert files(tmp_path) == {"step.csv", "step.md", "step.png"}
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    facts = environment.describe(CPU, "")
    for name in ("step.csv", "step.md"):
        text = (tmp_path / name).read_text()
        for wanted in (
            facts["hardware"],
            torch.__version__.split("+")[0],
            facts["date"],
            "launch.bench step",
        ):
            assert wanted in text
        assert "shardfuse sgd" in text
        assert "replicated torch Adam fused" in text


def test_update_and_comm_leave_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One launch of each; main's exit code says whether a launch failed."""
    options = ["update", "comm", "--quick", "--out", str(tmp_path)]
    assert main(options) == 0, capsys.readouterr().out
    parts = {f"{part}.{kind}" for part in ("update", "comm") for kind in ("csv", "md", "png")}
    assert files(tmp_path) == parts
    assert "share of triad" in (tmp_path / "update.md").read_text()
    assert "gloo reduce_scatter" in (tmp_path / "comm.md").read_text()


def test_failing_rank_is_reported_with_its_output() -> None:
    """The launch ends with an error that holds what the rank printed."""
    arguments = {"name": "no such shapes"}
    with pytest.raises(launches.LaunchError, match="Unknown shapes 'no such shapes'"):
        launches.run_ranks("launch.bench.shapes:named", arguments, world_size=1, timeout_s=60)


def with_other_lr(model: Model) -> Driver:
    """Build Adam with an lr that is not that of its reference."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1.1e-3)
    return ByHand(model, optimizer.step, lambda: 0)


@pytest.mark.parametrize("rule", sorted(ours.RULES))
def test_rules_equal_their_references(rule: str) -> None:
    """Every rule passes the check against an unsharded optimizer written independently."""
    row = bench_step.measure(f"shardfuse {rule}", TINY, 2, check=True)
    assert row["error"] < 1e-4


def test_wrongly_driven_peer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer whose result is off by a tenth gives an error and no numbers."""
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    monkeypatch.setitem(bench_step.METHODS, "wrong", Method("wrong", "adam", with_other_lr, adam))
    with pytest.raises(AssertionError, match="wrong: off by"):
        bench_step.measure("wrong", TINY, 2, check=True)


def measure_without_reduction() -> None:
    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    bench_step.METHODS["alone"] = Method("alone", "adam", with_other_lr, adam)
    bench_step.measure("alone", TINY, 2, check=False)


def test_ranks_that_differ_are_refused() -> None:
    """A peer that forgets to average its gradients is found on every rank."""
    with pytest.raises(RanksFailedError, match="ranks ended with different parameters") as error:
        run_procs(2, measure_without_reduction)  # of threads, the first to fail ends the other
    assert set(error.value.failures) == {0, 1}


def test_missing_package_is_a_row_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that is not installed starts no process and says so."""
    peer = dataclasses.replace(
        bench_step.METHODS["shardfuse adam"], name="absent", package="no-such-distribution"
    )
    monkeypatch.setitem(bench_step.METHODS, "absent", peer)
    row = bench_step.launch("absent", TINY, 2, 0, Options(quick=True))
    assert row["note"] == "not installed"
    assert "step_ms" not in row


def test_bert_base_has_its_size() -> None:
    """The shapes are BERT-base's: 109.48 M parameters in 199 tensors."""
    blocks = shapes.named("bert-base")
    assert shapes.numel_of(blocks) == 109_482_240
    assert sum(len(block) for block in blocks) == 199


@pytest.mark.parametrize(("count", "numel"), [(1, 1), (10, 1000), (1000, 12345), (7, 7)])
def test_equal_tensors_have_equal_bytes(count: int, numel: int) -> None:
    """So many tensors, the same number of elements whatever the count."""
    blocks = shapes.named(f"{count}x{numel}")
    sizes = [shape[0] for block in blocks for shape in block]
    assert len(sizes) == count
    assert sum(sizes) == numel
    assert max(sizes) - min(sizes) <= 1


def test_backward_gives_the_gradient_that_is_set_by_hand() -> None:
    """Both ways of providing gradients are the same function of tensor, step and rank."""
    model = Model(shapes.named(TINY), 1, CPU)
    model.run_backward(model, 3)
    for index, param in enumerate(model.parameters()):
        assert param.grad is not None
        assert torch.equal(param.grad, synthetic.fill_(torch.empty_like(param), index, 3, 1))
        other = synthetic.fill_(torch.empty_like(param), index, 3, 0)
        mean = synthetic.mean_grad(param.detach(), index, 3, 2)
        assert torch.equal(mean, (param.grad + other) / 2)
        assert not torch.equal(param.grad, other)


def test_rounds_hold_every_item_in_changing_order() -> None:
    """Launches are interleaved: each round has all of them, not in one order."""
    items = list(range(20))
    pairs = list(interleaved(items, 3))
    rounds = [[item for index, item in pairs if index == r] for r in range(3)]
    assert [index for index, _ in pairs] == sorted(index for index, _ in pairs)
    assert all(sorted(found) == items for found in rounds)
    assert len({tuple(found) for found in rounds}) == 3


def test_readme_commands_are_accepted() -> None:
    """Every command of the document parses (those for another device aside)."""
    readme = environment.ROOT / "launch" / "bench" / "README.md"
    lines = [line.strip() for line in readme.read_text().splitlines() if line.startswith("    py")]
    commands = [line.split("  ")[0].split()[3:] for line in lines]
    assert len(commands) >= 5
    for command in commands:
        if "--device" not in command:
            parse(command)
