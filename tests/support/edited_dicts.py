"""State dicts as somebody's edits leave them: valid ones with one change at a random place."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import shardfuse
from shardfuse.optim import npu, paddle
from tests.support.upstream import CLASSES

SHARDED = [name.replace("NpuFused", "Sharded") for name in CLASSES]


class Kind(NamedTuple):
    """An optimizer with options that give it all the states that it can have, or few."""

    cls: Any
    options: dict[str, Any]


def _kinds() -> dict[str, Kind]:
    more: dict[str, dict[str, Any]] = {
        "SGD": {"momentum": 0.9, "weight_decay": 0.1},
        "Adam": {"amsgrad": True},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "RMSpropTF": {"momentum": 0.9},
        "Lamb": {"weight_decay": 0.1},
    }
    kinds: dict[str, Kind] = {}
    for name in CLASSES:
        for cls in (getattr(shardfuse, name.replace("NpuFused", "Sharded")), getattr(npu, name)):
            kinds[cls.__name__] = Kind(cls, {"lr": 0.1, **more.get(name[len("NpuFused") :], {})})
    kinds["ShardedSGD plain"] = Kind(shardfuse.ShardedSGD, {"lr": 0.1})
    kinds["Lamb of Paddle"] = Kind(paddle.Lamb, {"learning_rate": 0.1})
    return kinds


KINDS = _kinds()
"""Every public class."""

SHAPES = [(3, 4), (3,), (2, 3), (2,)]


def build(kind: Kind, steps: int, dtype: torch.dtype = torch.float32, **sharding: Any) -> Any:
    """Return an optimizer over four parameters in two groups, after some steps of it."""
    named = [
        (f"{index}.w", nn.Parameter(torch.linspace(-1, 1, 12)[: torch.Size(shape).numel()]
        .reshape(shape).to(dtype)))
        for index, shape in enumerate(SHAPES)
    ]  # fmt: skip
    groups = [{"params": named[:2]}, {"params": named[2:]}]
    options = {"kernel": "eager", **sharding}
    if kind.cls is paddle.Lamb:
        optimizer = kind.cls(parameters=groups, sharding=options, **kind.options)
    else:
        optimizer = kind.cls(groups, sharding=options, **kind.options)
    train(optimizer, steps)
    return optimizer


def train(optimizer: Any, steps: int) -> None:
    """Take steps by gradients that differ between elements."""
    for step in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = torch.linspace(0.5, 1.5 + step, param.numel())
                param.grad = grad.reshape(param.shape).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def bits(optimizer: Any) -> Any:
    """Return all that a load may change on this rank: parameters, states, steps and groups."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = []
    for param in params:
        for name, value in optimizer.state[param].items():
            pieces = [p.data for p in value.pieces] if hasattr(value, "pieces") else [value]
            states.append((name, [_plain(piece) for piece in pieces]))
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    return [_plain(param) for param in params], states, groups


def _plain(value: Any) -> Any:
    """Return a value that equals another one only where all bits are the same."""
    if isinstance(value, Tensor):
        data = value.detach().contiguous()
        return str(data.dtype), tuple(data.shape), data.reshape(-1).view(torch.uint8).tolist()
    return repr(value)


# One change

_NUMBERS: list[Any] = [
    float("nan"), float("inf"), -float("inf"), -1, 0, 0.5, 1.5, 7, 2**40, 10**400, True, "0.1", 1j,
]  # fmt: skip


def _other_kinds(value: Any) -> list[Any]:
    """Return what may stand in the place of ``value`` by mistake."""
    others = [None, [], {}, "x", object(), torch.ones(2), 5, 0.25, (0.5, 0.5)]
    if isinstance(value, Tensor):
        others += [value.tolist(), value.numpy() if value.dtype == torch.float32 else None]
    return others


