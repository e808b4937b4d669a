"""The ranks of a run: device, process group, decisions and errors in common, sums."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.rendezvous import rendezvous

from pretraining.errors import UsageError
from pretraining.launch import Launch
from shardfuse.training.attempts import START_TIMEOUT, attempt_store, set_device

_PREPARATION_LIMIT = timedelta(days=1)
_LEAST_ANSWER_LIMIT = timedelta(minutes=10)
_GOODBYE_LIMIT = timedelta(seconds=10)
_MOST_RANKS_NAMED = 8

T = TypeVar("T")
Answer = dict[str, Any]
"""What a rank has to say: {"value": ...} or {"error": text}."""


def choose_device(choice: str, launch: Launch) -> torch.device:
    """Return this rank's accelerator where there is one, else the CPU; `choice` may force that."""
    if choice == "cpu":
        return torch.device("cpu")
    try:
        return set_device(launch.local_rank)
    except ValueError as error:
        raise UsageError(f"{error} --device cpu computes without.") from error


class Ranks:
    """The data-parallel ranks; all call the same methods in the same order.

    Two phases, because preparing a large corpus may take longer than a collective is given: first
    the ranks share only the launcher's key-value store, then `connect` builds the process group.

    A `UsageError` inside `once`, `together` or `gather` is raised on every rank, whichever it came
    from. Any other error is raised where it occurred, and is a `UsageError` on the others.
    """

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.device = torch.device("cpu")
        self._store: Store | None = None
        self._num_talks = 0
        self._spent: list[str] = []
        self._answer_limit = _PREPARATION_LIMIT
        # Kept: where gloo's thread drops a tensor last, while the group is being destroyed, that
        # thread and this one (in torch 2.7) wait for each other for ever.
        self._last_summed: torch.Tensor | None = None
        self._host_group: dist.ProcessGroup | None = None  # None: the default group
        if launch.is_distributed:
            store, _, _ = next(iter(rendezvous("env://")))
            try:
                self._store = attempt_store(store, launch.rank, launch.world_size, START_TIMEOUT)
            except TimeoutError as error:
                raise UsageError(str(error)) from error

    def once(self, build: Callable[[], T]) -> T:
        """Return on every rank what `build` returns on rank 0, which is of JSON's types."""
        if self._store is None:
            return build()
        talk = self._next_talk()
        if not self.launch.is_main:
            return cast(T, _value(self._hear(self._store, talk)))
        outcome = _Outcome(build)
        self._tell(self._store, talk, outcome.answer)
        return cast(T, outcome.value())

    def gather(self, report: Callable[[], T]) -> list[T]:
        """Return what `report` returns on each rank, of JSON's types, in rank order."""
        if self._store is None:
            return [report()]
        talk = self._next_talk()
        outcome = _Outcome(report)
        if self.launch.is_main:
            verdict = self._collect(self._store, talk, outcome.answer)
            self._tell(self._store, talk, verdict)
        else:
            self._store.set(f"{talk}/{self.launch.rank}", json.dumps(outcome.answer))
            verdict = self._hear(self._store, talk)
        outcome.raise_if_unexpected()
        return cast(list[T], _value(verdict))

    def together(self, act: Callable[[], T]) -> T:
        """Return what `act` returns on this rank, of any type, once it has returned on all."""
        values: list[T] = []
        self.gather(lambda: values.append(act()))
        return values[0]

    def connect(self, device: torch.device, timeout_seconds: float) -> None:
        """Create the process group with the backend of the device's kind."""
        self.device = device
        self._answer_limit = max(_LEAST_ANSWER_LIMIT, timedelta(seconds=timeout_seconds))
        if self._store is None:
            return
        dist.init_process_group(
            backend=dist.get_default_backend_for_device(device),
            store=self._store,
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=None if device.type == "cpu" else device,
        )
        if device.type != "cpu":
            # For numbers that the host needs at once: on the device they would wait for its queue.
            self._host_group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_seconds)
            )

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` over the ranks (updated in place), on their device. Collective."""
        if self._store is not None:
            on_host = values.device.type == "cpu"
            dist.all_reduce(values, group=self._host_group if on_host else None)
            self._last_summed = values
        return values

    def leave(self) -> None:
        """End the talks: return on rank 0 once all have heard the last, or after ten seconds."""
        if self._store is None:
            return
        self._store.set(f"shardfuse/bert/left/{self.launch.rank}", "")
        if self.launch.is_main:
            # Without torchrun the store lives in this process.
            others = [f"shardfuse/bert/left/{rank}" for rank in range(1, self.launch.world_size)]
            with suppress(RuntimeError):
                self._store.wait(others, _GOODBYE_LIMIT)

    def disconnect(self) -> None:
        """Destroy the process group; safe to call at any time."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _next_talk(self) -> str:
        self._num_talks += 1
        return f"shardfuse/bert/{self._num_talks}"

    def _hear(self, store: Store, talk: str) -> Answer:
        """Return rank 0's verdict."""
        store.wait([f"{talk}/verdict"], _PREPARATION_LIMIT)
        verdict: Answer = json.loads(store.get(f"{talk}/verdict"))
        if "error" in verdict:
            store.set(f"{talk}/heard/{self.launch.rank}", "")
        return verdict

    def _tell(self, store: Store, talk: str, verdict: Answer) -> None:
        store.set(f"{talk}/verdict", json.dumps(verdict))
        self._spent.append(f"{talk}/verdict")
        if "error" in verdict:
            # Without torchrun the store lives in this process: leave only once all have heard.
            others = [f"{talk}/heard/{rank}" for rank in range(1, self.launch.world_size)]
            with suppress(RuntimeError):
                store.wait(others, _GOODBYE_LIMIT)

    def _collect(self, store: Store, talk: str, own: Answer) -> Answer:
        """Return all ranks' values as one answer, or their errors as one."""
        keys = [f"{talk}/{rank}" for rank in range(1, self.launch.world_size)]
        with suppress(RuntimeError):
            store.wait(keys, self._answer_limit)
        answers = [own]
        for rank, key in enumerate(keys, start=1):
            if store.check([key]):
                answers.append(json.loads(store.get(key)))
            else:
                answers.append({"error": f"rank {rank} does not answer; see what it reported"})
        # All have heard the verdicts of all earlier talks.
        for key in (*self._spent, *keys):
            store.delete_key(key)
        self._spent.clear()
        return _merged(answers)


class _Outcome:
    """What an action returned or raised."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self._unexpected: BaseException | None = None
        try:
            self.answer: Answer = {"value": act()}
        except UsageError as error:
            self.answer = {"error": str(error)}
        except BaseException as error:
            self.answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            self._unexpected = error

    def raise_if_unexpected(self) -> None:
        """Raise what was not a `UsageError` once more, where it was raised."""
        if self._unexpected is not None:
            raise self._unexpected

    def value(self) -> Any:
        """Return what was returned, or raise what was raised."""
        self.raise_if_unexpected()
        return _value(self.answer)


def _value(answer: Answer) -> Any:
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer["value"]


def _merged(answers: Sequence[Answer]) -> Answer:
    """Return the list of all values or, if there are errors, each with the ranks that had it."""
    ranks_of: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        if "error" in answer:
            ranks_of.setdefault(answer["error"], []).append(rank)
    if not ranks_of:
        return {"value": [answer["value"] for answer in answers]}
    errors = []
    for error, ranks in ranks_of.items():
        shown = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED]))
        more = ", ..." if len(ranks) > _MOST_RANKS_NAMED else ""
        is_all = len(ranks) == len(answers)
        errors.append(error if is_all else f"{error} (rank {shown}{more})")
    return {"error": "; ".join(errors)}
