"""The math of each optimizer, written once, over fp32 tiles of blocks."""

from shardfuse.optim.rules.adam import AdamRule, AdamWRule
from shardfuse.optim.rules.base import Clip, ElementwiseRule, NormRule, UpdateRule
from shardfuse.optim.rules.bert_adam import BertAdamRule
from shardfuse.optim.rules.lamb import LambRule
from shardfuse.optim.rules.sgd import SGDRule

__all__ = [
    "AdamRule",
    "AdamWRule",
    "BertAdamRule",
    "Clip",
    "ElementwiseRule",
    "LambRule",
    "NormRule",
    "SGDRule",
    "UpdateRule",
]
