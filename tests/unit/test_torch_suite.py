"""torch's own optimizer tests, from its OptimizerInfo and inputs, on our classes with one rank.

What torch's test/test_optim.py has, and where it is here:

| torch's test | here |
|---|---|
| test_forloop_goes_right_direction (with_lrsched) | test_right_direction |
| test_tensor_lr, test_tensor_lr_num_dim | test_tensor_lr |
| test_optim_infos_do_not_specify_global_cliquey_kwargs | skipped: of torch's tables |
| test_errors | test_errors; what is judged otherwise is in OTHERWISE |
| test_param_groups_lr, test_param_groups_weight_decay | test_param_groups |
| test_foreach_matches_forloop, test_fused_matches_forloop | test_matches_forloop |
| test_foreach_large_tensor, test_fused_large_tensor | skipped: CUDA |
| test_mixed_device_dtype, test_*_on_multiple_devices | skipped: one device, refused in words |
| test_complex, test_complex_2d | test_complex: refused in words |
| test_step_is_noop_when_params_have_no_grad | test_step_without_gradients |
| test_step_is_noop_for_zero_grads | test_zero_gradients |
| test_step_post_hook, test_step_pre_hook, test_step_all_hooks | test_step_hooks |
| test_state_dict_deterministic, test_can_load_older_state_dict | test_state_dict |
| test_state_dict_with_cuda_params, test_capturable*, test_cpu_load_state_dict | skipped: CUDA |
| test_save_load_equality_with_weights_only | test_weights_only |
| test_load_nontensor_step | test_nontensor_step |
| test_*state_dict_pre_hook, _post_hook, prepend (8 tests) | test_state_dict_hooks |
| test_deepcopy_copies_all_public_attrs, test_pickle* | test_copies: refused in words |
| test_non_empty_state, test_can_load_from_to_named_state_dict | test_named |
| test_param_group_with_lrscheduler_goes_right_direction | test_right_direction |
| test_set_default_dtype_works_with_foreach, test_peak_memory_foreach | skipped: of foreach |
| test_rosenbrock_sparse, test_sparse* | test_sparse: refused in words |
| test_grad_scaling_autocast_fused_optimizers | tests/distributed/test_scaler_overflow.py |
| test_lbfgs_*, test_fused_*, test_adamw_serialization | skipped: of one class of torch's |
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shardfuse import ShardedAdadelta, ShardedAdam, ShardedAdamW, ShardedRMSprop, ShardedSGD
from tests.unit.test_validation import ALL, case_id

# torch's testing package needs this one.
pytest.importorskip("expecttest")
common = pytest.importorskip("torch.testing._internal.common_optimizers")
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

OURS: dict[str, Any] = {
    "SGD": ShardedSGD,
    "Adam": ShardedAdam,
    "AdamW": ShardedAdamW,
    "RMSprop": ShardedRMSprop,
    "Adadelta": ShardedAdadelta,
}
INFOS = [info for info in common.optim_db if info.name in OURS]
INPUTS = [(info, given) for info in INFOS for given in info.optim_inputs_func(device="cpu")]

# Errors of torch's that are none here, by description, and why.
OTHERWISE = {
    "betas must be either both floats or both Tensors": "each is read as a number",
    "lr as Tensor doesn't work with foreach & not capturable": "foreach chooses nothing here",
    "betas\\[0\\] as a Tensor is not supported for capturable=False and foreach=True": "the same",
}

# Where torch only warns, by description, and why.
REFUSED = {"warn on a bare unordered set of params": "each rank would have another order"}


def name_of(value: Any) -> str:
    if isinstance(value, common.OptimizerInfo):
        return str(value.name)
    return getattr(value, "desc", "") or case_id(value)


every_input = pytest.mark.parametrize(("info", "given"), INPUTS, ids=name_of)
every_class = pytest.mark.parametrize("cls", ALL, ids=case_id)


def weights(seed: int = 0) -> tuple[nn.Parameter, nn.Parameter, Tensor]:
    """Return torch's small problem: a matrix, a vector, an input."""
    generator = torch.Generator().manual_seed(seed)
    matrix = nn.Parameter(torch.randn(10, 5, generator=generator))
    vector = nn.Parameter(torch.randn(10, generator=generator))
    return matrix, vector, torch.randn(5, generator=generator)


