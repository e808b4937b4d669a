"""What HCCL refuses, in words like torch_npu's; see contract.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.support import placing


class ContractError(RuntimeError):
    """What HCCL says no to."""


_OPS: dict[Any, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    dist.ReduceOp.SUM: ("SUM", torch.add),
    dist.ReduceOp.PRODUCT: ("PROD", torch.mul),
    dist.ReduceOp.MIN: ("MIN", torch.minimum),
    dist.ReduceOp.MAX: ("MAX", torch.maximum),
}
_REDUCED = (torch.int8, torch.int16, torch.int32, torch.int64)
_REDUCED += (torch.float16, torch.float32, torch.bfloat16, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Terms:
    """What may differ between machines with HCCL.

    Args:
        devices: types of device whose tensors it takes: the CPU, or that of `pytest --device`.
        align: bytes whose multiples storage offsets must be; 1 for any.
        modifies_input: of a reduce-scatter, as zero-copy does.
        memory_mb: for communicators, each of which takes two buffers of HCCL_BUFFSIZE.
    """

    devices: tuple[str, ...] = field(default_factory=lambda: (placing.device_type(),))
    align: int = 512
    modifies_input: bool = False
    memory_mb: int = 12800

    @property
    def max_communicators(self) -> int:
        """How many of them the memory is enough for."""
        return self.memory_mb // (2 * int(os.environ.get("HCCL_BUFFSIZE", "200")))


def refuse(what: str, terms: Terms, *tensors: Tensor) -> None:
    """Raise for tensors that no collective takes."""
    for tensor in tensors:
        if tensor.device.type not in terms.devices or tensor.layout != torch.strided:
            expected = "NPU" if "cpu" not in terms.devices else "/".join(terms.devices)
            raise ContractError(
                f"HCCL {what}: Tensors must be {expected} and dense, not on {tensor.device}."
            )
        if not tensor.is_contiguous():
            raise ContractError(f"HCCL {what}: Tensors must be contiguous.")
        offset = tensor.storage_offset() * tensor.element_size()
        # Storages of the CPU may begin anywhere, and flat buffers in them at a page of memory.
        is_aligned = offset % terms.align == 0 or tensor.data_ptr() % terms.align == 0
        if tensor.numel() and not is_aligned and not is_theirs():
            raise ContractError(
                f"HCCL {what}: a tensor begins {offset} bytes into its storage, which is not a "
                f"multiple of {terms.align}: byte misalignment."
            )
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ContractError(f"HCCL {what}: Tensors must have identical type.")


def is_theirs() -> bool:
    """Return whether a framework calls that is known to run on HCCL with what is slow or doubtful.

    DeepSpeed and FSDP2 gather in place, and have no 512 bytes in their layout.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("torch.distributed.fsdp"):
            return True
        root = name.partition(".")[0]
        if root in ("shardfuse", "deepspeed"):
            return root == "deepspeed"
        frame = frame.f_back
    return False


def reduction(what: str, op: Any, tensor: Tensor) -> tuple[str, Callable[[Tensor, Tensor], Tensor]]:
    """Return the name and function of a reduction; raise for what HCCL has not."""
    found = next((had for known, had in _OPS.items() if op == known), None)
    if found is None:
        text = next((n for n in _NOT_HAD if op == getattr(dist.ReduceOp, n)), str(op))
        raise ContractError(
            f"Cannot use ReduceOp.{text} with HCCL, which has SUM, PROD, MIN and MAX."
        )
    if tensor.dtype not in _REDUCED:
        raise ContractError(f"HCCL {what}: Unsupported data type {tensor.dtype}.")
    return found


_NOT_HAD = ("AVG", "PREMUL_SUM", "BAND", "BOR", "BXOR")


def misaligned_parts(what: str, terms: Terms, part_nbytes: int) -> None:
    """Raise where parts of large messages do not begin at aligned addresses."""
    if part_nbytes >= _LARGE_NBYTES and part_nbytes % terms.align and not is_theirs():
        raise ContractError(
            f"HCCL {what}: parts of {part_nbytes} bytes are not multiples of {terms.align}: "
            "byte misalignment."
        )


_LARGE_NBYTES = 8192


def uneven(what: str, larger: Tensor, smaller: Tensor, world_size: int) -> None:
    """Raise where one is not of ``world_size`` parts of the size of the other."""
    if larger.numel() != smaller.numel() * world_size:
        raise ContractError(
            f"HCCL {what}: {larger.numel()} elements are not world size {world_size} times "
            f"{smaller.numel()}: uneven sizes are not supported."
        )


def overlap(one: Tensor, other: Tensor) -> bool:
    start, stop = one.data_ptr(), one.data_ptr() + one.nbytes
    return other.nbytes > 0 and start < other.data_ptr() + other.nbytes and other.data_ptr() < stop
