"""The checkpoints of one run: which is the newest whole one, and which may go."""

from __future__ import annotations

import functools
import logging
import operator
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.asynchronous import AsyncSave, async_save
from shardfuse.checkpoint.errors import CheckpointError, DamagedCheckpoint
from shardfuse.checkpoint.index import MANIFEST
from shardfuse.checkpoint.ranks import Ranks, check_state, tried
from shardfuse.checkpoint.saving import load, save
from shardfuse.checkpoint.whole import NAME, is_whole, steps_in, told_steps
from shardfuse.files import discard, write_whole

logger = logging.getLogger("shardfuse")

LATEST = "latest"

_NO_STEP = (1 << 48) - 1


class Checkpoints:
    """The checkpoints of one run, in ``folder/step-N``; load_latest() loads the newest whole one.

    A file ``latest`` names the newest, for people and scripts. It also shows that a run has begun
    whose checkpoints are gone; otherwise it decides nothing. Building a Checkpoints touches no
    file.

    Args:
        folder: folder of this run only, in a file system that all ranks see.
        keep: number of whole checkpoints that remain after a save, if there are that many. Damaged
            checkpoints do not count.
        process_group: the ranks, if what is saved has no ShardedOptimizer.

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
        """Return the folder of the checkpoint after ``step`` steps.

        Args:
            step: number of finished steps.
        """
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps of existing checkpoints, whole or not, newest first."""
        return steps_in(self.folder)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        info: Mapping[str, Any] | None = None,
        beside_training: bool = False,
    ) -> None:
        """Save the state after ``step`` steps, then remove old checkpoints. Collective.

        Args:
            state, info: as for shardfuse.checkpoint.save().
            step: number of finished steps, or of samples or tokens.
            beside_training: return at once, as async_save() does. wait() and the next save wait for
                it, so there are never two at once.

        Raises:
            ValueError: ``step`` is no whole number, or is below 0.
            PeerError: on all ranks, if they have different steps.
            CheckpointError: on all ranks, if any cannot write.
        """
        check_state(state)
        self.wait()
        step = operator.index(step) if hasattr(step, "__index__") else step  # numpy's, too
        ranks = Ranks(state, self._group, f"{self.folder} is not cleaned up")
        with ranks.call("Checkpoints.save()", f"step = {step!r}"):
            ranks.agree(None)  # a save beside training would find out late that steps differ
            if not isinstance(step, int) or not 0 <= step < _NO_STEP - 1:
                raise ValueError(f"Invalid step: {step!r}. Must be a whole number >= 0.")
        noted = {**(info or {}), "step": step}
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
        """Wait for a save beside training, then remove old checkpoints. Collective.

        Raises:
            CheckpointError: on all ranks, if any could not write.
        """
        if self._under_way is not None:
            (saving, ranks, step), self._under_way = self._under_way, None
            saving.wait()
            self._remove_old(ranks, step)

    @property
    def under_way(self) -> AsyncSave | None:
        """The save beside training that nothing has waited for yet, or None."""
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

        Damaged checkpoints are skipped; a warning of the logger "shardfuse" names them. It waits
        for a save beside training; if that fails, there is a warning, too.

        Args:
            state: as for shardfuse.checkpoint.load().
            accept: called with the saved ``info``; raises if the checkpoint shall not be loaded.
            trusted: as for load().

        Raises:
            DamagedCheckpoint: there are checkpoints, and none is whole.
            CheckpointError: the newest whole one does not fit ``state``.
        """
        check_state(state)
        try:
            self.wait()
        except CheckpointError as error:  # on all ranks
            logger.warning("%s", error)
        ranks = Ranks(state, self._group, f"{self.folder} is not loaded")
        with ranks.call("Checkpoints.load_latest()"):
            steps, faults = self._newest(ranks)
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
                logger.warning("%s: loading step-%d, the newest whole checkpoint.", text, step)
            return step
        if faults:
            raise DamagedCheckpoint(faults, f"{self.folder} has no whole checkpoint.")
        return None

    def _newest(self, ranks: Ranks) -> tuple[list[int], list[str]]:
        """Return steps, newest first, and what is wrong if ``latest`` has another. Collective."""
        if ranks.comm.rank == 0:
            self._finish_replacing()
        steps = told_steps(ranks, self.folder)
        named = ranks.number_of_first(self._named() if ranks.comm.rank == 0 else 0)
        if not named or [named - 1] == steps[:1]:
            return steps, []
        is_step = named < _NO_STEP
        return steps, [f"{LATEST} names {f'step-{named - 1}' if is_step else 'none'}"]

    def _named(self) -> int:
        """Return 1 and the step in ``latest``; 0 where there is none, else _NO_STEP."""
        try:
            text = (self.folder / LATEST).read_text(errors="replace").strip()
        except FileNotFoundError:
            return 0
        match = NAME.fullmatch(text)
        return min(int(match[1]) + 1, _NO_STEP) if match else _NO_STEP
