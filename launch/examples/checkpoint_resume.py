"""Save while training; go on from the newest checkpoint at another number of ranks.

    torchrun --standalone --nproc-per-node 2 launch/examples/checkpoint_resume.py 30
    torchrun --standalone --nproc-per-node 1 launch/examples/checkpoint_resume.py 60

The number is the last step. Delete runs/example to begin anew.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.training import Job, init_process_group, set_device

STEPS, BATCH = int(sys.argv[1] if sys.argv[1:] else 30), 64


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()

    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = ShardedAdamW(model, lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}

    # Entering it loads the newest intact checkpoint; SIGTERM saves, and ends all ranks together.
    with Job("runs/example", state, save_every=10, async_save=True) as job:
        if rank == 0:
            print(f"world size {dist.get_world_size()}, goes on after step {job.step}", flush=True)
        for step in job.steps(STEPS):
            inputs = torch.randn(BATCH, 16, device=device)
            targets = inputs[:, :4].sum(1, keepdim=True).tanh()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if rank == 0 and step % 10 in (0, 9):
                print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
