"""Fused flat-buffer optimizers, sharded over data-parallel ranks on HCCL, NCCL and gloo."""

from shardfuse.config import ShardConfig
from shardfuse.optim import (
    LambComparison,
    LambStepSize,
    MemorySummary,
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedMuon,
    ShardedOptimizer,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
    compare_lamb_variants,
)
from shardfuse.scaling import ShardedGradScaler
from shardfuse.version import __version__ as __version__

__all__ = [
    "LambComparison",
    "LambStepSize",
    "MemorySummary",
    "ShardConfig",
    "ShardedAdadelta",
    "ShardedAdam",
    "ShardedAdamP",
    "ShardedAdamW",
    "ShardedBertAdam",
    "ShardedGradScaler",
    "ShardedLamb",
    "ShardedMuon",
    "ShardedOptimizer",
    "ShardedRMSprop",
    "ShardedRMSpropTF",
    "ShardedSGD",
    "compare_lamb_variants",
]
