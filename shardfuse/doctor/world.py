"""The ranks that are looked at: how they meet, and how they tell each other what they found."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardfuse.doctor.findings import Finding, merged
from shardfuse.training.attempts import fresh_part

CONNECT_REMEDY = (
    "A firewall that blocks ports between the hosts, or another network interface than meant, ends "
    "so: open the ports, or name the interface by GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME or "
    "HCCL_SOCKET_IFNAME."
)


class World:
    """All ranks, in phases: findings travel through the launcher's store, so that ranks whose
    transport does not work can still tell.

    Args:
        limit_s: seconds that ranks are waited for in each phase.
    """

    def __init__(self, limit_s: float) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None:  # not run on hardware
            self.device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        self._limit = timedelta(seconds=limit_s)
        self._store: Store | None = None
        self._num, self._is_broken = 0, False

    @property
    def has_met(self) -> bool:
        """Whether all ranks are there, as far as meet() has seen."""
        return self.world_size == 1 or self._store is not None

    def meet(self) -> Finding:
        """Find the other ranks in the launcher's store."""
        if self.world_size == 1:
            return Finding("ranks", "ok", f"one, on {socket.gethostname()}, {self.device}")
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=self._limit)))
            self._store = fresh_part(store, self.rank, self.world_size, self._limit)
        except (RuntimeError, TimeoutError, ValueError) as error:
            return Finding(
                "ranks",
                "failed",
                f"rank {self.rank} on {socket.gethostname()} does not meet the others at {where}: "
                f"{_first_line(error)}",
                "See that all ranks are started, with the same MASTER_ADDR, and that a firewall "
                "lets their hosts reach that port.",
            )
        return Finding("ranks", "ok", f"{self.world_size}, {self.device}, met at {where}")

    def connect(self, backend: str | None) -> Finding:
        """Build the process group."""
        name = "process group"
        if self._store is None:
            return Finding(name, "ok", "none: one rank")
        backend = backend or dist.get_default_backend_for_device(self.device)
        try:
            dist.init_process_group(
                backend,
                store=PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=self._limit,
            )
            dist.all_reduce(torch.ones(1, device=self.device))
        except Exception as error:
            return Finding(
                name,
                "failed",
                f"{backend} does not connect the ranks: {_first_line(error)}",
                CONNECT_REMEDY,
            )
        return Finding(name, "ok", f"{backend} connects {self.world_size} ranks")

    def together(self, name: str, act: Callable[[], Finding]) -> Finding:
        """Return what all ranks have found, on all ranks; an error of one is a finding."""
        try:
            own = act()
        except Exception as error:
            own = Finding(name, "failed", f"{type(error).__name__}: {_first_line(error)}")
        own = replace(own, name=name)
        if self._store is None or self._is_broken:
            return own
        self._num += 1
        of_ranks = self._exchanged(own)
        if None in of_ranks:
            self._is_broken = True
        return merged(name, of_ranks)

    def _exchanged(self, own: Finding) -> list[Finding | None]:
        """Return every rank's finding; None of those that do not tell in time."""
        assert self._store is not None
        keys = [f"{self._num}/{rank}" for rank in range(self.world_size)]
        found: list[Finding | None] = []
        try:
            self._store.set(keys[self.rank], json.dumps(own.to_json()))
            for rank, key in enumerate(keys):
                found.append(own if rank == self.rank else self._heard(key))
        except RuntimeError:
            found += [None] * (self.world_size - len(found))
        return found

    def _heard(self, key: str) -> Finding | None:
        assert self._store is not None
        try:
            self._store.wait([key], 2 * self._limit)
        except RuntimeError:
            return None
        content: dict[str, Any] = json.loads(self._store.get(key))
        return Finding(**content)

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Destroy what was built, once all have heard everything."""
        try:
            yield
        finally:
            if not self._is_broken:
                self.together("goodbye", lambda: Finding("goodbye", "ok", ""))
            if dist.is_initialized():
                dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
