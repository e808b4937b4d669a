"""Jobs of Hugging Face's Trainer: the script that torchrun runs, and references of its results.

    torchrun --nproc-per-node 2 tests/support/trainer_runs.py FOLDER      jobs are in FOLDER/jobs.pt

A job is what a user's script is: TrainingArguments, a small BERT, Trainer, train(). The jobs of a
launch run one after another, because importing transformers takes longer than they do.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardfuse import ShardedLamb
from shardfuse.integrations import trainer_callback
from tests.support.oracles import LambOracle
from tests.support.runs import max_relative_error

REPOSITORY = Path(__file__).parents[2]

WORLD = 2
MICRO = 4  # samples of a micro-batch
GAS = 2  # micro-batches of a step, on each rank
STEPS = 6
WARMUP = 3
LR = 0.1  # parameters move by a third of their size and more
DECAY = 0.1
OPTIONS: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": DECAY}


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    how: str = "instance"  # or "class" or "deepspeed"
    variant: str = "google"
    max_grad_norm: float = 1.0
    bf16: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)  # more of TrainingArguments
    config: Mapping[str, Any] | None = None  # DeepSpeed's JSON
    resume: str | None = None  # a checkpoint, relative to the folder of the launch


def rates() -> list[float]:
    """Return the rate of every step: from 0 linearly to LR over WARMUP steps, then down to 0."""
    up = [LR * step / WARMUP for step in range(WARMUP)]
    return up + [LR * (STEPS - step) / (STEPS - WARMUP) for step in range(WARMUP, STEPS)]


def build_model() -> Any:
    """Return a BERT of two layers without dropout, the same on every call."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=90,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=96,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    for name, param in model.named_parameters():
        with torch.no_grad():  # no bias is zero, so that relative errors have a meaning
            param += 0.02 * torch.randn(param.shape)
        # Its gradient is zero but for rounding, of which Adam's division makes a large step.
        param.requires_grad_(not name.endswith("key.bias"))
    return model


def samples() -> list[dict[str, Tensor]]:
    """Return one epoch of samples; each has another number of tokens to predict."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(WORLD * MICRO * GAS * STEPS):
        tokens = torch.randint(0, 90, (16,), generator=generator)
        labels = torch.full((16,), -100)
        labels[: 1 + index % 7] = tokens[: 1 + index % 7]
        found.append({"input_ids": tokens.roll(1), "labels": labels})
    return found


def token_mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Return the loss of a micro-batch over the number of tokens predicted in the whole step.

    Given to Trainer because the loss of BertForMaskedLM takes no notice of that number.
    """
    logits = outputs["logits"].flatten(0, 1)
    total = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return total / (labels.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


def training_arguments(job: Job, folder: Path) -> Any:
    """Return the job's TrainingArguments."""
    from transformers import TrainingArguments

    options: dict[str, Any] = {"save_strategy": "no", **job.arguments}
    if job.config is None:
        options["use_cpu"] = True
    else:
        start_deepspeed()
        path = folder / f"{job.name}.{os.environ['RANK']}.json"
        path.write_text(json.dumps(job.config))
        options["deepspeed"] = str(path)
        options["accelerator_config"] = {"use_configured_state": True}
    return TrainingArguments(
        output_dir=str(folder / job.name),
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=GAS,
        num_train_epochs=1,
        train_sampling_strategy="sequential",
        learning_rate=LR,
        warmup_steps=WARMUP,
        weight_decay=DECAY,
        adam_beta1=OPTIONS["betas"][0],
        adam_beta2=OPTIONS["betas"][1],
        adam_epsilon=OPTIONS["eps"],
        max_grad_norm=job.max_grad_norm,
        bf16=job.bf16,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        **options,
    )


def start_deepspeed() -> None:
    """Import shardfuse.deepspeed, and do what else a machine without accelerator takes."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import shardfuse.deepspeed

    assert shardfuse.deepspeed.is_registered()
    # A C++ extension for all-reduces of inference, which takes a minute to compile.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    from accelerate.state import AcceleratorState, PartialState

    # Left to itself, Accelerate takes DeepSpeed without an accelerator for a single process.
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def build_trainer(job: Job, folder: Path) -> Any:
    """Return the job's Trainer, with an optimizer of ours in the job's way."""
    from transformers import Trainer

    args = training_arguments(job, folder)
    model = build_model().to(args.device)
    options = {**OPTIONS, "variant": job.variant, "sharding": {"grads_are_reduced": True}}
    kwargs: dict[str, Any] = {}
    if job.how == "instance":
        optimizer = ShardedLamb(model.named_parameters(), lr=LR, **options)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: [*rates(), 0.0][s] / LR)
        kwargs["optimizers"] = (optimizer, schedule)
    elif job.how == "class":
        kwargs["optimizer_cls_and_kwargs"] = (ShardedLamb, {"lr": LR, **options})
    if job.how != "deepspeed":
        kwargs["callbacks"] = [trainer_callback()]
    data = samples()
    return Trainer(
        model,
        args,
        train_dataset=data,
        eval_dataset=data[: WORLD * MICRO],
        compute_loss_func=token_mean,
        **kwargs,
    )


def run(job: Job, folder: Path) -> dict[str, Any]:
    """Train one job on this rank; return what the tests look at."""
    trainer = build_trainer(job, folder)
    used: list[float] = []  # what Trainer logs need not be what the step is taken with
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, args, kwargs: used.append(float(optimizer.param_groups[0]["lr"]))
    )
    trainer.train(resume_from_checkpoint=job.resume and str(folder / job.resume))
    hook.remove()
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    optimizer = trainer.optimizer.optimizer
    summary = None if job.how == "deepspeed" else optimizer.memory_summary()
    return {
        "params": [param.detach().clone() for param in trainer.model.parameters()],
        "norms": [entry["grad_norm"] for entry in logs],
        "logged": [entry["learning_rate"] for entry in logs],
        "used": used,
        "wrapper": type(trainer.model_wrapped).__name__,
        "optimizer": type(optimizer).__name__,
        "sharded_over": summary and summary.unsharded_state_nbytes // summary.state_nbytes,
    }


def main(folder: Path) -> None:
    """Run the jobs of this launch on this rank."""
    jobs = [Job(**job) for job in torch.load(folder / "jobs.pt", weights_only=True)]
    results = {job.name: run(job, folder) for job in jobs}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # At the interpreter's end torch 2.13 with gloo aborts now and then ("terminate called without
    # an active exception"): Trainer with torch's AdamW did so in 4 of 20 launches.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def launch(jobs: Sequence[Job], folder: Path, timeout: float = 200) -> list[dict[str, Any]]:
    """Run jobs by torchrun on two ranks; return {name of the job: result} of every rank."""
    torch.save([dataclasses.asdict(job) for job in jobs], folder / "jobs.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    result = subprocess.run(
        [*command, "--nproc-per-node", str(WORLD), __file__, str(folder)],
        env=os.environ | hidden,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


def step_samples(step: int) -> list[dict[str, Tensor]]:
    """Return the samples of a step, all ranks' together, in the order of micro-batches."""
    size = WORLD * MICRO * GAS
    return samples()[step * size : (step + 1) * size]


def backward(model: Any, chunk: Sequence[Mapping[str, Tensor]], num_items: int) -> None:
    """Add the gradient of one batch; fp32 models run under bf16 autocast."""
    tokens = torch.stack([sample["input_ids"] for sample in chunk])
    labels = torch.stack([sample["labels"] for sample in chunk])
    with torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.float32):
        logits = model(input_ids=tokens)["logits"]
    exact = logits if model.dtype == torch.float64 else logits.float()
    token_mean({"logits": exact}, labels, num_items).backward()


