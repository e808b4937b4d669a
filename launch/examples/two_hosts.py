r"""Two hosts: half of the bytes on the link between them.

One line on each, after `export HOST0=10.0.0.5 PORT=29500`: the first host's address, a free port.

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 \
        --master-addr "$HOST0" --master-port "$PORT" launch/examples/two_hosts.py

    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 \
        --master-addr "$HOST0" --master-port "$PORT" launch/examples/two_hosts.py
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdamW
from shardfuse.training import init_process_group, set_device

STEPS, BATCH = 60, 64


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()
    node = os.environ["GROUP_RANK"]
    print(
        f"rank {rank} of {dist.get_world_size()}, node {node}, {socket.gethostname()}", flush=True
    )

    torch.manual_seed(rank)  # each rank draws its own samples
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    # Over gloo's sockets gradients leave under backward, and params arrive under the next forward.
    sharding = {"grad_sync_dtype": "bfloat16", "param_sync_dtype": "bfloat16"}
    optimizer = ShardedAdamW(model, lr=1e-2, sharding=sharding)

    for step in range(STEPS):
        inputs = torch.randn(BATCH, 16, device=device)
        targets = inputs[:, :4].sum(1, keepdim=True).tanh()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
