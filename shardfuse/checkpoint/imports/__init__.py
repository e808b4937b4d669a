"""Read optimizer states of other libraries, as torch.optim's ``state_dict()``.

Each function reads files of one library, without that library. It returns
{"state": {number: {"step", "exp_avg", ...}}, "param_groups": [...]} with full fp32 CPU tensors of
the parameters' shapes, which shardfuse's ``load_state_dict()`` accepts with any number of ranks.
Steps are fp32 tensors (). Numbers run over the groups in order. If the other library keeps fp32
masters of low-precision parameters, they are there as "param". bf16 and fp16 states are widened,
which is exact. fp64 states are an error, because fp32 would lose digits.
"""

from shardfuse.checkpoint.imports.deepspeed import read_deepspeed, read_deepspeed_universal
from shardfuse.checkpoint.imports.torch_optim import read_apex, read_torch, read_zero_redundancy

__all__ = [
    "read_apex",
    "read_deepspeed",
    "read_deepspeed_universal",
    "read_torch",
    "read_zero_redundancy",
]
