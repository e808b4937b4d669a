"""Which communicator serves a group of ranks."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from shardfuse.comm.base import Communicator, SingleRank
from shardfuse.comm.gloo.pairwise import PairwiseCommunicator
from shardfuse.comm.process_group import ProcessGroupCommunicator, is_initialized
from shardfuse.comm.traits import traits_of

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
    if isinstance(process_group, Communicator):
        return process_group
    if isinstance(process_group, str) and process_group == "alone":
        return SingleRank()
    if process_group is None and not is_initialized():
        _check_launched_alone()
        return SingleRank()
    native = ProcessGroupCommunicator(process_group, device)
    if native.world_size == 1:
        return SingleRank()
    if collectives == "native":
        choice, reason = "native", "as configured"
    elif traits_of(native.backend).prefers_pairwise and device.type == "cpu":
        choice, reason = "pairwise", f"{native.backend}'s own move more bytes"
    else:
        choice, reason = "native", f"{native.backend} has them"
    logger.info("collectives=%s over %d ranks: %s", choice, native.world_size, reason)
    if choice == "native":
        return native
    return PairwiseCommunicator(process_group, device, reads_memory=collectives == "auto")


def _check_launched_alone() -> None:
    """Raise where a launcher says that this process is one of several, which would train apart.

    A worker of a DataLoader inherits the launcher's environment, and is no rank.
    """
    launched = os.environ.get("WORLD_SIZE", "")
    if not launched.isdigit() or int(launched) < 2:
        return
    if torch.utils.data.get_worker_info() is not None:
        return
    raise RuntimeError(
        f"WORLD_SIZE is {launched}, but torch.distributed is not initialised: every rank would "
        "train by itself. Call init_process_group() first (under DeepSpeed "
        "deepspeed.init_distributed(), under Accelerate Accelerator()). If this process is to be "
        'alone, say so: process_group="alone", for an optimizer '
        'sharding={"process_group": "alone"}.'
    )
