"""``python -m shardfuse plan`` and ``compare-variants``: options, tables, JSON and a picture."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shardfuse import optim
from shardfuse.config import ShardConfig
from shardfuse.optim import LambComparison, compare_lamb_variants
from shardfuse.plan.budget import Budget, plan
from shardfuse.plan.fsdp import plan_fsdp
from shardfuse.plan.models import count_elements, params_of, shapes_of
from shardfuse.plan.timing import Speeds, Times, predict
from shardfuse.rules.lamb import PRESETS
from shardfuse.rules.muon import is_named_like_embedding

_MIB = 1 << 20


def plan_to_json(budget: Budget, times: Times | None) -> dict[str, Any]:
    """Return everything that describe_plan() prints, in JSON types, bytes and seconds."""
    found = asdict(budget)
    del found["buckets"]
    found["world_size"], found["total_nbytes"] = budget.world_size, budget.total_nbytes
    found["peak_nbytes"] = budget.peak_nbytes
    if times is not None:
        found["times"] = {**asdict(times), "exposed": times.exposed}
    return found


def describe_plan(budget: Budget, times: Times | None) -> str:
    """Return a table to print."""
    return "\n".join(
        [
            *_head_lines(budget),
            "",
            *_memory_lines(budget),
            "",
            *_traffic_lines(budget),
            *_time_lines(budget, times),
        ]
    )


def _head_lines(budget: Budget) -> Iterator[str]:
    ranks = f"{budget.world_size:,} ranks"
    if budget.num_replicas > 1:
        ranks += f", {budget.num_replicas:,} rows of {budget.num_shards:,} shards"
    yield f"{budget.numel:,} elements in {budget.num_params:,} parameters on {ranks}"
    padding = budget.padded_numel - budget.numel
    what = "buckets" if budget.buckets else "layers of FSDP2"
    yield (
        f"{budget.num_buckets:,} {what} of at most {budget.bucket_nbytes / _MIB:,.1f} MiB; "
        f"padding {padding:,} elements ({padding / budget.numel:.2%})"
    )


def _memory_lines(budget: Budget) -> Iterator[str]:
    rows = [(name, nbytes) for name, nbytes in budget.memory.items()]
    yield "Memory of one rank, without activations                MiB"
    yield from _table_lines([*rows, ("in all", budget.total_nbytes)])
    yield ""
    yield "Beside these for a time                                 MiB"
    yield from _table_lines(list(budget.for_a_time.items()))
    yield from _table_lines([("building, with the model, in all", budget.building_nbytes)])
    yield from _table_lines([("the most at any time", budget.peak_nbytes)])
    yield ""
    yield "The same optimizer by the ZeRO paper's formulas         MiB"
    rows = [(_NOT_HERE.get(name, name), nbytes) for name, nbytes in budget.published.items()]
    yield from _table_lines(rows)


_NOT_HERE = {"ZeRO-3": "ZeRO-3 (here by FSDP2 alone: --fsdp)"}


def _table_lines(rows: Sequence[tuple[str, int]]) -> Iterator[str]:
    for name, nbytes in rows:
        yield f"  {name:<42}{nbytes / _MIB:>14,.1f}"


def _traffic_lines(budget: Budget) -> Iterator[str]:
    yield "Collectives of a step                  axis       number   payload MiB   sent MiB a rank"
    for call in budget.collectives:
        payload, sent = call.payload_nbytes / _MIB, call.sent_nbytes / _MIB
        yield f"  {call.kind:<35}  {call.axis:<9}{call.number:>8,}{payload:>14,.2f}{sent:>18,.2f}"
    if not budget.collectives:
        yield "  none: one rank"
    if budget.exchange is not None:
        own, whole = budget.exchange.flops, budget.exchange.total_flops
        yield ""
        yield "Products that orthogonalise matrices in a step      TFLOP"
        yield f"  {'the rank that has most':<42}{own / 1e12:>14,.4f}"
        yield f"  {'all ranks':<42}{whole / 1e12:>14,.4f}"


def _time_lines(budget: Budget, times: Times | None) -> Iterator[str]:
    if times is None:
        return
    yield ""
    yield "Seconds of a step, by the speeds given (a model, see shardfuse/plan/timing.py)"
    for name, seconds in (
        ("forward and backward", times.compute),
        ("traffic alone", times.traffic),
        ("step", times.step),
        ("of it, exposed", times.exposed),
        ("step with nothing overlapped", times.without_overlap),
        ("step with both directions overlapped", times.with_overlap),
        ("DistributedDataParallel, replicated", times.ddp),
    ):
        yield f"  {name:<42}{seconds:>14.4f}"
    if times.step > 1.01 * times.ddp:
        yield _why_slower(budget, times)


def _why_slower(budget: Budget, times: Times) -> str:
    """Return the cause of a step that takes longer than DDP's."""
    text = f"The step takes {times.step / times.ddp:.2f} of DDP's time, because "
    if times.with_overlap < 0.99 * times.step:
        off = [
            name
            for name, is_on in zip(
                ("overlap_grad_sync", "overlap_param_sync"), budget.overlaps, strict=True
            )
            if not is_on
        ]
        where = "over a mesh" if budget.num_replicas > 1 else "by --sharding or on this transport"
        return f"{text}{' and '.join(off)} are off {where}."
    if budget.needs_all:
        return f"{text}the norms of this optimizer need all gradients before the first update."
    return f"{text}the all-gather of parameters is not hidden by forward."


