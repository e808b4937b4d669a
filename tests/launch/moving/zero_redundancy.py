"""A script with ZeroRedundancyOptimizer; the edits of the page are applied to a copy."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

STEPS = 8


def compute_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    inputs = torch.randn(16, 8, generator=generator)
    return (model(inputs) - inputs[:, :2].sum(1, keepdim=True).tanh()).square().mean()


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 31), nn.Tanh(), nn.Linear(31, 1))
    model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    start = 0
    if os.path.exists(path):
        saved = torch.load(path, weights_only=False)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]

    for step in range(start, STEPS):
        loss = compute_loss(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
        if step == STEPS // 2 - 1:
            optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**saved, "step": step + 1}, path)

    dist.barrier()
    del model  # before the group: torch's gloo group may never end if DDP is the last to hold it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
