"""What an optimizer reports of its memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Bytes that the optimizer holds on this rank, and the bytes of its unsharded state.

    Args:
        world_size: number of ranks that the state is sharded over.
        num_buckets: number of buckets of parameters, each with its own collective.
        param_nbytes: bytes of the flat buffers of parameters.
        grad_nbytes: bytes of gradients.
        state_nbytes: bytes of moments and fp32 masters on this rank.
        unsharded_state_nbytes: bytes of the same on a single rank.
    """

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
