"""The math of each optimizer, written once, over fp32 tiles of blocks."""

from shardfuse.rules.adamp import AdamPRule
from shardfuse.rules.base import (
    Clip,
    ElementwiseRule,
    MatrixRule,
    Member,
    NormRule,
    ReducingRule,
    RowRule,
    Rows,
    Settings,
    UpdateRule,
)
from shardfuse.rules.elementwise import (
    AdadeltaRule,
    AdamRule,
    AdamWRule,
    BertAdamRule,
    RMSpropRule,
    RMSpropTFRule,
    SGDRule,
)
from shardfuse.rules.lamb import LambRule, PaddleLambRule
from shardfuse.rules.muon import MuonRule

__all__ = [
    "AdadeltaRule",
    "AdamPRule",
    "AdamRule",
    "AdamWRule",
    "BertAdamRule",
    "Clip",
    "ElementwiseRule",
    "LambRule",
    "MatrixRule",
    "Member",
    "MuonRule",
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
