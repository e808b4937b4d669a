"""Sharded checkpoints that appear whole or not at all, and load on any number of ranks.

RUN/checkpoints/
    step-500/    written by all ranks with torch.distributed.checkpoint
        parts.json    the run's options; size and digest of every file
    step-1000/
    latest       the name of the newest one

[Note: when latest moves]
Each rank syncs its files to the disk and tells rank 0 their sizes and digests. Rank 0 looks for
every one of them, under a name that no reader takes for a checkpoint; only then it renames the
folder, and `latest` after it. What comes before is left alone until then, so whatever goes wrong,
there is a checkpoint as good as before.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from pretraining.config import RunConfig, identity, option
from pretraining.errors import UsageError
from pretraining.files import blaming, describe, sha256, sync, sync_tree, write_whole
from pretraining.ranks import Ranks
from shardfuse import ShardedGradScaler, ShardedOptimizer

NUM_KEPT = 2
LATEST_FILE = "latest"
PARTS_FILE = "parts.json"

T = TypeVar("T")

_NAME = re.compile(r"step-(\d+)")


class Part(NamedTuple):
    """One file of a checkpoint; its digest is "" where no rank took one."""

    name: str
    nbytes: int
    digest: str


class Checkpoints:
    """The checkpoints of one run: parameters, optimizer state, loss scale and step."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        model: nn.Module,
        optimizer: ShardedOptimizer,
        scaler: ShardedGradScaler,
    ) -> None:
        self._folder = config.run_dir / "checkpoints"
        self._run = identity(config)
        self._ranks = ranks
        self._model = model
        self._optimizer = optimizer
        self._scaler = scaler

    def save(self, step: int) -> None:
        """Save the state after `step` finished steps. Collective. [Note: when latest moves]

        Raises `UsageError` on every rank where a part of any cannot be written.
        """
        target = self._folder / f"step-{step}"
        unfinished = self._folder / f".{target.name}.unfinished"
        try:
            self._blamed_once(self._make_room)
            parts = self._blamed_gather(partial(self._write, unfinished, step))
            written = [Part(*part) for of_rank in parts for part in of_rank]
            self._blamed_once(partial(self._publish, unfinished, target, written))
        except UsageError as error:
            if self._ranks.launch.is_main:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise UsageError(f"step {step} is not saved: {error}; {self._way_on()}") from error

    def load_latest(self, say: Callable[[str], None]) -> int:
        """Load the newest whole checkpoint; return its step, or 0 where there is none. Collective.

        That is the one that `latest` names, unless it is missing or damaged; `say` is told which
        was taken then. Raises `UsageError` on every rank where there are only damaged ones.
        """
        faults: list[str] = []
        named, names = self._blamed_once(self._candidates)
        if named not in names and (named or names):
            faults.append(f"{LATEST_FILE} names {named or 'none'}")
        for name in names:
            folder = self._folder / name
            found = [fault for fault in self._blamed_gather(partial(self._faults, folder)) if fault]
            faults += found[:1]
            if not found:
                if faults:
                    say(f"{'; '.join(faults)}: continuing from {name}, the newest whole checkpoint")
                return self._load(folder)
        if faults:
            raise UsageError(
                f"--resume: {self._folder} has no whole checkpoint ({'; '.join(faults)}); "
                "restore one, or start a new run elsewhere"
            )
        say(f"{self._folder} has no checkpoint yet: starting from step 0")
        return 0

    def _blamed_once(self, act: Callable[[], T]) -> T:
        return self._ranks.once(partial(self._blamed, act))

    def _blamed_gather(self, act: Callable[[], T]) -> list[T]:
        return self._ranks.gather(partial(self._blamed, act))

    def _blamed(self, act: Callable[[], T]) -> T:
        with blaming("--run-dir", self._folder.parent):
            return act()

    def _make_room(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for leftover in self._folder.glob(".step-*"):
            shutil.rmtree(leftover)

    def _write(self, unfinished: Path, step: int) -> list[Part]:
        """Write this rank's part; return its files. Collective."""
        writer = _PartWriter(unfinished)
        try:
            with _quiet():
                dcp.save(self._state(step), storage_writer=writer)
        except CheckpointException as error:
            for rank, (reason, _) in error.failures.items():
                if isinstance(reason, OSError):
                    text = f"--run-dir {self._folder.parent}: {describe(reason)} (rank {rank})"
                    raise UsageError(text) from error
            raise
        return [_part_of(unfinished / name, nbytes) for name, nbytes in writer.sizes.items()]

    def _publish(self, unfinished: Path, target: Path, parts: list[Part]) -> None:
        for part in parts:
            if fault := _size_fault(unfinished / part.name, part.nbytes):
                raise UsageError(f"{fault}; all ranks must write to one --run-dir")
        metadata = unfinished / ".metadata"
        parts.append(_part_of(metadata, metadata.stat().st_size))
        found = {"run": self._run, "parts": [part._asdict() for part in parts]}
        write_whole(unfinished / PARTS_FILE, json.dumps(found, indent=1))
        sync_tree(unfinished)
        _discard(target)
        unfinished.rename(target)
        sync(self._folder)
        write_whole(self._folder / LATEST_FILE, target.name)
        older = [name for name in self._names() if _step(name) < _step(target.name)]
        for name in older[NUM_KEPT - 1 :]:
            _discard(self._folder / name)

    def _way_on(self) -> str:
        """Say where the run stands without what could not be saved."""
        with suppress(OSError):
            return f"--resume continues from {(self._folder / LATEST_FILE).read_text()}"
        return "there is no earlier checkpoint"

    def _candidates(self) -> tuple[str, list[str]]:
        """Return the name in `latest` ("" for none) and those to try, the best first."""
        if not self._folder.is_dir():
            return "", []
        names = self._names()
        try:
            named = (self._folder / LATEST_FILE).read_text(errors="replace").strip()
        except FileNotFoundError:
            named = ""
        return named, sorted(names, key=lambda name: name != named)

    def _names(self) -> list[str]:
        """Return the names of the checkpoints that are there, the newest first."""
        names = [path.name for path in self._folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(names, key=_step, reverse=True)

    def _faults(self, folder: Path) -> str:
        """Say what is wrong with this rank's share of the files, or "".

        Raises `UsageError` for the checkpoint of another run, and `OSError`.
        """
        launch = self._ranks.launch
        try:
            run, parts = _listing(folder)
        except (ValueError, TypeError, KeyError, EOFError) as error:
            return f"{folder.name}: {PARTS_FILE} is damaged ({type(error).__name__})"
        for name, value in self._run.items():
            if run.get(name, value) != value:
                raise UsageError(
                    f"--resume: {folder} is of a run with {option(name)} {run[name]}, this one "
                    f"has {value}; restore this run's own checkpoints"
                )
        for part in parts[launch.rank :: launch.world_size]:
            path = folder / part.name
            if fault := _size_fault(path, part.nbytes):
                return f"{folder.name}: {fault}"
            if part.digest and sha256(path).hex() != part.digest:
                return f"{folder.name}: {part.name} is damaged"
        return ""

    def _load(self, folder: Path) -> int:
        state = self._state(step=0)
        try:
            with _quiet():
                dcp.load(state, checkpoint_id=folder)
            self._optimizer.load_sharded_state_dict(state["optimizer"])
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            raise _misfit(folder, reason) from error
        except (ValueError, RuntimeError, KeyError) as error:
            raise _misfit(folder, error) from error
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
        return int(state["step"])

    def _state(self, step: int) -> dict[str, Any]:
        # named_parameters() has a tied weight once; loading fills these very tensors.
        model = {name: param.data for name, param in self._model.named_parameters()}
        return {
            "model": model,
            "optimizer": self._optimizer.sharded_state_dict(),
            "scaler": self._scaler.state_dict(),
            "step": torch.tensor(step),
        }


class _PartWriter(dcp.FileSystemWriter):
    """Writes as usual, remembers {file name: bytes}, and lets the system's errors through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sizes: dict[str, int] = {}

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's items; raises `OSError`."""
        try:
            results = super().write_data(plan, planner)
            results.wait()
        except RuntimeError as error:
            # torch's zip writer only reports that it is not where it should be.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        for result in results.value():
            info = result.storage_data
            end = info.offset + info.length
            self.sizes[info.relative_path] = max(end, self.sizes.get(info.relative_path, 0))
        return results


def _part_of(path: Path, nbytes: int) -> Part:
    if fault := _size_fault(path, nbytes):
        raise UsageError(fault)
    return Part(path.name, nbytes, sha256(path).hex())


def _size_fault(path: Path, nbytes: int) -> str:
    if not path.exists():
        return f"{path.name} is missing"
    found = path.stat().st_size
    return f"{path.name} has {found:,} bytes of {nbytes:,}" if found < nbytes else ""


def _listing(folder: Path) -> tuple[dict[str, Any], list[Part]]:
    """Return the options of a checkpoint's run, as far as they are known, and its files."""
    listing = folder / PARTS_FILE
    if listing.exists():
        found = json.loads(listing.read_text())
        return dict(found["run"]), [Part(**part) for part in found["parts"]]
    # Saved before there were listings: the sizes are known.
    sizes: dict[str, int] = {".metadata": 1}
    if (folder / ".metadata").exists():
        try:
            metadata = dcp.FileSystemReader(folder).read_metadata()
        except Exception as error:
            raise ValueError(".metadata") from error
        for info in metadata.storage_data.values():
            end = info.offset + info.length
            sizes[info.relative_path] = max(end, sizes.get(info.relative_path, 0))
    return {}, [Part(name, nbytes, "") for name, nbytes in sizes.items()]


def _misfit(folder: Path, error: BaseException) -> UsageError:
    reason = " ".join(str(error).split())
    return UsageError(
        f"--resume: {folder} does not fit this run's model and optimizer ({reason}); "
        "restore this run's own checkpoints"
    )


def _discard(folder: Path) -> None:
    """Remove a checkpoint; what is left of it if that is cut short is not taken for one."""
    if folder.exists():
        rest = folder.with_name(f".{folder.name}.discarded")
        shutil.rmtree(rest, ignore_errors=True)
        folder.rename(rest)
        shutil.rmtree(rest, ignore_errors=True)


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what torch.distributed.checkpoint says about a process without a group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed")
        yield
