"""Autocast in bf16, or in fp16 with a gradient scaler whose scale is equal on all ranks.

torchrun --standalone --nproc-per-node 2 launch/examples/mixed_precision.py
torchrun --standalone --nproc-per-node 2 launch/examples/mixed_precision.py float16
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW, ShardedGradScaler
from shardfuse.training import init_process_group, set_device

STEPS, BATCH = 60, 64


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()
    dtype = torch.float16 if "float16" in sys.argv[1:] else torch.bfloat16

    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    # clip_grad_norm: every step clips, after the scale has been undone.
    optimizer = ShardedAdamW(model, lr=1e-2, sharding={"clip_grad_norm": 1.0})
    scaler = ShardedGradScaler(device.type, enabled=dtype == torch.float16)

    for step in range(STEPS):
        inputs = torch.randn(BATCH, 16, device=device)
        targets = inputs[:, :4].sum(1, keepdim=True).tanh()
        with torch.autocast(device.type, dtype):
            output = model(inputs)
        loss = (output.float() - targets).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # with fp16: all ranks skip the step, or none does
        scaler.update()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}  {output.dtype}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
