"""The ranks that the doctor examines: how they connect, and how they exchange findings."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shardfuse.comm.select import launched_apart
from shardfuse.comm.session import unreadable
from shardfuse.doctor.host import VERDICTS, Finding, merge_findings
from shardfuse.training.attempts import attempt_store, set_device

CONNECT_REMEDY = (
    "A firewall that blocks ports between the hosts, or another network interface than meant, ends "
    "so: open the ports, or name the interface by GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME or "
    "HCCL_SOCKET_IFNAME."
)


def _env_int(name: str, default: str) -> int:
    """Return an environment variable as an integer; -1 if it is no number."""
    text = os.environ.get(name, default)
    return int(text) if text.isascii() and text.isdigit() else -1


class World:
    """All ranks, in phases, with findings exchanged through the launcher's store.

    The store works even if the transport between the ranks does not.

    Args:
        limit_s: seconds to wait for other ranks in each phase.
        device: "cpu" to ignore an accelerator; None: use it if there is one.
    """

    def __init__(self, limit_s: float, device: Literal["cpu"] | None = None) -> None:
        self.rank = _env_int("RANK", "0")
        self.world_size = _env_int("WORLD_SIZE", "1")
        self.device = torch.device("cpu")
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and device is None:  # not run on hardware
            self.device = torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))
        self._limit = timedelta(seconds=limit_s)
        self._store: Store | None = None
        self._phase, self._is_broken = 0, False
        self.is_consistent = True
        """Whether all ranks have gone the same way so far: none was silent, or failed alone."""

    @property
    def has_joined(self) -> bool:
        """Whether all ranks are there, as far as join() has seen."""
        return self._is_rank and (self.world_size == 1 or self._store is not None)

    @property
    def _is_rank(self) -> bool:
        """Whether RANK is in the range of WORLD_SIZE."""
        return 0 <= self.rank < self.world_size

    def select_device(self) -> Finding:
        """Make this rank's accelerator the current one."""
        if self.device.type == "cpu":
            return Finding("device", "ok", "cpu")
        try:
            set_device(self.device.index)
        except ValueError as error:
            text, _, remedy = str(error).partition(". ")
            return Finding("device", "failed", text, remedy)
        number = torch.accelerator.device_count()
        return Finding("device", "ok", f"{self.device.type}, {number} on this host")

    def join(self) -> Finding:
        """Find the other ranks in the launcher's store."""
        if not self._is_rank:
            variables = [f"{n}={os.environ.get(n)}" for n in ("RANK", "WORLD_SIZE")]
            remedy = "Start this by torchrun, or set both, with RANK from 0 to WORLD_SIZE - 1."
            return Finding("ranks", "failed", f"no rank: {', '.join(variables)}", remedy)
        apart = launched_apart()
        if apart is not None:
            remedy = "Have it start torchrun, once a host, and torchrun this command."
            return Finding("ranks", "warning", f"{apart}: each is alone", remedy)
        if self.world_size == 1:
            return Finding("ranks", "ok", f"one, on {socket.gethostname()}, {self.device}")
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        try:
            store, _, _ = next(iter(rendezvous("env://", timeout=self._limit)))
            self._store = attempt_store(store, self.rank, self.world_size, self._limit)
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

    def run_on_all_ranks(self, name: str, act: Callable[[], Finding]) -> Finding:
        """Run a check on all ranks; return the merged finding. An exception counts as a finding."""
        try:
            own, has_raised = act(), False
        except Exception as error:
            own = Finding(name, "failed", f"{type(error).__name__}: {_first_line(error)}")
            has_raised = True
        own = replace(own, name=name)
        if self._store is None or self._is_broken:
            return own
        self._phase += 1
        answers = self._exchange({"finding": own.to_json(), "has_raised": has_raised})
        if None in answers:
            self._is_broken = True
        have_raised = {answer["has_raised"] for answer in answers if answer is not None}
        self.is_consistent &= not self._is_broken and len(have_raised) == 1
        return merge_findings(name, [a if a is None else Finding(**a["finding"]) for a in answers])

    def _exchange(self, own: dict[str, Any]) -> list[dict[str, Any] | None]:
        """Return the answer of each rank; None for ranks that do not answer in time."""
        assert self._store is not None
        keys = [f"{self._phase}/{rank}" for rank in range(self.world_size)]
        answers: list[dict[str, Any] | None] = []
        try:
            self._store.set(keys[self.rank], json.dumps(own))
            for rank, key in enumerate(keys):
                answers.append(own if rank == self.rank else self._receive(key))
        except RuntimeError:
            answers += [None] * (self.world_size - len(answers))
        return answers

    def _receive(self, key: str) -> dict[str, Any] | None:
        assert self._store is not None
        try:
            self._store.wait([key], 2 * self._limit)
        except RuntimeError:
            return None
        text = self._store.get(key).decode(errors="replace")
        with suppress(LookupError, ValueError, TypeError, RecursionError):
            answer = json.loads(text)
            finding = Finding(**answer["finding"])
            if finding.verdict in VERDICTS and isinstance(answer["has_raised"], bool):
                return {"finding": finding.to_json(), "has_raised": answer["has_raised"]}
        finding = Finding("the store", "failed", str(unreadable(key, text)))
        return {"finding": finding.to_json(), "has_raised": True}

    @contextmanager
    def cleanup(self) -> Iterator[None]:
        """Destroy the process group, once all ranks have received everything."""
        try:
            yield
        finally:
            if not self._is_broken:
                self.run_on_all_ranks("goodbye", lambda: Finding("goodbye", "ok", ""))
            if dist.is_initialized():
                dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__
