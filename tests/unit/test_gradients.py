"""Where gradients come from and what happens to them: every way torch allows, alone and sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import ShardedAdam, ShardedAdamW, ShardedBertAdam, ShardedLamb, ShardedSGD
from tests.support.harness import everywhere
from tests.support.models import TiedModel
from tests.support.oracles import BertAdamOracle
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(60)

# fp32 rounding of a few updates, on both sides.
TOLERANCE = 1e-5

FiveOptimizers: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (ShardedSGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (ShardedAdam, {"lr": 0.1, "weight_decay": 0.1}),
    (ShardedAdamW, {"lr": 0.1, "weight_decay": 0.1}),
    (ShardedBertAdam, {"lr": 0.1}),
    (ShardedLamb, {"lr": 0.1, "weight_decay": 0.1}),
]
five = pytest.mark.parametrize(("cls", "options"), FiveOptimizers, ids=lambda v: "")


def assert_like_torch(model: nn.Module, reference: nn.Module) -> None:
    pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
    for (name, param), expected in pairs:
        torch.testing.assert_close(param, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def train_like_torch(zero: str) -> None:
    model = TiedModel()
    reference = copy.deepcopy(model)
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    optimizer = ShardedSGD(model.parameters(), **options)
    expected = torch.optim.SGD(reference.parameters(), **options, foreach=False)
    for step in range(4):
        for network, opt in ((model, optimizer), (reference, expected)):
            network(TiedModel.batch(step, 4)).backward()
            opt.step()
            if zero == "model":
                network.zero_grad()
            elif zero == "model-zeros":
                network.zero_grad(set_to_none=False)
            elif zero == "none":
                opt.zero_grad(set_to_none=True)
            elif zero == "zeros":
                opt.zero_grad(set_to_none=False)
            else:
                assert zero == "by hand"
                for param in network.parameters():
                    param.grad = None
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert (param.grad is None) == (other.grad is None)
            assert param.grad is None or not param.grad.any()
    assert_like_torch(model, reference)


@pytest.mark.parametrize("zero", ["model", "model-zeros", "none", "zeros", "by hand"])
def test_zeroing_gradients(zero: str) -> None:
    """Every way of clearing gradients, through the model or the optimizer, trains like torch."""
    everywhere(train_like_torch, zero)


def step_on_zeros(cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    param, idle = nn.Parameter(torch.ones(2000)), nn.Parameter(torch.ones(2000))
    optimizer = cls([param, idle], **options)
    for _ in range(2):
        param.grad = torch.ones(2000)
        idle.grad = torch.ones(2000)
        optimizer.step()
    before = idle.detach().clone()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert not torch.equal(idle, before)
    optimizer.zero_grad()
    before = idle.detach().clone()
    param.grad = torch.ones(2000)
    optimizer.step()
    assert torch.equal(idle, before)


@five
def test_zero_is_not_none(
    cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """A gradient of zero still takes momentum and decay; a gradient of None takes nothing."""
    everywhere(step_on_zeros, cls, options)


def train_accumulated() -> None:
    model = TiedModel()
    reference = copy.deepcopy(model)
    optimizer = ShardedSGD(model.parameters(), 0.1)
    for step in range(3):
        for micro in range(3):
            model(TiedModel.batch(10 * step + micro, 4)).backward()
            reference(TiedModel.batch(10 * step + micro, 4)).backward()
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(param.grad, other.grad)
        optimizer.step()
        torch.optim.SGD(reference.parameters(), 0.1, foreach=False).step()
        model.zero_grad()
        reference.zero_grad()
    assert_like_torch(model, reference)


def test_accumulation() -> None:
    """Several backward passes add up in p.grad, readable at any time, until the step."""
    everywhere(train_accumulated)


def assign_gradients() -> None:
    param = nn.Parameter(torch.zeros(40, 60))
    optimizer = ShardedSGD([param], 1.0)
    total = torch.zeros(40, 60)

    def step(grad: Tensor) -> None:
        param.grad = grad
        optimizer.step()
        total.sub_(grad)
        assert torch.equal(param.detach(), total)
        assert torch.equal(param.grad, grad)

    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-4, 5, (60, 40), generator=generator).float()
    step(integers.t())
    step(integers.t().contiguous())
    step(torch.tensor(2.0).expand(40, 60))
    step(integers.repeat(2, 2)[:40, :60])
    param.grad = None
    param.sum().backward()
    param.grad.mul_(2.0)
    step(param.grad)
    param.grad.copy_(integers.t())
    step(param.grad)


def test_assigned_gradients() -> None:
    """Gradients set by hand, strided in any way or edited in place, are the ones applied."""
    everywhere(assign_gradients)


def replace_gradient_data() -> None:
    param = nn.Parameter(torch.zeros(3000))
    optimizer = ShardedSGD([param], 1.0)
    param.sum().backward()
    param.grad.data = torch.full((3000,), 3.0)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((3000,), -3.0))


def test_gradient_data_replaced() -> None:
    """A gradient whose `.data` was pointed elsewhere is read where it is now."""
    everywhere(replace_gradient_data)


def repeat_steps() -> None:
    param = nn.Parameter(torch.zeros(3000))
    optimizer = ShardedSGD([param], 1.0)
    (param * torch.arange(3000.0)).sum().backward()
    for count in range(1, 4):
        optimizer.step()
        assert torch.equal(param.detach(), -count * torch.arange(3000.0))
        assert torch.equal(param.grad, torch.arange(3000.0))


def test_repeated_steps() -> None:
    """A step leaves p.grad as it is, and a second one on the same p.grad applies it again."""
    everywhere(repeat_steps)


def leave_unused(cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any]) -> None:
    names = ("used", "unused", "frozen", "late")
    params = {name: nn.Parameter(torch.full((1500,), 2.0)) for name in names}
    params["frozen"].requires_grad_(False)
    optimizer: Any = cls(params.values(), **options)
    for step in range(4):
        loss = params["used"].sum() + (params["late"].sum() if step >= 2 else 0.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for name in ("unused", "frozen"):
        assert torch.equal(params[name].detach(), torch.full((1500,), 2.0))
        assert params[name].grad is None
    optimizer.consolidate_state_dict(to=None)
    state = optimizer.state_dict()["state"]
    assert set(state) == {0, 3}
    if "momentum_buffer" not in state[0]:
        assert (state[0]["step"], state[3]["step"]) == (4, 2)

    alone = nn.Parameter(torch.full((1500,), 2.0))
    fresh = cls([alone], **options)
    for _ in range(2):
        alone.grad = torch.ones(1500)
        fresh.step()
    assert_bitwise([params["late"].detach()], [alone.detach()])


@five
def test_unused_parameters(
    cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    """Without a gradient: no change, no state, no step; the first one later starts from step 1."""
    everywhere(
        leave_unused, cls, {**options, **({"max_grad_norm": -1} if "Bert" in str(cls) else {})}
    )


def unfreeze() -> None:
    model = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.01)
    model[0].requires_grad_(False)
    reference = copy.deepcopy(model)
    optimizer = ShardedAdam(model.parameters(), lr=0.1)
    expected = torch.optim.Adam(reference.parameters(), lr=0.1, foreach=False)
    for step in range(4):
        for network, opt in ((model, optimizer), (reference, expected)):
            network[0].requires_grad_(step >= 2)
            network(torch.ones(3, 60)).sum().backward()
            opt.step()
            opt.zero_grad()
    assert_like_torch(model, reference)


def test_unfreezing() -> None:
    """A parameter frozen at construction trains once requires_grad is set, as in torch."""
    everywhere(unfreeze)


def unfreeze_under_clip() -> None:
    params = [nn.Parameter(torch.ones(1500)), nn.Parameter(torch.ones(100), requires_grad=False)]
    options = {"lr": 0.1, "max_grad_norm": 1.0, "e": 1.0}
    optimizer = ShardedBertAdam(params, **options)
    oracle = BertAdamOracle([{"params": params}], **options)
    grads = [torch.ones(1500), torch.full((100,), 5.0)]
    for step in range(3):
        params[1].requires_grad_(step > 0)
        params[0].grad = grads[0].clone()
        params[1].grad = grads[1].clone() if step > 0 else None
        optimizer.step()
        oracle.step([[grads[0], grads[1] if step > 0 else None]])
    for param, value in zip(params, oracle.values(), strict=True):
        torch.testing.assert_close(param.double(), value, rtol=TOLERANCE, atol=0.0)


def test_unfrozen_parameters_join_the_clip() -> None:
    """BertAdam's norm is that of the whole (group, dtype), unfrozen parameters included."""
    everywhere(unfreeze_under_clip)


