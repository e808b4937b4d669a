"""Which communicator serves a process group: its backend, and how the processes were started."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch

from shardfuse.comm.gloo import PairwiseCommunicator
from shardfuse.comm.hybrid import HybridCommunicator
from shardfuse.comm.native import (
    ProcessGroupCommunicator,
    backend_for,
    group_of_mesh,
    is_initialized,
    traits_of,
)
from shardfuse.comm.transport import Communicator, SingleRank

logger = logging.getLogger("shardfuse")


def communicator_for(
    process_group: Any, device: torch.device, collectives: str = "auto"
) -> Communicator:
    """Return the Communicator of ``process_group`` for tensors on ``device``.

    With no group given and none initialised, or a group of one rank, it does not communicate.
    ``collectives="auto"`` exchanges between pairs of ranks where the backend's own reduce-scatter
    and all-gather were measured to be slower, and there reads memory of ranks on the same host;
    "pairwise" does not; "native" always takes the backend's. The group "alone" is this process. A
    Communicator is returned as it is.

    Raises:
        RuntimeError: a launcher started several ranks, and no process group was initialised.
    """
    if _is_communicator(process_group):
        return process_group
    if isinstance(process_group, str) and process_group == "alone":
        return SingleRank()
    if process_group is None and not is_initialized():
        _check_launched_alone()
        return SingleRank()
    return _chosen(process_group, device, collectives) or SingleRank()


def _is_communicator(process_group: Any) -> TypeGuard[Communicator]:
    """Return whether it is one; isinstance() would read properties, one of which communicates."""
    names = ("reduce_scatter", "all_gather", "post_receive")
    return all(hasattr(type(process_group), name) for name in names)


def device_for(process_group: Any) -> torch.device:
    """Return a device on which all ranks can exchange errors.

    The accelerator, where there is one and ``process_group`` serves it: HCCL and NCCL serve no CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or isinstance(process_group, str) or not is_initialized():
        return torch.device("cpu")
    if _is_communicator(process_group):
        return accelerator
    try:
        backend_for(process_group, accelerator)
    except ValueError:
        return torch.device("cpu")
    return accelerator


def _chosen(
    process_group: Any,
    device: torch.device,
    collectives: str,
    parent: ProcessGroupCommunicator | None = None,
) -> ProcessGroupCommunicator | None:
    """Return the communicator of several ranks; None for one."""
    native = ProcessGroupCommunicator(process_group, device, parent=parent)
    if native.world_size == 1:
        return None
    if collectives == "native":
        choice, reason = "native", "as configured"
    elif traits_of(native.backend).prefers_pairwise and device.type == "cpu":
        choice, reason = "pairwise", f"{native.backend}'s own move more bytes"
    else:
        choice, reason = "native", f"{native.backend} has them"
    logger.info("collectives=%s over %d ranks: %s", choice, native.world_size, reason)
    if choice == "native":
        return native
    reads_memory = collectives == "auto"
    return PairwiseCommunicator(process_group, device, reads_memory=reads_memory, parent=parent)


def communicator_of(mesh: Any, device: torch.device, collectives: str = "auto") -> Communicator:
    """Return the Communicator of all ranks of a torch DeviceMesh, of any number of dimensions.

    Args:
        mesh: the first call for it is collective, for its ranks.
        device, collectives: as of communicator_for().
    """
    if mesh.size() == 1:
        return SingleRank()
    return communicator_for(group_of_mesh(mesh), device, collectives)


