"""torch_npu's bugs that train on in silence, a test for each."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse.optim import npu, paddle
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle
from tests.support.runs import TOLERANCE, assert_bitwise, max_relative_error
from tests.support.upstream import SHAPES, Twin, every_optimizer, noise

pytestmark = pytest.mark.timeout(60)

# 1. Gradients that were dropped


@pytest.mark.parametrize("how", ["model.zero_grad", "p.grad = None"])
@every_optimizer
def test_model_zero_grad_does_not_reapply_stale_gradients(name: str, how: str) -> None:
    """Once dropped, a gradient is not applied; the next one is, as by the reference."""
    twin = Twin(name)
    for seed in range(2):
        twin.step(seed)
    if how == "model.zero_grad":
        twin.model.zero_grad()
    for param in twin.params:
        if how == "p.grad = None":
            param.grad = None
        assert param.grad is None
    before = twin.values()
    for _ in range(3):
        twin.optimizer.step()
    assert_bitwise(twin.values(), before)
    twin.step(2)
    twin.check()


# 2. States that are loaded late


@every_optimizer
def test_state_loaded_after_a_step_is_what_training_goes_on_from(name: str) -> None:
    """An optimizer that was used before loading continues the saved run, bit for bit."""
    saved, used = Twin(name), Twin(name)
    for seed in range(3):
        saved.step(seed)
    state = copy.deepcopy(saved.optimizer.state_dict())
    for seed in range(10, 15):
        used.step(seed)
    used.optimizer.load_state_dict(state)
    with torch.no_grad():
        for mine, theirs in zip(used.params, saved.params, strict=True):
            mine.copy_(theirs)
    for seed in range(3, 6):
        saved.step(seed)
        used.step(seed)
    saved.check()
    assert_bitwise(used.values(), saved.values())


def bert_steps(num_steps: int, resume_at: int | None = None, **options: Any) -> list[float]:
    """Return the factors on BertAdam's learning rate, one per step, from how a param moves."""
    options = {"lr": 1.0, "b1": 0.0, "b2": 0.0, "e": 0.0, "weight_decay": 0.0, **options}
    param = nn.Parameter(torch.zeros(3))
    optimizer = npu.NpuFusedBertAdam([param], **options)
    factors = []
    for step in range(num_steps):
        if step == resume_at:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = npu.NpuFusedBertAdam([param], **options)
            optimizer.load_state_dict(state)
        before = param.detach().clone()
        param.grad = torch.ones(3)
        optimizer.step()
        factors.append(float((before - param.detach()).mean()))
    return factors


@pytest.mark.parametrize("resume_at", [1, 3])
def test_bert_adam_schedule_goes_on_after_resume(resume_at: int) -> None:
    """The step is saved, so that the schedule does not start again from the warm-up."""
    factors = bert_steps(7, resume_at, warmup=0.4, t_total=5)
    assert factors == pytest.approx([0, 0.5, 1, 2 / 3, 1 / 3, 0, 0], abs=1e-6)


def test_torch_adam_checkpoint_counts_steps_once() -> None:
    """Four steps of torch.optim.Adam and four of ours are eight of torch's."""
    options = {"lr": 0.1, "weight_decay": 0.1}
    twin = Twin("NpuFusedAdam", **options)
    params = [nn.Parameter(value.clone()) for value in twin.start]
    plain = torch.optim.Adam(params, **options)
    for seed in range(8):
        grads = twin.grads(seed)
        if seed == 4:
            state = plain.state_dict()
            twin.optimizer.load_state_dict(state)
            with torch.no_grad():
                for mine, theirs in zip(twin.params, params, strict=True):
                    mine.copy_(theirs)
        if seed >= 4:
            twin.model.zero_grad()
            twin.backward(grads)
            twin.optimizer.step()
            # What was loaded is a copy: torch's own count is not ours.
            assert int(plain.state[params[0]]["step"]) == seed
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        plain.step()
    assert [entry["step"] for entry in twin.optimizer.state_dict()["state"].values()] == [8] * 3
    ends = [p.detach() for p in params]
    assert max_relative_error(twin.values(), ends, twin.start) < TOLERANCE


# 3. Parameters that are re-allocated


@pytest.mark.parametrize("how", [".data =", ".to()"])
@every_optimizer
def test_reallocated_parameters_are_an_error_and_can_be_taken_back(name: str, how: str) -> None:
    """step() names them and changes nothing; after rebind() training goes on as if never moved."""
    twin = Twin(name)
    twin.step(0)
    if how == ".data =":
        twin.params[0].data = twin.params[0].data.clone()
    else:
        # What model.cpu() and model.npu() do: every parameter gets new memory.
        twin.model._apply(torch.clone)
    before = twin.values()
    twin.model.zero_grad()
    twin.backward(twin.grads(1))
    with pytest.raises(RuntimeError, match=r"re-allocated(.|\n)*rebind"):
        twin.optimizer.step()
    assert_bitwise(twin.values(), before)
    twin.optimizer.rebind()
    twin.step(1)
    twin.check()


