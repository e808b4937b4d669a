"""Gradients kept, moved, swapped, shared, replaced and cleared, in every order, as torch has it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardfuse import ShardedSGD
from shardfuse.optim.npu import NpuFusedSGD
from tests.support.gradient_programs import LOCAL, Op, check, random_program
from tests.support.harness import everywhere, run_threads
from tests.support.models import TiedModel

pytestmark = [
    pytest.mark.timeout(120),
    # One is set whose strides are not the parameter's, as any caller may.
    pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract"),
    # Programs edit gradients in place, on purpose.
    pytest.mark.filterwarnings("ignore:p.grad of .* was written to:UserWarning"),
]

BUILDS: dict[str, Callable[..., Any]] = {
    "sgd": lambda groups: ShardedSGD(groups, lr=1.0),
    "npu": lambda groups: NpuFusedSGD(groups, lr=1.0),
    "reduced": lambda groups: ShardedSGD(groups, lr=1.0, sharding={"grads_are_reduced": True}),
}
NUM_PROGRAMS = 60


def run_programs(kind: str, seeds: range) -> None:
    for seed in seeds:
        check(random_program(seed), BUILDS[kind], alike=kind == "reduced")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", BUILDS)
def test_random_programs(kind: str, world_size: int) -> None:
    """Thirty things done to gradients, one after another: every tensor in sight is torch's."""
    if world_size == 1:
        run_programs(kind, range(NUM_PROGRAMS))
    else:
        run_threads(2, run_programs, kind, range(NUM_PROGRAMS, 2 * NUM_PROGRAMS), timeout=100)


@pytest.mark.parametrize("last", ["zero", "zero_to_none", "backward", "step"])
def test_every_short_program(last: str) -> None:
    """After a backward any two things done to gradients, then one that writes to their memory."""
    local = [Op(name, first, 1 - first) for name in LOCAL for first in (0, 1)]
    for middle in itertools.product(local, repeat=2):
        program = [Op("backward"), *middle, Op(last), Op("backward", seed=3), Op("step")]
        check(program, BUILDS["sgd"])


def keep_over_zero(build: Callable[..., Any]) -> None:
    """The program that showed the fault: one gradient kept, one moved to another's parameter."""
    model, other = nn.Linear(4, 4), nn.Parameter(torch.zeros(4))
    optimizer = build(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    kept = model.weight.grad
    assert model.bias.grad is not None
    other.grad, model.weight.grad, model.bias.grad = model.bias.grad, None, None
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    model(torch.ones(2, 4)).sum().backward()
    for grad in (kept, other.grad):
        assert grad is not None
        assert torch.equal(grad, torch.full_like(grad, 2.0))


@pytest.mark.parametrize("kind", BUILDS)
def test_zeroing_leaves_what_is_kept(kind: str) -> None:
    """zero_grad(set_to_none=False) clears what p.grad is then, and nothing else."""
    everywhere(keep_over_zero, BUILDS[kind])


ATTACK = """
import torch
from shardfuse.optim.npu import NpuFusedSGD
m = torch.nn.Linear(4, 4)
o = NpuFusedSGD(m.parameters(), lr=0.1)
m(torch.ones(2, 4)).sum().backward()
k = m.weight.grad
m.weight.grad = None
o.zero_grad()
print(k.abs().sum().item())
"""


def test_kept_in_a_program_of_its_own() -> None:
    """References are counted right in a plain script too, whose variables live elsewhere."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ATTACK]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True)
    assert result.stdout == "32.0\n"


def aliases_over_flats(build: Callable[..., Any]) -> None:
    """Gradients trade places by aliases, between flats that were made at different times."""
    params = [nn.Parameter(torch.zeros(300)) for _ in range(3)]
    params[2].requires_grad_(False)
    optimizer = build([{"params": params[:1]}, {"params": params[1:2]}, {"params": params[2:]}])
    for step in range(3):
        params[2].requires_grad_(step > 0)
        used = [p for p in params if p.requires_grad]
        optimizer.zero_grad(set_to_none=True)
        sum((p * (i + 2.0)).sum() for i, p in enumerate(used)).backward()
        grads = [p.grad.detach() for p in used if p.grad is not None]
        before = [p.detach().clone() for p in used]
        for index, param in enumerate(used):
            param.grad = grads[index - 1]
        # What was set by hand last is written to its own slot, and must not reach another's.
        used[-1].grad = torch.full((300,), 9.0)
        optimizer.step()
        now = [p.detach() for p in used]
        moves = [float(a[0] - b[0]) for a, b in zip(before, now, strict=True)]
        assert moves == [len(used) + 1.0, *range(2, len(used)), 9.0]


def test_aliases_in_slots_of_other_flats() -> None:
    """A gradient that lies in a slot of any flat is read before that slot is written."""
    everywhere(aliases_over_flats, BUILDS["sgd"])


def second_order(build: Callable[..., Any]) -> Tensor:
    param = nn.Parameter(torch.arange(1.0, 4.0))
    optimizer = build([param])
    for _ in range(2):
        param.pow(3).sum().backward(create_graph=True)
        assert param.grad is not None
        param.grad.pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        assert not param.grad.requires_grad
        param.grad = None  # or else parameter and gradient hold each other
        param.data.clamp_(-4, 4)
    return param.detach()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph() -> None:
    """backward(create_graph=True) leaves a graph in p.grad, and a penalty on it is trained on."""

    def like_torch() -> None:
        for build in BUILDS.values():
            expected = second_order(lambda p: torch.optim.SGD(p, lr=1.0))
            assert torch.equal(second_order(build), expected)

    everywhere(like_torch)


def accumulate_in_own_memory(build: Callable[..., Any]) -> None:
    params = [nn.Parameter(torch.zeros(40)), nn.Parameter(torch.zeros(5, 6))]
    optimizer = build(params)
    memory = torch.zeros(70)
    params[0].grad, params[1].grad = memory[:40], memory[40:].view(5, 6)
    for _ in range(2):
        sum(p.sum() for p in params).backward()
    assert torch.equal(memory, torch.full((70,), 2.0))
    memory.mul_(5.0)
    optimizer.step()
    assert all(torch.equal(p.detach(), torch.full_like(p, -10.0)) for p in params)


@pytest.mark.parametrize("kind", BUILDS)
def test_gradients_in_memory_of_the_caller(kind: str) -> None:
    """Gradients that were made views of the caller's own buffer go on to accumulate there."""
    everywhere(accumulate_in_own_memory, BUILDS[kind])


def look_in_a_hook(build: Callable[..., Any]) -> None:
    param, seen = nn.Parameter(torch.zeros(40)), []
    param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    optimizer = build([param])
    for _ in range(2):
        param.sum().backward()
    assert seen[0] is seen[1] is param.grad
    assert torch.equal(seen[0], torch.full((40,), 2.0))
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((40,), -2.0))