def train_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 16, 3), nn.Flatten())
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(torch.linspace(-1, 1, param.numel()).reshape(param.shape) / (index + 1))
    model.to(memory_format=torch.channels_last)
    reference = copy.deepcopy(model)
    optimizer = ShardedAdam(model.parameters(), lr=0.05, eps=1e-3)
    expected = torch.optim.Adam(reference.parameters(), lr=0.05, eps=1e-3, foreach=False)
    x = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)
    for _ in range(3):
        for network, opt in ((model, optimizer), (reference, expected)):
            network(x.to(memory_format=torch.channels_last)).square().mean().backward()
            opt.step()
            network.zero_grad()
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert_like_torch(model, reference)


def test_channels_last() -> None:
    """Channels-last parameters keep their memory format and train like torch."""
    everywhere(train_channels_last)


def train_strided() -> None:
    base = torch.arange(120.0 * 60).reshape(120, 60)
    layouts = [base.t(), base[::2], base[:, 7], base[:1].expand(5, 60)]
    params = [nn.Parameter(t) for t in layouts]
    values = [t.clone() for t in layouts]
    optimizer = ShardedSGD(params, 1.0)
    for param, value in zip(params, values, strict=True):
        assert torch.equal(param.detach(), value)
        param.grad = value.clone()
    optimizer.step()
    for param, value in zip(params, values, strict=True):
        assert torch.equal(param.detach(), torch.zeros_like(value))


