"""The gradients and buffers of shardfuse.optim.npu, and torch_npu's defects in them mended."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfuse.grads.buffer
import shardfuse.grads.full
from tests.support.models import lie_in
from tests.support.oracles import AdamOracle, LambOracle, SGDOracle
from tests.support.upstream import CLASSES
from tests.unit.test_npu_api import build, every_class, ones


def test_zero_grad_keeps_the_tensors() -> None:
    """By default gradients stay the same tensors, zeros; None and set_to_none work as in torch."""
    first, never = ones(), ones()
    optimizer = build("NpuFusedAdam", [first, never])
    first.sum().backward()
    grad = first.grad
    optimizer.zero_grad()
    assert first.grad is grad
    assert torch.equal(grad, torch.zeros(3))
    assert never.grad is None
    first.sum().backward()
    assert first.grad is grad
    assert torch.equal(grad, torch.ones(3))
    optimizer.zero_grad(set_to_none=True)
    assert first.grad is None


@pytest.mark.parametrize("how", ["backward", "assigned"])
@every_class
def test_unused_after_zero_grad(name: str, how: str) -> None:
    """A parameter that backward did not reach keeps its bits, decay and momentum on; torch_npu
    moves it. It goes on as if those steps had not been."""
    options = {"weight_decay": 0.1, **({"max_grad_norm": -1} if "Bert" in name else {})}
    params, alone = [ones(2000), ones(3)], ones(2000)
    optimizer, reference = build(name, params, **options), build(name, [alone], **options)
    for step in range(4):
        if step != 2:
            for param in (params[0], alone):
                if how == "assigned":
                    param.grad = torch.ones(2000)
                else:
                    param.sum().backward()
            reference.step()
            reference.zero_grad()
        params[1].sum().backward()
        before = params[0].detach().clone()
        optimizer.step()
        assert torch.equal(before, params[0]) == (step == 2)
        optimizer.zero_grad()
        assert not params[0].grad.any()
    assert torch.equal(params[0], alone)


def test_the_usual_step_looks_at_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a gradient is absent is looked up only where backward did not reach it."""
    looked = []

    def is_absent(grad: Tensor) -> bool:
        looked.append(grad.numel())
        return real(grad)

    real = shardfuse.grads.full.is_absent
    monkeypatch.setattr(shardfuse.grads.full, "is_absent", is_absent)
    monkeypatch.setattr(shardfuse.grads.buffer, "is_absent", is_absent)
    params = [ones(5), ones(6)]
    optimizer = build("NpuFusedSGD", params, momentum=0.9)
    for step in range(3):
        # A gradient of -0.0 that backward has made is one.
        sum(
            (-0.0 if step == 2 else 1.0) * p.sum() for p in params[: 1 if step == 1 else 2]
        ).backward()
        before = params[1].detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert looked == ([] if step == 0 else [6])
        assert torch.equal(params[1].detach(), before) == (step == 1)


def test_cleared_gradients_stay_absent_when_combined() -> None:
    """A gradient that was assigned, zeroed and then moved into the combined tensor is absent."""
    unused, used = ones(), ones()
    optimizer = build("NpuFusedSGD", [unused, used], weight_decay=0.1)
    unused.grad = torch.ones(3)
    optimizer.zero_grad()
    used.sum().backward()
    assert float(optimizer.get_combined_grads()[0].sum()) == 3.0
    optimizer.step()
    assert torch.equal(unused.detach(), torch.ones(3))
    assert not torch.equal(used.detach(), torch.ones(3))


@pytest.mark.parametrize("edit", ["zero_", "add_"])
def test_written_gradients_count(edit: str) -> None:
    """A gradient that was written by hand after zero_grad() is one, also if it is zero."""
    param = ones()
    optimizer = build("NpuFusedSGD", [param], momentum=0.9)
    param.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before = param.detach().clone()
    param.grad.zero_() if edit == "zero_" else param.grad.add_(1.0)
    optimizer.step()
    momentum = 0.9 if edit == "zero_" else 1.9
    torch.testing.assert_close(param.detach(), before - 0.1 * momentum)


