"""An FSDP2 script; the edits of the page are applied to a copy."""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

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
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = 0
    if os.path.exists(path):
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        start = STEPS // 2

    for step in range(start, STEPS):
        loss = compute_loss(model, step, rank)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
        if step == STEPS // 2 - 1:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=path)

    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