@pytest.mark.parametrize("swap", [False, True])
def test_load_state_dict_with_assign(swap: bool) -> None:
    """Where torch swaps the parameters' tensors step() says so, as with `.data =`.

    Where it puts others into the model, which is its default, no optimizer follows them: not
    torch.optim's either. They have to be built after that.
    """
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizers = [
        npu.NpuFusedSGD(model.parameters(), 0.5),
        torch.optim.SGD(other.parameters(), 0.5),
    ]
    ones = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for module in (model, other):
            module.load_state_dict({k: v.clone() for k, v in ones.items()}, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for module in (model, other):
        module(torch.ones(1, 3)).sum().backward()
    if swap:
        with pytest.raises(RuntimeError, match="re-allocated"):
            optimizers[0].step()
        optimizers[0].rebind()
    for optimizer in optimizers:
        optimizer.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine.detach(), torch.full_like(mine, 0.5 if swap else 1.0))


# 4. Parameters that have no gradient at first


@pytest.mark.parametrize("how", ["unused", "frozen"])
@every_optimizer
def test_parameters_without_a_first_gradient_are_trained_later(name: str, how: str) -> None:
    """Each starts from nothing with its first gradient, as in the reference; so do experts."""
    twin = Twin(name)
    if how == "frozen":
        twin.params[1].requires_grad_(False)
    for seed in range(6):
        if seed == 2:
            twin.params[1].requires_grad_(True)
        # From then on the second and the third parameter take turns, as experts do.
        twin.step(seed, absent=[1] if seed < 2 else [1 + seed % 2])
        if seed == 1:
            assert torch.equal(twin.params[1].detach(), twin.start[1])
    twin.check()


# 5. fp16 parameters


@pytest.mark.parametrize("numel", [6_600, 20_000, 70_000])
def test_fp16_lamb_of_large_tensors_moves_in_every_step(numel: int) -> None:
    """The square of the update's norm passes 65504; the trust ratio is right all the same."""
    twin = Twin("NpuFusedLamb", [(numel,)], torch.float16, lr=0.1)
    overflows = 0
    for seed in range(20):
        before = twin.params[0].detach().clone()
        twin.step(seed)
        assert not torch.equal(twin.params[0].detach(), before)
        oracle = twin.oracle.groups[0]["params"][0].state
        direction = oracle["exp_avg"] / (oracle["exp_avg_sq"].sqrt() + 1e-6)
        overflows += float(direction.pow(2).sum()) > 65504
    assert overflows > 0
    twin.check()


def test_fp16_lamb_with_tiny_gradients_moves() -> None:
    """Squares of gradients below fp16's smallest number are not lost under eps=1e-6."""
    param = nn.Parameter(noise((1000,), 0).half())
    oracle = LambOracle([{"params": [param]}], lr=0.1, eps=1e-6)
    optimizer = npu.NpuFusedLamb([param], lr=0.1, eps=1e-6)
    start = param.detach().clone()
    for seed in range(3):
        param.grad = (noise((1000,), 1 + seed) * 1e-4).half()
        oracle.step([[param.grad]])
        before = param.detach().clone()
        optimizer.step()
        assert not torch.equal(param.detach(), before)
    master = optimizer.state_dict()["state"][0]["param"]
    assert max_relative_error([master], oracle.values(), [start]) < TOLERANCE


def test_fp16_paddle_lamb_of_large_tensors_moves_in_every_step() -> None:
    """Paddle's Lamb too: late and dropped gradients, and an update whose norm overflows fp16."""
    params = [nn.Parameter(noise((n,), n).half()) for n in (70_000, 2000)]
    oracle = LambOracle([{"params": params}], lr=0.1, weight_decay=0.01, variant="paddle")
    optimizer = paddle.Lamb(0.1, lamb_weight_decay=0.01, parameters=params)
    for step in range(6):
        grads = [noise(p.shape, 10 * step + i).half() for i, p in enumerate(params)]
        # The second is late, and dropped again in the last step.
        given = [grads[0], grads[1] if 2 <= step < 5 else None]
        optimizer.clear_grad()
        for param, grad in zip(params, given, strict=True):
            param.grad = grad
        before = [p.detach().clone() for p in params]
        optimizer.step()
        oracle.step([given])
        for param, old, grad in zip(params, before, given, strict=True):
            assert torch.equal(param.detach(), old) == (grad is None)
    for param, value in zip(params, oracle.values(), strict=True):
        # The fp32 master rounded once; the smallest positive fp16 number is 6e-8.
        torch.testing.assert_close(param.detach().double(), value, rtol=2.0**-11, atol=1e-6)


def fp16_adam(params: list[nn.Parameter], options: dict[str, Any]) -> tuple[Any, AdamOracle]:
    """Let three steps be made on the gradients that the parameters have."""
    oracle = AdamOracle([{"params": params}], **options)
    optimizer = npu.NpuFusedAdam(params, **options)
    for _ in range(3):
        optimizer.step()
        oracle.step([[p.grad for p in params]])
    return optimizer, oracle


