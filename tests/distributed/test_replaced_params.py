"""Changes of a model after its optimizer was built: parameters of which the model has others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from shardfuse import ShardedAdamW
from shardfuse.comm.session import PeerError
from tests.support.harness import STAYING, run_procs


class Net(nn.Module):
    """An embedding, a layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.layer = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.embedding(tokens)).relu())  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A layer beside an adapter, in place of the layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.adapter = layer, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.adapter(x)  # type: ignore[no-any-return]


def new_head(model: Net) -> None:
    model.head = nn.Linear(4, 5, bias=False)


def larger_embedding(model: Net) -> None:
    old, model.embedding = model.embedding, nn.Embedding(7, 4)
    with torch.no_grad():
        model.embedding.weight[:5] = old.weight


def tied(model: Net) -> None:
    model.head.weight = model.embedding.weight


def parametrized(model: Net) -> None:
    nn.utils.parametrizations.weight_norm(model.layer)


def assigned(model: Net) -> None:
    model.layer.weight = nn.Parameter(model.layer.weight.detach().clone())


def loaded(model: Net) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def adapted(model: Net) -> None:
    model.layer = Adapted(model.layer)  # type: ignore[assignment]


def pruned(model: Net) -> None:
    nn.utils.prune.l1_unstructured(model.layer, "weight", amount=0.5)


def averaged(model: Net) -> None:
    AveragedModel(model).update_parameters(model)


def wrapped(model: Net) -> None:
    nn.Sequential(model)


def swapped(model: Net) -> None:
    own = dict(model.named_parameters())
    others = {name: nn.Parameter(param.detach().clone()) for name, param in own.items()}
    torch.func.functional_call(model, others, (torch.arange(3),))


REPLACED: dict[Callable[[Net], None], list[str]] = {
    new_head: ["head.weight"],
    larger_embedding: ["embedding.weight"],
    tied: ["head.weight"],
    parametrized: ["layer.weight"],
    assigned: ["layer.weight"],
    loaded: ["embedding.weight, layer.weight, layer.bias and 1 more"],
}
KEPT = [adapted, pruned, averaged, wrapped, swapped]


def warned(change: Callable[[Net], None], num_before: int, action: Any = "always") -> list[str]:
    """Return the warnings of four steps, before some of which the model is changed."""
    torch.manual_seed(0)
    model = Net()
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        for step in range(4):
            if step == num_before:
                change(model)
            loss = model(torch.arange(5)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # as loops do: on a device, errors of a peer are raised by what waits
    return [str(each.message) for each in found if "No module has" in str(each.message)]


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("change", REPLACED)
def test_replaced_params_are_named(change: Callable[[Net], None], num_before: int) -> None:
    """Once; DistributedDataParallel raises an error in the next forward."""
    for found in run_procs(2, warned, change, num_before):
        (text,) = found
        assert f"the parameters {REPLACED[change][0]} any more" in text


def on_one(rank: int, is_error: bool) -> list[str]:
    """Return the warnings, or the error, where one rank alone replaces parameters."""
    change = new_head if dist.get_rank() == rank else wrapped
    try:
        return warned(change, 2, "error" if is_error else "always")
    except (UserWarning, PeerError) as error:
        STAYING.append(error)
        return [str(error)]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_alone(rank: int) -> None:
    """It warns; where warnings are errors, both ranks raise one."""
    found = run_procs(2, on_one, rank, False)
    assert [len(texts) for texts in found] == [int(own == rank) for own in range(2)]
    for texts in run_procs(2, on_one, rank, True, timeout=25):
        assert "No module has the parameters head.weight" in texts[0]


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("change", KEPT)
def test_changes_that_keep_the_params(change: Callable[[Net], None], num_before: int) -> None:
    assert run_procs(2, warned, change, num_before) == [[], []]


def warned_without_modules(is_head_replaced: bool) -> list[str]:
    """Return the warnings of steps by functional_call(), of two models that were dropped.

    The modules that it calls are of two other models. With ``is_head_replaced`` the second model
    is kept, and gets another head.
    """
    torch.manual_seed(0)
    models: list[Any] = [Net(), Net()]
    params = [dict(model.named_parameters()) for model in models]
    optimizer = ShardedAdamW([p for own in params for p in own.values()], lr=0.1)
    if is_head_replaced:
        new_head(models[1])
    del models[: 1 if is_head_replaced else 2]
    called = [Net(), Net()]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(4):
            for model, own in zip(called, params, strict=True):
                out = torch.func.functional_call(model, own, (torch.arange(5),))
                out.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [str(each.message) for each in found if "No module has" in str(each.message)]


def test_models_that_were_dropped_as_a_whole() -> None:
    """Their parameters were not replaced: functional_call() still uses them."""
    assert run_procs(2, warned_without_modules, False) == [[], []]
    for (text,) in run_procs(2, warned_without_modules, True):
        assert "the parameters param_groups[0][7] any more" in text


def looks(num_steps: int) -> int:
    """Return how often modules are searched where each step builds another."""
    model, found = Net(), 0
    optimizer = ShardedAdamW(model.named_parameters(), lr=0.1)
    watch = optimizer._replaced_params
    search = type(optimizer._modules).held

    def held(*args: object) -> list[bool]:
        nonlocal found
        found += 1
        return search(*args)  # type: ignore[arg-type]

    type(optimizer._modules).held = held  # type: ignore[assignment, method-assign]
    for _ in range(num_steps):
        nn.Sequential(nn.Linear(2, 2))
        model(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert watch is not None
    return found


def test_steps_that_build_modules_are_not_followed_for_long() -> None:
    """A search takes time for each module of the process."""
    assert run_procs(2, looks, 15) == [10, 10]
