"""What a study compares, and which run its results ask for next. Pure functions, no files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from pretraining.config import check_options
from pretraining.errors import UsageError
from pretraining.parser import given, option


@dataclasses.dataclass(frozen=True)
class Method:
    """An optimizer, and where the search for its learning rate begins at the smallest batch."""

    options: tuple[str, ...]
    first_lr: float


METHODS = {
    "lamb-google": Method(("--optimizer", "lamb", "--lamb-variant", "google"), 5e-3),
    "lamb-npu": Method(("--optimizer", "lamb", "--lamb-variant", "npu"), 5e-3),
    "adamw": Method(("--optimizer", "adamw"), 1e-3),
    "bertadam": Method(("--optimizer", "bertadam"), 1e-3),
}

GRID_FACTOR = 2.0
"""Between one learning rate that is tried and the next."""

WARMUP = 0.1
"""Share of the steps, the same for all."""

_OWN = {
    *("optimizer", "lamb_variant", "lr", "seed", "steps", "global_batch_size", "warmup"),
    *("run_dir", "resume", "recipe", "dry_run"),
}
"""Options by which trials differ, or of which the table tells."""


@dataclasses.dataclass(frozen=True, order=True)
class Trial:
    """One run."""

    method: str
    batch: int
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.batch}-{self.lr:g}-seed{self.seed}"


Outcomes = Mapping[Trial, float]
"""Held-out MLM loss, in nats, of each run that has ended; inf where the loss was not finite."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Design:
    """Methods x batches, a search for the learning rate in each, seeds at the one that is best."""

    methods: tuple[str, ...] = tuple(METHODS)
    batches: tuple[int, ...]
    samples: int
    """Of each run, whatever its batch; a batch takes samples / batch steps."""
    seeds: int
    extensions: int
    """How far beyond its first three learning rates a search goes on while the last is the best."""
    options: tuple[str, ...]
    """Of pretrain.py, for every run."""

    @classmethod
    def of(cls, base: Design, changes: Mapping[str, Any]) -> Design:
        """Return `base` with changes, lists or tuples; raises `UsageError`."""
        values = {key: _frozen(value) for key, value in changes.items()}
        if "options" in values:
            values["options"] = base.options + values["options"]
        design = dataclasses.replace(base, **values)
        design.check()
        return design

    def check(self) -> None:
        """Raise `UsageError` where no study can be made of it."""
        if self.samples < 1 or self.seeds < 1 or not self.batches or min(self.batches) < 1:
            raise UsageError("--samples, --seeds and --batches must be at least 1")
        if list(self.batches) != sorted(set(self.batches)):
            raise UsageError(f"--batches must rise, got {' '.join(map(str, self.batches))}")
        for batch in self.batches:
            if self.samples % batch:
                raise UsageError(
                    f"--batches: {batch} does not divide the {self.samples} samples of a run; "
                    f"use powers of two, or --samples {batch * max(1, self.samples // batch)}"
                )
        for name in sorted(given(self.options) & _OWN):
            raise UsageError(f"{option(name)} is the study's own to choose; drop it after --")
        for method in self.methods:
            trial = Trial(method, self.batches[0], METHODS[method].first_lr, 0)
            check_options(self.arguments(trial), 1)

    def arguments(self, trial: Trial) -> list[str]:
        """Return the options of pretrain.py that make a trial, but its folder."""
        steps = self.samples // trial.batch
        own = {"lr": trial.lr, "seed": trial.seed, "steps": steps, "warmup": WARMUP}
        own |= {"global-batch-size": trial.batch, "eval-every": steps, "log-every": steps}
        # A kill costs a quarter of a run at most.
        own |= {"save-every": math.ceil(steps / 4)}
        pairs = [(f"--{name}", str(value)) for name, value in own.items()]
        options = [*METHODS[trial.method].options, *(part for pair in pairs for part in pair)]
        return [*options, *self.options]

    def wanted(self, outcomes: Outcomes) -> Iterator[Trial]:
        """Yield the runs that what is known asks for, the first ones first."""
        for method in self.methods:
            for search in self.searches(method, outcomes):
                yield from search.wanted()

    def searches(self, method: str, outcomes: Outcomes) -> Iterator[Search]:
        """Yield a method's search at each batch, up to the first whose result is open.

        A batch starts from the best learning rate of the one before, times the square root of
        their ratio.
        """
        start = METHODS[method].first_lr
        before = self.batches[0]
        for batch in self.batches:
            start *= math.sqrt(batch / before)
            search = Search(self, method, batch, start, outcomes)
            yield search
            best = search.best
            if best is None:
                return
            start, before = best.lr, batch


@dataclasses.dataclass(frozen=True)
class Search:
    """The search for one method's learning rate at one batch, and the seeds at the best one."""

    design: Design
    method: str
    batch: int
    start: float
    outcomes: Outcomes

    def trial(self, rung: int, seed: int = 0) -> Trial:
        """Return the run so many factors above the start."""
        lr = float(f"{self.start * GRID_FACTOR**rung:.3g}")
        return Trial(self.method, self.batch, lr, seed)

    def rungs(self) -> range:
        """Return the learning rates that the results so far ask for: three, and more at an edge."""
        low, high = -1, 1
        limit = 1 + self.design.extensions
        while all(self.trial(rung) in self.outcomes for rung in range(low, high + 1)):
            best = self._best_of(range(low, high + 1))
            if best == low and low > -limit:
                low -= 1
            elif best == high and high < limit:
                high += 1
            else:
                break
        return range(low, high + 1)

    def _best_of(self, rungs: range) -> int:
        return min(rungs, key=lambda rung: self.outcomes[self.trial(rung)])

    @property
    def best(self) -> Trial | None:
        """Return the run of seed 0 with the lowest loss, or None while the search is open."""
        rungs = self.rungs()
        if any(self.trial(rung) not in self.outcomes for rung in rungs):
            return None
        return self.trial(self._best_of(rungs))

    @property
    def is_at_edge(self) -> bool:
        """Return whether the search ended where a better learning rate may lie beyond."""
        rungs = self.rungs()
        return self.best in (self.trial(rungs[0]), self.trial(rungs[-1]))

    def chosen(self) -> list[Trial]:
        """Return the runs at the best learning rate, one for each seed; none while it is open.

        Where all have diverged there is one.
        """
        best = self.best
        if best is None or math.isinf(self.outcomes[best]):
            return [] if best is None else [best]
        return [dataclasses.replace(best, seed=seed) for seed in range(self.design.seeds)]

    def wanted(self) -> Iterator[Trial]:
        """Yield the runs that are missing."""
        trials = [self.trial(rung) for rung in self.rungs()] + self.chosen()
        yield from (trial for trial in trials if trial not in self.outcomes)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


WHOLE = Design(
    batches=(16, 32, 64, 128, 256, 512),
    samples=32_768,
    seeds=3,
    extensions=3,
    options=("--eval-samples", "2048"),
)

QUICK = Design(
    batches=(16, 128, 512),
    samples=8_192,
    seeds=1,
    extensions=0,
    options=("--eval-samples", "1024", "--corpus-words", "300000", "--vocab-size", "4096"),
)
