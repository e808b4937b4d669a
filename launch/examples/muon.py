"""Muon for the matrices of hidden layers; AdamW for embeddings, the output layer, biases, norms.

torchrun --standalone --nproc-per-node 2 launch/examples/muon.py
"""

import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedMuon
from shardfuse.training import init_process_group, set_device

STEPS, BATCH, WORDS, WIDTH = 60, 256, 64, 64


class Model(nn.Module):
    """Predicts the word that follows a word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return logits (n, WORDS)."""
        found = self.words(words)
        return self.head(self.norm(found + self.hidden(found)))


def main() -> None:
    device = set_device()  # an NPU or a GPU for each rank; the CPU where there is none
    init_process_group()  # HCCL, NCCL or gloo, whichever the device has
    rank = dist.get_rank()

    torch.manual_seed(rank)  # each rank draws its own samples
    model = Model().to(device)
    # Of a model, the embedding and the output layer are found; lists need groups with "use_muon".
    optimizer = ShardedMuon(model, lr=0.02, weight_decay=0.01, adamw={"lr": 3e-3})

    for step in range(STEPS):
        words = torch.randint(WORDS, (BATCH,), device=device)
        following = (5 * words + 3) % WORDS
        loss = nn.functional.cross_entropy(model(words), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 in (0, 9):
            print(f"step {step + 1}  loss {loss.item():.4f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
