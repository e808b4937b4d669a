"""A plain loop: the optimizer is replaced, the model is not wrapped.

    torchrun --standalone --nproc-per-node 2 launch/examples/plain_loop.py

The optimizer averages the gradients of all ranks, and each rank keeps its part of Adam's states.
"""

import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.training import init_process_group, set_device

STEPS, BATCH = 60, 64


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()

    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = ShardedAdamW(model, lr=1e-2)  # all start with rank 0's weights

    for step in range(STEPS):
        inputs = torch.randn(BATCH, 16, device=device)
        targets = inputs[:, :4].sum(1, keepdim=True).tanh()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