def communicator_over(
    mesh: Any, process_group: Any, device: torch.device, collectives: str = "auto"
) -> Communicator:
    """Return the Communicator that shards over one axis of ``mesh`` and sums over both.

    Args:
        mesh: a torch DeviceMesh of two dimensions. They are (replicate, shard), as of FSDP2's
            hybrid sharding, in any order where they have these names.
        process_group: all ranks of the mesh; None is the default group.
        device, collectives: as of communicator_for().

    Raises:
        ValueError: another number of dimensions, other ranks than the group's, no sharding, or
            ranks in an order that groups do not have.
    """
    if getattr(mesh, "ndim", 0) != 2:
        raise ValueError(
            f"Invalid mesh: {mesh!r}. Give a DeviceMesh of two dimensions, (replicate, shard)."
        )
    names = mesh.mesh_dim_names or ()
    replicate, shard = ("replicate", "shard") if {"replicate", "shard"} == set(names) else (0, 1)
    world = _chosen(process_group, device, collectives)
    if world is None or world.world_size != mesh.size():
        num_ranks = 1 if world is None else world.world_size
        raise ValueError(
            f"Invalid mesh: it has {mesh.size()} ranks, the process group {num_ranks}. Give "
            "process_group the group of exactly the mesh's ranks."
        )
    _check_order(mesh, shard)
    rows = _chosen(mesh.get_group(shard), device, collectives, world)
    columns = _chosen(mesh.get_group(replicate), device, collectives, world)
    if rows is None:
        raise ValueError(
            f"Invalid mesh: {mesh!r} has one rank along its shard dimension, so nothing is "
            "sharded. Use more ranks, or DistributedDataParallel."
        )
    return world if columns is None else HybridCommunicator(world, rows, columns)


def _check_order(mesh: Any, shard: str | int) -> None:
    """Raise ValueError unless the ranks of a column are the same rank of their rows' groups.

    torch numbers the ranks of a group in ascending order, whatever their order in the mesh.
    """
    axis = mesh.mesh_dim_names.index(shard) if isinstance(shard, str) else shard
    order = mesh.mesh.argsort(dim=axis).movedim(axis, 1)
    if not (order == order[0]).all():
        raise ValueError(
            f"Invalid mesh: {mesh.mesh.tolist()}. torch numbers the ranks of a row in ascending "
            "order, so that ranks of a column would hold different shards. Order the ranks of all "
            "rows alike, as init_device_mesh() does."
        )


def _check_launched_alone() -> None:
    """Raise where a launcher says that this process is one of several, which would train apart.

    For srun and mpirun there is a warning, because they also start independent processes. A worker
    of a DataLoader inherits the launcher's environment, and is no rank.
    """
    if torch.utils.data.get_worker_info() is not None:
        return
    apart = launched_apart()
    if apart is not None:
        _warn_of(apart)
    launched = os.environ.get("WORLD_SIZE", "")
    if not launched.isdigit() or int(launched) < 2:
        return
    raise RuntimeError(
        f"WORLD_SIZE is {launched}, but torch.distributed is not initialised: every rank would "
        "train by itself. Call init_process_group() first (under DeepSpeed "
        "deepspeed.init_distributed(), under Accelerate Accelerator()). To let this process train "
        'by itself, pass process_group="alone", to an optimizer '
        'sharding={"process_group": "alone"}.'
    )


@functools.cache  # once
def _warn_of(apart: str) -> None:
    logger.warning(
        "%s: each trains by itself. To train together, have it start torchrun, once a host, and "
        'call init_process_group(). If they are to be apart, pass process_group="alone", to an '
        'optimizer sharding={"process_group": "alone"}.',
        apart,
    )


_COUNTS = {
    "SLURM_STEP_NUM_TASKS": "srun",  # of the step; SLURM_NTASKS is set in the job's script, too
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
}


def launched_apart(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return "srun has started 4 processes ..." if that was without torchrun; else None.

    torchrun, and launchers like it, set WORLD_SIZE and RANK.
    """
    if "WORLD_SIZE" in environment or "RANK" in environment:
        return None
    for name, launcher in _COUNTS.items():
        text = environment.get(name, "")
        if text.isdecimal() and int(text) > 1:
            return f"{launcher} has started {text} processes ({name}), and WORLD_SIZE is not set"
    return None
