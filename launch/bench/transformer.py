"""A language model that trains on random tokens: a real forward and backward pass.

Or, in sizes "... elsewhere", one whose passes only take their time, as on an accelerator: the
host's cores are free for communication and for the update. Its gradients are constants. In sizes
"... elsewhere, host ahead" a layer's pass begins with that of the layer before, as kernels that a
host has queued do: what its thread computes between two layers takes no time of their own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """Of a model and of the batch that each rank gives it."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    batch: int
    length: int
    is_elsewhere: bool = False
    host_is_ahead: bool = False


SIZES = {
    "33M": Size(layers=8, hidden=512, heads=8, vocabulary=8000, batch=8, length=64),
    "tiny": Size(layers=2, hidden=32, heads=2, vocabulary=100, batch=2, length=8),
}
ELSEWHERE = " elsewhere"
HOST_AHEAD = ", host ahead"
SIZES |= {name + ELSEWHERE: replace(size, is_elsewhere=True) for name, size in SIZES.items()}
SIZES |= {
    name + HOST_AHEAD: replace(size, host_is_ahead=True)
    for name, size in SIZES.items()
    if size.is_elsewhere
}

FORWARD_S = 13e-9
"""Seconds per weight that forward takes elsewhere, and half of what backward takes.

So it was for the 33.4 M on one core: 0.38 s and 0.77 s without the embedding, whose rows are only
looked up.
"""


class Block(nn.Module):
    """Causal attention and an MLP of four times the width, each after a layer norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = nn.Linear(hidden, 4 * hidden)
        self.mlp_out = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        projected = self.query_key_value(self.attention_norm(x))
        heads = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        out: Tensor = x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x))))
        return out


class _BlockElsewhere(Block):
    """A block that only takes its time."""

    def __init__(self, size: Size) -> None:
        super().__init__(size.hidden, size.heads)
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return elsewhere(x, self.parameters(), self.size)


class Transformer(nn.Module):
    """Embeddings, blocks and a head of its own; forward returns the loss of the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        # The same values on every rank and for every method, whatever was drawn before.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.tokens = nn.Embedding(size.vocabulary, size.hidden)
            self.positions = nn.Parameter(0.02 * torch.randn(size.length, size.hidden))
            self.blocks = nn.ModuleList(
                _BlockElsewhere(size) if size.is_elsewhere else Block(size.hidden, size.heads)
                for _ in range(size.layers)
            )
            self.norm = nn.LayerNorm(size.hidden)
            self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)
        self.size = size

    def forward(self, batch: Tensor) -> Tensor:
        if self.size.is_elsewhere:
            lookups = [self.tokens.weight, self.positions]
            x = elsewhere(batch.float().mean(), lookups, self.size, is_lookup=True)
            for block in self.blocks:
                x = block(x)
            return elsewhere(x, [*self.norm.parameters(), *self.head.parameters()], self.size)
        x = self.tokens(batch[:, :-1]) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def elsewhere(
    x: Tensor, params: Iterable[Tensor], size: Size, *, is_lookup: bool = False
) -> Tensor:
    """Return ``x`` (), after the time that a layer of ``params`` takes; its backward, too.

    The params are read, as those of a layer are.
    """
    params = list(params)
    with torch.no_grad():
        torch.stack([param.view(-1)[0] for param in params])
    seconds = 0.0 if is_lookup else FORWARD_S * sum(param.numel() for param in params)
    queue = _QUEUE if size.host_is_ahead else None
    if queue is not None and is_lookup:
        queue.start()
    out: Tensor = _Elsewhere.apply(seconds, queue, x, *params)
    return out


class _Queue:
    """Layers' passes one after the other, of which the host has launched the next ones before."""

    def __init__(self) -> None:
        self._cpu_s = 0.0  # of this thread, at the end of the last pass

    def start(self) -> None:
        """Forward begins: the host is not ahead of it, but comes from an optimizer's step."""
        self._cpu_s = time.thread_time()

    def run(self, seconds: float) -> None:
        """Sleep for a pass of ``seconds``, less the CPU time of this thread since the last one."""
        time.sleep(max(0.0, seconds - (time.thread_time() - self._cpu_s)))
        self._cpu_s = time.thread_time()


_QUEUE = _Queue()


class _Elsewhere(torch.autograd.Function):
    """A layer whose gradients are all ``x``, 1 / 1000 of it."""

    @staticmethod
    def forward(
        ctx: Any, seconds: float, queue: _Queue | None, x: Tensor, *params: Tensor
    ) -> Tensor:
        ctx.run = time.sleep if queue is None else queue.run
        ctx.run(seconds)
        ctx.seconds, ctx.value = seconds, x.item() / 1000
        ctx.like = [torch.empty_like(param, device="meta") for param in params]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.run(2 * ctx.seconds)
        made = [torch.full(like.shape, ctx.value, dtype=like.dtype) for like in ctx.like]
        return None, None, grads[0], *made


@functools.cache
def numel_of(size: Size) -> int:
    """Return the number of elements of a model's parameters."""
    with torch.device("meta"):
        return sum(param.numel() for param in Transformer(size).parameters())


def make_batch(size: Size, step: int, rank: int) -> Tensor:
    """Return (batch, length + 1) tokens that depend on step and rank alone."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    return torch.randint(size.vocabulary, (size.batch, size.length + 1), generator=generator)
