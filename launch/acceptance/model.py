"""What is trained here: a small language model on random tokens, and how."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from launch.bench.training import Training
from launch.bench.transformer import SIZES as BENCH_SIZES
from launch.bench.transformer import Size, Transformer, make_batch
from shardfuse import ShardedAdamW
from shardfuse.comm import Communicator

LR = 1e-4
SIZES = BENCH_SIZES | {
    "266M": Size(layers=16, hidden=1024, heads=16, vocabulary=32000, batch=2, length=512)
}
"""Of 266M a step takes a device some 50 ms, and the host about 5."""

_BUCKETS = 4


class ShardedTraining(Training):
    """shardfuse's training, of which backward can be had without a step."""

    def __init__(self, model: Transformer, optimizer: ShardedAdamW) -> None:
        super().__init__(model, model, optimizer)
        self.model, self.optimizer = model, optimizer

    def backward(self, batch: torch.Tensor, *, set_to_none: bool = True) -> None:
        """Make new gradients, in the memory of the last ones without ``set_to_none``."""
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.model(batch).backward()


def sharded(
    device: torch.device, size: str, **sharding: Any
) -> tuple[ShardedTraining, ShardedAdamW]:
    """Return shardfuse's training of a new model, and its optimizer."""
    model = Transformer(SIZES[size]).to(device)
    own = {"consolidate_every": 0, **sharding}
    optimizer = ShardedAdamW(model.named_parameters(), lr=LR, sharding=own)
    return ShardedTraining(model, optimizer), optimizer


def replicated(comm: Communicator, device: torch.device, size: str) -> Training:
    """Return torch's own training of a new model: DDP, and fused AdamW on every rank."""
    model = Transformer(SIZES[size]).to(device)
    several = comm.world_size > 1
    module = DistributedDataParallel(model, gradient_as_bucket_view=True) if several else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Training(model, module, optimizer)


def batch_of(comm: Communicator, device: torch.device, size: str, step: int) -> torch.Tensor:
    """Return this rank's tokens of a step."""
    return make_batch(SIZES[size], step, comm.rank).to(device)


def bucket_mib(size: str) -> float:
    """Return the size of buckets of which a model has a few."""
    with torch.device("meta"):
        numel = sum(param.numel() for param in Transformer(SIZES[size]).parameters())
    return 4 * numel / _BUCKETS / (1 << 20)