def test_gradients_dropped_by_the_model() -> None:
    """model.zero_grad() sets gradients to None; the next ones are taken, not the old."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = build("NpuFusedSGD", model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    model.zero_grad()
    (0 * model(torch.ones(1, 3)).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), torch.full((2, 3), 0.9))


def test_closure() -> None:
    """A closure may make the first gradients; its loss comes back."""
    for name in CLASSES:
        param = ones()
        optimizer = build(name, [param])

        def closure(optimizer: Any = optimizer, param: Tensor = param) -> Tensor:
            optimizer.zero_grad()
            loss = param.square().sum()
            loss.backward()
            return loss.detach()

        assert float(optimizer.step(closure)) == 3.0
        assert float(optimizer.step(closure)) < 3.0


def test_unknown_keyword_of_step() -> None:
    """step() takes a closure and a grad_scaler, nothing else."""
    with pytest.raises(TypeError, match="scaler"):
        build("NpuFusedAdam", [ones()]).step(scaler=None)


def test_late_groups_and_frozen_parameters() -> None:
    """Late gradients, groups added after steps and unfrozen parameters train from their start."""
    params = [ones(), ones(), ones()]
    params[1].requires_grad_(False)
    optimizer = build("NpuFusedAdam", params[:2])
    starts = {0: 0, 1: 2, 2: 1}
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": [params[2]]})
        if step == 2:
            params[1].requires_grad_(True)
        sum(p.sum() for i, p in enumerate(params) if starts[i] <= step).backward()
        optimizer.step()
        optimizer.zero_grad()
    for index, param in enumerate(params):
        oracle = AdamOracle([{"params": [torch.ones(3)]}], lr=0.1)
        for _ in range(4 - starts[index]):
            oracle.step([[torch.ones(3)]])
        torch.testing.assert_close(param.double(), oracle.values()[0], rtol=1e-6, atol=1e-7)


def test_loading_after_steps() -> None:
    """A state loaded into an optimizer that was used is the state; steps do not count twice."""
    saved = ones()
    optimizer = build("NpuFusedBertAdam", [saved], warmup=0.5, t_total=10)
    for _ in range(3):
        saved.grad = torch.ones(3)
        optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    assert state["state"][0]["step"] == 3
    other = nn.Parameter(saved.detach().clone())
    used = build("NpuFusedBertAdam", [other], warmup=0.5, t_total=10)
    other.grad = torch.ones(3)
    used.step()
    with torch.no_grad():
        other.copy_(saved)
    used.load_state_dict(state)
    for param, opt in ((saved, optimizer), (other, used)):
        param.grad = torch.full((3,), 2.0)
        opt.step()
    assert torch.equal(saved, other)


def test_copies_and_moves_are_refused() -> None:
    """Re-allocation is found at once and mended by rebind(); copies are refused in words."""
    param = ones()
    optimizer = build("NpuFusedAdam", [param])
    param.data = torch.ones(3)
    param.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match="re-allocated"):
        optimizer.step()
    optimizer.rebind()
    optimizer.step()
    assert not torch.equal(param.detach(), torch.ones(3))
    with pytest.raises(TypeError, match="deep-copied"):
        copy.deepcopy(optimizer)


def test_parameters_outlive_the_optimizer() -> None:
    """The buffers belong to the parameters too: dropping the optimizer frees none of them."""
    param = ones(5000)
    optimizer = build("NpuFusedAdam", [param])
    del optimizer
    torch.full((5000,), 7.0)
    assert torch.equal(param.detach(), torch.ones(5000))
    param.sum().backward()
    assert torch.equal(param.grad, torch.ones(5000))


def test_large_half_precision_lamb_moves() -> None:
    """The norm of an update whose square overflows fp16 is right: the step is the oracle's.

    70,000 elements of size 3 and more: torch_npu's ratio is 0 here, and the parameter frozen.
    """
    param = ones(70_000, torch.float16)
    optimizer = build("NpuFusedLamb", [param], lr=0.5)
    oracle = LambOracle([{"params": [param]}], lr=0.5)
    for _ in range(3):
        param.grad = torch.ones_like(param)
        optimizer.step()
        oracle.step([[torch.ones(70_000)]])
    assert torch.isfinite(param).all()
    assert float(param.detach().max()) < 1.0
    torch.testing.assert_close(param.double(), oracle.values()[0], rtol=2.0**-11, atol=0.0)


# Combined tensors


def test_combined_tensors_alias() -> None:
    """Edits of the combined tensors reach the model, p.grad and the step; padding stays zero."""
    params = [ones(5), ones(7, torch.float16), ones(2000)]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
    optimizer = build("NpuFusedSGD", groups)
    assert optimizer.get_combined_grads()[0].abs().max() == 0
    sum(p.float().sum() for p in params).backward()
    fp32, fp16 = optimizer.get_combined_params()
    fp32.fill_(3.0)
    fp16.fill_(2.0)
    assert [float(p.detach().min()) for p in params] == [3.0, 2.0, 3.0]
    grads32, grads16 = optimizer.get_combined_grads()
    assert (grads32.shape, grads16.shape) == (fp32.shape, fp16.shape)
    assert float(grads32.sum()) == 2005
    grads32.add_(1.0)
    grads16.mul_(4.0)
    assert [float(p.grad.min()) for p in params] == [2.0, 4.0, 2.0]
    assert float(optimizer.grad_norm()) == pytest.approx((4 * 2005 + 16 * 7) ** 0.5)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((5,), 2.8))
    torch.testing.assert_close(params[1].detach(), torch.full((7,), 1.6).half())
    torch.testing.assert_close(params[2].detach(), torch.full((2000,), 2.0))
    assert float(fp32.sum()) == pytest.approx(5 * 2.8 + 2000 * 2.0)


@pytest.mark.parametrize("fill", [2.0, -2.0])
def test_combined_edits_do_not_reach_norms_as_padding(fill: float) -> None:
    """LAMB after filling whole combined tensors is LAMB on parameters and gradients so filled."""
    reference, edited = ones(5), ones(5)
    ours, theirs = build("NpuFusedLamb", [edited]), build("NpuFusedLamb", [reference])
    ours.get_combined_params()[0].fill_(fill)
    edited.sum().backward()
    ours.get_combined_grads()[0].fill_(fill)
    with torch.no_grad():
        reference.fill_(fill)
    reference.grad = torch.full((5,), fill)
    ours.step()
    theirs.step()
    assert torch.equal(edited, reference)


def test_protocol_of_torch_npus_scaler() -> None:
    """What torch_npu's GradScaler reads is there before the first step and aliases p.grad."""
    first, second = ones(5), ones(6)
    optimizer = build("NpuFusedAdam", [first, second])
    assert optimizer.is_fused_optimizer
    assert optimizer.is_params_grads_combined
    assert not {"found_inf", "grad_scale"} & set(dir(optimizer))
    first.grad = torch.ones(5)
    optimizer._maybe_init_combined_params_and_grads()
    held = first.grad
    fp32, fp16 = optimizer.grads_all_group_combined
    assert fp16 is None
    fp32.mul_(3.0)
    assert first.grad is held
    assert torch.equal(held, torch.full((5,), 3.0))
    assert second.grad is None


