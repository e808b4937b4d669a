"""A part of the launcher's key-value store that no earlier attempt of the same job has written to.

[Note: stale keys] torchrun's agent keeps one store while it restarts its workers (torch 2.13 with
--standalone, or with a fixed master port), so that a restarted rank finds what ranks of the attempt
before have left: a verdict of theirs, or the address of a process that has ended, for which gloo
then waits until its timeout (NCCL's unique id is such a key, too; pytorch#135712). The number of
the attempt does not tell them apart everywhere: it is each agent's own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardfuse.comm.session import unreadable
from shardfuse.training.interface import gloo_interface

logger = logging.getLogger("shardfuse")

START_LIMIT = timedelta(minutes=10)
"""How long ranks wait for each other when they start."""

_LEAD = "shardfuse/lead"
_POLL_S = 0.01


def fresh_part(store: Store, rank: int, world_size: int, limit: timedelta) -> Store:
    """Return the part of ``store`` that is this attempt's, once all of its ranks are there.

    Rank 0 draws a name. Others answer under the name that they find, which may be of an attempt
    before; it is right only once their own answer, which nobody else can know, comes back.

    Raises:
        TimeoutError: they do not come within ``limit``.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set(_LEAD, own)
        keys = [f"shardfuse/{own}/{other}" for other in range(1, world_size)]
        try:
            store.wait(keys, limit)
        except RuntimeError as error:
            raise TimeoutError(f"not all of {world_size} ranks have started") from error
        answers = [_name_in(store, key) for key in keys]
        for key in keys:
            store.delete_key(key)
        store.set(f"shardfuse/{own}/go", json.dumps(["", *answers]))
        return PrefixStore(own, store)
    deadline, answered = time.monotonic() + limit.total_seconds(), ""
    while time.monotonic() < deadline:
        if store.check([_LEAD]):
            name = store.get(_LEAD).decode(errors="replace")  # of whatever attempt
            if name != answered:
                store.set(f"shardfuse/{name}/{rank}", own)
                answered = name
            go = f"shardfuse/{name}/go"
            if store.check([go]) and own in _names_in(store, go):
                return PrefixStore(name, store)
        time.sleep(_POLL_S)
    raise TimeoutError("rank 0 has not started")


def _name_in(store: Store, key: str) -> str:
    """Return the name that a rank has drawn; raise PeerError where there is anything else."""
    text = store.get(key).decode(errors="replace")
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise unreadable(key, text)
    return text


def _names_in(store: Store, key: str) -> list[Any]:
    """Likewise, of all ranks."""
    text = store.get(key).decode(errors="replace")
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, list):
            return found
    raise unreadable(key, text)


def init_process_group(backend: str | None = None, **options: Any) -> None:
    """Call torch.distributed.init_process_group() for ranks that a launcher may have restarted.

    The launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun does. Ranks use a
    part of the launcher's store that no earlier attempt has written to; see [Note: stale keys].
    Without RANK in the environment this does nothing, because a single process has no group.
    If this host's own name is a loopback address, as on Debian and Ubuntu, it sets
    GLOO_SOCKET_IFNAME to the interface that leads to MASTER_ADDR, unless it is set.

    Args:
        backend: None: the backend of this machine's accelerator, or gloo.
        options: further arguments of torch.distributed.init_process_group(), such as ``timeout``.

    Raises:
        TimeoutError: not all ranks start within ten minutes.
    """
    if not dist.is_torchelastic_launched() and "RANK" not in os.environ:
        return
    store, rank, world_size = next(iter(rendezvous("env://")))
    if backend is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None else accelerator
        backend = dist.get_default_backend_for_device(device)
    interface = gloo_interface(os.environ) if "gloo" in backend else None
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        logger.info("GLOO_SOCKET_IFNAME=%s: this host's name leads to no other", interface)
    store = fresh_part(store, rank, world_size, START_LIMIT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)
