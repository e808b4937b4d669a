"""A few dozen random programs; ``python -m tests.fuzz`` runs thousands. See tests/fuzz."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.fuzz.actor import Outcome
from tests.fuzz.features import FEATURES
from tests.fuzz.fsdp import generate_fsdp
from tests.fuzz.generate import generate
from tests.fuzz.program import Group, Op, Program, Spec
from tests.fuzz.shrink import shrink
from tests.fuzz.worlds import Worlds, judge

pytestmark = pytest.mark.timeout(280)

NUM_PROGRAMS = 36
NUM_FSDP_PROGRAMS = 5


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """Processes that all tests here share."""
    with Worlds() as running:
        yield running


_ENDS_IN_A_DEADLOCK = pytest.mark.skipif(
    torch.__version__ < "2.8",
    reason="a gloo group of torch 2.7 and its thread may wait for each other when it is destroyed",
)


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(world, marks=_ENDS_IN_A_DEADLOCK) for world in (2, 3))]
)
@pytest.mark.cpu_only("programs make their tensors by themselves")
def test_random_programs(world: int, worlds: Worlds) -> None:
    """Every program ends as the references say, on every rank; most of them have no fault."""
    counts: Counter[str] = Counter()
    for seed in range(NUM_PROGRAMS // 3):
        program = generate(seed, (world,))
        verdict = worlds.run(program)
        assert verdict.status != "failed", f"{program}\n{verdict.text}"
        counts[verdict.status] += 1
    assert counts["passed"] >= NUM_PROGRAMS // 4


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(world, marks=_ENDS_IN_A_DEADLOCK) for world in (2, 3, 4))]
)
@pytest.mark.cpu_only("programs make their tensors by themselves")
@pytest.mark.gloo_only("torch's own collectives")
def test_programs_over_fsdp(world: int, worlds: Worlds) -> None:
    """Models that FSDP2 has sharded: every program ends as the references say."""
    for seed in range(NUM_FSDP_PROGRAMS):
        program = generate_fsdp(seed, (world,))
        verdict = worlds.run(program)
        assert verdict.status == "passed", f"{program}\n{verdict.text}"


@pytest.mark.parametrize(
    "world", [1, *(pytest.param(world, marks=_ENDS_IN_A_DEADLOCK) for world in (2, 3, 4))]
)
@pytest.mark.cpu_only("programs make their tensors by themselves")
@pytest.mark.gloo_only("torch's own collectives")
def test_programs_of_muon(world: int, worlds: Worlds) -> None:
    """Whole matrices: bit for bit, of stages 1 and 2 and over FSDP2."""
    programs = [generate(seed, (world,), optimizer="ShardedMuon") for seed in range(6)]
    programs += [generate_fsdp(seed, (world,), "ShardedMuon") for seed in range(3)]
    for program in programs:
        verdict = worlds.run(program)
        assert verdict.status != "failed", f"{program}\n{verdict.text}"
    assert any(program.sharding.get("stage") == 2 for program in programs)


def test_a_seed_is_a_program() -> None:
    """The same seed gives the same program; others give others, with every operation among them."""
    programs = [generate(seed) for seed in range(200)]
    assert list(map(str, programs)) == [str(generate(seed)) for seed in range(200)]
    assert len({str(program) for program in programs}) == 200
    assert any(program.optimizer == "ShardedMuon" for program in programs)
    counts = Counter(op.name for program in programs for op in program.ops)
    assert {"backward", "step", "reload", "train", "one_rank", "move_grad", "check_state"} <= set(
        counts
    )
    assert {program.world for program in programs} == {1, 2, 3}


def test_features_can_be_left_out() -> None:
    """What is off in the table is in no program."""
    off = dict.fromkeys(FEATURES, False)
    for seed in range(100):
        program = generate(seed, features=off)
        names = {op.name for op in program.ops}
        assert not names & {"one_rank", "reload", "train", "keep_grad", "delay", "hook_step"}
        assert not program.scaler
        assert {spec.dtype for spec in program.all_specs()} == {"float32"}


def simple(**changes: Any) -> Program:
    """Return a program that passes: two parameters, two steps."""
    specs = (Spec("a", (600,)), Spec("b", (5, 7)))
    ops = []
    for seed in range(2):
        ops += [Op("backward", {"seed": seed, "absent": {}}), Op("step"), Op("delay", DELAY)]
    options = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.5, "dampening": 0.0, "nesterov": False}
    base = Program(0, 2, "ShardedSGD", options, (Group(specs),), {"kernel": "eager"}, tuple(ops))
    return replace(base, **changes)


DELAY = {"milliseconds": (1, 0, 2)}


@pytest.mark.cpu_only("programs make their tensors by themselves")
def test_an_error_on_one_rank_alone_is_no_pass(worlds: Worlds) -> None:
    """Where no rank may have an error, one of all ranks fails too, and the next program runs."""
    assert worlds.run(simple()).status == "passed"
    verdict = worlds.run(simple(ops=(Op("step", {"clip": -1.0}),)))
    assert verdict.status == "failed"
    assert "Invalid max_norm" in verdict.text
    assert worlds.run(simple()).status == "passed"


def test_a_smaller_program_fails_too() -> None:
    """Shrinking keeps what matters and drops the rest."""
    program = generate(5, (3,))
    wanted = program.ops[len(program.ops) // 2]
    least = shrink(program, lambda other: wanted in other.ops)
    assert least.ops == (wanted,)
    assert least.world == 2
    assert len(least.all_specs()) == 1


def test_ranks_must_hold_the_same_bits() -> None:
    """Ranks that each agree with the reference within a tolerance must still be alike."""
    alike = [Outcome("ok", 6, "", 0.0, [(0, 1), (1, 2)])] * 2
    assert judge(simple(), alike, 0.0).status == "passed"
    other = [alike[0], alike[0]._replace(digests=[(0, 1), (1, 3)])]
    assert judge(simple(), other, 0.0).status == "failed"
