"""What a run would be: phases, batches, learning rates, and a rank's memory and traffic."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from pretraining.config import RunConfig, dry_run_of, parse_config
from pretraining.files import blaming
from pretraining.launch import Launch
from pretraining.optimizers import build_optimizer
from pretraining.phases import Phase, spans
from pretraining.pretrained import new_model
from shardfuse.plan import Budget, plan, plan_fsdp
from shardfuse.plan.command import describe_plan
from shardfuse.plan.models import shapes_of_module

PICTURE = Path("dry-run.png")


def show(argv: Sequence[str], launch: Launch) -> int:
    """Print the run, and draw its learning rates into dry-run.png. Trains and prepares nothing.

    Raises `UsageError` where there cannot be such a run.
    """
    config = parse_config(argv)
    world_size = dry_run_of(argv) or launch.world_size
    config.check_batches(world_size)
    if launch.is_main:
        print("\n".join(lines(config, world_size)), flush=True)
        with blaming("--dry-run", PICTURE):
            draw(config, PICTURE)
        print(f"learning rates: {PICTURE}")
    return 0


def lines(config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield what show() prints."""
    yield f"BERT {config.model_size}, {config.optimizer}, {config.dtype}, {world_size:,} ranks"
    total_samples = total_tokens = 0
    pairs = zip(config.phases, spans(config.phases), strict=True)
    for number, (phase, steps) in enumerate(pairs, start=1):
        samples = phase.steps * phase.global_batch_size
        total_samples += samples
        total_tokens += samples * phase.seq_len
        yield f"phase {number}: steps {steps.start:,} to {steps.stop:,}"
        yield from (f"  {line}" for line in _of_phase(phase, world_size, is_first=number == 1))
    yield f"in all: {config.steps:,} steps, {total_samples:,} samples, {total_tokens:,} tokens"
    yield ""
    yield describe_plan(budget(config, world_size), None)


def _of_phase(phase: Phase, world_size: int, *, is_first: bool) -> Iterator[str]:
    micro = phase.micro_batches(world_size)
    samples = phase.steps * phase.global_batch_size
    yield (
        f"batch of {phase.global_batch_size:,} samples of {phase.seq_len} tokens = {world_size:,} "
        f"ranks x {micro.number:,} micro-batches x {micro.size:,}; {samples:,} samples"
    )
    num_warmup = round(phase.warmup * phase.steps)
    start = f"from {phase.lr * phase.warmup_from:g} " if phase.warmup_from else ""
    without_rise = ", as if it had been so from the start" if phase.decay_from == "start" else ""
    yield (
        f"learning rate {start}up to {phase.lr:g} in {num_warmup:,} steps, then down to 0 by the "
        f"power of {phase.decay_power:g}{without_rise}"
    )
    if not is_first:
        kept = {
            "weights": "weights; moments and their count of steps begin anew",
            "moments": "weights and moments; the count of steps begins anew",
            "all": "weights, moments and the count of steps",
        }
        yield f"of the phase before: {kept[phase.carry]}"


def budget(config: RunConfig, world_size: int) -> Budget:
    """Return a rank's memory and traffic, by shardfuse.plan; without an accelerator as on NPUs."""
    with torch.device("meta"):
        model = new_model(config, config.vocab_size)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = "npu" if accelerator is None else accelerator.type
    return (plan_fsdp if config.is_sharded_on(world_size) else plan)(
        shapes_of_module(model),
        functools.partial(_build, config),
        world_size=world_size,
        device="cpu" if config.device == "cpu" else device,
        sharding=config.shard_config(),
    )


def _build(config: RunConfig, params: object, *, sharding: object) -> object:
    return build_optimizer(config, params, sharding)  # type: ignore[arg-type]


def draw(config: RunConfig, path: Path) -> None:
    """Write a PNG of the learning rate of every step."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    pairs = zip(config.phases, spans(config.phases), strict=True)
    for number, (phase, steps) in enumerate(pairs, start=1):
        rates = [phase.lr_at(step - steps.start) for step in steps]
        label = f"phase {number}: {phase.seq_len} tokens, batch {phase.global_batch_size:,}"
        axes.plot(list(steps), rates, label=label)
    axes.set(xlabel="optimizer step", ylabel="learning rate")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