def _other_tensors(value: Tensor) -> list[Callable[[], Any]]:
    """Return what a tensor may have become."""
    shape = value.shape
    return [
        lambda: value.double(),
        lambda: value.double() * 1e300,
        lambda: value.half(),
        lambda: value.bfloat16(),
        lambda: (value * 100).long(),
        lambda: torch.full(shape, 2**40 + 1),
        lambda: value > 0,
        lambda: value * (1 + 2j),
        lambda: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
        lambda: value.to_sparse(),
        lambda: value.to("meta"),
        lambda: value.to(torch.float8_e5m2),
        lambda: nn.Parameter(value),
        lambda: value.t() if value.dim() == 2 else value[None],
        lambda: value.flatten()[:-1],
        lambda: value.flatten(),
        lambda: value.reshape(-1)[0],
        lambda: value[:0],
        lambda: value[:1].expand(shape),
        lambda: torch.full(shape, float("nan")),
        lambda: torch.full(shape, float("inf")),
        lambda: -value - 1,
        lambda: value * 3 + 1,
        lambda: torch.zeros(shape),
    ]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all that is in a dict of dicts and lists."""
    keys: Any = ()
    if isinstance(value, dict | list):
        keys = value.keys() if isinstance(value, dict) else range(len(value))
    found = []
    for key in keys:
        found += [(*path, key), *_places(value[key], (*path, key))]
    return found


def edited(rng: random.Random, saved: dict[str, Any]) -> tuple[str, Any]:
    """Return what was changed, and a copy of a state dict with that change."""
    changed = copy.deepcopy(saved)
    places = _places(changed)
    # Half of the changes are to states, of which there are fewer places than of options.
    states = [place for place in places if place[0] == "state" and len(place) > 1]
    path = rng.choice(states if states and rng.random() < 0.5 else places)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    last, value = path[-1], parent[path[-1]]
    act = rng.choice(["delete", "add", "kind", "value", "value", "value", "key", "swap"])
    if act == "delete":
        del parent[last]
    elif act == "add":
        extra = rng.choice([5, "x", None, copy.deepcopy(value), torch.ones(3), {}])
        if isinstance(parent, dict):
            parent[rng.choice(["foo", 99, "99", -1, "max_exp_avg_sq", "step", "lr"])] = extra
        else:
            parent.append(extra)
    elif act == "key" and isinstance(parent, dict):
        new = rng.choice([str(last), f"{last}_", 99, -1, None, 2.5, (1,)])
        parent[new] = parent.pop(last)
    elif act == "swap":
        other = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        parent[last], parent[other] = parent[other], parent[last]
    elif act == "kind":
        parent[last] = rng.choice(_other_kinds(value))
    elif isinstance(value, Tensor) and value.dim() > 0:
        parent[last] = rng.choice(_other_tensors(value))()
    else:
        parent[last] = rng.choice(_NUMBERS)
    return f"{act} at {path}", changed


def through_json(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict as JSON gives it back, with its lists of numbers made tensors again."""
    text = json.dumps(saved, default=lambda value: {"tensor": value.tolist()})

    def back(found: dict[str, Any]) -> Any:
        return torch.tensor(found["tensor"]) if found.keys() == {"tensor"} else found

    result: dict[str, Any] = json.loads(text, object_hook=back)
    return result


# What a dict says


def lost(told: Mapping[str, Any], held: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return what of an accepted dict is not in what was loaded, or is there and not in the dict.

    Args:
        told: the dict that was loaded.
        held: the optimizer's own state dict since then.
        before: the one before, whose hyper-parameters stay where ``told`` has none.
    """
    found = []
    for index, (mine, theirs, old) in enumerate(
        zip(held["param_groups"], told["param_groups"], before["param_groups"], strict=True)
    ):
        for key in mine.keys() | theirs.keys():
            if key not in ("params", "param_names"):
                expected = theirs[key] if key in theirs else old.get(key)
                if not _same(mine.get(key), expected):
                    found.append(f"{key} of group {index}: {mine.get(key)!r} for {expected!r}")
    numbers = [number for group in told["param_groups"] for number in group["params"]]
    texts = {str(number): number for number in numbers}
    entries = {}
    for key, entry in told["state"].items():
        number = key if key in numbers else texts.get(key)
        if number is None:
            found.append(f"states of {key!r}")
        else:
            entries[numbers.index(number)] = entry
    for index in range(len(numbers)):
        mine, entry = held["state"].get(index, {}), entries.get(index, {})
        theirs = {key: value for key, value in entry.items() if value is not None}
        if "step" not in mine:  # where updates are not counted
            theirs.pop("step", None)
        if "param" in mine:  # of a dict without a master, it is that of the parameter as it is
            theirs.setdefault("param", mine["param"])
        found += [
            f"{key} of parameter {index}"
            for key in mine.keys() | theirs.keys()
            if key not in mine or key not in theirs or not _same(mine[key], theirs[key])
        ]
    return found


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor) or isinstance(theirs, Tensor):
        if isinstance(mine, Tensor) and isinstance(theirs, Tensor) and mine.dim():
            mine, theirs = mine.float().cpu(), theirs.float().cpu()
            return mine.shape == theirs.shape and torch.equal(
                mine.nan_to_num(9.0, 8.0, 7.0), theirs.nan_to_num(9.0, 8.0, 7.0)
            )
        return bool(mine == theirs)
    if isinstance(mine, tuple | list) and isinstance(theirs, tuple | list):
        pairs = zip(mine, theirs, strict=False)
        return len(mine) == len(theirs) and all(_same(a, b) for a, b in pairs)
    return bool(mine == theirs) or mine is theirs or repr(mine) == repr(theirs)
