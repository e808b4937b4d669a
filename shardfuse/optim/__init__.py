"""The sharded optimizers."""

from shardfuse.optim.adadelta import ShardedAdadelta
from shardfuse.optim.adam import ShardedAdam, ShardedAdamW
from shardfuse.optim.adamp import ShardedAdamP
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.optim.bert_adam import ShardedBertAdam
from shardfuse.optim.lamb import ShardedLamb
from shardfuse.optim.lamb_compare import LambComparison, LambStepSize, compare_lamb_variants
from shardfuse.optim.memory import MemorySummary
from shardfuse.optim.rmsprop import ShardedRMSprop, ShardedRMSpropTF
from shardfuse.optim.sgd import ShardedSGD

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
    "ShardedOptimizer",
    "ShardedRMSprop",
    "ShardedRMSpropTF",
    "ShardedSGD",
    "compare_lamb_variants",
]
