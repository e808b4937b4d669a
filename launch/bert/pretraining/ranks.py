"""The ranks of a run: device, process group, agreement on data, sums, and requests to stop."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from pretraining.errors import UsageError
from pretraining.launch import Launch

_PREPARED_KEY = "shardfuse/bert/prepared"
_PREPARATION_LIMIT = timedelta(days=1)
_GOODBYE_LIMIT = timedelta(seconds=10)


def choose_device(choice: str, launch: Launch) -> torch.device:
    """Return this rank's accelerator where there is one, else the CPU; `choice` may force that."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if choice == "cpu" or accelerator is None:
        return torch.device("cpu")
    num_devices = torch.accelerator.device_count()
    if launch.local_rank >= num_devices:
        raise UsageError(
            f"--nproc-per-node asks for more than this machine's {num_devices} {accelerator.type} "
            "devices; start one process per device, or pass --device cpu"
        )
    torch.accelerator.set_device_index(launch.local_rank)
    return torch.device(accelerator.type, launch.local_rank)


class Ranks:
    """The data-parallel ranks; every method but `sum_` is for one rank or all alike.

    Two phases, because preparing a large corpus may take longer than a collective is given: first
    the ranks share only the launcher's key-value store, then `connect` builds the process group.
    """

    def __init__(self, launch: Launch, device: torch.device) -> None:
        self.launch = launch
        self.device = device
        self._store: Store | None = None
        # Kept: where gloo's thread drops a tensor last, while the group is being destroyed, that
        # thread and this one (in torch 2.7) wait for each other for ever.
        self._last_summed: torch.Tensor | None = None
        if launch.is_distributed:
            self._store, _, _ = next(iter(rendezvous("env://")))

    def once(self, build: Callable[[], str]) -> str:
        """Return what `build` returns on rank 0; a `UsageError` there is raised on every rank."""
        if self._store is None:
            return build()
        if not self.launch.is_main:
            self._store.wait([_PREPARED_KEY], _PREPARATION_LIMIT)
            answer = json.loads(self._store.get(_PREPARED_KEY))
            self._store.set(_heard_key(self.launch.rank), "")
            if "error" in answer:
                raise UsageError(answer["error"])
            return str(answer["value"])
        try:
            value = build()
        except UsageError as error:
            self._store.set(_PREPARED_KEY, json.dumps({"error": str(error)}))
            # Without torchrun the store lives in this process: leave only once all have heard.
            others = [_heard_key(rank) for rank in range(1, self.launch.world_size)]
            with suppress(RuntimeError):
                self._store.wait(others, _GOODBYE_LIMIT)
            raise
        self._store.set(_PREPARED_KEY, json.dumps({"value": value}))
        return value

    def connect(self, timeout_seconds: float) -> None:
        """Create the process group with the backend of the device's kind."""
        if self._store is None:
            return
        dist.init_process_group(
            backend=dist.get_default_backend_for_device(self.device),
            store=self._store,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=None if self.device.type == "cpu" else self.device,
        )

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the ranks (updated in place). Collective."""
        if self._store is not None:
            dist.all_reduce(values)
            self._last_summed = values
        return values

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self.sum_(torch.zeros(1, device=self.device)).item()

    def disconnect(self) -> None:
        """Destroy the process group; safe to call at any time."""
        if dist.is_initialized():
            dist.destroy_process_group()


def _heard_key(rank: int) -> str:
    return f"{_PREPARED_KEY}/heard/{rank}"


class StopRequest:
    """Notes SIGINT and SIGTERM, so that the run can save and stop between two steps.

    A terminal's Ctrl-C reaches a rank twice, once directly and once through the launcher, so
    further signals change nothing; SIGKILL remains for a run that does not answer.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_requested = True

    def restore(self) -> None:
        """Put the earlier handlers back."""
        with suppress(ValueError):
            for number, handler in self._previous.items():
                signal.signal(number, handler)
