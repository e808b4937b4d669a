"""Lightning's Trainer: configure_optimizers() returns ours, and nothing else changes.

torchrun --standalone --nproc-per-node 2 launch/examples/lightning_fit.py
"""

import gc
import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shardfuse import ShardedAdamW

EPOCHS, BATCH = 8, 32


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.losses).mean()
        self.print(f"epoch {self.current_epoch + 1}  loss {mean:.4f}", flush=True)
        self.losses.clear()

    def configure_optimizers(self) -> ShardedAdamW:
        return ShardedAdamW(self, lr=1e-2)  # and finds that the "ddp" strategy averages gradients


def main() -> None:
    torch.manual_seed(0)  # all ranks make the same data; Lightning gives each its part of it
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy="ddp",
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        default_root_dir="runs/lightning",
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=BATCH, shuffle=True))


if __name__ == "__main__":
    main()
    gc.collect()  # what Trainer holds, first: the group may never end if DDP lets go of it last
    torch.distributed.destroy_process_group()
