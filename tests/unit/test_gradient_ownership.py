"""Gradients as tensors that callers keep, move between parameters, and set by the thousand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import ShardedLamb, ShardedSGD
from shardfuse.grads.source import GradSnapshot, memory_of
from shardfuse.optim.npu import NpuFusedAdam
from tests.support.harness import everywhere

pytestmark = pytest.mark.timeout(60)


def backward(params: list[nn.Parameter], factor: float) -> None:
    """Give each parameter a gradient of its own."""
    torch.stack([(p * (i + factor)).sum() for i, p in enumerate(params)]).sum().backward()


def swap_gradients(params: list[nn.Parameter], _: torch.optim.Optimizer) -> list[Tensor]:
    backward(params, 2.0)
    params[0].grad, params[1].grad = params[1].grad, params[0].grad
    return []


def rotate_aliases(params: list[nn.Parameter], _: torch.optim.Optimizer) -> list[Tensor]:
    backward(params, 2.0)
    grads = [p.grad.detach() for p in params if p.grad is not None]
    for index, param in enumerate(params):
        param.grad = grads[(index + 1) % len(grads)]
    return []


def move_gradient(params: list[nn.Parameter], _: torch.optim.Optimizer) -> list[Tensor]:
    backward(params, 2.0)
    params[1].grad, params[0].grad = params[0].grad, None
    return []


def move_gradient_before_backward(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    move_gradient(params, optimizer)
    (params[0] * 7.0).sum().backward()
    return []


def share_gradient(params: list[nn.Parameter], _: torch.optim.Optimizer) -> list[Tensor]:
    backward(params, 2.0)
    params[2].grad = params[0].grad
    return []


def alias_own_gradient(params: list[nn.Parameter], _: torch.optim.Optimizer) -> list[Tensor]:
    backward(params, 2.0)
    for param in params:
        assert param.grad is not None
        param.grad = param.grad.view(param.shape)
    return []


def keep_gradients(params: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Two losses, the sum of whose gradients is applied."""
    kept = []
    for factor in (2.0, 5.0):
        optimizer.zero_grad()
        backward(params, factor)
        kept.append([p.grad for p in params])
    for param, first, second in zip(params, *kept, strict=True):
        param.grad = first + second
    return [*kept[0], *kept[1]]


def keep_gradients_of_unused(
    params: list[nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[Tensor]:
    backward(params, 2.0)
    kept = [p.grad for p in params if p.grad is not None]
    optimizer.zero_grad()
    params[0].sum().backward()
    return kept


def handle_gradients(
    handle: Callable[[list[nn.Parameter], torch.optim.Optimizer], list[Tensor]],
    shape: tuple[int, ...],
) -> None:
    results = []
    for cls in (torch.optim.SGD, ShardedSGD):
        params = [nn.Parameter(torch.full(shape, float(i))) for i in range(3)]
        optimizer = cls(params, 1.0)
        kept = handle(params, optimizer)
        optimizer.step()
        grads = [p.grad for p in params if p.grad is not None]
        results.append([*(p.detach() for p in params), *grads, *kept])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("shape", [(3000,), (40, 60)], ids=str)
@pytest.mark.parametrize(
    "handle",
    [
        swap_gradients,
        rotate_aliases,
        move_gradient,
        move_gradient_before_backward,
        share_gradient,
        alias_own_gradient,
        keep_gradients,
        keep_gradients_of_unused,
    ],
)
def test_gradients_handed_around(
    handle: Callable[..., list[Tensor]], shape: tuple[int, ...]
) -> None:
    """As in torch, a gradient is a tensor by itself: it may be kept, moved to another parameter."""
    everywhere(handle_gradients, handle, shape)


def assign_many() -> None:
    generator = torch.Generator().manual_seed(0)
    numels = [1, 127, 128, 129, 511, 512, 513, 1, 1500, 2000, 70, 0, 30_000]
    values = [torch.randint(-4, 5, (n,), generator=generator).float() for n in numels]
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = ShardedSGD(params, 1.0)

    def step(grads: list[Tensor | None]) -> None:
        for param, value, grad in zip(params, values, grads, strict=True):
            param.grad = grad
            value.sub_(0 if grad is None else grad)
        optimizer.step()
        for param, value in zip(params, values, strict=True):
            assert torch.equal(param.detach(), value)

    def fresh() -> list[Tensor | None]:
        return [torch.randint(-4, 5, (n,), generator=generator).float() for n in numels]

    step(fresh())
    step([grad if i not in (0, 7) else None for i, grad in enumerate(fresh())])
    step([torch.ones(1).expand(n) for n in numels])
    step([torch.arange(2.0 * n)[::2] for n in numels])
    optimizer.zero_grad()
    torch.cat([2.0 * p for p in params]).sum().backward()
    step(
        [p.grad if i % 2 else grad for i, (p, grad) in enumerate(zip(params, fresh(), strict=True))]
    )


def test_many_short_gradients() -> None:
    """1-D neighbours, which are copied together: of any size and stride, some of them missing."""
    everywhere(assign_many)


@pytest.mark.parametrize("shape", [(700,), (20, 35)], ids=str)
@pytest.mark.parametrize("numel", [1, 1400])
def test_gradient_of_another_size(numel: int, shape: tuple[int, ...]) -> None:
    """`.data` of another size raises, of one element too, and no parameter changes."""
    params = [nn.Parameter(torch.zeros(shape)) for _ in range(3)]
    optimizer = ShardedSGD([(f"p{i}", param) for i, param in enumerate(params)], 1.0)
    for param in params:
        param.grad = torch.ones(shape)
    params[1].grad.data = torch.ones(numel)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=rf"p1 has {numel} elements, the parameter 700\."):
        optimizer.step()
    assert not any(param.any() for param in params)
    params[1].grad = torch.ones(shape)
    optimizer.step()
    assert all(torch.equal(param.detach(), -torch.ones(shape)) for param in params)


def loop_as_usual(build: Callable[..., Any], zero: dict[str, bool], clips: bool) -> None:
    params = [nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(40, 60))]
    optimizer = build(params)
    for _ in range(3):
        for _ in range(2):
            backward(params, 2.0)
        if clips:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad(**zero)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("zero", [{"set_to_none": True}, {"set_to_none": False}], ids=str)
@pytest.mark.parametrize(
    "build",
    [lambda params: ShardedSGD(params, 1.0), ShardedLamb, NpuFusedAdam],
    ids=["sgd", "lamb", "npu"],
)
def test_usual_loops_copy_nothing_out(
    monkeypatch: pytest.MonkeyPatch, build: Callable[..., Any], zero: dict[str, bool], clips: bool
) -> None:
    """Where nobody keeps a gradient, no slot's old values are copied away."""

    def refuse(grad: Tensor) -> None:
        raise AssertionError(f"{tuple(grad.shape)} is held")

    monkeypatch.setattr("shardfuse.grads.buffer.detach_copy", refuse)
    everywhere(loop_as_usual, build, zero, clips)
    with pytest.raises(AssertionError, match="is held"):
        handle_gradients(swap_gradients, (3000,))


def test_a_gradient_of_no_elements_has_no_sum() -> None:
    """Its strides may be any: torch views it as no other type."""
    param = nn.Parameter(torch.ones(0, dtype=torch.bfloat16))
    param.grad = torch.zeros(0, dtype=torch.bfloat16)[::2]
    assert param.grad.stride() == (2,)
    assert GradSnapshot([param], memory_of([param.grad])).is_current()
