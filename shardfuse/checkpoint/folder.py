"""The checkpoints of one run: the newest intact one is loaded, old ones are removed."""

from __future__ import annotations

import functools
import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardfuse.checkpoint.collective import CheckpointGroup, catch, check_state
from shardfuse.checkpoint.index import NO_STEP, CheckpointError, DamagedCheckpoint, step_in_name
from shardfuse.checkpoint.integrity import (
    broadcast_steps,
    is_intact,
    list_steps,
    malformed_step_names,
    verify_share,
)
from shardfuse.checkpoint.loading import load
from shardfuse.checkpoint.replacement import (
    recover_interrupted,
    remove_checkpoint,
    remove_checkpoint_files,
    unrelated_names,
)
from shardfuse.checkpoint.saving import AsyncSave, save_while
from shardfuse.checkpoint.saving import async_save as start_async_save
from shardfuse.files import FolderHandle, is_folder
from shardfuse.runtime import paused_gc

logger = logging.getLogger("shardfuse")

LATEST = "latest"

_MAX_ATTEMPTS = 10
"""How often another process may remove the checkpoint before it is loaded."""


class Checkpoints:
    """The checkpoints of one run, in ``folder/step-N``; load_latest() loads the newest intact one.

    A file ``latest`` names the newest, for people and scripts. It also shows that a run has begun,
    if its checkpoints are missing; it has no other effect. The constructor touches no file, and
    loading writes none: another process may load while one saves. Other files in a checkpoint's
    folder stay when the checkpoint is removed. If ``step-N`` is a link, only the link is removed.

    Args:
        folder: folder of this run only, in a file system that all ranks see.
        keep: number of intact checkpoints that remain after a save, if there are that many. Damaged
            checkpoints do not count.
        process_group: the ranks, if the state has no ShardedOptimizer.

    Raises:
        ValueError: ``keep`` is not an integer, or less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, process_group: Any = None) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
            raise ValueError(f"Invalid keep: {keep!r}. Must be a number of checkpoints >= 1.")
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._group = process_group
        self._running_save: tuple[AsyncSave, CheckpointGroup, int] | None = None
        self._warned_names: set[str] = set()

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint after ``step`` steps.

        Args:
            step: number of finished steps.
        """
        return self.folder / f"step-{step}"

    def steps(self) -> list[int]:
        """Return the steps of existing checkpoints, intact or not, newest first."""
        return list_steps(self.folder)

    def save(
        self,
        state: Mapping[str, Any],
        step: int,
        *,
        info: Mapping[str, Any] | None = None,
        async_save: bool = False,
    ) -> None:
        """Save the state after ``step`` steps, then remove old checkpoints. Collective.

        Args:
            state, info: as for shardfuse.checkpoint.save().
            step: number of finished steps, or of samples or tokens.
            async_save: return at once, as shardfuse.checkpoint.async_save() does. wait() and the
                next save wait for it, so there are never two saves at once.

        Raises:
            ValueError: ``step`` is not an integer, or less than 0.
            PeerError: on all ranks, if their steps differ.
            CheckpointError: on all ranks, if any rank cannot write.
        """
        check_state(state)
        self.wait()
        is_number = hasattr(step, "__index__") and not isinstance(step, bool)
        step = operator.index(step) if is_number else step  # also numpy's integers
        ranks = CheckpointGroup(state, self._group, f"{self.folder} is not cleaned up")
        with ranks.region("Checkpoints.save()", f"step = {step!r}"):
            ranks.agree(None)  # compares steps now; an asynchronous save would only do so later
            if not is_number or not 0 <= step < NO_STEP - 1:
                raise ValueError(f"Invalid step: {step!r}. Must be a whole number >= 0.")
        info_with_step = {**(info or {}), "step": step}
        write_latest = functools.partial(self._write_latest, step)
        if async_save:
            saving = start_async_save(
                state,
                self.path(step),
                process_group=self._group,
                info=info_with_step,
                then=write_latest,
            )
            self._running_save = (saving, ranks, step)
            return
        share_faults: dict[int, list[str]] = {}
        save_while(
            lambda: self._verify_kept(ranks, step, share_faults),
            state,
            self.path(step),
            process_group=self._group,
            info=info_with_step,
            then=write_latest,
        )
        self._remove_old(ranks, step, share_faults)

    def wait(self) -> None:
        """Wait for an asynchronous save, then remove old checkpoints. Collective.

        Raises:
            CheckpointError: on all ranks, if any rank could not write.
        """
        if self._running_save is not None:
            (saving, ranks, step), self._running_save = self._running_save, None
            saving.wait()
            self._remove_old(ranks, step)

    @property
    def under_way(self) -> AsyncSave | None:
        """The asynchronous save that no call has waited for yet, or None."""
        return None if self._running_save is None else self._running_save[0]

    def _write_latest(self, step: int) -> None:
        latest = self.folder / LATEST
        if os.path.lexists(latest) and not latest.is_file():
            self._warn_of_names([LATEST])
        else:
            with FolderHandle(self.folder) as folder:
                folder.write_atomically(LATEST, f"step-{step}".encode())
        recover_interrupted(self.folder)

    def _warn_of_names(self, names: Sequence[str]) -> None:
        """Warn once of names in the folder that are ignored."""
        new = [name if len(name) < 80 else f"{name[:77]}..." for name in names]
        new = [name for name in new if name not in self._warned_names]
        self._warned_names.update(new)
        if new:
            logger.warning(
                "%s: no checkpoint is called or made so: %s", self.folder, ", ".join(new)
            )

    def _verify_kept(
        self, ranks: CheckpointGroup, newest: int, share_faults: dict[int, list[str]]
    ) -> None:
        """Verify this rank's shares of the checkpoints that _remove_old() will verify. Local."""
        older = [step for step in list_steps(self.folder) if step < newest]
        for step in older[: self._keep - 1]:
            path, comm = self.path(step), ranks.comm
            share_faults[step] = verify_share(path, comm.rank, comm.world_size)

    @paused_gc()
    def _remove_old(
        self,
        ranks: CheckpointGroup,
        newest: int,
        share_faults: Mapping[int, list[str]] = MappingProxyType({}),
    ) -> None:
        """Remove old checkpoints; each rank verifies its share of those that are kept. Collective.

        Checkpoints newer than ``newest`` belong to a run that was restarted from an earlier step.
        They are renamed, so that load_latest() does not take them for the newest.

        Args:
            ranks: of the save.
            newest: the step that was saved.
            share_faults: by step, the result of this rank's verify_share(), if there is one.
        """
        with ranks.region("removing old checkpoints"):
            self._remove_older_than(ranks, newest, share_faults)

    def _remove_older_than(
        self, ranks: CheckpointGroup, newest: int, share_faults: Mapping[int, list[str]]
    ) -> None:
        older = [step for step in broadcast_steps(ranks, self.folder) if step != newest]
        num_intact, error = 1, None
        for step in older:  # all ranks verify, in the same order; only the first rank removes
            if step > newest:
                act = functools.partial(self._mark_superseded, step)
            else:
                act = functools.partial(_remove_old_checkpoint, self.path(step))
            if step < newest and num_intact < self._keep:
                num_intact += is_intact(ranks, self.path(step), share_faults.get(step))
            elif ranks.comm.rank == 0 and error is None:
                error = catch(act)[1]
        ranks.agree(error)

    def _mark_superseded(self, step: int) -> None:
        superseded = self.folder / f"superseded-step-{step}"
        if is_folder(superseded):
            remove_checkpoint(superseded)
        number = 1
        while os.path.lexists(superseded):
            number += 1
            superseded = self.folder / f"superseded-step-{step}.{number}"
        os.rename(self.path(step), superseded)

    def load_latest(
        self,
        state: dict[str, Any],
        *,
        accept: Callable[[Mapping[str, Any]], None] = lambda info: None,
        trusted: bool = False,
    ) -> int | None:
        """Load the newest intact checkpoint; return its step, or None if there is none. Collective.

        Damaged checkpoints are skipped, with a warning of the logger "shardfuse" that names them.
        An asynchronous save is waited for; if it fails, there is a warning, too.

        Args:
            state: as for shardfuse.checkpoint.load().
            accept: called with the saved ``info``; raises if the checkpoint must not be loaded.
            trusted: as for load().

        Raises:
            DamagedCheckpoint: there are checkpoints, and none is intact.
            CheckpointError: the newest intact one does not fit ``state``.
        """
        check_state(state)
        try:
            self.wait()
        except CheckpointError as error:  # raised on all ranks, so all go on
            logger.warning("%s", error)
        ranks = CheckpointGroup(state, self._group, f"{self.folder} is not loaded")
        for _ in range(_MAX_ATTEMPTS):
            with ranks.region("Checkpoints.load_latest()"):
                steps, faults = self._steps_and_faults(ranks)
            for step in steps:
                try:
                    self._load(state, step, accept, trusted)
                except CheckpointError as error:
                    if self._was_removed(ranks, step):
                        break  # another process saves and has removed it: list the steps again
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
            f"{_MAX_ATTEMPTS} times before it was read. Load with a larger keep= there."
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

    def _was_removed(self, ranks: CheckpointGroup, step: int) -> bool:
        """Return whether the checkpoint no longer exists, as the first rank sees it. Collective."""
        still_exists = ranks.comm.rank > 0 or step in list_steps(self.folder)
        return ranks.gather_numbers(1 if still_exists else 2)[0] == 2

    def _steps_and_faults(self, ranks: CheckpointGroup) -> tuple[list[int], list[str]]:
        """Return steps, newest first, and a fault if ``latest`` names another. Collective."""
        if ranks.comm.rank == 0:
            self._warn_of_names(malformed_step_names(self.folder))
        for _ in range(_MAX_ATTEMPTS):
            steps = broadcast_steps(ranks, self.folder)
            latest_plus_one = ranks.broadcast_number(
                self._read_latest() if ranks.comm.rank == 0 else 0
            )
            latest = latest_plus_one - 1
            if not latest_plus_one or [latest] == steps[:1]:
                return steps, []
            is_step = latest_plus_one < NO_STEP
            # A folder that is listed while another process saves and removes in it may miss both
            # the new checkpoint and the old one.
            if not is_step or latest in steps or self._was_removed(ranks, latest):
                break
        return steps, [f"{LATEST} names {f'step-{latest}' if is_step else 'none'}"]

    def _read_latest(self) -> int:
        """Return the step in ``latest`` plus 1; 0 without the file, NO_STEP if it names none."""
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
"""Bytes of ``latest`` that are read."""


def _remove_old_checkpoint(path: Path) -> None:
    """Remove an old checkpoint and nothing else; of a link only the link.

    Raises:
        OSError: a file system operation failed.
    """
    if path.is_symlink():
        path.unlink()
        return
    unrelated = unrelated_names(path)
    if unrelated:  # the folder keeps its name and these files
        remove_checkpoint_files(path)
        logger.warning("%s is removed, but for what no checkpoint has: %s", path, unrelated[:3])
        return
    discarded = path.with_name(f".{path.name}.discarded")
    if is_folder(discarded):
        remove_checkpoint(discarded)
    # Renamed first: a process that is killed while it removes files must leave no damaged step-N.
    os.rename(path, discarded)
    remove_checkpoint(discarded)