@pytest.mark.parametrize("kind", BUILDS)
def test_gradients_that_a_hook_has_kept(kind: str) -> None:
    """A hook that came before the optimizer's has p.grad itself, not what it was at first."""
    everywhere(look_in_a_hook, BUILDS[kind])


def test_backward_leaves_gradients_in_their_slots() -> None:
    """The usual ones, those of weights used twice included: step() copies nothing."""
    model = TiedModel()
    optimizer = ShardedSGD(model.parameters(), 0.1)
    for step in range(2):
        for micro in range(2):
            model(TiedModel.batch(2 * step + micro, 4)).backward()
            for grads in optimizer._grads._flats.values():
                present = [i for i, p in enumerate(grads.params) if p.grad is not None]
                assert len(present) > 2
                assert all(grads.holds(i, grads.params[i].grad) for i in present)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 1)


def test_zeroing_in_the_usual_loop_is_one_fill_a_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backward has made every gradient, none is looked at by itself."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(100)]
    optimizer = NpuFusedSGD(params, lr=0.1)
    sum(p.sum() for p in params).backward()
    optimizer.step()

    def refuse(*args: Any) -> None:
        raise AssertionError("looked at one gradient")

    with monkeypatch.context() as patch:
        patch.setattr("shardfuse.grads.buffer.GradBuffer.holds", refuse)
        patch.setattr("shardfuse.grads.buffer.clear_grad", refuse)
        optimizer.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)
    before = [p.detach().clone() for p in params]
    params[0].sum().backward()
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, params, strict=True)]
    assert moved == [True] + [False] * 99


def step_at_own_scale(dtype: torch.dtype) -> None:
    rank = dist.get_rank()
    param = nn.Parameter(torch.zeros(3000, dtype=dtype))
    optimizer: Any = ShardedSGD([param], 1.0, sharding={"bucket_cap_mb": 0.002})
    scale = 4.0 ** (rank + 1)
    (param * (2.0 * rank + 1) * scale).sum().backward()
    kept = param.grad
    assert kept is not None
    before = kept.clone()
    for count in (1, 2):
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(scale)
        optimizer.step()
        assert torch.equal(param.detach(), torch.full_like(param, -2.0 * count))
        assert param.grad is kept
        assert torch.equal(kept, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_different_loss_scales_leave_gradients_alone(dtype: torch.dtype) -> None:
    """Each rank undoes its own scale in what it sends: p.grad, and who keeps it, see no change."""
    run_threads(2, step_at_own_scale, dtype)
