"""The options of a run: parsed, validated once, then frozen."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pretraining.architecture import Architecture
from pretraining.corpus import check_corpus
from pretraining.data_options import DATA_DEFAULTS
from pretraining.defaults import OF_PHASES, phases_of, refuse_flags, take_architecture
from pretraining.errors import UsageError
from pretraining.files import blaming, write_whole
from pretraining.parser import (
    DtypeName,
    LambVariantName,
    OptimizerName,
    new_parser,
    option,
)
from pretraining.phases import FIELDS, Phase, spans
from pretraining.rundir import CONFIG_FILE, check_unused, newest_run_dir, next_run_dir
from shardfuse import ShardConfig
from shardfuse.optim.dtensors import config_for

DEFAULT_LR: dict[str, float] = {
    "lamb": 1e-2,
    "adamw": 2e-3,
    "adam": 2e-3,
    "bertadam": 2e-3,
    "muon": 2e-3,
    "sgd": 0.5,
}
"""Peak learning rates that learn with the default model, batch and number of steps."""

_IDENTITY = (
    "vocab_size",
    "vocab_words",
    "jsonl_key",
    "model_size",
    "dropout",
    "optimizer",
    "lamb_variant",
    "weight_decay",
    "betas",
    "eps",
    "max_grad_norm",
    "dtype",
    "seed",
    "sharding",
    "eval_samples",
)
"""Options that decide the losses: `--resume` takes them from the run and lets none change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Paths are as given; sizes count samples, tokens or steps as the name says."""

    corpus: tuple[Path, ...]
    corpus_words: int
    data_dir: Path
    vocab_size: int
    vocab_words: int
    jsonl_key: str
    strict: bool
    init_from: Path | None
    """Folder of a transformers checkpoint that the run begins with."""
    architecture: Architecture
    """Of that checkpoint; empty where there is none."""
    model_size: str
    """Google's name, or layers x width of a checkpoint's other shape."""
    dropout: float
    optimizer: OptimizerName
    lamb_variant: LambVariantName
    weight_decay: float
    betas: tuple[float, float]
    eps: float | None
    """None: the optimizer's own."""
    max_grad_norm: float
    """Bound of the global gradient norm; 0 means no clipping."""
    phases: tuple[Phase, ...]
    """One after the other; without a recipe there is one."""
    dtype: DtypeName
    seed: int
    device: Literal["auto", "cpu"]
    bucket_cap_mb: float
    fsdp: bool
    """On several ranks FSDP2 shards the model."""
    sharding: str
    """Other options of ShardConfig, as a JSON object."""
    run_dir: Path
    is_numbered: bool
    """The run directory was not named: any other number does as well."""
    resume: str  # "", "yes" or "auto", which is "" where there is no run to continue
    save_every: int
    async_save: bool
    eval_every: int
    eval_samples: int
    log_every: int
    norms_every: int
    """Steps between two whose norms are noted; 0 for none."""
    tensorboard: bool
    timeout_seconds: float

    def __post_init__(self) -> None:
        for name in ("corpus_words", "vocab_size", "vocab_words", "eval_samples"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("save_every", "eval_every", "log_every", "timeout_seconds", "bucket_cap_mb"):
            self._require(name, getattr(self, name) > 0, "greater than 0")
        for name in ("weight_decay", "max_grad_norm", "seed", "norms_every"):
            self._require(name, getattr(self, name) >= 0, "0 or greater")
        self._require("weight_decay", self.weight_decay < float("inf"), "a number")
        self._require("seed", self.seed < 1 << 63, "below 2**63")
        self._require("timeout_seconds", self.timeout_seconds < 1e9, "below 1e9")
        self._require("dropout", 0 <= self.dropout < 1, "from 0 to below 1")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "from 0 to below 1")
        layers = "left out with --fsdp, which sends layers"
        self._require("bucket_cap_mb", not self.fsdp or self.bucket_cap_mb == 25, layers)
        if self.eps is not None:
            self._require("eps", self.eps >= 0, "0 or greater")
            self._require("eps", self.eps < float("inf"), "a number")
            self._require("eps", self.optimizer != "sgd", "left out with sgd, which has none")
        self.shard_config()
        self._check_positions()

    def shard_config(self) -> ShardConfig:
        """Return how the optimizer is sharded; raises `UsageError`."""
        try:
            options = json.loads(self.sharding)
            # Checkpoints are sharded: nothing is ever consolidated.
            own = {"bucket_cap_mb": self.bucket_cap_mb, "consolidate_every": 0}
            config = ShardConfig.of({**({} if self.fsdp else own), **options})
            if self.fsdp:
                config_for(config)  # raises for options of what FSDP2 does
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"--sharding must be a JSON object of ShardConfig's options, got {self.sharding}: "
                f"{error}"
            ) from error
        if self.init_from is not None and not config.broadcast_params:
            raise UsageError(
                "--sharding: broadcast_params must not be false with --init-from, whose weights "
                "rank 0 alone reads; drop it"
            )
        return config

    def _check_positions(self) -> None:
        positions = self.architecture.get("max_position_embeddings", self.max_seq_len)
        if positions < self.max_seq_len:
            raise UsageError(
                f"--init-from: {self.init_from} has {positions} positions, --seq-len (or a phase) "
                f"asks for {self.max_seq_len}; use at most {positions}, or another checkpoint"
            )

    def _require(self, name: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise UsageError(f"{option(name)} must be {wanted}, got {getattr(self, name)}")

    @property
    def steps(self) -> int:
        """Return the steps of all phases."""
        return spans(self.phases)[-1].stop

    @property
    def max_seq_len(self) -> int:
        """Return the length of the longest sequences, for which the model has positions."""
        return max(phase.seq_len for phase in self.phases)

    def is_sharded_on(self, world_size: int) -> bool:
        """Return whether FSDP2 shards the model on so many ranks."""
        return self.fsdp and world_size > 1

    def check_batches(self, world_size: int) -> None:
        """Raise `UsageError` if a phase's batch cannot be split over so many ranks."""
        for phase in self.phases:
            phase.micro_batches(world_size)


def check_options(argv: Sequence[str], world_size: int) -> None:
    """Raise `UsageError` for what is wrong with the options themselves.

    No file is looked at, so every rank comes to the same verdict, and at once.
    """
    arguments = new_parser().parse_args(argv)
    if arguments.resume == "auto" and arguments.run_dir is None:
        raise UsageError("--resume auto needs --run-dir: a restart has to find the same folder")
    if arguments.dry_run is not None:
        if arguments.dry_run < 0:
            raise UsageError(f"--dry-run must be a number of ranks, got {arguments.dry_run}")
        world_size = arguments.dry_run or world_size
        if arguments.resume:
            raise UsageError("--dry-run is of a new run; drop --resume")
    if arguments.resume != "yes" and arguments.recipe is None:
        _to_config(arguments, Path(), [{}]).check_batches(world_size)


def dry_run_of(argv: Sequence[str]) -> int | None:
    """Return for how many ranks a run is only to be shown, 0 for those that are here, or None."""
    num_ranks: int | None = new_parser().parse_args(argv).dry_run
    return num_ranks


def parse_config(argv: Sequence[str], runs_dir: Path = Path("runs")) -> RunConfig:
    """Parse the command line; raise `UsageError` where it cannot make a run.

    With `--resume`, options that are not given come from the run that is continued. What files and
    folders there are is for one rank to find out, before it tells the others.
    """
    parser = new_parser()
    first = parser.parse_args(argv)
    if first.resume == "auto" and not (first.run_dir / CONFIG_FILE).exists():
        first.resume = ""
    if first.resume:
        run_dir = first.run_dir or newest_run_dir(runs_dir)
        config = _resumed_config(parser, argv, run_dir)
        remedy = f"restore it, as {run_dir} was made with it, or name a copy"
    else:
        run_dir = first.run_dir or next_run_dir(runs_dir)
        with blaming("--run-dir", run_dir):
            check_unused(run_dir)
        config = _new_config(parser, argv, run_dir)
        config = dataclasses.replace(config, is_numbered=first.run_dir is None, resume="")
        remedy = "name an existing one"
    check_corpus(config.corpus, remedy)
    return config


def _new_config(parser: argparse.ArgumentParser, argv: Sequence[str], run_dir: Path) -> RunConfig:
    recipe = parser.parse_args(argv).recipe
    phases = phases_of(recipe, parser, argv) if recipe else [{}]
    take_architecture(parser, argv)
    try:
        return _to_config(parser.parse_args(argv), run_dir, phases)
    except TypeError as error:
        raise UsageError(f"--recipe: {recipe}: {error}") from error


def _resumed_config(
    parser: argparse.ArgumentParser, argv: Sequence[str], run_dir: Path
) -> RunConfig:
    stored = read_stored_config(run_dir)
    try:
        phases: Sequence[dict[str, Any]] = stored["phases"]
        known = {action.dest for action in parser._actions} | {"architecture"}
        defaults = {name: value for name, value in stored.items() if name in known}
        if len(phases) == 1:
            first = dataclasses.asdict(Phase(**phases[0]))
            defaults |= {name: first[name] for name in OF_PHASES if name in known}
        else:
            refuse_flags(argv, f"of the phases of {run_dir}")
        parser.set_defaults(**defaults)
        recipe = parser.parse_args(argv).recipe
        if recipe:
            phases = phases_of(recipe, parser, argv)
            if stored["architecture"]:
                sizes = ("model_size", "vocab_size")
                parser.set_defaults(**{name: stored[name] for name in sizes})
        elif len(phases) == 1:
            phases = [{"micro_batch_size": phases[0]["micro_batch_size"]}]
        config = _to_config(parser.parse_args(argv), run_dir, phases)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise _damaged(run_dir, str(error)) from error
    if config.init_from is not None and str(config.init_from.absolute()) != stored["init_from"]:
        raise UsageError(
            f"--run-dir {run_dir} was made with --init-from {stored['init_from']}, not "
            f"{config.init_from}; drop the option, or start another run in another folder"
        )
    _check_same_run(config, stored)
    return config


def stored_config(run_dir: Path) -> RunConfig:
    """Return the options of the run in a folder; raises `UsageError`. No text is looked at."""
    argv = ["--resume", "--run-dir", str(run_dir)]
    return _resumed_config(new_parser(), argv, run_dir)


def _to_config(
    arguments: argparse.Namespace, run_dir: Path, phases: Sequence[dict[str, Any]]
) -> RunConfig:
    """Build a configuration; `phases` have what differs from the options."""
    values = {**vars(arguments), "run_dir": run_dir, "is_numbered": False}
    for name in ("recipe", "dry_run"):
        del values[name]
    common = {name: values.pop(name) for name in FIELDS if name in values}
    lr = DEFAULT_LR[arguments.optimizer] if common["lr"] is None else common["lr"]
    common |= {"lr": lr, "carry": "all"}
    sizes = common.pop("micro_batch_size")
    if sizes is None:
        sizes = [phase.get("micro_batch_size", 0) for phase in phases]
    elif len(sizes) == 1:
        sizes = sizes * len(phases)
    if len(sizes) != len(phases):
        raise UsageError(
            f"--micro-batch-size has {len(sizes)} numbers for {len(phases)} phases; give one for "
            "all of them, or one for each"
        )
    pairs = zip(phases, sizes, strict=True)
    values["phases"] = [common | phase | {"micro_batch_size": size} for phase, size in pairs]
    return _from_values(values)


def _from_values(values: dict[str, Any]) -> RunConfig:
    """Build a configuration from JSON's types."""
    paths = {name: Path(values[name]) for name in ("data_dir", "run_dir")}
    if values["init_from"] is not None:
        paths["init_from"] = Path(values["init_from"])
    own = {
        "corpus": tuple(Path(path) for path in values["corpus"]),
        "betas": tuple(values["betas"]),
        "phases": tuple(Phase(**phase) for phase in values["phases"]),
    }
    return RunConfig(**values | paths | own)


def to_json(config: RunConfig) -> dict[str, Any]:
    """Return the fields in JSON's types; paths are absolute, as others may work elsewhere."""
    values = dataclasses.asdict(config)
    for name in ("data_dir", "run_dir", "init_from"):
        if values[name] is not None:
            values[name] = str(values[name].absolute())
    values["phases"] = list(values["phases"])
    return values | {"corpus": [str(path.absolute()) for path in config.corpus]}


def from_json(values: dict[str, Any]) -> RunConfig:
    """Return what `to_json` was given."""
    return _from_values(values)


def identity(config: RunConfig) -> dict[str, Any]:
    """Return the options that decide the losses, in JSON's types."""
    values = {name: getattr(config, name) for name in _IDENTITY}
    return values | {"betas": list(config.betas)} | _identity_of(config.phases)


def _identity_of(phases: Sequence[Phase]) -> dict[str, Any]:
    """Return the options of one phase, or lists of those of several."""
    if len(phases) == 1:
        names = [name for name in OF_PHASES if name != "carry"]
        return {name: getattr(phases[0], name) for name in names}
    return {name: [getattr(phase, name) for phase in phases] for name in OF_PHASES}


def read_stored_config(run_dir: Path) -> dict[str, Any]:
    """Return what `write_stored_config` wrote; raises `UsageError`."""
    try:
        stored: Any = json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--resume: {run_dir / CONFIG_FILE} cannot be read; name the folder of a run"
        ) from error
    except ValueError as error:
        raise _damaged(run_dir, str(error)) from error
    if not isinstance(stored, dict) or "corpus_digest" not in stored:
        raise _damaged(run_dir, "it has no corpus_digest")
    if "phases" not in stored:  # of a run that was begun before there were any
        one = {name: stored.pop(name) for name in FIELDS if name in stored}
        stored["phases"] = [{"carry": "all", **one}]
    later = {"sharding": "{}", "async_save": False, "eps": None, "init_from": None}
    later |= {"architecture": {}, "norms_every": 50, "tensorboard": False, "fsdp": False}
    return {**later, **DATA_DEFAULTS, **stored}


def _damaged(run_dir: Path, reason: str) -> UsageError:
    return UsageError(
        f"--resume: {run_dir / CONFIG_FILE} cannot be read as that of a run "
        f"({' '.join(reason.split())}); restore it from a copy"
    )


def write_stored_config(config: RunConfig, texts: Sequence[Path], corpus_digest: str) -> None:
    """Write what `--resume` needs to know: options, text files and the prepared text's digest."""
    stored = to_json(dataclasses.replace(config, corpus=tuple(texts)))
    stored["corpus_digest"] = corpus_digest
    for name in ("run_dir", "is_numbered", "resume"):
        del stored[name]
    write_whole(config.run_dir / CONFIG_FILE, json.dumps(stored, indent=2) + "\n")


def _check_same_run(config: RunConfig, stored: dict[str, Any]) -> None:
    phases = tuple(Phase(**phase) for phase in stored["phases"])
    was = {**stored, **_identity_of(phases)}
    for name, asked in identity(config).items():
        if name not in was or asked != was[name]:
            raise UsageError(
                f"--run-dir {config.run_dir} was made with {option(name)} {was.get(name)}, "
                f"not {asked}; drop the option, or start another run in another folder"
            )
