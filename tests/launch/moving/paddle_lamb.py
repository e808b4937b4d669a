"""A script with Paddle's optimizer on torch's parameters is none: only the edited copy is run."""

import sys

import torch
import torch.distributed as dist
from paddle.nn import ClipGradByGlobalNorm
from paddle.optimizer import Lamb
from torch import nn


def main(path: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Lamb(
        learning_rate=2e-2,
        parameters=model.named_parameters(),
        grad_clip=ClipGradByGlobalNorm(1.0),
        exclude_from_weight_decay_fn=lambda param: param.name.endswith("bias"),
    )
    torch.manual_seed(rank)
    for step in range(20):
        inputs = torch.randn(64, 8)
        loss = (model(inputs) - inputs[:, :2].sum(1, keepdim=True).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
