"""The command line of pretrain.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn, get_args

from pretraining.data_options import add_data_options
from pretraining.errors import UsageError
from pretraining.phases import DecayFrom

ModelSizeName = Literal["tiny", "mini", "small", "base", "large"]
OptimizerName = Literal["lamb", "adamw", "adam", "bertadam", "muon", "sgd"]
DtypeName = Literal["fp32", "bf16", "fp16"]
LambVariantName = Literal["npu", "apex", "nvlamb", "google", "paddle", "deepspeed"]


def option(name: str) -> str:
    """Return the command-line spelling of a field."""
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (--help lists the options)")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Adds defaults, but not where there is none or the text has told it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = "(default:" in (action.help or "")
        if told or action.default is None or action.default is False or action.default == ():
            return action.help
        return super()._get_help_string(action)


def new_parser() -> Parser:
    """Return the parser of all options; it raises `UsageError`."""
    parser = Parser(
        prog="pretrain.py",
        description="Pretrain BERT with sharded, fused optimizers.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    add_data_options(parser.add_argument_group("data"))
    _add_model_options(parser.add_argument_group("model"))
    _add_training_options(parser.add_argument_group("training"))
    _add_run_options(parser.add_argument_group("run"))
    parser.set_defaults(architecture={})
    return parser


def given(argv: Sequence[str]) -> set[str]:
    """Return the names of the options that a command line has."""
    parser = new_parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    parser._defaults.clear()
    return set(vars(parser.parse_args(argv)))


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--init-from", type=Path, metavar="DIR",
        help="folder of a transformers checkpoint: its weights, sizes and tokenizer")  # fmt: skip
    add("--model-size", choices=get_args(ModelSizeName), default="tiny", help="Google's sizes")
    add("--seq-len", type=int, default=32, help="tokens of a sentence pair")
    add("--dropout", type=float, default=0.0, help="BERT's own is 0.1")


def _add_training_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--recipe", help="file of options and phases, or one of recipes/, such as nvidia-large")
    add("--optimizer", choices=get_args(OptimizerName), default="lamb", help="sharded optimizer")
    add("--lamb-variant", choices=get_args(LambVariantName), default="google",
        help="LAMB's rule")  # fmt: skip
    add("--lr", type=float, help="peak learning rate (default: one per optimizer, see README)")
    add("--weight-decay", type=float, default=0.01, help="not on biases and LayerNorm")
    add("--betas", type=float, nargs=2, default=(0.9, 0.99), metavar=("B1", "B2"),
        help="moment decay; sgd takes B1 as momentum, muon both for AdamW")  # fmt: skip
    add("--eps", type=float, help="beside the root of the second moment (default: the optimizer's)")
    add("--warmup", type=float, default=0.05, help="share of the steps")
    add("--decay-power", type=float, default=1.0, help="of the polynomial decay to 0")
    add("--warmup-from", type=float, default=0.0, help="share of --lr that the rise begins at")
    add("--decay-from", choices=get_args(DecayFrom), default="warmup",
        help="start: as if there had been no rise")  # fmt: skip
    add("--max-grad-norm", type=float, default=1.0, help="0: no clipping")
    add("--steps", type=int, default=2700, help="optimizer steps")
    add("--global-batch-size", type=int, default=48, help="samples per step, over all ranks")
    add("--micro-batch-size", type=int, nargs="+", metavar="N",
        help="samples per forward pass, one number or one for each phase "
        "(default: 0, the rank's whole share)")  # fmt: skip
    add("--dtype", choices=get_args(DtypeName), default="fp32", help="autocast type")
    add("--seed", type=int, default=0, help="of weights, samples and dropout")
    add("--device", choices=("auto", "cpu"), default="auto", help="auto: accelerator if any")
    add("--bucket-cap-mb", type=float, default=25, help="size of one collective, MiB")
    add("--fsdp", action="store_true",
        help="shard parameters and gradients, too: FSDP2 on each layer and the root")  # fmt: skip
    add("--sharding", default="{}", metavar="JSON",
        help='more of ShardConfig, such as {"stage": 2}')  # fmt: skip


def _add_run_options(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--run-dir", type=Path, help="default: a new runs/bert-NNN; with --resume the newest")
    add("--resume", nargs="?", const="yes", default="", choices=("yes", "auto"),
        help="continue from the last checkpoint; auto: or begin, if there is none")  # fmt: skip
    add("--dry-run", nargs="?", type=int, const=0, metavar="RANKS",
        help="show what the run would be on so many ranks, and train nothing")  # fmt: skip
    add("--save-every", type=int, default=1000, help="steps between checkpoints")
    add("--async-save", action="store_true", help="write checkpoints while training continues")
    add("--eval-every", type=int, default=250, help="steps between held-out evaluations")
    add("--eval-samples", type=int, default=512, help="held-out samples")
    add("--log-every", type=int, default=100, help="steps between lines where no bar can be shown")
    add("--norms-every", type=int, default=50,
        help="steps between two whose norms and trust ratios are noted; 0: none")  # fmt: skip
    add("--tensorboard", action="store_true", help="write all numbers for TensorBoard, too")
    add("--timeout-seconds", type=float, default=120, help="of a collective")