def draw(budget: Budget, path: Path) -> None:
    """Draw the memory of one rank beside that of the published formulas, as a PNG.

    Raises:
        ValueError: the package matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ValueError("matplotlib is not installed: pip install matplotlib.") from None
    mpl.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    names = [*budget.published, "shardfuse"]
    left = 0.0
    for part, nbytes in budget.memory.items():
        axes.barh(len(names) - 1, nbytes / _MIB, left=left, label=part)
        left += nbytes / _MIB
    values = [nbytes / _MIB for nbytes in budget.published.values()]
    axes.barh(range(len(values)), values, color="0.75")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("MiB of one rank, without activations")
    axes.set_title(f"{budget.numel:,} elements on {budget.world_size:,} ranks", fontsize=10)
    # Below the axes, where it covers no bar.
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.4, -0.2), ncols=3)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _muon(params: Sequence[tuple[str, Any]], **options: Any) -> Any:
    """Return a ShardedMuon as of the model itself, whose embeddings and heads names tell."""
    for name, param in params:
        if is_named_like_embedding(name):
            param.use_muon = False
    return optim.ShardedMuon(params, **options)


_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adadelta": optim.ShardedAdadelta,
    "adam": optim.ShardedAdam,
    "adamp": optim.ShardedAdamP,
    "adamw": optim.ShardedAdamW,
    "bertadam": functools.partial(optim.ShardedBertAdam, lr=1e-4),
    "lamb": optim.ShardedLamb,
    "muon": _muon,
    "rmsprop": optim.ShardedRMSprop,
    "rmsproptf": optim.ShardedRMSpropTF,
    "sgd": functools.partial(optim.ShardedSGD, lr=0.1),
}


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("give an object, in braces")
        return found
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no JSON, such as '{{\"stage\": 2}}': {error}"
        ) from None


def installed_device() -> str:
    """Return the type of device for which the installed torch is built."""
    if importlib.util.find_spec("torch_npu") is not None:
        return "npu"
    return "cuda" if torch.version.cuda is not None else "cpu"


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    command.add_argument(
        "--model",
        required=True,
        help="bert-tiny to bert-large; a number of elements, such as 10b; package.module:callable, "
        "whose code is run, of an installed package or, looked for last, in the working directory",
    )
    command.add_argument("--world-size", type=int, required=True, help="ranks in all")
    command.add_argument(
        "--replicas", type=int, default=1, help="rows of a mesh (default: %(default)s)"
    )
    for name, choices, default, text in (
        ("--optimizer", sorted(_OPTIMIZERS), "adamw", "its class"),
        ("--dtype", sorted(_DTYPES), "fp32", "of parameters"),
        ("--device", ["npu", "cuda", "cpu"], installed_device(), "of the ranks"),
    ):
        command.add_argument(
            name, choices=choices, default=default, help=f"{text} (default: %(default)s)"
        )
    command.add_argument(
        "--fsdp",
        nargs="?",
        choices=sorted(_DTYPES),
        const=True,
        help="under FSDP2, which shards parameters, too: fully_shard() of each layer and the root; "
        "with a dtype, MixedPrecisionPolicy(param_dtype=)",
    )
    for name, text in (("--options", "of the optimizer"), ("--sharding", "as in ShardConfig")):
        command.add_argument(
            name,
            type=_json_object,
            default={},
            metavar="JSON",
            help=f"{text} (default: %(default)s)",
        )
    _add_times(command)
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")
    command.add_argument("--png", type=Path, metavar="FILE", help="draw the memory")


def _add_times(command: argparse.ArgumentParser) -> None:
    times = command.add_argument_group("times, where forward and backward are given")
    times.add_argument("--forward-ms", type=float, help="of all micro-batches of a step")
    times.add_argument("--backward-ms", type=float, help="likewise")
    times.add_argument(
        "--tokens", type=float, help="of one rank's batch, with --tflops in place of the above"
    )
    times.add_argument(
        "--tflops", type=float, help="that a rank reaches; 6 for each token and weight"
    )
    times.add_argument(
        "--link-gbit", type=float, default=100.0, help="each way (default: %(default)s)"
    )
    times.add_argument(
        "--latency-us", type=float, default=20.0, help="of a collective (default: %(default)s)"
    )
    times.add_argument(
        "--memory-gb", type=float, default=1000.0, help="GB a second (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        ValueError, TypeError: the options are invalid together.
    """
    if "sharding" in arguments.options:
        raise ValueError("Invalid --options: sharding has an option of its own, --sharding.")
    shapes = shapes_of(arguments.model)
    build = functools.partial(_OPTIMIZERS[arguments.optimizer], **arguments.options)
    common: dict[str, Any] = {
        "world_size": arguments.world_size,
        "num_replicas": arguments.replicas,
        "dtype": _DTYPES[arguments.dtype],
        "device": arguments.device,
        "sharding": ShardConfig.of(arguments.sharding),
    }
    if arguments.fsdp is None:
        budget = plan(shapes, build, **common)
    else:
        budget = plan_fsdp(shapes, build, travels_as=_DTYPES.get(arguments.fsdp), **common)
    times = _predict_times(arguments, budget, count_elements(shapes))
    if arguments.png is not None:
        draw(budget, arguments.png)
    print(
        json.dumps(plan_to_json(budget, times)) if arguments.json else describe_plan(budget, times)
    )
    return 0


