"""Optimizer states that other libraries have written, as torch.optim's ``state_dict()`` has them.

Each function reads files of one kind, without that library, and returns
{"state": {number: {"step", "exp_avg", ...}}, "param_groups": [...]}: whole fp32 CPU tensors of the
parameters' shapes, which ``load_state_dict()`` of ours takes at any number of ranks. Steps are fp32
tensors (). Numbers run over the groups in order. What the other library keeps in fp32 of parameters
in low precision is there as "param". bf16 and fp16 states are widened, which is exact; fp64 ones,
which would lose digits, are an error.
"""

from shardfuse.checkpoint.imports.apex import read_apex
from shardfuse.checkpoint.imports.torch_optim import read_torch, read_zero_redundancy
from shardfuse.checkpoint.imports.universal import read_deepspeed_universal
from shardfuse.checkpoint.imports.zero import read_deepspeed

__all__ = [
    "read_apex",
    "read_deepspeed",
    "read_deepspeed_universal",
    "read_torch",
    "read_zero_redundancy",
]
