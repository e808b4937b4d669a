"""LAMB with gradient accumulation, clipping, warm-up and decay.

torchrun --standalone --nproc-per-node 2 launch/examples/accumulate_clip_schedule.py
"""

import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedLamb
from shardfuse.training import init_process_group, set_device

STEPS, MICRO_BATCHES, BATCH, WARMUP = 60, 4, 32, 10


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()

    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = ShardedLamb(model, lr=0.05, weight_decay=0.01, variant="google")
    up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARMUP)
    down = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS - WARMUP)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [up, down], [WARMUP])

    def backward() -> torch.Tensor:
        inputs = torch.randn(BATCH, 16, device=device)
        targets = inputs[:, :4].sum(1, keepdim=True).tanh()
        loss = (model(inputs) - targets).square().mean()
        (loss / MICRO_BATCHES).backward()
        return loss.detach()

    for step in range(STEPS):
        with optimizer.no_sync():  # all but the last: their gradients stay on this rank
            for _ in range(MICRO_BATCHES - 1):
                backward()
        loss = backward()
        norm = optimizer.clip_grad_norm(1.0)  # of the mean over micro-batches and ranks
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}  gradient norm {norm:.3f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
