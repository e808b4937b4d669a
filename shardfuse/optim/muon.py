"""ShardedMuon: Muon for matrices and AdamW for all other parameters, in one optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from shardfuse.config import ShardConfig
from shardfuse.engine.setup import as_list, ordered
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.compat import TorchOptions
from shardfuse.rules import MuonRule
from shardfuse.rules.muon import NS_COEFFICIENTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

_ADAMW = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
"""Defaults of groups that follow AdamW, as of ShardedAdamW; lr and weight_decay are Muon's."""


class ShardedMuon(ShardedOptimizer):
    """Muon, sharded; the formula and signature of torch.optim.Muon. AdamW for the rest.

        b = momentum * b + (1 - momentum) * grad
        u = (1 - momentum) * grad + momentum * b if nesterov else b
        p *= 1 - lr * weight_decay
        p -= lr * ratio * orthogonal(u)

    ``orthogonal`` is the quintic Newton-Schulz iteration in bf16, over whole matrices: the ranks
    share them out by cost, so each is transformed once. That takes two all-to-alls a step beside
    the messages of ShardedAdam, of 2 bytes an element each. For a matrix (m, n) the ratio is
    sqrt(max(1, m / n)), or 0.2 * sqrt(max(m, n)) under adjust_lr_fn="match_rms_adamw", with which
    rates and decays tuned for AdamW fit (arXiv 2502.16982).

    Muon is for the matrices of hidden layers. A group with ``"use_muon": False`` follows AdamW with
    its own lr, weight_decay, betas, eps and amsgrad; one with True must hold matrices. Parameters
    without such a group are divided: matrices follow Muon, and all others AdamW, in a group behind.
    If a model is passed, the weights of its embeddings follow AdamW, too, and that of its output
    layer: the one linear layer whose weight has the shape of an embedding's. An attribute
    ``use_muon`` of a parameter, as DeepSpeed has it, counts more than both; FSDP2 drops it, so set
    it after fully_shard().

    Args:
        params: a module; or parameters, (name, parameter) pairs, or group dicts holding either.
        lr, weight_decay, momentum, nesterov, eps: as in the formula; eps bounds the norm from below
            by which the iteration divides first.
        ns_coefficients, ns_steps: of the iteration.
        adjust_lr_fn: None or "original", or "match_rms_adamw".
        split: matrices in each parameter, stacked along dimension 0: 3 for a fused query, key and
            value (3 * n, m), the number of experts for (experts, n, m). Usually set in a group.
        adamw: options of the groups that follow AdamW, such as {"lr": 3e-4}; a group's own count
            more.
        sharding: a ShardConfig, or a plain dict with its keys.
        torch_options: ``maximize`` and other keywords of torch.optim's; see ShardedOptimizer.

    Raises:
        ValueError: hyper-parameters out of range or NaN, also in a group dict; a parameter that is
            no matrix in a group with ``use_muon``; ranks that disagree.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split: int = 1,
        adamw: Mapping[str, Any] | None = None,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split": split,
            "use_muon": True,
            **{key: value for key, value in _ADAMW.items() if key != "eps"},
        }
        self._adamw = {**_ADAMW, **(adamw or {})}
        self._split = split

        def make_rule() -> MuonRule:
            unknown = [key for key in adamw or {} if key not in (*defaults, *torch_options)]
            if unknown:
                raise ValueError(
                    f"Invalid adamw: AdamW has no {unknown[0]}. Use lr, weight_decay, betas, eps "
                    "or amsgrad."
                )
            return MuonRule()

        super().__init__(params, defaults, make_rule, sharding, **torch_options)

    def _read_params(self, params: Any) -> list[Any]:
        adamw_ids = _embedding_and_head_ids(params) if isinstance(params, nn.Module) else set()
        members = as_list(params)
        if not isinstance(members[0], Mapping):
            members = [{"params": members}]
        return [
            own for group in members for own in _split_by_use_muon(group, adamw_ids, self._split)
        ]

    def _read_group(self, group: dict[str, Any]) -> dict[str, Any]:
        if not group.get("use_muon", True):
            return {**self._adamw, **group}
        if "use_muon" not in group and self._built:
            kinds = list(_split_by_use_muon(group, set(), self._split))
            if len(kinds) > 1:
                raise ValueError(
                    "The new group has matrices and other parameters. Add two groups, of which the "
                    'one without matrices has "use_muon": False.'
                )
            group = kinds[0]
            return group if group["use_muon"] else {**self._adamw, **group}
        return group


def _split_by_use_muon(
    group: Mapping[str, Any], adamw_ids: set[int], split: int
) -> Iterator[dict[str, Any]]:
    """Yield ``group`` if it tells its kind; else its matrices and its other parameters apart.

    ``adamw_ids`` are the ids of parameters that are matrices, but not of hidden layers. ``split``
    is that of groups without one: unless 1, parameters of three dimensions are stacked matrices.
    """
    if "use_muon" in group or "params" not in group:
        yield dict(group)
        return
    members = ordered(dict(group))["params"]
    split = group.get("split", split)
    members = [members] if isinstance(members, Tensor) else list(members)
    kinds: tuple[list[Any], list[Any]] = [], []
    for member in members:
        param = member[1] if isinstance(member, Sequence) else member
        num_dims = param.dim() if isinstance(param, Tensor) else 0
        is_matrix = num_dims == 2 or (num_dims == 3 and split != 1)
        # One that is marked and is no matrix is refused by name, as in a group with use_muon.
        is_hidden = getattr(param, "use_muon", is_matrix and id(param) not in adamw_ids)
        kinds[bool(is_hidden)].append(member)
    for use_muon in (True, False):
        if kinds[use_muon] or (use_muon and not members):
            yield {**group, "params": kinds[use_muon], "use_muon": use_muon}


def _embedding_and_head_ids(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings, and of the output layer.

    Tables of positions may have the shape of hidden layers, of which there are several.
    """
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    linear = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    shapes = Counter(tuple(weight.shape) for weight in linear.values())
    heads = [
        weight
        for shape in {tuple(table.shape) for table in tables}
        for weight in linear.values()
        if tuple(weight.shape) == shape and shapes[shape] == 1
    ]
    return {id(weight) for weight in (*tables, *heads)}
