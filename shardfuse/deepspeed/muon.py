"""DeepSpeed's Muon as ShardedMuon: its keys, its defaults, and its marks on parameters.

deepspeed.initialize() marks every parameter of the model under ``{"type": "Muon"}``: ``use_muon``
on those of two or more dimensions without "embed" or "lm_head" in the name, and under
``per_head_muon`` the number of heads, ``muon_num_heads``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

_MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0, "momentum": 0.95}
_ADAMW: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
"""DeepSpeed's defaults of the two kinds of groups, and all keys that these take."""

_WITHOUT_EFFECT = ("torch_adam", "foreach", "per_head_muon", "ns_method")
"""Implementations of DeepSpeed's, of equal formulas; and what marks on parameters tell."""

_NS_METHODS = ("standard", "gram")


def from_muon_options(
    params: Iterable[Any], options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (groups, ShardedMuon's arguments) for the params of ``{"type": "Muon"}``.

    As in DeepSpeed, a group is divided by the marks of its parameters, and its own options count
    more than ``muon_lr`` and ``adam_lr``, and these more than those that both kinds share.

    Args:
        params: parameters, or group dicts.
        options: of the JSON.

    Raises:
        ValueError: an option or a parameter that ShardedMuon has no counterpart of.
    """
    given = {key: value for key, value in options.items() if key not in _WITHOUT_EFFECT}
    if not given.pop("adam_w_mode", True):
        raise ValueError(
            '"adam_w_mode": false in the params of "Muon": ShardedMuon updates all but matrices by '
            "AdamW. Remove the key, or do not register with replace_muon=True."
        )
    if given.pop("fp32_optimizer_states", None) is False:
        raise ValueError(
            '"fp32_optimizer_states": false in the params of "Muon": states of ShardedMuon are '
            "fp32. Remove the key, or do not register with replace_muon=True."
        )
    if options.get("ns_method", "gram") not in _NS_METHODS:
        raise ValueError(
            f'Invalid "ns_method": {options["ns_method"]!r} in the params of "Muon". ShardedMuon '
            "has one iteration, in bf16. Remove the key."
        )
    arguments = {"sharding": given.pop("sharding")} if "sharding" in given else {}
    rates = given.pop("muon_lr", None), given.pop("adam_lr", None)
    for key in given:
        if key not in {**_MUON, **_ADAMW}:
            raise ValueError(
                f'"{key}" in the params of "Muon" is no key of it in DeepSpeed. Remove it, or '
                'write "type": "ShardedMuon", whose params are those of the class.'
            )
    defaults = []
    for keys, rate in zip((_MUON, _ADAMW), rates, strict=True):
        shared = {key: value for key, value in given.items() if key in keys}
        defaults.append({**keys, **shared, **({} if rate is None else {"lr": rate})})
    groups = [part for group in _groups(params) for part in _matrices_and_others(group, *defaults)]
    return groups, arguments


def _groups(params: Iterable[Any]) -> list[Mapping[str, Any]]:
    members = list(params)
    return members if members and isinstance(members[0], Mapping) else [{"params": members}]


def _matrices_and_others(
    group: Mapping[str, Any], muon: Mapping[str, Any], adamw: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the matrices of ``group``, by the number of matrices in each, and the others."""
    by_split: dict[int, list[Tensor]] = {}
    for param in group["params"]:
        by_split.setdefault(_split_of(param), []).append(param)
    for split, members in sorted(by_split.items(), reverse=True):
        keys = muon if split else adamw
        own = {key: group[key] for key in keys if key in group}
        kind = {"use_muon": True, "split": split} if split else {"use_muon": False}
        yield {**keys, **own, **kind, "params": members}


def _split_of(param: Tensor) -> int:
    """Return how many matrices DeepSpeed's marks tell ``param`` to be; 0 for AdamW's.

    Raises:
        ValueError: it has no mark, or is no matrix and no stack of matrices.
    """
    if not hasattr(param, "use_muon"):
        raise ValueError(
            f"A parameter {tuple(param.shape)} has no use_muon: it is not one of the model. Pass "
            "model_parameters of the model alone, or set param.use_muon."
        )
    if not param.use_muon:
        return 0
    if param.dim() > 3:
        raise ValueError(
            f"DeepSpeed's Muon flattens a parameter {tuple(param.shape)} to a matrix, and "
            'ShardedMuon does not. Write "type": "ShardedMuon", which gives it to AdamW, or do not '
            "register with replace_muon=True."
        )
    heads = getattr(param, "muon_num_heads", None)
    return heads or (len(param) if param.dim() == 3 else 1)


def forget_marks(params: Iterable[Tensor]) -> None:
    """Delete ``use_muon`` of parameters whose kind is known.

    At stages 1 and 2 DeepSpeed orthogonalises the gradients of marked parameters by itself, under
    any optimizer that has "muon" in the name of its class.
    """
    for param in params:
        if hasattr(param, "use_muon"):
            del param.use_muon
