"""How the rules' math is run over a shard: eagerly over tiles, or through torch.compile."""

from shardfuse.engine.kernels.engine import Kernels, Span
from shardfuse.engine.kernels.segments import SegmentSum

__all__ = ["Kernels", "SegmentSum", "Span"]
