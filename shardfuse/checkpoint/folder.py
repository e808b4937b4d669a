"""The checkpoints of one run: which is the newest whole one, and which may go."""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.collective import CheckpointGroup, catch, check_state
from shardfuse.checkpoint.index import NO_STEP, CheckpointError, DamagedCheckpoint, step_in_name
from shardfuse.checkpoint.integrity import (
    broadcast_steps,
    is_intact,
    list_steps,
    malformed_step_names,
)
from shardfuse.checkpoint.loading import load
from shardfuse.checkpoint.replacement import (
    recover_interrupted,
    remove_checkpoint,
    remove_checkpoint_files,
    unrelated_names,
)
from shardfuse.checkpoint.saving import AsyncSave, async_save, save
from shardfuse.files import FolderHandle, is_folder

logger = logging.getLogger("shardfuse")

LATEST = "latest"

_ATTEMPTS = 10
"""How often another process may remove the checkpoint that is about to be loaded."""


class Checkpoints:
    """The checkpoints of one run, in ``folder/step-N``; load_latest() loads the newest whole one.

    A file ``latest`` names the newest, for people and scripts. It also shows that a run has begun
    whose checkpoints are gone; otherwise it decides nothing. Building a Checkpoints touches no
    file, and loading writes none: another process may load while one saves. Files beside those of
    a checkpoint stay when it is removed. A checkpoint in another place, which ``step-N`` links to,
    stays too, and the link goes.

    Args:
        folder: folder of this run only, in a file system that all ranks see.
        keep: number of whole checkpoints that remain after a save, if there are that many. Damaged
            checkpoints do not count.
        process_group: the ranks, if what is saved has no ShardedOptimizer.

    Raises:
        ValueError: ``keep`` is no whole number, or less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, process_group: Any = None) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"Invalid keep: {keep!r}. Must be a number of checkpoints >= 1.")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._group = process_group
        self._under_way: tuple[AsyncSave, CheckpointGroup, int] | None = None
        self._odd: set[str] = set()

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps.

        Args:
            step: number of finished steps.
        """
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps of existing checkpoints, whole or not, newest first."""
        return list_steps(self.folder)

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
        is_number = hasattr(step, "__index__") and not isinstance(step, bool)
        step = operator.index(step) if is_number else step  # numpy's, too
        ranks = CheckpointGroup(state, self._group, f"{self.folder} is not cleaned up")
        with ranks.region("Checkpoints.save()", f"step = {step!r}"):
            ranks.agree(None)  # a save beside training would find out late that steps differ
            if not is_number or not 0 <= step < NO_STEP - 1:
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

    def _name_latest(self, step: int) -> None:
        latest = self.folder / LATEST
        if os.path.lexists(latest) and not latest.is_file():
            self._tell_odd([LATEST])
        else:
            with FolderHandle(self.folder) as folder:
                folder.write_atomically(LATEST, f"step-{step}".encode())
        recover_interrupted(self.folder)

    def _tell_odd(self, names: Sequence[str]) -> None:
        """Warn once of what lies in the folder and is taken for nothing."""
        new = [name if len(name) < 80 else f"{name[:77]}..." for name in names]
        new = [name for name in new if name not in self._odd]
        self._odd.update(new)
        if new:
            logger.warning(
                "%s: no checkpoint is called or made so: %s", self.folder, ", ".join(new)
            )

    def _remove_old(self, ranks: CheckpointGroup, newest: int) -> None:
        """Remove what is older than the checkpoints that are kept. Every rank looks at its share.

        Collective. What is newer than the newest is of a run that was taken back: it is left there
        under a name that is not taken for a checkpoint's.
        """
        with ranks.region("removing old checkpoints"):
            self._remove_older(ranks, newest)

    def _remove_older(self, ranks: CheckpointGroup, newest: int) -> None:
        older = [step for step in broadcast_steps(ranks, self.folder) if step != newest]
        num_whole, error = 1, None
        for step in older:
            if step > newest:
                act = functools.partial(self._set_aside, step)
            else:
                act = functools.partial(_remove_old_checkpoint, self.path(step))
            if step < newest and num_whole < self._keep:
                num_whole += is_intact(ranks, self.path(step))
            elif ranks.comm.rank == 0 and error is None:
                error = catch(act)[1]
        ranks.agree(error)

    def _set_aside(self, step: int) -> None:
        rest = self.folder / f"superseded-step-{step}"
        if is_folder(rest):
            remove_checkpoint(rest)
        number = 1
        while os.path.lexists(rest):
            number += 1
            rest = self.folder / f"superseded-step-{step}.{number}"
        os.rename(self.path(step), rest)

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
        ranks = CheckpointGroup(state, self._group, f"{self.folder} is not loaded")
        for _ in range(_ATTEMPTS):
            with ranks.region("Checkpoints.load_latest()"):
                steps, faults = self._newest(ranks)
            for step in steps:
                try:
                    self._load(state, step, accept, trusted)
                except CheckpointError as error:
                    if self._is_gone(ranks, step):
                        break  # another process saves, and has removed it
                    if not isinstance(error, DamagedCheckpoint):
                        raise
                    faults += error.faults[:1]
                    continue
                if faults:
                    text = "; ".join(fault.rstrip(".") for fault in faults)
                    logger.warning("%s: loading step-%d, the newest whole checkpoint.", text, step)
                return step
            else:
                if faults:
                    raise DamagedCheckpoint(faults, f"{self.folder} has no whole checkpoint.")
                return None
        raise CheckpointError(
            f"{self.folder} is not loaded: another process removed the newest checkpoint "
            f"{_ATTEMPTS} times before it was read. Load with a larger keep= there."
        )

    def _load(self, state: dict[str, Any], step: int, accept: Any, trusted: bool) -> None:
        load(
            state,
            self.path(step),
            process_group=self._group,
            accept=accept,
            trusted=trusted,
            look_beside=False,
        )

    def _is_gone(self, ranks: CheckpointGroup, step: int) -> bool:
        """Return whether the first rank sees no checkpoint of that step any more. Collective."""
        is_there = ranks.comm.rank > 0 or step in list_steps(self.folder)
        return ranks.gather_numbers(1 if is_there else 2)[0] == 2

    def _newest(self, ranks: CheckpointGroup) -> tuple[list[int], list[str]]:
        """Return steps, newest first, and what is wrong if ``latest`` has another. Collective."""
        if ranks.comm.rank == 0:
            self._tell_odd(malformed_step_names(self.folder))
        steps = broadcast_steps(ranks, self.folder)
        named = ranks.broadcast_number(self._named() if ranks.comm.rank == 0 else 0)
        if not named or [named - 1] == steps[:1]:
            return steps, []
        is_step = named < NO_STEP
        return steps, [f"{LATEST} names {f'step-{named - 1}' if is_step else 'none'}"]

    def _named(self) -> int:
        """Return 1 and the step in ``latest``; 0 where there is none, else NO_STEP."""
        latest = self.folder / LATEST
        if not latest.is_file():
            return NO_STEP if os.path.lexists(latest) else 0
        try:
            with latest.open("rb") as file:
                text = file.read(_MAX_LATEST_NBYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            return 0
        step = step_in_name(text)
        return NO_STEP if step is None else step + 1


_MAX_LATEST_NBYTES = 64
"""Of ``latest`` that are looked at."""


def _remove_old_checkpoint(path: Path) -> None:
    """Remove an old checkpoint and nothing else; the link, where it lies elsewhere.

    Raises:
        OSError: the file system refuses.
    """
    if path.is_symlink():
        path.unlink()
        return
    others = unrelated_names(path)
    if others:  # whose names stay
        remove_checkpoint_files(path)
        logger.warning("%s is removed, but for what no checkpoint has: %s", path, others[:3])
        return
    rest = path.with_name(f".{path.name}.discarded")
    if is_folder(rest):
        remove_checkpoint(rest)
    os.rename(path, rest)
    remove_checkpoint(rest)