def _predict_times(arguments: argparse.Namespace, budget: Budget, numel: int) -> Times | None:
    forward_ms, backward_ms = arguments.forward_ms, arguments.backward_ms
    for one, other in (("forward_ms", "backward_ms"), ("tokens", "tflops")):
        if (getattr(arguments, one) is None) != (getattr(arguments, other) is None):
            names = f"--{one} and --{other}".replace("_", "-")
            raise ValueError(f"Give {names} together: times are computed from both.")
    if arguments.tokens is not None:
        if forward_ms is not None:
            raise ValueError("Give --tokens and --tflops, or --forward-ms and --backward-ms.")
        if not arguments.tflops > 0:
            raise ValueError(f"Invalid --tflops: {arguments.tflops}. Must be > 0.")
        # Two for each weight and token forward, four backward (arXiv 2001.08361, section 2.1).
        forward_ms = 2 * numel * arguments.tokens / arguments.tflops / 1e9
        backward_ms = 2 * forward_ms
    if forward_ms is None or backward_ms is None:
        return None
    if arguments.fsdp is not None:
        raise ValueError("Times under --fsdp are not modelled: leave out those of the compute.")
    speeds = Speeds(
        link=arguments.link_gbit * 1e9 / 8,
        latency_s=arguments.latency_us * 1e-6,
        memory=arguments.memory_gb * 1e9,
        flops=math.inf if arguments.tflops is None else arguments.tflops * 1e12,
    )
    return predict(budget, speeds, forward_ms / 1e3, backward_ms / 1e3)


def add_variants_options(command: argparse.ArgumentParser) -> None:
    """Add the options of ``compare-variants``."""
    names = ", ".join(PRESETS)
    command.add_argument(
        "variant",
        type=_parse_variant,
        help=f"{names}; or JSON with ShardedLamb's switches, such as "
        """'{"variant": "npu", "clamp_value": 5}'""",
    )
    command.add_argument(
        "other",
        type=_parse_variant,
        nargs="?",
        default="google",
        help="likewise (default: %(default)s)",
    )
    command.add_argument(
        "--model",
        required=True,
        help="package.module:callable, called without arguments, whose module's weights are "
        "compared on, of an installed package or, looked for last, in the working directory; "
        "bert-tiny to bert-large, or a number of elements, such as 10m, with weights "
        "drawn as BERT's are",
    )
    command.add_argument(
        "--num-steps", type=int, default=1, help="compare this step (default: %(default)s)"
    )
    command.add_argument(
        "--weight-decay", type=float, default=0.01, help="of both (default: %(default)s)"
    )
    command.add_argument("--beta1", type=float, default=0.9, help="of both (default: %(default)s)")
    command.add_argument(
        "--beta2", type=float, default=0.999, help="of both (default: %(default)s)"
    )
    command.add_argument("--eps", type=float, default=1e-6, help="of both (default: %(default)s)")
    command.add_argument(
        "--seed", type=int, default=0, help="of weights and gradients (default: %(default)s)"
    )
    command.add_argument("--json", action="store_true", help="print JSON, for scripts")


def run_variants(arguments: argparse.Namespace) -> int:
    """Print a line for each parameter, and the factor for lr.

    Raises:
        ValueError, TypeError: the options are invalid.
    """
    comparison = compare_lamb_variants(
        params_of(arguments.model, arguments.seed),
        arguments.variant,
        arguments.other,
        betas=(arguments.beta1, arguments.beta2),
        eps=arguments.eps,
        weight_decay=arguments.weight_decay,
        num_steps=arguments.num_steps,
        seed=arguments.seed,
    )
    print(json.dumps(comparison_to_json(comparison)) if arguments.json else comparison)
    return 0


def comparison_to_json(comparison: LambComparison) -> dict[str, Any]:
    """Return JSON types: None in place of NaN and infinity."""
    found = asdict(comparison)
    for entry, size in zip(found["params"], comparison.params, strict=True):
        entry["ratio"] = _finite_or_none(size.ratio)
    for name in ("median_ratio", "max_ratio", "lr_factor"):
        found[name] = _finite_or_none(getattr(comparison, name))
    return found


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _parse_variant(text: str) -> str | dict[str, Any]:
    if not text.startswith("{"):
        return text
    try:
        switches: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    return switches
