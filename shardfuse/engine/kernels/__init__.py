"""How the rules' math is run over a shard: eagerly over tiles, or through torch.compile."""

from shardfuse.engine.kernels.engine import Kernels, Pass
from shardfuse.engine.kernels.passes import Scale, Tile, ascending
from shardfuse.engine.kernels.segments import SegmentSum

__all__ = ["Kernels", "Pass", "Scale", "SegmentSum", "Tile", "ascending"]