def test_combined_gradients_with_a_graph() -> None:
    """Gradients made with create_graph=True are combined by value; the buffer joins no graph."""
    param = ones(5)
    optimizer = build("NpuFusedSGD", [param])
    param.grad = torch.autograd.grad(param.square().sum(), param, create_graph=True)[0]
    assert param.grad.requires_grad
    combined = optimizer.get_combined_grads()[0]
    assert not combined.requires_grad
    assert float(combined.sum()) == 10.0


def test_combined_lists() -> None:
    """[fp32, fp16], None where there is none; bf16 third; later groups and unfrozen ones after."""
    optimizer = build("NpuFusedAdam", [ones(dtype=torch.float16)])
    assert [t is None for t in optimizer.get_combined_params()] == [True, False]
    optimizer = build("NpuFusedAdam", [ones(), ones(dtype=torch.bfloat16), ones()])
    dtypes = [t if t is None else t.dtype for t in optimizer.get_combined_grads()]
    assert dtypes == [torch.float32, None, torch.bfloat16]
    frozen = ones().requires_grad_(False)
    optimizer.add_param_group({"params": [ones(dtype=torch.float16), frozen]})
    assert [t.dtype for t in optimizer.get_combined_params()[3:]] == [torch.float32, torch.float16]
    assert [t.dtype for t in optimizer.get_combined_grads()[3:]] == [torch.float16]
    frozen.requires_grad_(True).sum().backward()
    assert float(optimizer.get_combined_grads()[4].sum()) == 3


