"""What an optimizer reports of its memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Bytes that the optimizer holds on this rank, and what its state would take unsharded."""

    world_size: int
    num_buckets: int
    param_nbytes: int
    grad_nbytes: int
    state_nbytes: int
    unsharded_state_nbytes: int

    def __str__(self) -> str:
        mib = 1 / (1 << 20)
        return (
            f"{self.num_buckets} buckets over {self.world_size} ranks; per rank: params "
            f"{self.param_nbytes * mib:.1f} MiB, gradients {self.grad_nbytes * mib:.1f} MiB, "
            f"optimizer state {self.state_nbytes * mib:.1f} MiB "
            f"(unsharded {self.unsharded_state_nbytes * mib:.1f} MiB)"
        )
