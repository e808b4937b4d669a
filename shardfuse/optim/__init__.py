"""The sharded optimizers."""

from shardfuse.optim.adam import ShardedAdam, ShardedAdamW
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.bert_adam import ShardedBertAdam
from shardfuse.optim.lamb import ShardedLamb
from shardfuse.optim.memory import MemorySummary
from shardfuse.optim.sgd import ShardedSGD

__all__ = [
    "MemorySummary",
    "ShardedAdam",
    "ShardedAdamW",
    "ShardedBertAdam",
    "ShardedLamb",
    "ShardedOptimizer",
    "ShardedSGD",
]