def test_combined_gradients_of_frozen_neighbours() -> None:
    """Parameters with gradients lie at the same elements of both; frozen ones come last."""
    frozen, first, second = ones(2000).requires_grad_(False), ones(5), ones(6)
    groups = [{"params": [frozen, first]}, {"params": [second]}]
    optimizer = build("NpuFusedAdam", groups)
    (2 * first.sum() + 3 * second.sum()).backward()
    params, grads = optimizer.get_combined_params()[0], optimizer.get_combined_grads()[0]
    assert grads.numel() < params.numel()
    params[: grads.numel()].sub_(grads)
    assert [float(p.detach().max()) for p in (frozen, first, second)] == [1.0, -1.0, -2.0]


@pytest.mark.parametrize("assigned", [False, True])
def test_combined_gradients_keep_absence(assigned: bool) -> None:
    """Looking at the combined gradients neither gives a parameter one nor undoes a clip."""
    used, unused = ones(), ones()
    optimizer = build("NpuFusedSGD", [used, unused], weight_decay=0.1)
    (used.sum() + unused.sum()).backward()
    optimizer.zero_grad()
    used.sum().backward()
    if assigned:
        used.grad = torch.ones(3)
    unused.grad = None
    norm = optimizer.clip_grad_norm_fused_(0.5)
    assert float(norm) == pytest.approx(3**0.5)
    assert float(optimizer.get_combined_grads()[0].sum()) == 3.0
    optimizer.step()
    assert torch.equal(unused.detach(), torch.ones(3))
    expected = 1 - 0.1 * (0.5 / (3**0.5 + 1e-6) + 0.1)
    torch.testing.assert_close(used.detach(), torch.full((3,), expected))


def test_one_tensor_per_dtype_costs_no_memory() -> None:
    """Combined tensors are the flat buffers themselves, for every optimizer."""
    params = [ones(3000), ones(10), ones(500, torch.float16)]
    optimizer = build("NpuFusedAdam", [{"params": params[:1]}, {"params": params[1:]}])
    combined = [t for t in optimizer.get_combined_params() if t is not None]
    assert sum(t.nbytes for t in combined) == optimizer.memory_summary().param_nbytes
    assert len(combined) == 2
    for buffer in combined:
        assert lie_in([p for p in params if p.dtype == buffer.dtype], [buffer])


def test_momentum_from_partial_state() -> None:
    """Each parameter's first momentum is its own first gradient, whatever others have had."""
    params = [ones(), ones()]
    optimizer = build("NpuFusedSGD", params, momentum=0.9, dampening=0.5)
    oracle = SGDOracle([{"params": params}], lr=0.1, momentum=0.9, dampening=0.5)
    for step in range(3):
        grads = [torch.ones(3), torch.ones(3) if step else None]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        oracle.step([grads])
    for param, value in zip(params, oracle.values(), strict=True):
        torch.testing.assert_close(param.double(), value, rtol=1e-6, atol=1e-7)
