"""torch_npu's nine optimizers under their drop-in names, each beside its float64 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from shardfuse.optim import npu
from tests.support.oracles import AdamOracle, BertAdamOracle, LambOracle, Oracle, SGDOracle
from tests.support.oracles_family import AdadeltaOracle, AdamPOracle, RMSpropOracle, RMSpropTFOracle
from tests.support.runs import TOLERANCE, max_relative_error

REQUIRED = "required"

# class: (upstream's arguments and defaults, keys of the state).
CLASSES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "NpuFusedSGD": (
        {
            "lr": REQUIRED,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
        },
        [],
    ),
    "NpuFusedAdam": (
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0, "amsgrad": False},
        ["step", "exp_avg", "exp_avg_sq"],
    ),
    "NpuFusedAdamW": (
        {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, "amsgrad": False},
        ["step", "exp_avg", "exp_avg_sq"],
    ),
    "NpuFusedBertAdam": (
        {
            "lr": REQUIRED,
            "warmup": -1,
            "t_total": -1,
            "schedule": "warmup_linear",
            "b1": 0.9,
            "b2": 0.999,
            "e": 1e-6,
            "weight_decay": 0.01,
            "max_grad_norm": 1.0,
        },
        ["step", "exp_avg", "exp_avg_sq"],
    ),
    "NpuFusedLamb": (
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-6,
            "weight_decay": 0,
            "adam": False,
            "use_global_grad_norm": False,
        },
        ["step", "exp_avg", "exp_avg_sq"],
    ),
    "NpuFusedRMSprop": (
        {
            "lr": 1e-2,
            "alpha": 0.99,
            "eps": 1e-8,
            "weight_decay": 0,
            "momentum": 0,
            "centered": False,
        },
        ["step", "square_avg"],
    ),
    "NpuFusedRMSpropTF": (
        {
            "lr": 1e-2,
            "alpha": 0.9,
            "eps": 1e-10,
            "weight_decay": 0,
            "momentum": 0.0,
            "centered": False,
            "decoupled_decay": False,
            "lr_in_momentum": True,
        },
        ["step", "square_avg"],
    ),
    "NpuFusedAdadelta": (
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0},
        ["step", "square_avg", "acc_delta"],
    ),
    "NpuFusedAdamP": (
        {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0,
            "delta": 0.1,
            "wd_ratio": 0.1,
            "nesterov": False,
        },
        ["step", "exp_avg", "exp_avg_sq"],
    ),
}
# Arguments that are not put into the groups.
NOT_IN_GROUPS = {"adam", "use_global_grad_norm"}


class Member(NamedTuple):
    """The options of one optimizer, all of which matter, and its reference."""

    options: Mapping[str, Any]
    oracle: type[Oracle]
    oracle_options: Mapping[str, Any] = {}


FAMILY: dict[str, Member] = {
    "NpuFusedSGD": Member({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, SGDOracle),
    "NpuFusedAdam": Member({"lr": 0.1, "weight_decay": 0.1}, AdamOracle),
    "NpuFusedAdamW": Member({"lr": 0.1, "weight_decay": 0.1}, AdamOracle, {"decoupled": True}),
    "NpuFusedBertAdam": Member({"lr": 0.1, "warmup": 0.1, "t_total": 20}, BertAdamOracle),
    "NpuFusedLamb": Member({"lr": 0.05, "weight_decay": 0.1}, LambOracle),
    "NpuFusedRMSprop": Member({"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}, RMSpropOracle),
    "NpuFusedRMSpropTF": Member({"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, RMSpropTFOracle),
    "NpuFusedAdadelta": Member({"lr": 20.0, "weight_decay": 0.1}, AdadeltaOracle),
    "NpuFusedAdamP": Member({"lr": 0.05, "weight_decay": 0.1}, AdamPOracle),
}
every_optimizer = pytest.mark.parametrize("name", FAMILY)

# More than one block, a matrix, a vector.
SHAPES: tuple[tuple[int, ...], ...] = ((1500,), (6, 7), (5,))


def noise(shape: Sequence[int], seed: int) -> Tensor:
    """Return fp32 numbers with magnitudes in [0.1, 1), so that no eps hides or makes an error."""
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0
    return signs * (0.1 + 0.9 * torch.rand(shape, generator=generator))


def fresh_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Return parameters that are equal on every call."""
    return [nn.Parameter(noise(s, 1000 + i).to(dtype)) for i, s in enumerate(shapes)]


def build(name: str, params: Any, **options: Any) -> Any:
    """Return the drop-in optimizer with its options of FAMILY, `options` on top."""
    return getattr(npu, name)(params, **{**FAMILY[name].options, **options})


def reference(name: str, params: Sequence[Tensor], **options: Any) -> Oracle:
    """Return the float64 reference of build(name, params, **options)."""
    member = FAMILY[name]
    return member.oracle(
        [{"params": list(params)}], **{**member.options, **options, **member.oracle_options}
    )


class Twin:
    """A drop-in optimizer over a module's parameters, and the reference with equal values."""

    def __init__(
        self,
        name: str,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.params = fresh_params(shapes, dtype)
        self.model = nn.ParameterList(self.params)
        self.start = [p.detach().clone() for p in self.params]
        self.oracle = reference(name, self.params, **options)
        self.optimizer = build(name, self.params, **options)

    def grads(self, seed: int, absent: Sequence[int] = ()) -> list[Tensor | None]:
        """Return gradients in the parameters' dtype, None for the parameters in `absent`."""
        return [
            None if i in absent else noise(p.shape, 100 * seed + i).to(p.dtype)
            for i, p in enumerate(self.params)
        ]

    def backward(self, grads: Sequence[Tensor | None]) -> None:
        """Add gradients to the parameters' own, through autograd."""
        pairs = zip(self.params, grads, strict=True)
        losses = [(p * g).sum() for p, g in pairs if g is not None]
        torch.autograd.backward(losses)

    def step(self, seed: int, absent: Sequence[int] = ()) -> None:
        """Let both make one step; gradients of the parameters in `absent` are None."""
        grads = self.grads(seed, absent)
        self.model.zero_grad()
        self.backward(grads)
        self.optimizer.step()
        self.oracle.step([grads])

    def values(self) -> list[Tensor]:
        """Return copies of the parameters; of half-precision ones the fp32 masters."""
        if self.params[0].dtype == torch.float32:
            return [p.detach().clone() for p in self.params]
        state = self.optimizer.state_dict()["state"]
        # A state dict is on the CPU.
        masters = [state[i]["param"].to(p.device, copy=True) for i, p in enumerate(self.params)]
        for param, master in zip(self.params, masters, strict=True):
            assert torch.equal(param.detach(), master.to(param.dtype))
        return masters

    def check(self) -> None:
        """Fail unless the parameters are the reference's within fp32 rounding, and have moved."""
        values = self.values()
        assert max_relative_error(values, self.oracle.values(), self.start) < TOLERANCE
        for value, start in zip(values, self.start, strict=True):
            assert not torch.equal(value, start.float())
