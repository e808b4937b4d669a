"""A loop by Accelerate: accumulation, clipping, and a saved state.

    torchrun --standalone --nproc-per-node 2 launch/examples/accelerate_loop.py

accelerator.prepare() wraps the model in DistributedDataParallel, which averages the gradients.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardfuse import ShardedAdamW
from shardfuse.integrations import consolidate_on_save

EPOCHS, BATCH = 8, 16


def main() -> None:
    # It starts the process group, which has to be there before the optimizer.
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2)
    consolidate_on_save(accelerator)  # save_state() then has the states of all ranks

    torch.manual_seed(0)  # all ranks make the same data, and each takes its part of it
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(accelerator.device)
    optimizer = ShardedAdamW(model, lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(EPOCHS):
        losses = []
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - targets).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        accelerator.print(f"epoch {epoch + 1}  loss {torch.stack(losses).mean():.4f}", flush=True)
    accelerator.save_state("runs/accelerate")  # accelerator.load_state() reads it

    # The model first: torch's gloo group may never end if DDP is the last to let go of it.
    model, optimizer, loader = accelerator.free_memory(model, optimizer, loader)
    accelerator.end_training()


if __name__ == "__main__":
    main()
