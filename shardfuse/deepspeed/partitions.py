"""Reads where tensors lie in the partitions of DeepSpeed's ZeRO stages 1 and 2."""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

import torch
from torch import Tensor

from shardfuse.comm import communicator_for
from shardfuse.deepspeed.partitioned import Partitioned
from shardfuse.engine.foreign_shards import ForeignShards, Segment
from shardfuse.engine.kernels import Kernels
from shardfuse.engine.step import StepEngine

logger = logging.getLogger("shardfuse")


def bind(zero: Any, optimizer: Partitioned) -> None:
    """Tell ``optimizer`` of every partition that ``zero`` has put in its groups.

    Args:
        zero: DeepSpeed's optimizer of stage 1 or 2, which wraps ``optimizer``.

    Raises:
        RuntimeError: the partitions are not what zero's tables say.
    """
    rule = optimizer._rule
    index_of = {param: index for index, param in enumerate(optimizer._params)}
    square = functools.partial(_global_square, weakref.ref(zero))
    for number, flat in enumerate(zero.single_partition_of_fp32_groups):
        members = zero.round_robin_bit16_groups[number]
        positions = [index_of[param] for param in members]
        policies = [optimizer.layout.specs[position].policy for position in positions]
        whole = zero.bit16_groups_flat[number]
        comm = communicator_for(zero.real_dp_process_group[number], whole.device)
        segments = _segments(zero, number, comm.rank, policies)
        shards = ForeignShards(rule, flat, segments, policies=policies, global_square=square)
        kernels = Kernels(rule, kernel=optimizer._config.kernel, device=flat.device)
        kernels.choose(flat.numel())
        engine = StepEngine(rule, shards, comm=comm, kernels=kernels, comm_device=whole.device)
        optimizer.bind(flat, shards, engine, positions)
        _check_map(members, segments, number)
    optimizer._params = []  # the optimizer is to hold nothing but its partitions


def _segments(zero: Any, number: int, rank: int, policies: list[str]) -> list[Segment]:
    """Return the segments of rank's partition of group ``number``."""
    whole, size = zero.bit16_groups_flat[number], zero.partition_size[number]
    flat = zero.single_partition_of_fp32_groups[number]
    if flat.dtype != torch.float32 or flat.numel() != size or not flat.is_contiguous():
        raise RuntimeError(
            f"DeepSpeed's partition of group {number} is {tuple(flat.shape)} {flat.dtype}, not "
            f"({size},) torch.float32. Remove bf16_master_weights_and_grads and "
            "fp16_master_weights_and_grads."
        )
    first, last = rank * size, (rank + 1) * size
    segments = []
    end = 0
    for position, param in enumerate(zero.round_robin_bit16_groups[number]):
        # DeepSpeed has made them views of the flat.
        nbytes = param.data_ptr() - whole.data_ptr()
        offset = nbytes // whole.element_size() if param.numel() else end
        if offset < end or offset + param.numel() > whole.numel():
            raise RuntimeError(
                f"Parameter {position} of group {number} does not lie in DeepSpeed's "
                "bit16_groups_flat after the one before, so that its norm cannot be told. Report "
                "this with the DeepSpeed version."
            )
        end = offset + param.numel()
        start, stop = max(offset, first), min(end, last)
        if stop > start:
            segments.append(Segment(position, start - first, stop - start, policies[position]))
    return segments


def _check_map(members: list[Tensor], segments: list[Segment], number: int) -> None:
    """Say where DeepSpeed's own map of tensors, used for universal checkpoints, is another.

    In 0.19.8 it is, under round_robin_gradients: the map goes by the order of registration.
    """
    for segment in segments:
        mapping = getattr(members[segment.param], "_hp_mapping", None)
        address = None if mapping is None else mapping.get_hp_fragment_address()
        if address is None or (address.start, address.numel) != (segment.start, segment.numel):
            logger.warning(
                "Checkpoints of this run must not be made universal: DeepSpeed's map of group %d "
                "names other tensors than lie in the partition. Remove round_robin_gradients.",
                number,
            )
            return


def _global_square(zero_ref: weakref.ref[Any]) -> Tensor:
    """Return the squared norm () of all gradients as they are in step(): DeepSpeed has clipped."""
    zero = zero_ref()
    assert zero is not None
    norm = torch.as_tensor(zero._global_grad_norm, dtype=torch.float32)
    if zero.clip_grad > 0:
        norm = norm / ((norm + 1e-6) / zero.clip_grad).clamp(min=1.0)
    return norm.square()
