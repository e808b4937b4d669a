"""DeepSpeed's engine, with the optimizer named in its JSON.

    torchrun --standalone --nproc-per-node 2 launch/examples/deepspeed_json.py

One import is new. The settings are a text here; initialize(config="ds.json") reads a file.
"""

import json
import os

import deepspeed
import torch
from torch import nn

import shardfuse.deepspeed  # noqa: F401  makes the Sharded* names known to DeepSpeed

STEPS = 60
SETTINGS = """
{
  "train_micro_batch_size_per_gpu": 64,
  "optimizer": {
    "type": "ShardedLamb",
    "params": {"lr": 0.02, "weight_decay": 0.01, "variant": "google"}
  },
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {"stage": 1}
}
"""


def main() -> None:
    deepspeed.init_distributed()
    rank = int(os.environ["RANK"])

    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, config=json.loads(SETTINGS))

    batch = engine.train_micro_batch_size_per_gpu()
    for step in range(STEPS):
        inputs = torch.randn(batch, 16, device=engine.device)
        targets = inputs[:, :4].sum(1, keepdim=True).tanh()
        loss = (engine(inputs.bfloat16()).float() - targets).square().mean()
        engine.backward(loss)
        engine.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