def assert_same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual["state"], expected["state"], rtol=0, atol=0)
    assert actual["param_groups"] == expected["param_groups"]


def closure_for(optimizer: Any, matrix: Tensor, vector: Tensor, given: Tensor) -> Any:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (matrix.mv(given) + vector).pow(2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    return closure


def train(cls: Any, kwargs: dict[str, Any], num_steps: int = 7) -> tuple[list[Tensor], Any]:
    matrix, vector, given = weights()
    optimizer = cls([matrix, vector], **with_lr(cls, kwargs))
    closure = closure_for(optimizer, matrix, vector, given)
    for _ in range(num_steps):
        optimizer.step(closure)
    return [matrix.detach().clone(), vector.detach().clone()], optimizer


def with_lr(cls: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords with a learning rate where ours requires one; torch's SGD has 1e-3."""
    own = {"lr": 1e-3} if cls.__name__ in ("ShardedSGD", "ShardedBertAdam") else {}
    return {**own, **copy.deepcopy(kwargs)}


@every_input
@pytest.mark.parametrize("named", [False, True])
def test_matches_forloop(info: Any, given: Any, named: bool) -> None:
    """Every configuration of torch's ends where its single-tensor implementation does."""
    expected, reference = train(info.optim_cls, {**given.kwargs, "foreach": False})
    actual, optimizer = train(OURS[info.name], {**given.kwargs, "foreach": False})
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1.3e-6, atol=1e-5)
    for param, entry in reference.state_dict()["state"].items():
        for key, value in entry.items():
            ours = torch.as_tensor(optimizer.state_dict()["state"].get(param, {}).get(key, 0.0))
            if value is not None:
                theirs = torch.as_tensor(value)
                torch.testing.assert_close(
                    ours.cpu(), theirs.cpu(), rtol=1e-5, atol=1e-5, check_dtype=False
                )


@every_input
def test_tensor_lr(info: Any, given: Any) -> None:
    """A learning rate that is a tensor of one element is that number."""
    lr = float(given.kwargs.get("lr", 1e-3))
    kwargs = {key: value for key, value in given.kwargs.items() if key != "lr"}
    expected, _ = train(OURS[info.name], {**kwargs, "lr": lr})
    for shape in ((), (1,)):
        actual, optimizer = train(OURS[info.name], {**kwargs, "lr": torch.full(shape, lr)})
        assert isinstance(optimizer.param_groups[0]["lr"], Tensor)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("info", INFOS, ids=name_of)
def test_right_direction(info: Any) -> None:
    """The loss falls, or rises under maximize, with each of torch's schedulers over it."""
    for given in info.optim_inputs_func(device="cpu"):
        for makers in (*info.scheduler_inputs, ()):
            matrix, vector, inputs = weights()
            cls = OURS[info.name]
            optimizer = cls([matrix, vector], **with_lr(cls, given.kwargs))
            schedulers = [make(optimizer) for make in makers]
            closure = closure_for(optimizer, matrix, vector, inputs)
            start = closure().item()
            for _ in range(20):
                loss = optimizer.step(closure)
                for scheduler in schedulers:
                    if isinstance(scheduler, ReduceLROnPlateau):
                        scheduler.step(loss.item())
                    else:
                        assert isinstance(scheduler, LRScheduler)
                        scheduler.step()
            end = closure().item()
            assert end > start if given.kwargs.get("maximize") else end < start, given


def raised(cls: Any, error: Any) -> Exception | None:
    """Return what an erroneous input of torch's raises at construction or in a step."""
    given = error.optimizer_error_input
    params = given.params
    if params is None:
        params = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(3))]
    try:
        optimizer = cls(params, **with_lr(cls, given.kwargs))
        if error.error_on is common.OptimizerErrorEnum.STEP_ERROR:
            optimizer.step()
    except Exception as failure:
        return failure
    return None


