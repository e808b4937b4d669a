"""Programs that hand gradients around, run by an optimizer and by plain torch side by side.

Gradients are integers and the learning rate is 1, so that both sides agree bit for bit. The torch
side has the parameters of every rank, and its step takes the mean over them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

NUM_PARAMS = 6
FROZEN = 5  # index of the parameter that is frozen at first


class Op(NamedTuple):
    """What to do, to which parameters; of one shape where there are two."""

    name: str
    first: int = 0
    second: int = 0
    seed: int = 0


class Subject:
    """Parameters with their gradients, one outside of the optimizer, and what a caller keeps.

    Parameters 0, 1 and 5 have one shape, 2, 3 and 4 another; 1 and 4 are in a group of their own.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        shapes = [(7,), (7,), (2, 3), (2, 3), (2, 3), (7,)]
        self.params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        self.params[3] = nn.Parameter(torch.zeros(3, 2).t())  # strides of its own
        self.params[FROZEN].requires_grad_(False)
        self.outside = {shape: nn.Parameter(torch.zeros(shape)) for shape in shapes}
        self.kept: list[Tensor] = []

    def groups(self) -> list[dict[str, Any]]:
        """Return two groups, with parameters of either shape in both."""
        second = (1, 4)
        return [
            {"params": [p for i, p in enumerate(self.params) if i not in second]},
            {"params": [self.params[i] for i in second]},
        ]

    def run(self, op: Op) -> None:
        """Do what concerns this rank's gradients alone."""
        getattr(self, f"_{op.name}")(self.params[op.first], self.params[op.second], op.seed)

    def _values(self, like: Tensor, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(2 * seed + self.rank)
        return torch.randint(-4, 5, like.shape, generator=generator).float()

    def _backward(self, first: Tensor, second: Tensor, seed: int) -> None:
        """Give a gradient to those parameters whose bits are set in ``seed``; to all, if none."""
        chosen = [p for i, p in enumerate(self.params) if seed >> i & 1 or not seed % 64]
        chosen = [p for p in chosen if p.requires_grad]
        if chosen:
            sum((p * self._values(p, seed + i)).sum() for i, p in enumerate(chosen)).backward()

    def _keep(self, first: Tensor, second: Tensor, seed: int) -> None:
        if first.grad is not None:
            self.kept.append(first.grad)

    def _let_go(self, first: Tensor, second: Tensor, seed: int) -> None:
        del self.kept[::2]

    def _none(self, first: Tensor, second: Tensor, seed: int) -> None:
        first.grad = None

    def _move(self, first: Tensor, second: Tensor, seed: int) -> None:
        second.grad, first.grad = first.grad, None

    def _swap(self, first: Tensor, second: Tensor, seed: int) -> None:
        second.grad, first.grad = first.grad, second.grad

    def _share(self, first: Tensor, second: Tensor, seed: int) -> None:
        second.grad = first.grad

    def _take_out(self, first: Tensor, second: Tensor, seed: int) -> None:
        self.outside[tuple(first.shape)].grad, first.grad = first.grad, None

    def _bring_back(self, first: Tensor, second: Tensor, seed: int) -> None:
        fitting = [grad for grad in self.kept if grad.shape == first.shape]
        if fitting:
            first.grad = fitting[-1]

    def _replace(self, first: Tensor, second: Tensor, seed: int) -> None:
        first.grad = self._values(first, seed)

    def _own(self, first: Tensor, second: Tensor, seed: int) -> None:
        """Have gradients accumulate in a view of memory that the caller keeps."""
        buffer = self._values(first, seed)
        first.grad = buffer.view(first.shape)
        self.kept.append(buffer)

    def _edit(self, first: Tensor, second: Tensor, seed: int) -> None:
        if first.grad is not None:
            first.grad.add_(1.0)

    def _unfreeze(self, first: Tensor, second: Tensor, seed: int) -> None:
        self.params[FROZEN].requires_grad_(True)

    def tensors(self) -> list[Tensor | None]:
        """Return everything that a caller can look at."""
        owners = [*self.params, *self.outside.values()]
        return [*(p.detach() for p in self.params), *(p.grad for p in owners), *self.kept]


LOCAL = ("keep", "none", "move", "swap", "share", "take_out", "bring_back", "replace", "own")
EVERYWHERE = ("backward", "zero", "zero_to_none", "step")
RARE = ("let_go", "edit", "unfreeze", "norm", "clip")


class Reference:
    """What torch does, on the gradients of all ranks."""

    def __init__(self, world_size: int, alike: bool) -> None:
        self.ranks = [Subject(0 if alike else rank) for rank in range(world_size)]
        self.optimizers = [torch.optim.SGD(rank.groups(), lr=1.0) for rank in self.ranks]

    def run(self, op: Op) -> None:
        """Do ``op`` on every rank; only step() is not a matter of each by itself."""
        if op.name in ("zero", "zero_to_none"):
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=op.name == "zero_to_none")
        elif op.name in ("step", "clip"):
            self._step()
        elif op.name != "norm":
            for rank in self.ranks:
                rank.run(op)

    @torch.no_grad()
    def _step(self) -> None:
        for column in zip(*(rank.params for rank in self.ranks), strict=True):
            grads = [param.grad for param in column]
            if grads[0] is not None:
                mean = sum(grads) / len(grads)
                for param in column:
                    param -= mean


class Tested:
    """What an optimizer of ours does on this rank."""

    def __init__(self, rank: int, build: Callable[..., Any]) -> None:
        self.subject = Subject(rank)
        self.optimizer = build(self.subject.groups())

    def run(self, op: Op) -> None:
        """Do ``op``. Collective, as some are."""
        if op.name in ("zero", "zero_to_none"):
            self.optimizer.zero_grad(set_to_none=op.name == "zero_to_none")
        elif op.name == "norm":
            self.optimizer.grad_norm()
        elif op.name in ("step", "clip"):
            if op.name == "clip":
                self.optimizer.clip_grad_norm(1e9)
            self.optimizer.step()
        else:
            self.subject.run(op)


def check(program: Sequence[Op], build: Callable[..., Any], *, alike: bool = False) -> None:
    """Run ``program`` and fail where a tensor that the caller sees is not torch's.

    Args:
        program: what to do.
        build: makes the optimizer from groups, at learning rate 1.
        alike: whether ranks have the same gradients.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    reference = Reference(world_size, alike)
    tested = Tested(0 if alike else rank, build)
    for index, op in enumerate(program):
        reference.run(op)
        tested.run(op)
        found, expected = tested.subject.tensors(), reference.ranks[rank].tensors()
        text = f"after {[tuple(op) for op in program[: index + 1]]}"
        assert _equal(found, expected), text
        assert _identities(found) == _identities(expected), text


def _equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    return all(
        (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )


def _identities(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return for each tensor the first place where the same one is."""
    return [next(i for i, other in enumerate(tensors) if other is t) for t in tensors]


def random_program(seed: int, length: int = 30) -> list[Op]:
    """Return a program that ``seed`` reproduces."""
    chance = random.Random(seed)
    names = LOCAL + 3 * EVERYWHERE + RARE
    program = [Op("backward")]
    for _ in range(length):
        shape = chance.choice([(0, 1, 5), (2, 3, 4)])
        first, second = chance.sample(shape, 2)
        program.append(Op(chance.choice(names), first, second, chance.randrange(1, 1000)))
    return program
