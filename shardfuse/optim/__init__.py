"""The sharded optimizers."""

from shardfuse.optim.algorithms import (
    ShardedAdadelta,
    ShardedAdam,
    ShardedAdamP,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedRMSprop,
    ShardedRMSpropTF,
    ShardedSGD,
)
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.compat import MemorySummary
from shardfuse.optim.lamb import LambComparison, LambStepSize, ShardedLamb, compare_lamb_variants
from shardfuse.optim.muon import ShardedMuon

__all__ = [
    "LambComparison",
    "LambStepSize",
    "MemorySummary",
    "ShardedAdadelta",
    "ShardedAdam",
    "ShardedAdamP",
    "ShardedAdamW",
    "ShardedBertAdam",
    "ShardedLamb",
    "ShardedMuon",
    "ShardedOptimizer",
    "ShardedRMSprop",
    "ShardedRMSpropTF",
    "ShardedSGD",
    "compare_lamb_variants",
]
