"""FSDP2 shards the parameters; LAMB has exact norms of whole tensors, in one all-reduce a step.

    torchrun --standalone --nproc-per-node 2 launch/examples/fsdp.py

The model may be larger than a device. The states are DTensors: torch saves and reshards them.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from shardfuse import ShardedLamb
from shardfuse.training import init_process_group, set_device

STEPS, BATCH = 60, 64


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = ShardedLamb(model.named_parameters(), lr=2e-2, weight_decay=0.01, variant="google")

    torch.manual_seed(rank)  # each rank draws its own samples
    for step in range(STEPS):
        inputs = torch.randn(BATCH, 16, device=device)
        targets = inputs[:, :4].sum(1, keepdim=True).tanh()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    names = [tempfile.mkdtemp()]
    dist.broadcast_object_list(names)  # all ranks write to the folder of the first
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=names[0])
    dcp.load(saved, checkpoint_id=names[0])  # at any number of ranks
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