def reference(job: Job, used: Sequence[float]) -> tuple[list[Tensor], list[float]]:
    """Return the params and the gradient norms that per-tensor fp64 math gives.

    A step has one batch of all ranks' samples. ``used`` are the rates of the steps.
    """
    model = build_model().double()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    plain = [name for name in trained if "bias" in name or "LayerNorm" in name]
    parts, decays = [list(trained)], [DECAY]
    if job.how == "class":  # the groups that Trainer makes
        parts, decays = [[name for name in trained if name not in plain], plain], [DECAY, 0.0]
    members = [[trained[name] for name in part] for part in parts]
    groups = [{"params": p, "weight_decay": d} for p, d in zip(members, decays, strict=True)]
    oracle = LambOracle(groups, names=parts, variant=job.variant, **OPTIONS)
    norms = []
    for step, lr in enumerate(used):
        model.zero_grad()
        backward(model, step_samples(step), num_predicted(step))
        limit = job.max_grad_norm or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), limit)))
        for group in oracle.groups:
            group["lr"] = lr
        oracle.step([[param.grad for param in part] for part in members])
        with torch.no_grad():
            flat = [param for part in members for param in part]
            for param, value in zip(flat, oracle.values(), strict=True):
                param.copy_(value)
    return [param.detach() for param in model.parameters()], norms


def reference_bf16(job: Job, used: Sequence[float]) -> tuple[list[Tensor], list[float]]:
    """Return params and norms of an unsharded ShardedLamb under bf16 autocast, in a plain loop.

    The products are those of the ranks' micro-batches, so that they round alike.
    """
    model = build_model()
    optimizer = ShardedLamb(model.named_parameters(), variant=job.variant, **OPTIONS)
    norms = []
    for step, lr in enumerate(used):
        optimizer.zero_grad()
        part = step_samples(step)
        for first in range(0, len(part), MICRO):
            backward(model, part[first : first + MICRO], num_predicted(step))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), job.max_grad_norm)))
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return [param.detach() for param in model.parameters()], norms


def num_predicted(step: int) -> int:
    """Return the number of tokens to predict in a step, on all ranks together."""
    return sum(int(sample["labels"].ne(-100).sum()) for sample in step_samples(step))


def error(params: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference, after checking that what can move has moved."""
    start = list(build_model().parameters())
    for param, before in zip(params, start, strict=True):
        assert torch.equal(param, before) != before.requires_grad
    return max_relative_error(params, expected, [param.detach() for param in start])


def distance(params: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the norm of all differences, relative to that of the movement since the start."""
    error(params, expected)  # checks that what can move has moved
    start = [param.detach() for param in build_model().parameters()]
    return _norm_of_difference(params, expected) / _norm_of_difference(expected, start)


def _norm_of_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    norms = [(a.detach().double() - b.double()).norm() for a, b in zip(left, right, strict=True)]
    return float(torch.stack(norms).norm())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
