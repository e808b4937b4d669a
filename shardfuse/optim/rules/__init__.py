"""The math of each optimizer, written once, over fp32 tiles of blocks."""

from shardfuse.optim.rules.adadelta import AdadeltaRule
from shardfuse.optim.rules.adam import AdamRule, AdamWRule
from shardfuse.optim.rules.adamp import AdamPRule
from shardfuse.optim.rules.base import (
    Clip,
    ElementwiseRule,
    Member,
    NormRule,
    RowRule,
    Rows,
    UpdateRule,
)
from shardfuse.optim.rules.bert_adam import BertAdamRule
from shardfuse.optim.rules.lamb import LambRule
from shardfuse.optim.rules.paddle import PaddleLambRule
from shardfuse.optim.rules.rmsprop import RMSpropRule, RMSpropTFRule
from shardfuse.optim.rules.sgd import SGDRule

__all__ = [
    "AdadeltaRule",
    "AdamPRule",
    "AdamRule",
    "AdamWRule",
    "BertAdamRule",
    "Clip",
    "ElementwiseRule",
    "LambRule",
    "Member",
    "NormRule",
    "PaddleLambRule",
    "RMSpropRule",
    "RMSpropTFRule",
    "RowRule",
    "Rows",
    "SGDRule",
    "UpdateRule",
]
