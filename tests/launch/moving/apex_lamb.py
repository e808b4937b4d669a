"""A script with apex, which needs a GPU: only the edited copy is run."""

import sys

import apex
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(model)
    optimizer = apex.optimizers.FusedLAMB(
        model.parameters(), lr=2e-2, weight_decay=0.01, max_grad_norm=1.0
    )
    torch.manual_seed(rank)
    for step in range(20):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs[:, :2].sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
