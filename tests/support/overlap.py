"""A model and what is done to its gradients between backward and step(), for tests of overlap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import placing

ON = {"overlap_grad_sync": True, "overlap_param_sync": True}
OFF = {"overlap_grad_sync": False, "overlap_param_sync": False}

WIRES: dict[str, dict[str, Any]] = {
    "bf16": {"grad_sync_dtype": torch.bfloat16},
    "fp16": {"grad_sync_dtype": torch.float16},
    "bf16 params": {"param_sync_dtype": torch.bfloat16},
    "8 bits": {"grad_sync_bits": 8, "param_sync_bits": 8},
    "8-bit gradients, clip": {"grad_sync_bits": 8, "clip_grad_norm": 0.1},
    "4-bit params": {"param_sync_bits": 4},
    "4-bit params, no feedback": {"param_sync_bits": 4, "error_feedback": False},
    "clip": {"clip_grad_norm": 0.1},
}
"""What travels in another dtype, or in fewer bits, and a clip in step()."""


class Net(nn.Module):
    """A tied matrix, blocks that may be checkpointed, a layer used now and then, one never.

    ``used_last``: the last two are registered first, so that what backward makes first is complete.
    """

    def __init__(self, dtype: torch.dtype = torch.float32, *, used_last: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        if used_last:
            self.sometimes, self.never = nn.Linear(32, 32), nn.Linear(32, 40)
        self.embedding = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        if not used_last:
            self.sometimes, self.never = nn.Linear(32, 32), nn.Linear(32, 40)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-4, 5, param.shape, generator=generator) / 16)
        self.to(dtype)
        self.with_sometimes = False
        self.reentrant: bool | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.reentrant is None:
                x = torch.tanh(block(x))
            else:
                x = checkpoint(lambda h, b=block: torch.tanh(b(h)), x, use_reentrant=self.reentrant)
        if self.with_sometimes:
            x = x + self.sometimes(x)
        logits = self.norm(x) @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def tokens(rank: int, step: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(40, (2, 6), generator=generator)


Program = Callable[[Net, Any, int, int], None]


def plain(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model(tokens(rank, step)).backward()


def twice(model: Net, optimizer: Any, rank: int, step: int) -> None:
    for micro in range(2):
        model(tokens(rank, step, micro)).backward()


def no_sync(model: Net, optimizer: Any, rank: int, step: int) -> None:
    with optimizer.no_sync():
        model(tokens(rank, step, 1)).backward()
    plain(model, optimizer, rank, step)


def on_one_rank(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model.with_sometimes = rank == step % 2
    plain(model, optimizer, rank, step)


def without_backward(model: Net, optimizer: Any, rank: int, step: int) -> None:
    if rank > 0 or step % 2:
        plain(model, optimizer, rank, step)


def two_losses(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model.sometimes(model.embedding.weight[:3]).square().mean().backward()
    plain(model, optimizer, rank, step)


def checkpointed(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model.reentrant = step % 2 == 1
    plain(model, optimizer, rank, step)


def scaled(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    for grad in grads[:3]:
        grad.mul_(0.5)


def scaled_by_data(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    for param in model.parameters():
        if param.grad is not None:
            param.grad.data.mul_(0.5)


def unscaled(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    # As torch.amp.GradScaler does, which counts as no write.
    torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(0.25))


def one_element(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    grad = model.blocks[1].weight.grad
    if rank == 0 and grad is not None:
        grad.data.view(-1)[77 + step] += 1e-3


def replaced(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    grad = model.norm.weight.grad
    model.norm.weight.grad = None if rank == step % 2 or grad is None else grad * 2.0


def swapped(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    first, second = model.blocks[0].weight, model.blocks[1].weight
    first.grad, second.grad = second.grad, first.grad


def discarded(model: Net, optimizer: Any, rank: int, step: int) -> None:
    model(tokens(rank, step, 1)).backward()
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    plain(model, optimizer, rank, step)


def clipped(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    optimizer.clip_grad_norm(0.05)


def asked_for_its_norm(model: Net, optimizer: Any, rank: int, step: int) -> None:
    plain(model, optimizer, rank, step)
    optimizer.grad_norm()


def kept(model: Net, optimizer: Any, rank: int, step: int) -> None:
    before = model.blocks[0].weight.grad
    optimizer.zero_grad()
    plain(model, optimizer, rank, step)
    if before is not None:
        assert model.blocks[1].weight.grad is not None
        model.blocks[1].weight.grad += before  # what an older step made


UNSEEN = () if not placing.on_device() else (scaled_by_data, unscaled, one_element)
"""Programs that write to gradients in ways that do not show on a device."""

PROGRAMS: dict[str, Program] = {
    function.__name__: function
    for function in (
        plain,
        twice,
        no_sync,
        on_one_rank,
        without_backward,
        two_losses,
        checkpointed,
        scaled,
        scaled_by_data,
        unscaled,
        one_element,
        replaced,
        swapped,
        discarded,
        clipped,
        asked_for_its_norm,
        kept,
    )
    if function not in UNSEEN
}


def count_early(optimizer: Any) -> list[bool]:
    """Return a list that grows by a True for every bucket that leaves under backward."""
    grads = optimizer._grads
    original, found = grads._send_early, []

    def counted(**kwargs: Any) -> bool:
        found.append(original(**kwargs))
        return bool(found[-1])

    grads._send_early = counted
    return found