def test_strided_parameters() -> None:
    """Transposed parameters and slices keep their values when they move into the buffer."""
    everywhere(train_strided)


def test_overlapping_parameters() -> None:
    """Parameters that share memory are refused: moving them would silently untie them."""
    base = torch.ones(4000)
    for second in (base[2999:], base.view(40, 100), base):
        with pytest.raises(ValueError, match="share memory"):
            ShardedSGD([nn.Parameter(base[:3000]), nn.Parameter(second)], 1.0)
    ShardedSGD([nn.Parameter(base[:3000]), nn.Parameter(base[3000:])], 1.0)


def step_by_closure() -> None:
    param = nn.Parameter(torch.full((1200,), 3.0))
    optimizer = ShardedSGD([param], 0.5)
    enabled = []

    def closure() -> Tensor:
        enabled.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.square().sum() / 2
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 1200 * 9 / 2
    assert float(optimizer.step(closure)) == 1200 * 1.5**2 / 2
    assert enabled == [True, True]
    assert torch.equal(param.detach(), torch.full((1200,), 0.75))
    assert optimizer.step() is None


def test_closure() -> None:
    """A closure runs with gradients enabled, may make the first ones, and its loss comes back."""
    everywhere(step_by_closure)


def lose_clipping() -> None:
    param = nn.Parameter(torch.zeros(2000))
    optimizer: Any = ShardedSGD([param], 1.0)
    param.grad = torch.full((2000,), 2.0)
    assert float(optimizer.grad_norm()) == pytest.approx(2.0 * 2000**0.5)
    param.grad = torch.full((2000,), 3.0)
    optimizer.step()
    assert torch.equal(param.detach(), torch.full((2000,), -3.0))


def test_gradients_assigned_after_the_norm() -> None:
    """The step applies the gradients that p.grad holds then, not those grad_norm() saw."""
    everywhere(lose_clipping)


def sparse_gradients() -> None:
    embedding = nn.Embedding(300, 8, sparse=True)
    optimizer = ShardedSGD([("table.weight", embedding.weight)], 0.1)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match=r"table\.weight is sparse"):
        optimizer.step()


def test_sparse_gradients() -> None:
    """A sparse gradient is refused by the parameter's name."""
    sparse_gradients()
