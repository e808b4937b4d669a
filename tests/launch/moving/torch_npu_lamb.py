"""A script with torch_npu, which needs an NPU: only the edited copy is run."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_npu.optim import NpuFusedLamb


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(model)
    optimizer = NpuFusedLamb(model.parameters(), lr=2e-2, weight_decay=0.01)
    torch.manual_seed(rank)
    for step in range(20):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs[:, :2].sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_fused_(max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
