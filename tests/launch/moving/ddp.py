"""A DDP script with all that such scripts have; the edits of the page are applied to a copy."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

STEPS, MICRO_BATCHES = 8, 2


class Net(nn.Module):
    """A frozen layer with a low-rank adapter (LoRA), BatchNorm, and a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.block = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.base(x) + self.lora_b(self.lora_a(x)))
        return checkpoint(self.block, x, use_reentrant=False)


def batch(step: int, index: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs[:, :2].sum(1, keepdim=True).tanh()


def compute_loss(model: nn.Module, step: int, index: int, rank: int) -> torch.Tensor:
    inputs, targets = batch(step, index, rank)
    return (model(inputs) - targets).square().mean() / MICRO_BATCHES


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    return compute_loss(model.eval(), STEPS, 0, 0).item()


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # DDP broadcasts the parameters of rank 0
    model = Net()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
    ema = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    start = 0
    if os.path.exists(path):
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        ema.load_state_dict(saved["ema"])
        start = saved["step"]

    for step in range(start, STEPS):
        model.train()
        for index in range(MICRO_BATCHES - 1):
            with model.no_sync():
                compute_loss(model, step, index, rank).backward()
        compute_loss(model, step, MICRO_BATCHES - 1, rank).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        ema.update_parameters(model.module)
        if rank == 0:
            loss, average = evaluate(model.module), evaluate(ema)
            print(f"step {step + 1}  loss {loss:.6f}  average {average:.6f}", flush=True)
        is_save = step == STEPS // 2 - 1
        if is_save and rank == 0:
            saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"schedule": schedule.state_dict(), "ema": ema.state_dict()}
            torch.save({**saved, "step": step + 1}, path)

    dist.barrier()
    del model  # before the group: torch's gloo group may never end if DDP is the last to hold it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