@pytest.mark.parametrize("info", INFOS, ids=name_of)
def test_errors(info: Any) -> None:
    """What torch refuses is refused, in its words, but for OTHERWISE."""
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        desc = error.optimizer_error_input.desc
        # Warnings are errors in these tests, so that torch's own of duplicates is raised.
        failure = raised(OURS[info.name], error)
        if desc in OTHERWISE:
            assert failure is None, desc
            continue
        kind = TypeError if desc in REFUSED else error.error_type
        assert isinstance(failure, kind), (desc, failure)
        with pytest.raises(kind, match=error.error_regex):
            raise failure


@pytest.mark.parametrize("info", INFOS, ids=name_of)
def test_param_groups(info: Any) -> None:
    """A group's own learning rate and decay are its own; one of 0 leaves it."""
    cls = OURS[info.name]
    matrix, vector, given = weights()
    groups = [{"params": [matrix]}, {"params": [vector], "lr": 0.0, "weight_decay": 0.0}]
    optimizer = cls(groups, lr=0.01, weight_decay=0.1)
    before = [matrix.detach().clone(), vector.detach().clone()]
    optimizer.step(closure_for(optimizer, matrix, vector, given))
    assert not torch.equal(matrix.detach(), before[0])
    assert torch.equal(vector.detach(), before[1])


@every_class
def test_step_without_gradients(cls: Any) -> None:
    """Without gradients nothing moves, and no state is made; an empty tensor is no trouble."""
    params = [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(0, 4))]
    optimizer = cls(params, lr=0.1, weight_decay=0.1)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    params[1].grad = torch.zeros(0, 4)
    optimizer.step()
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, before, strict=True))
    state = optimizer.state_dict()["state"]
    assert all(int(entry.get("step", 0)) == 0 for key, entry in state.items() if key == 0)


@every_class
def test_zero_gradients(cls: Any) -> None:
    """zero_grad() clears to None, or to zeros; a gradient of zero without decay moves nothing."""
    param = nn.Parameter(torch.randn(4, 3))
    optimizer = cls([param], lr=0.1, weight_decay=0.0)
    param.sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert param.grad is not None
    assert torch.equal(param.grad, torch.zeros(4, 3))
    before = param.detach().clone()
    optimizer.step()
    assert torch.equal(param.detach(), before)
    optimizer.zero_grad()
    assert param.grad is None


@every_class
def test_step_hooks(cls: Any) -> None:
    """Pre-hooks see and may change the arguments, post-hooks come after; handles remove them."""
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = cls([param], lr=0.1)
    seen: list[str] = []
    handles = [
        optimizer.register_step_pre_hook(lambda *a: seen.append("before")),
        optimizer.register_step_post_hook(lambda *a: seen.append("after")),
    ]

    def closure() -> Tensor:
        seen.append("closure")
        return torch.ones(())

    assert optimizer.step(closure) == 1
    assert seen == ["before", "closure", "after"]
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert len(seen) == 3


@every_class
def test_state_dict(cls: Any) -> None:
    """An optimizer that loads another's dict goes on as it does, and its dict is equal."""
    matrix, vector, given = weights()
    optimizer = cls([matrix, vector], lr=0.01)
    closure = closure_for(optimizer, matrix, vector, given)
    for _ in range(3):
        optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    others = [nn.Parameter(p.detach().clone()) for p in (matrix, vector)]
    again = cls(others, lr=0.5)
    again.load_state_dict(saved)
    assert_same(again.state_dict(), saved)
    for _ in range(3):
        optimizer.step(closure)
        again.step(closure_for(again, others[0], others[1], given))
    assert torch.equal(others[0].detach(), matrix.detach())
    assert torch.equal(others[1].detach(), vector.detach())


@every_class
def test_weights_only(cls: Any) -> None:
    """torch.load with weights_only reads what torch.save wrote of a dict."""
    _, optimizer = train(cls, {}, num_steps=2)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_same(loaded, optimizer.state_dict())


