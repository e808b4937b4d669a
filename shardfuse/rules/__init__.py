"""The math of each optimizer, written once, over fp32 tiles of blocks."""

from shardfuse.rules.adadelta import AdadeltaRule
from shardfuse.rules.adam import AdamRule, AdamWRule
from shardfuse.rules.adamp import AdamPRule
from shardfuse.rules.base import (
    Clip,
    ElementwiseRule,
    Member,
    NormRule,
    ReducingRule,
    RowRule,
    Rows,
    Settings,
    UpdateRule,
)
from shardfuse.rules.bert_adam import BertAdamRule
from shardfuse.rules.lamb import LambRule
from shardfuse.rules.paddle import PaddleLambRule
from shardfuse.rules.rmsprop import RMSpropRule, RMSpropTFRule
from shardfuse.rules.sgd import SGDRule

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
    "ReducingRule",
    "RowRule",
    "Rows",
    "SGDRule",
    "Settings",
    "UpdateRule",
]
