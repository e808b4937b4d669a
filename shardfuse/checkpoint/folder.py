"""The checkpoints of one run: which is the newest whole one, and which may go."""

from __future__ import annotations

import functools
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.asynchronous import AsyncSave, async_save
from shardfuse.checkpoint.errors import DamagedCheckpoint
from shardfuse.checkpoint.index import MANIFEST
from shardfuse.checkpoint.ranks import Ranks, tried
from shardfuse.checkpoint.saving import load, save
from shardfuse.checkpoint.whole import NAME, is_whole, steps_in, told_steps
from shardfuse.files import discard, write_whole

logger = logging.getLogger("shardfuse")

LATEST = "latest"

_NO_STEP = (1 << 24) - 1


class Checkpoints:
    """Checkpoints of one run in ``folder/step-N``; the newest whole one is the one that counts.

    A file ``latest`` names the newest. It decides nothing: it is there for people and scripts, and
    so that checkpoints that are gone are not taken for a run that has not begun. Building a
    Checkpoints touches nothing.

    Args:
        folder: of this run alone, in a file system that all ranks see.
        keep: how many whole ones are left after a save. A damaged one counts for none, so that
            there are ``keep`` to go back to, as far as there have been so many.
        process_group: of the ranks, where what is saved has no ShardedOptimizer.

    Raises:
        ValueError: ``keep`` is less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, process_group: Any = None) -> None:
        if keep < 1:
            raise ValueError(f"Invalid keep: {keep}. Must be >= 1.")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._group = process_group
        self._under_way: tuple[AsyncSave, Ranks, int] | None = None

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps."""
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are there, whole or not, the newest first."""
        return steps_in(self.folder)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        info: Mapping[str, Any] | None = None,
        beside_training: bool = False,
    ) -> None:
        """Save the state after ``step`` steps, then remove what is not kept. Collective.

        Args:
            state, info: as of shardfuse.checkpoint.save().
            step: of finished steps.
            beside_training: return at once, as async_save() does; wait() ends it, and so does the
                next save. There are never two at once.

        Raises:
            CheckpointError: on all ranks, where any cannot write.
        """
        self.wait()
        noted = {**(info or {}), "step": step}
        ranks = Ranks(state, self._group, f"{self.folder} is not cleaned up")
        name_latest = functools.partial(self._name_latest, step)
        if beside_training:
            saving = async_save(
                state, self.path(step), process_group=self._group, info=noted, then=name_latest
            )
            self._under_way = (saving, ranks, step)
            return
        save(state, self.path(step), process_group=self._group, info=noted, then=name_latest)
        self._remove_old(ranks, step)

    def wait(self) -> None:
        """Return once a save beside training has ended, and old ones are removed. Collective.

        Raises:
            CheckpointError: on all ranks, where any could not write.
        """
        if self._under_way is not None:
            (saving, ranks, step), self._under_way = self._under_way, None
            saving.wait()
            self._remove_old(ranks, step)

    @property
    def under_way(self) -> AsyncSave | None:
        """The save beside training that has not been waited for."""
        return None if self._under_way is None else self._under_way[0]

    def _finish_replacing(self) -> None:
        """Give its name to a checkpoint that was whole when a kill came before it replaced one."""
        for rest in self.folder.glob(".step-*.unfinished"):
            target = self.folder / rest.name.removeprefix(".").removesuffix(".unfinished")
            if (rest / MANIFEST).exists() and not target.exists():
                rest.rename(target)

    def _name_latest(self, step: int) -> None:
        write_whole(self.folder / LATEST, f"step-{step}".encode())
        for leftover in self.folder.glob(".step-*"):  # of saves that were cut short
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove_old(self, ranks: Ranks, newest: int) -> None:
        """Remove what is older than the checkpoints that are kept. Every rank looks at its share.

        Collective. What is newer than the newest is of a run that was taken back: it is left there
        under a name that is not taken for a checkpoint's.
        """
        with ranks.call("removing old checkpoints"):
            self._remove_older(ranks, newest)

    def _remove_older(self, ranks: Ranks, newest: int) -> None:
        older = [step for step in told_steps(ranks, self.folder) if step != newest]
        num_whole, error = 1, None
        for step in older:
            if step > newest:
                act = functools.partial(self._set_aside, step)
            else:
                act = functools.partial(discard, self.path(step))
            if step < newest and num_whole < self._keep:
                num_whole += is_whole(ranks, self.path(step))
            elif ranks.comm.rank == 0 and error is None:
                error = tried(act)[1]
        ranks.agree(error)

    def _set_aside(self, step: int) -> None:
        rest = self.folder / f"superseded-step-{step}"
        discard(rest)
        self.path(step).rename(rest)

    def load_latest(
        self,
        state: dict[str, Any],
        *,
        accept: Callable[[Mapping[str, Any]], None] = lambda info: None,
        trusted: bool = False,
    ) -> int | None:
        """Load the newest whole checkpoint; return its step, or None if there is none. Collective.

        Damaged ones are passed over, and named in a warning of the logger "shardfuse".

        Args:
            state: as of shardfuse.checkpoint.load().
            accept: is given the ``info`` that was saved, and raises if this is not to be loaded.
            trusted: as of load().

        Raises:
            DamagedCheckpoint: there are some, and none is whole.
            CheckpointError: the newest whole one does not fit ``state``.
        """
        ranks = Ranks(state, self._group, f"{self.folder} is not loaded")
        faults: list[str] = []
        with ranks.call("Checkpoints.load_latest()"):
            if ranks.comm.rank == 0:
                self._finish_replacing()
            steps = told_steps(ranks, self.folder)
            named = ranks.words(self._named() if ranks.comm.rank == 0 else 0)[0]
        if named and [named - 1] != steps[:1]:
            is_step = named < _NO_STEP
            faults.append(f"{LATEST} names {f'step-{named - 1}' if is_step else 'none'}")
        for step in steps:
            try:
                load(
                    state,
                    self.path(step),
                    process_group=self._group,
                    accept=accept,
                    trusted=trusted,
                    look_beside=False,
                )
            except DamagedCheckpoint as damage:
                faults += damage.faults[:1]
                continue
            if faults:
                text = "; ".join(fault.rstrip(".") for fault in faults)
                logger.warning("%s: step-%d is taken, the newest whole checkpoint.", text, step)
            return step
        if faults:
            raise DamagedCheckpoint(faults, f"{self.folder} has no whole checkpoint.")
        return None

    def _named(self) -> int:
        """Return 1 and the step in ``latest``; 0 where there is none, else _NO_STEP."""
        try:
            text = (self.folder / LATEST).read_text(errors="replace").strip()
        except FileNotFoundError:
            return 0
        match = NAME.fullmatch(text)
        return min(int(match[1]) + 1, _NO_STEP) if match else _NO_STEP
