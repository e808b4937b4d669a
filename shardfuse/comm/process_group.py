"""The collectives of torch.distributed, each as its backend has it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from shardfuse.comm.base import Handle, ReduceOp
from shardfuse.comm.traits import traits_of

# torch 2.13 renamed these and warns on the old names; the C++ entry points are the same.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)
all_gather_single = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


class _WorkHandle:
    """A torch Work, waited for once, that keeps its tensors alive until then."""

    def __init__(self, work: Any, *tensors: torch.Tensor) -> None:
        self._work = work
        self._tensors: tuple[torch.Tensor, ...] = tensors

    def wait(self) -> None:
        # Never polled: gloo fills the output of a reduce-scatter inside wait().
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._tensors = ()


class ProcessGroupCommunicator:
    """A Communicator over a torch process group of any backend.

    Args:
        process_group: a ``torch.distributed.ProcessGroup``; None is the default group.
        device: where the tensors live; picks the backend of a group that has several.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: this process is not a member of the group.
    """

    def __init__(self, process_group: Any, device: torch.device) -> None:
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise RuntimeError(
                "torch.distributed is not initialised. Call init_process_group() first."
            )
        self._rank = dist.get_rank(group)
        if self._rank < 0:
            raise ValueError("process_group does not contain this process's rank.")
        self._world_size = dist.get_world_size(group)
        # Weak: a gloo group that outlives destroy_process_group() aborts the process at exit.
        self._group_ref: weakref.ref[Any] = weakref.ref(group)
        self.backend = backend_for(group, device)
        self._traits = traits_of(self.backend)

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the group."""
        return self._world_size

    @property
    def can_exchange(self) -> bool:
        """Whether ``exchange()`` works: here the backend makes the sums."""
        return False

    def exchange(self, received: torch.Tensor, input: torch.Tensor) -> Handle:
        """Raise: see PairwiseCommunicator."""
        raise NotImplementedError("This communicator cannot exchange; call reduce_scatter().")

    @property
    def _group(self) -> Any:
        group: Any = self._group_ref()
        if group is None:
            raise RuntimeError(
                "The optimizer's process group was destroyed. Build a new optimizer after "
                "init_process_group()."
            )
        return group

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """Sum ``input`` (world_size * n,) over ranks; write part ``rank`` into ``output`` (n,)."""
        assert reduce_scatter_single is not None
        work = reduce_scatter_single(output, input, group=self._group, async_op=True)
        return _WorkHandle(work, output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """Write every rank's ``input`` (n,) into ``output`` (world_size * n,), in rank order."""
        assert all_gather_single is not None
        if not self._traits.in_place_all_gather and _overlaps(output, input):
            input = input.clone()
        work = all_gather_single(output, input, group=self._group, async_op=True)
        return _WorkHandle(work, output, input)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Handle:
        """Reduce ``tensor`` (n,) over ranks, in place."""
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        work = dist.all_reduce(tensor, reduce_op, group=self._group, async_op=True)
        return _WorkHandle(work, tensor)

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> Handle:
        """Overwrite ``tensor`` (n,) by that of group rank ``src``, in place."""
        global_src = dist.get_global_rank(self._group, src)
        work = dist.broadcast(tensor, global_src, group=self._group, async_op=True)
        return _WorkHandle(work, tensor)


def _overlaps(output: torch.Tensor, input: torch.Tensor) -> bool:
    start = output.data_ptr()
    return start <= input.data_ptr() < start + output.numel() * output.element_size()


def is_initialized() -> bool:
    """Return whether there is a default process group."""
    return dist.is_available() and dist.is_initialized()


def backend_for(process_group: Any, device: torch.device) -> str:
    """Return the backend name that serves ``device`` in ``process_group``: "gloo", "hccl", ..."""
    config = dist.get_backend_config(process_group)
    for entry in config.split(","):
        device_type, _, backend = entry.rpartition(":")
        if device_type in ("", device.type):
            return backend
    raise ValueError(
        f"The process group has no backend for {device.type!r} tensors (it has {config!r}). "
        f"Call init_process_group({dist.get_default_backend_for_device(device)!r})."
    )