@pytest.mark.parametrize("info", INFOS, ids=name_of)
def test_nontensor_step(info: Any) -> None:
    """Steps may be tensors or numbers; torch's dicts of every configuration load."""
    for given in info.optim_inputs_func(device="cpu"):
        _, reference = train(info.optim_cls, given.kwargs, num_steps=3)
        state = copy.deepcopy(reference.state_dict())
        for entry in state["state"].values():
            if "step" in entry:
                entry["step"] = int(entry["step"])
        results = []
        for saved in (state, copy.deepcopy(reference.state_dict())):
            matrix, vector, inputs = weights()
            cls = OURS[info.name]
            optimizer = cls([matrix, vector], **with_lr(cls, given.kwargs))
            optimizer.load_state_dict(saved)
            optimizer.step(closure_for(optimizer, matrix, vector, inputs))
            results.append(matrix.detach())
        assert torch.equal(results[0], results[1])


@every_class
@pytest.mark.parametrize(
    ("kind", "loads"),
    [
        ("register_state_dict_pre_hook", False),
        ("register_state_dict_post_hook", False),
        ("register_load_state_dict_pre_hook", True),
        ("register_load_state_dict_post_hook", True),
    ],
)
def test_state_dict_hooks(cls: Any, kind: str, loads: bool) -> None:
    """Each is called once, in the order of ``prepend``, and not after its removal."""
    _, optimizer = train(cls, {}, num_steps=1)
    calls: list[str] = []
    handle = getattr(optimizer, kind)(lambda *a: calls.append("second"))
    getattr(optimizer, kind)(lambda *a: calls.append("first"), prepend=True)
    state = optimizer.state_dict()
    if loads:
        optimizer.load_state_dict(state)
    assert calls == ["first", "second"]
    handle.remove()
    state = optimizer.state_dict()
    if loads:
        optimizer.load_state_dict(state)
    assert calls == ["first", "second", "first"]


@every_class
def test_copies(cls: Any) -> None:
    """deepcopy and pickle are refused in words: the buffers are the model's parameters."""
    _, optimizer = train(cls, {}, num_steps=1)
    for duplicate in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be pickled or deep-copied"):
            duplicate(optimizer)


@every_class
def test_named(cls: Any) -> None:
    """A dict saved with names loads without, and the other way."""
    matrix, vector, given = weights()
    pairs: list[Any] = [("matrix", matrix), ("vector", vector)]
    optimizer = cls(pairs, lr=0.01)
    optimizer.step(closure_for(optimizer, matrix, vector, given))
    saved = optimizer.state_dict()
    assert [n for g in saved["param_groups"] for n in g["param_names"]] == ["matrix", "vector"]
    others = weights()[:2]
    unnamed = cls(list(others), lr=0.5)
    unnamed.load_state_dict(saved)
    assert unnamed.param_groups[0]["lr"] == 0.01
    again = cls([("a", nn.Parameter(torch.ones(10, 5))), ("b", nn.Parameter(torch.ones(10)))], 0.5)
    again.load_state_dict(unnamed.state_dict())
    assert [n for g in again.param_groups for n in g["param_names"]] == ["a", "b"]


@every_class
def test_complex(cls: Any) -> None:
    """Complex parameters are refused, naming the dtype."""
    with pytest.raises(TypeError, match="complex64"):
        cls([nn.Parameter(torch.randn(3, dtype=torch.complex64))], lr=0.1)


@every_class
def test_sparse(cls: Any) -> None:
    """A sparse gradient is refused, naming the parameter, and nothing has moved."""
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = cls([("table", param)], lr=0.1)
    param.grad = torch.eye(3, 2).to_sparse()
    with pytest.raises(RuntimeError, match=r"table.*sparse|sparse.*table"):
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3, 2))


def test_all_that_torch_has_of_ours_are_run() -> None:
    """The five formulas are found in the installed torch, with inputs each."""
    assert {info.name for info in INFOS} == set(OURS)
    assert len(INPUTS) >= 5 * 5
