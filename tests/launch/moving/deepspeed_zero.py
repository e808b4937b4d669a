"""A DeepSpeed script; the edits of the page are applied to a copy."""

import os
import sys

import deepspeed
import torch
from torch import nn

SETTINGS = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True},
    },
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
}
STEPS = 8


def main(path: str) -> None:
    deepspeed.init_distributed()
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 31), nn.Tanh(), nn.Linear(31, 1))
    engine, *_ = deepspeed.initialize(model=model, config=SETTINGS)
    engine.load_checkpoint(path)

    for step in range(engine.global_steps, STEPS):
        generator = torch.Generator().manual_seed(10 * step + rank)
        inputs = torch.randn(16, 8, generator=generator)
        loss = (engine(inputs) - inputs[:, :2].sum(1, keepdim=True).tanh()).square().mean()
        engine.backward(loss)
        engine.step()
        if rank == 0:
            print(f"step {step + 1}  loss {loss.item():.6f}", flush=True)
        if step == STEPS // 2 - 1:
            engine.save_checkpoint(path)

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
