"""The options of a run: parsed, validated once, then frozen."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from pretraining.corpus import check_corpus_files
from pretraining.errors import UsageError

ModelSizeName = Literal["tiny", "mini", "small", "base", "large"]
OptimizerName = Literal["lamb", "adamw", "adam", "bertadam", "sgd"]
DtypeName = Literal["fp32", "bf16", "fp16"]
LambVariantName = Literal["npu", "apex", "nvlamb", "google", "paddle", "deepspeed"]

DEFAULT_LR: dict[str, float] = {
    "lamb": 1e-2,
    "adamw": 2e-3,
    "adam": 2e-3,
    "bertadam": 2e-3,
    "sgd": 0.5,
}
"""Peak learning rates that learn with the default model, batch and number of steps."""

CONFIG_FILE = "config.json"

_IDENTITY = (
    "vocab_size",
    "model_size",
    "seq_len",
    "dropout",
    "optimizer",
    "lamb_variant",
    "lr",
    "weight_decay",
    "betas",
    "warmup",
    "decay_power",
    "max_grad_norm",
    "steps",
    "global_batch_size",
    "dtype",
    "seed",
    "eval_samples",
)
"""Options that decide the losses: `--resume` takes them from the run and lets none change."""

_MIN_SEQ_LEN = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run. Paths are as given; sizes count samples, tokens or steps as the name says."""

    corpus: tuple[Path, ...]
    corpus_words: int
    data_dir: Path
    vocab_size: int
    model_size: ModelSizeName
    seq_len: int
    dropout: float
    optimizer: OptimizerName
    lamb_variant: LambVariantName
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    warmup: float
    """Share of the steps in which the learning rate rises linearly."""
    decay_power: float
    max_grad_norm: float
    """Bound of the global gradient norm; 0 means no clipping."""
    steps: int
    global_batch_size: int
    micro_batch_size: int
    """Samples in one forward pass of one rank; 0 means the rank's whole share of the batch."""
    dtype: DtypeName
    seed: int
    device: Literal["auto", "cpu"]
    bucket_cap_mb: float
    run_dir: Path
    resume: bool
    save_every: int
    eval_every: int
    eval_samples: int
    log_every: int
    timeout_seconds: float

    def __post_init__(self) -> None:
        for name in ("corpus_words", "vocab_size", "steps", "global_batch_size", "eval_samples"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("save_every", "eval_every", "log_every", "timeout_seconds", "bucket_cap_mb"):
            self._require(name, getattr(self, name) > 0, "greater than 0")
        for name in ("weight_decay", "max_grad_norm", "decay_power", "micro_batch_size", "seed"):
            self._require(name, getattr(self, name) >= 0, "0 or greater")
        self._require("seq_len", self.seq_len >= _MIN_SEQ_LEN, f"at least {_MIN_SEQ_LEN}")
        self._require("lr", 0 < self.lr < math.inf, "a number greater than 0")
        self._require("dropout", 0 <= self.dropout < 1, "from 0 to below 1")
        self._require("warmup", 0 <= self.warmup <= 1, "a share of the steps from 0 to 1")
        self._require("betas", all(0 <= beta < 1 for beta in self.betas), "from 0 to below 1")
        check_corpus_files(self.corpus)

    def _require(self, name: str, is_valid: bool, wanted: str) -> None:
        if not is_valid:
            raise UsageError(f"{option(name)} must be {wanted}, got {getattr(self, name)}")

    def micro_batches(self, world_size: int) -> MicroBatches:
        """Split the global batch over ranks and micro-batches, or say why that cannot work."""
        size, micro = self.global_batch_size, self.micro_batch_size
        if size % world_size:
            nearest = max(1, round(size / world_size)) * world_size
            raise UsageError(
                f"--global-batch-size {size} cannot be split over {world_size} ranks; "
                f"use a multiple such as {nearest}, or another --nproc-per-node"
            )
        share = size // world_size
        micro = micro or share
        if share % micro:
            raise UsageError(
                f"--micro-batch-size {micro} does not divide a rank's {share} samples "
                f"(--global-batch-size {size} over {world_size} ranks); use a divisor of {share}"
            )
        return MicroBatches(samples_per_rank=share, size=micro, number=share // micro)


@dataclasses.dataclass(frozen=True)
class MicroBatches:
    """How one rank works through its share of the global batch, all in samples."""

    samples_per_rank: int
    size: int
    number: int


def option(name: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


def _new_parser() -> _Parser:
    parser = _Parser(
        prog="pretrain.py",
        description="Pretrain BERT with sharded, fused optimizers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    _add_data_options(parser.add_argument_group("data"))
    _add_model_options(parser.add_argument_group("model"))
    _add_training_options(parser.add_argument_group("training"))
    _add_run_options(parser.add_argument_group("run"))
    return parser


def _add_data_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--corpus", type=Path, nargs="+", default=(), metavar="FILE",
        help="text: one sentence per line, blank lines between documents "
        "(default: docstrings of the installed Python packages)")  # fmt: skip
    add("--corpus-words", type=int, default=1_100_000, help="size of the docstring corpus")
    add("--data-dir", type=Path, default=Path("runs/data"), help="cache of prepared text")
    add("--vocab-size", type=int, default=8192, help="WordPiece vocabulary")


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model-size", choices=get_args(ModelSizeName), default="tiny", help="Google's sizes")
    add("--seq-len", type=int, default=32, help="tokens of a sentence pair")
    add("--dropout", type=float, default=0.0, help="BERT's own is 0.1")


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--optimizer", choices=get_args(OptimizerName), default="lamb", help="sharded optimizer")
    add("--lamb-variant", choices=get_args(LambVariantName), default="google",
        help="LAMB's rule")  # fmt: skip
    add("--lr", type=float, help="peak learning rate (default: one per optimizer, see README)")
    add("--weight-decay", type=float, default=0.01, help="not on biases and LayerNorm")
    add("--betas", type=float, nargs=2, default=(0.9, 0.99), metavar=("B1", "B2"),
        help="moment decay; sgd takes B1 as momentum")  # fmt: skip
    add("--warmup", type=float, default=0.05, help="share of the steps")
    add("--decay-power", type=float, default=1.0, help="of the polynomial decay to 0")
    add("--max-grad-norm", type=float, default=1.0, help="0: no clipping")
    add("--steps", type=int, default=2700, help="optimizer steps")
    add("--global-batch-size", type=int, default=48, help="samples per step, over all ranks")
    add("--micro-batch-size", type=int, default=0,
        help="samples per forward pass; 0: the rank's whole share")  # fmt: skip
    add("--dtype", choices=get_args(DtypeName), default="fp32", help="autocast type")
    add("--seed", type=int, default=0, help="of weights, samples and dropout")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: accelerator if any")
    add("--bucket-cap-mb", type=float, default=25, help="size of one collective, MiB")


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--run-dir", type=Path, help="default: a new runs/bert-NNN; with --resume the newest")
    add("--resume", action="store_true", help="continue from the last checkpoint")
    add("--save-every", type=int, default=1000, help="steps between checkpoints")
    add("--eval-every", type=int, default=250, help="steps between held-out evaluations")
    add("--eval-samples", type=int, default=512, help="held-out samples")
    add("--log-every", type=int, default=100, help="steps between lines where no bar can be shown")
    add("--timeout-seconds", type=float, default=120, help="of a collective")


def parse_config(argv: Sequence[str], runs_dir: Path = Path("runs")) -> RunConfig:
    """Parse the command line; raise `UsageError` where it cannot make a run.

    With `--resume`, options that are not given come from the run that is continued.
    """
    parser = _new_parser()
    first = parser.parse_args(argv)
    run_dir = first.run_dir or _default_run_dir(runs_dir, resume=first.resume)
    if not first.resume:
        if run_dir.is_file() or (run_dir.is_dir() and any(run_dir.iterdir())):
            raise UsageError(
                f"--run-dir {run_dir} is not empty; pass --resume to continue the run in it, "
                "or name another folder"
            )
        return _to_config(first, run_dir)
    stored = read_stored_config(run_dir)
    parser.set_defaults(**{name: value for name, value in stored.items() if hasattr(first, name)})
    config = _to_config(parser.parse_args(argv), run_dir)
    _check_same_run(config, stored)
    return config


def _to_config(arguments: argparse.Namespace, run_dir: Path) -> RunConfig:
    values = vars(arguments) | {"run_dir": run_dir}
    values["corpus"] = tuple(Path(path) for path in arguments.corpus)
    values["data_dir"] = Path(arguments.data_dir)
    values["betas"] = tuple(arguments.betas)
    if values["lr"] is None:
        values["lr"] = DEFAULT_LR[arguments.optimizer]
    return RunConfig(**values)


def _default_run_dir(runs_dir: Path, resume: bool) -> Path:
    numbers = [int(path.name[5:]) for path in runs_dir.glob("bert-*") if path.name[5:].isdigit()]
    if resume and not numbers:
        raise UsageError(f"--resume: {runs_dir} holds no run; name one with --run-dir")
    return runs_dir / f"bert-{max(numbers, default=0) + (not resume):03d}"


def read_stored_config(run_dir: Path) -> dict[str, Any]:
    """Return what `write_stored_config` wrote."""
    try:
        stored: dict[str, Any] = json.loads((run_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(
            f"--resume: {run_dir / CONFIG_FILE} cannot be read; name the folder of a run"
        ) from error
    return stored


def write_stored_config(config: RunConfig, texts: Sequence[Path], corpus_digest: str) -> None:
    """Write what `--resume` needs to know: options, text files and the prepared text's digest."""
    stored: dict[str, Any] = dataclasses.asdict(config) | {"corpus_digest": corpus_digest}
    for name in ("run_dir", "resume"):
        del stored[name]
    # The run may be resumed from another working directory.
    stored["corpus"] = [str(path.absolute()) for path in texts]
    stored["data_dir"] = str(config.data_dir.absolute())
    text = json.dumps(stored, indent=2)
    (config.run_dir / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _check_same_run(config: RunConfig, stored: dict[str, Any]) -> None:
    for name in _IDENTITY:
        asked = getattr(config, name)
        asked = list(asked) if isinstance(asked, tuple) else asked
        if name not in stored or asked != stored[name]:
            raise UsageError(
                f"--run-dir {config.run_dir} was made with {option(name)} {stored.get(name)}, "
                f"not {asked}; drop the option, or start another run in another folder"
            )