def test_fp16_adam_with_eps_that_rounds_to_zero_gives_no_nan() -> None:
    """0 / (0 + 1e-8) is 0 in fp16 parameters too: a gradient of zero moves nothing."""
    param = nn.Parameter(noise((2000,), 0).half())
    param.grad = noise((2000,), 1).half()
    param.grad[::3] = 0
    start = param.detach().clone()
    optimizer, oracle = fp16_adam([param], {"lr": 0.1, "eps": 1e-8})
    assert torch.equal(param.detach()[::3], start[::3])
    master = optimizer.state_dict()["state"][0]["param"]
    assert max_relative_error([master], oracle.values(), [start]) < TOLERANCE


def test_the_documented_adam_example_gives_no_nan() -> None:
    """Its fp16 parameters begin with an element whose value and gradient are 0: 0 it stays."""
    params = []
    for numel, dtype in (
        (6, None),
        (12, None),
        (6, torch.half),
        (12, torch.half),
        (18, torch.half),
    ):
        params.append(nn.Parameter(torch.arange(numel).reshape(-1, 3).to(dtype or torch.float)))
        params[-1].grad = params[-1].detach().clone() / 100.0
    options = {"eps": 1e-8, "betas": (0.9, 0.999), "lr": 2e-3, "weight_decay": 0.05}
    _, oracle = fp16_adam(params, options)
    for param, value in zip(params, oracle.values(), strict=True):
        rounding = 2.0**-11 if param.dtype == torch.half else 1e-6
        torch.testing.assert_close(param.detach().double(), value, rtol=rounding, atol=1e-6)
        assert float(param.detach().flatten()[0]) == 0


@every_optimizer
def test_fp16_parameters_have_fp32_states(name: str) -> None:
    """Moments and masters are fp32 ones, and the masters follow the reference."""
    twin = Twin(name, dtype=torch.float16)
    for seed in range(3):
        twin.step(seed)
    twin.check()
    for entry in twin.optimizer.state_dict()["state"].values():
        tensors = [value for value in entry.values() if isinstance(value, Tensor)]
        assert tensors
        assert all(tensor.dtype == torch.float32 for tensor in tensors)


# 6. Parameters that backward does not reach


@every_optimizer
def test_unused_parameters_stay_after_zero_grad(name: str) -> None:
    """zero_grad() keeps the tensors, yet neither decay nor momentum moves what is unused."""
    twin = Twin(name)
    for seed in range(5):
        absent = [0, 1] if seed in (2, 3) else []
        grads = twin.grads(seed, absent)
        twin.optimizer.zero_grad()
        twin.backward(grads)
        before, state = twin.values(), copy.deepcopy(twin.optimizer.state_dict()["state"])
        twin.optimizer.step()
        twin.oracle.step([grads])
        for index in absent:
            assert not twin.params[index].grad.any()
            assert torch.equal(twin.params[index].detach(), before[index])
            after = twin.optimizer.state_dict()["state"][index]
            assert all(
                torch.equal(torch.as_tensor(after[k]), torch.as_tensor(v))
                for k, v in state[index].items()
            )
    twin.check()


# 7. BertAdam's options


def test_bert_adam_clips_by_the_groups_own_max_grad_norm() -> None:
    """Each group is clipped to its own bound; one without it, to the constructor's."""
    params = [nn.Parameter(noise(SHAPES[0], i)) for i in range(3)]
    start = [p.detach().clone() for p in params]
    bounds: list[dict[str, Any]] = [{"max_grad_norm": 0.5}, {"max_grad_norm": -1.0}, {}]
    groups = [{"params": [p], **bound} for p, bound in zip(params, bounds, strict=True)]
    # With a large e the update is proportional to the gradient, so that the clip shows.
    options = {"lr": 1.0, "e": 1.0, "max_grad_norm": 2.0}
    oracle = BertAdamOracle(groups, **options)
    ignoring = BertAdamOracle([{"params": [p]} for p in params], **options)
    optimizer = npu.NpuFusedBertAdam(groups, **options)
    for seed in range(3):
        grads = [[noise(SHAPES[0], 10 * seed + i)] for i in range(3)]
        for param, (grad,) in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        oracle.step(grads)
        ignoring.step(grads)
    values = [p.detach() for p in params]
    assert max_relative_error(values, oracle.values(), start) < TOLERANCE
    for index, differs in enumerate([True, True, False]):
        wrong = max_relative_error([values[index]], [ignoring.values()[index]], [start[index]])
        assert (wrong > 1e-3) == differs


def test_bert_adam_without_warmup_follows_its_published_formula() -> None:
    """warmup=-1 with t_total is (1 - x) / 2 in the linear schedule: kept, and documented."""
    factors = bert_steps(6, warmup=-1, t_total=5)
    assert factors == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1, 0.0], abs=1e-6)
    assert bert_steps(3) == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize("bound", [1.0, -1.0])
def test_max_grad_norm_may_change_between_steps(bound: float) -> None:
    """A group's bound is read in every step, as its learning rate is."""
    twin = Twin("NpuFusedBertAdam", e=1.0, lr=2.0)
    twin.step(0)
    twin.optimizer.param_groups[0]["max_grad_norm"] = bound
    twin.oracle.groups[0]["max_grad_norm"] = bound
    twin.step(1)
    twin.check()
