"""DeepSpeed's FusedLamb as ShardedLamb: the same formula, with norms of full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_GROUP_OPTIONS = ("lr", "betas", "eps", "weight_decay")
_RULE_OPTIONS = ("bias_correction", "max_coeff", "min_coeff")


def from_lamb_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ShardedLamb's arguments for the params of ``{"type": "Lamb"}``.

    Raises:
        ValueError: an option that ShardedLamb has no counterpart of.
    """
    given = dict(options)
    if given.pop("eps_inside_sqrt", False) or given.pop("amsgrad", False):
        raise ValueError(
            "ShardedLamb has no eps_inside_sqrt and no amsgrad. Remove them from the params of "
            '"Lamb", or do not register with replace_lamb=True.'
        )
    if given.pop("max_grad_norm", 0):
        raise ValueError('"max_grad_norm" in the params of "Lamb": write "gradient_clipping".')
    # FusedLamb corrects the bias in the step size, as this variant does.
    if given.pop("bias_correction", True) is False:
        given["bias_correction"] = False
    given.setdefault("eps", 1e-8)
    return {**given, "variant": "deepspeed"}


def from_fused_lamb(optimizer: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return (groups, ShardedLamb's arguments) of an instance of FusedLamb.

    Raises:
        ValueError: it has been stepped, or its options have no counterpart.
    """
    if optimizer.state:
        raise ValueError("FusedLamb was stepped already. Pass a fresh one to initialize().")
    first = optimizer.param_groups[0]
    for name in _RULE_OPTIONS:
        if any(group[name] != first[name] for group in optimizer.param_groups):
            raise ValueError(f"{name} differs between groups of FusedLamb; ShardedLamb has one.")
    options = from_lamb_options(
        {
            **{name: first[name] for name in _RULE_OPTIONS},
            "eps_inside_sqrt": optimizer.eps_mode == 0,
            "max_grad_norm": max(group["max_grad_norm"] for group in optimizer.param_groups),
        }
    )
    groups = [
        {"params": group["params"], **{name: group[name] for name in _GROUP_OPTIONS}}
        for group in optimizer.param_groups
    ]
    return groups, options
