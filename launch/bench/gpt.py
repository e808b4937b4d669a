"""A small GPT that predicts the bytes of real text, trained by one method on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from launch.bench.transformer import Block
from shardfuse import ShardedAdamW, ShardedLamb, ShardedMuon

VOCABULARY = 256
DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
WARM_UP, LAST_LR = 0.1, 0.1
"""Parts of the steps in which the rate rises, and of the highest rate at the end (cosine)."""
NUM_POINTS = 20
"""Evaluations of a run."""


@dataclass(frozen=True)
class Size:
    """Of a model, of the batch of each rank, of a run, and of the held-out sample of each rank."""

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int
    steps: int
    held_out: int = 16


SIZES = {
    "10.8 M": Size(layers=6, hidden=384, heads=6, length=64, batch=8, steps=100),
    "0.5 M": Size(layers=4, hidden=96, heads=4, length=128, batch=8, steps=200),
    "tiny": Size(layers=1, hidden=32, heads=2, length=16, batch=2, steps=20, held_out=2),
}


class GPT(nn.Module):
    """Embeddings of bytes and positions, blocks, and a head; forward returns logits."""

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.hidden)
        self.positions = nn.Embedding(size.length, size.hidden)
        self.blocks = nn.ModuleList(Block(size.hidden, size.heads) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        self.head = nn.Linear(size.hidden, VOCABULARY, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                nn.init.normal_(param, std=0.02, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (batch, length, VOCABULARY) of bytes (batch, length)."""
        x = self.tokens(inputs) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def _ddp(model: GPT, lr: float) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=DECAY)


def _adamw(model: GPT, lr: float, **sharding: Any) -> Any:
    return ShardedAdamW(model, lr=lr, betas=BETAS, weight_decay=DECAY, sharding=sharding)


def _fsdp(model: GPT, lr: float) -> Any:
    for module in (*model.blocks, model):
        fully_shard(module)
    return ShardedAdamW(model.named_parameters(), lr=lr, betas=BETAS, weight_decay=DECAY)


def _lamb(model: GPT, lr: float) -> Any:
    return ShardedLamb(model, lr=lr, betas=BETAS, weight_decay=DECAY, variant="google")


def _muon(model: GPT, lr: float, adamw_lr: float) -> Any:
    """Return Muon for the matrices of the blocks, each of a fused query, key, value by itself."""
    named = list(model.named_parameters())
    fused = [(name, p) for name, p in named if name.endswith("query_key_value.weight")]
    matrices = [
        (name, p)
        for name, p in named
        if p.ndim == 2 and name.startswith("blocks.") and (name, p) not in fused
    ]
    rest = [pair for pair in named if pair not in fused and pair not in matrices]
    groups: list[dict[str, Any]] = [
        {"params": fused, "split": 3},
        {"params": matrices},
        {"params": rest, "use_muon": False, "lr": adamw_lr},
    ]
    return ShardedMuon(groups, lr=lr, weight_decay=DECAY, adamw={"lr": adamw_lr, "betas": BETAS})


BASELINE = "DDP + torch AdamW"
METHODS: Mapping[str, Callable[..., Any]] = {
    BASELINE: _ddp,
    "shardfuse AdamW": _adamw,
    "shardfuse AdamW, bf16 wire": lambda model, lr: _adamw(
        model, lr, grad_sync_dtype="bfloat16", param_sync_dtype="bfloat16"
    ),
    "shardfuse AdamW, stage 2": lambda model, lr: _adamw(model, lr, stage=2),
    "shardfuse AdamW over FSDP2": _fsdp,
    "shardfuse LAMB": _lamb,
    "shardfuse Muon": _muon,
}


def load(path: str) -> tuple[Tensor, Tensor]:
    """Return the bytes of a text for training and for evaluation: every twentieth document."""
    with open(path, "rb") as file:
        documents = file.read().split(b"\n\n")
    parts = (
        b"\n\n".join(d for i, d in enumerate(documents) if (i % 20 == 19) == is_held_out)
        for is_held_out in (False, True)
    )
    training, held_out = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return training, held_out


def _windows(text: Tensor, size: Size, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ``count`` inputs (count, length) and their next bytes, from places that seed draws."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(text.numel() - size.length - 1, (count,), generator=generator)
    rows = torch.stack([text[s : s + size.length + 1] for s in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(
    method: str, size: str, rates: Mapping[str, float], seed: int, text: str
) -> list[list[float]]:
    """Return (step, held-out loss in nats per byte, the mean over ranks) of a run.

    Every method sees the same weights, batches, schedule and clip for a seed.

    Args:
        rates: the learning rates that the method's function takes.
        text: path of the text.
    """
    return [list(point) for point in _run(method, SIZES[size], rates, seed, text)]


def _run(
    method: str, size: Size, rates: Mapping[str, float], seed: int, path: str
) -> Iterator[tuple[int, float]]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    training, held_out = load(path)
    fixed = _windows(held_out, size, size.held_out, rank)
    net = GPT(size, seed)
    model: nn.Module = DistributedDataParallel(net) if method == BASELINE else net
    optimizer = METHODS[method](net, **rates)
    warm_up = max(1, int(WARM_UP * size.steps))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / (size.steps - warm_up)
        return LAST_LR + (1 - LAST_LR) * (1 + math.cos(math.pi * done)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    for step in range(size.steps):
        batch = _windows(training, size, size.batch, (seed * size.steps + step) * world_size + rank)
        _loss(model, *batch).backward()
        if method == BASELINE:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        else:
            optimizer.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % (size.steps // NUM_POINTS) == 0:
            with torch.no_grad():
                loss = _loss(model, *fixed)
            dist.all_reduce(loss)
            yield step + 1, float(loss) / world_size
