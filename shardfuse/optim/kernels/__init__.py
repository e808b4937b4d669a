"""How the rules' math is run over a shard: eagerly over tiles, or through torch.compile."""

from shardfuse.optim.kernels.engine import Kernels, Span
from shardfuse.optim.kernels.segments import SegmentSum

__all__ = ["Kernels", "SegmentSum", "Span"]
