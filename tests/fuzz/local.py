"""One rank's parameters and gradients, in plain torch: used by the reference and by the actor.

The reference holds one for every rank and so knows all gradients without communication; the actor
holds the parameters that its sharded optimizer updates. Losses are linear, so that gradients do not
depend on the parameters' values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.fuzz.program import Op, Program, Spec, gradient, initial_value, laid_out


class LocalModel:
    """Parameters by name, in order of registration, with what a caller has done to gradients."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program = program
        self.rank = rank
        self.specs: dict[str, Spec] = {}
        self.params: dict[str, torch.nn.Parameter] = {}
        self.scale = 1.0  # the loss scale
        self.kept: list[Tensor] = []
        self.hooked: dict[str, float] = {}  # factors of hooks on gradients

    def add(self, specs: Sequence[Spec]) -> list[torch.nn.Parameter]:
        """Make parameters."""
        for spec in specs:
            self.specs[spec.name] = spec
            value = initial_value(spec)
            self.params[spec.name] = torch.nn.Parameter(value, requires_grad=not spec.frozen)
        return [self.params[spec.name] for spec in specs]

    def replace(self) -> None:
        """Put copies in the place of all parameters, without gradients."""
        for name, old in self.params.items():
            copied = torch.nn.Parameter(old.detach().clone(), requires_grad=old.requires_grad)
            self.params[name] = copied
            if name in self.hooked:
                self.hook(name, self.hooked[name])

    def named(self, names: Sequence[str] | None) -> list[tuple[str, torch.nn.Parameter]]:
        """Return (name, parameter) of those of ``names`` that exist; of all for None."""
        chosen = self.params if names is None else names
        return [(name, self.params[name]) for name in chosen if name in self.params]

    def hook(self, name: str, factor: float) -> None:
        """Have autograd multiply the gradients of a parameter by ``factor``."""
        self.hooked[name] = factor
        param = self.params[name]
        if param.requires_grad:
            param.register_hook(lambda grad: grad * factor)
        else:
            # torch refuses hooks on parameters that need no gradient.
            del self.hooked[name]

    def chosen(
        self, names: Sequence[str], ranks: Sequence[int]
    ) -> list[tuple[str, torch.nn.Parameter]]:
        """Return those of ``names`` that this rank changes if ``ranks`` do.

        Frozen ones only if all do: a gradient of one on some ranks alone is a fault, and made by
        ``one_rank`` operations.
        """
        everyone = len(ranks) == self.program.world
        named = self.named(names if self.rank in ranks else ())
        return [(name, param) for name, param in named if everyone or param.requires_grad]

    def apply(self, op: Op) -> set[str]:
        """Do what ``op`` says to gradients here; return the names that autograd reached."""
        reached = getattr(self, op.name)(**op.args)
        return reached or set()

    # Operations, by name. Parameters that do not exist (yet) are passed over.

    def backward(
        self,
        seed: int,
        absent: dict[int, Sequence[str]],
        zero: Sequence[str] = (),
        overflow: tuple[int, str, float] | None = None,
    ) -> set[str]:
        """Accumulate gradients; on each rank some parameters are not part of the loss."""
        left_out = absent.get(self.rank, ())
        used = {
            name: param
            for name, param in self.params.items()
            if param.requires_grad and name not in left_out
        }
        uses = [(name, use) for name in used for use in range(self.specs[name].uses)]
        factors = [self._factor(name, seed, use, zero, overflow) for name, use in uses]
        params = [used[name] for name, _ in uses]
        if self.program.joined and params:
            products = list(torch._foreach_mul(params, factors))
        else:
            products = [param * factor for param, factor in zip(params, factors, strict=True)]
        terms = [product.sum().float() for product in products]
        if terms:
            (torch.stack(terms).sum() * self.scale).backward()
        return set(used)

    def _factor(
        self,
        name: str,
        seed: int,
        use: int,
        zero: Sequence[str],
        overflow: tuple[int, str, float] | None,
    ) -> Tensor:
        spec = self.specs[name]
        factor = gradient(self.program, spec, seed, self.rank, use)
        if name in zero:
            factor.zero_()
        if overflow is not None and overflow[:2] == (self.rank, name) and factor.numel():
            factor.view(-1)[-1] = overflow[2]
        return factor.to(getattr(torch, spec.dtype))

    def set_grad(
        self, seed: int, names: Sequence[str], ranks: Sequence[int], form: str = "contiguous"
    ) -> None:
        """Assign gradients that autograd has not made."""
        for name, param in self.chosen(names, ranks):
            self.assign(seed, name, param, form)

    def assign(self, seed: int, name: str, param: torch.nn.Parameter, form: str) -> None:
        """Assign one gradient."""
        value = gradient(self.program, self.specs[name], seed, self.rank) * self.scale
        param.grad = laid_out(value.to(param.dtype), form)

    def one_rank(self, kind: str, rank: int, names: Sequence[str], seed: int = 0) -> None:
        """Freeze, unfreeze or give frozen ones a gradient, on one rank alone."""
        for name, param in self.named(names if self.rank == rank else ()):
            if kind == "gradient":
                self.assign(seed, name, param, "contiguous")
            elif kind == "freeze":
                param.requires_grad_(False).grad = None
            elif kind == "unfreeze":
                param.requires_grad_(True)

    def drop_grad(self, names: Sequence[str], ranks: Sequence[int]) -> None:
        """Set gradients to None."""
        for _, param in self.chosen(names, ranks):
            param.grad = None

    def edit_grad(self, names: Sequence[str], ranks: Sequence[int], factor: float) -> None:
        """Multiply gradients in place."""
        for _, param in self.named(names if self.rank in ranks else ()):
            if param.grad is not None:
                param.grad.mul_(factor)

    def clip_locally(self, limit: float) -> None:
        """Clip by torch's function, which sees this rank's gradients alone."""
        torch.nn.utils.clip_grad_norm_(self.params.values(), limit)

    def keep_grad(self, names: Sequence[str], drop: bool) -> None:
        """Hold on to gradients, and take them away from their parameters or not."""
        for _, param in self.named(names):
            if param.grad is not None:
                self.kept.append(param.grad)
                if drop:
                    param.grad = None

    def move_grad(self, source: str, target: str, swap: bool) -> None:
        """Give one parameter's gradient to another of the same shape."""
        pair = self.chosen([source, target], [self.rank])
        if len(pair) == 2:
            (_, first), (_, second) = pair
            first.grad, second.grad = second.grad if swap else None, first.grad

    def train(self, names: Sequence[str], value: bool, ranks: Sequence[int], drop: bool) -> None:
        """Freeze or unfreeze parameters."""
        for _, param in self.named(names if self.rank in ranks else ()):
            param.requires_grad_(value)
            if drop:
                param.grad = None

    def hook_grad(self, names: Sequence[str], factor: float) -> None:
        """Register hooks on gradients."""
        for name, _ in self.named(names):
            if name not in self.hooked:
                self.hook(name, factor)

    def grads(self) -> dict[str, Tensor | None]:
        """Return the gradients by name."""
        return {name: param.grad for name, param in self.params.items()}


LOCAL = (
    "backward",
    "set_grad",
    "drop_grad",
    "edit_grad",
    "clip_locally",
    "keep_grad",
    "move_grad",
    "train",
    "hook_grad",
    "one_rank",
)
"""Operations that are gradients' alone."""
