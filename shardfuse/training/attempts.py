"""Start of a rank: its device, its network interface, and a process group after restarts.

[Note: stale keys] torchrun's agent keeps one store while it restarts its workers (torch 2.13 with
--standalone, or with a fixed master port). So a restarted rank finds keys of ranks of the previous
attempt: a verdict, or the address of a process that has ended, for which gloo then waits until its
timeout. (NCCL's unique id is such a key, too; pytorch#135712.) The number of the attempt does not
always tell attempts apart, because each agent counts its own.
"""

from __future__ import annotations

import fcntl
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardfuse.comm.session import unreadable

logger = logging.getLogger("shardfuse")

START_TIMEOUT = timedelta(minutes=10)
"""How long ranks wait for each other when they start."""

_LEADER_KEY = "shardfuse/lead"
_POLL_S = 0.01


def attempt_store(store: Store, rank: int, world_size: int, limit: timedelta) -> Store:
    """Return the part of ``store`` that belongs to this attempt, once all of its ranks have joined.

    Rank 0 draws a name. Each other rank answers under the name that it finds, which may be of an
    earlier attempt. The name is current only if rank 0 echoes this rank's answer, a random number.
    So no rank uses a store of an earlier attempt; see [Note: stale keys].

    Raises:
        TimeoutError: not all ranks join within ``limit``.
    """
    own = secrets.token_hex(8)
    if rank == 0:
        store.set(_LEADER_KEY, own)
        keys = [f"shardfuse/{own}/{other}" for other in range(1, world_size)]
        try:
            store.wait(keys, limit)
        except RuntimeError as error:
            raise TimeoutError(f"not all of {world_size} ranks have started") from error
        answers = [_read_name(store, key) for key in keys]
        for key in keys:
            store.delete_key(key)
        store.set(f"shardfuse/{own}/go", json.dumps(["", *answers]))
        return PrefixStore(own, store)
    deadline, answered = time.monotonic() + limit.total_seconds(), ""
    while time.monotonic() < deadline:
        if store.check([_LEADER_KEY]):
            name = store.get(_LEADER_KEY).decode(errors="replace")  # of this or an earlier attempt
            if name != answered:
                store.set(f"shardfuse/{name}/{rank}", own)
                answered = name
            go = f"shardfuse/{name}/go"
            if store.check([go]) and own in _read_names(store, go):
                return PrefixStore(name, store)
        time.sleep(_POLL_S)
    raise TimeoutError("rank 0 has not started")


def _read_name(store: Store, key: str) -> str:
    """Return the name that a rank has drawn; raise PeerError for any other content."""
    text = store.get(key).decode(errors="replace")
    if not re.fullmatch("[0-9a-f]{16}", text):
        raise unreadable(key, text)
    return text


def _read_names(store: Store, key: str) -> list[Any]:
    """Return the names that rank 0 echoes; raise PeerError for any other content."""
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
    Without RANK in the environment this does nothing, because a single process has no group. If
    this host's own name resolves to a loopback address, as on Debian and Ubuntu, it sets
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
    store = attempt_store(store, rank, world_size, START_TIMEOUT)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)


def set_device(local_rank: int | None = None) -> torch.device:
    """Make this rank's accelerator the current device and return it, or the CPU without one.

    Call it before init_process_group(), and move the model to the returned device.

    Args:
        local_rank: index of the device on this host. None: LOCAL_RANK, which torchrun sets, or 0.
            Pass 0 if each rank sees only its own device (ASCEND_RT_VISIBLE_DEVICES,
            CUDA_VISIBLE_DEVICES).

    Raises:
        ValueError: this host has no device of that index.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if local_rank is None else local_rank
    count = torch.accelerator.device_count()
    if not 0 <= index < count:
        raise ValueError(
            f"local rank {index} has no device of its own: this process sees {count} of type "
            f"{accelerator.type}. Start as many ranks as devices (--nproc-per-node), or make more "
            "devices visible; if each rank sees only its own device, pass local_rank=0."
        )
    torch.accelerator.set_device_index(index)
    return torch.device(accelerator.type, index)


_SIOCGIFADDR = 0x8915  # Linux ioctl: IPv4 address of an interface


def gloo_interface(environment: Mapping[str, str]) -> str | None:
    """Return the interface that leads to the first host; None if gloo finds it by itself.

    Gloo listens on the address of the host's own name. On Debian and Ubuntu that is 127.0.1.1,
    which
    no other host reaches: then one rank's connection is refused, and the other ranks wait.

    Args:
        environment: environment variables of a rank, set by its launcher.
    """
    num_ranks = environment.get("WORLD_SIZE", "1")
    if environment.get("LOCAL_WORLD_SIZE", num_ranks) == num_ranks:
        return None  # all ranks are on this host
    if "GLOO_SOCKET_IFNAME" in environment or _is_reachable_by_others(socket.gethostname()):
        return None
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # connect() of UDP sends nothing; it selects the route.
            probe.connect((environment.get("MASTER_ADDR", ""), 9))
            address = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(address).is_loopback:
        return None
    return next((name for name in _interface_names() if interface_address(name) == address), None)


def _interface_names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def interface_address(interface: str) -> str:
    """Return the IPv4 address of an interface; empty if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        try:
            answer = fcntl.ioctl(control.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _is_reachable_by_others(host: str) -> bool:
    """Return whether gloo's choice of this host's addresses is no loopback address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as trial:
            try:
                trial.bind(address)
            except OSError:
                continue  # gloo also tries the next address
        return not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return False
