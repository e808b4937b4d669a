"""DistributedDataParallel stays; shardfuse shards the update and the states.

    torchrun --standalone --nproc-per-node 2 launch/examples/ddp.py

DDP averages the gradients. The optimizer finds the wrapper, and does not average them again.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from shardfuse import ShardedAdamW
from shardfuse.training import init_process_group, set_device

EPOCHS, BATCH = 8, 32


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has

    torch.manual_seed(0)  # all ranks make the same data, and each takes its part of it
    inputs = torch.randn(512, 16)
    data = TensorDataset(inputs, inputs[:, :4].sum(1, keepdim=True).tanh())
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)

    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net)
    optimizer = ShardedAdamW(model, lr=1e-2)

    for epoch in range(EPOCHS):
        losses = []
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            loss = (model(batch.to(device)) - targets.to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}  loss {torch.stack(losses).mean():.4f}", flush=True)

    del model  # first: torch's gloo group may never end if DDP is the last to let go of it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
