"""Unsupported settings of a DeepSpeed configuration, each with the line to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardfuse.rules import NormRule, RowRule

Refusal = tuple[bool, str, str]
"""Whether the refusal applies, the reason, and the remedy."""


def check(engine: Any, name: str) -> None:
    """Raise unless the configuration of ``engine`` works with the optimizer ``name``.

    The configuration is the same on all ranks, and so is the error.

    Raises:
        ValueError: it does not; the text has the reason and the remedy.
    """
    stage = engine.zero_optimization_stage()
    at_stage = _at_stage_0(engine) if stage == 0 else _on_partitions(engine)
    for applies, reason, remedy in (*_any_stage(engine), *at_stage):
        if applies:
            raise ValueError(
                f"shardfuse's {name} cannot be driven by this DeepSpeed configuration: {reason}. "
                f"{remedy}"
            )


def _any_stage(engine: Any) -> Iterator[Refusal]:
    yield (
        engine.zero_optimization_stage() > 2,
        "at ZeRO stage 3 the parameters themselves are cut up, and no rank sees a whole tensor",
        'Set "zero_optimization": {"stage": 2}, or 1 or 0.',
    )
    yield (
        bool(engine.has_moe_layers),
        "experts are reduced over other ranks than the rest of the model",
        "Use one of DeepSpeed's own optimizers for models with experts.",
    )
    yield (
        bool(engine.pipeline_parallelism),
        "norms over the stages of a pipeline are not implemented",
        "Pass the model itself in place of a PipelineModule.",
    )
    yield (
        engine.mp_world_size > 1 or engine.sequence_parallel_size > 1,
        "norms of tensors that are split over ranks, and sums over parts of a sequence, are not "
        "implemented",
        'Leave out mpu, "tensor_parallel" and "sequence_parallel_size".',
    )
    yield (
        bool(engine.zenflow_config()) or bool(engine.is_deepcompile_enabled()),
        "zenflow and DeepCompile update the parameters by themselves",
        'Remove "zero_optimization": {"zenflow": ...} and "compile": {"deepcompile": true}.',
    )


def _offload_to(engine: Any) -> str:
    offload = engine.zero_offload_optimizer()
    return "none" if offload is None else str(getattr(offload.device, "value", offload.device))


def _at_stage_0(engine: Any) -> Iterator[Refusal]:
    model_dtype, accumulation_dtype = engine.get_data_types()
    yield (
        engine.fp16_enabled(),
        "at stage 0 DeepSpeed's fp16 block wraps the optimizer and gives it copies of the "
        "parameters, so that the model itself would not move",
        'Remove "fp16" and set "torch_autocast": {"enabled": true, "dtype": "float16"}, or '
        'keep it and set "zero_optimization": {"stage": 1} or 2.',
    )
    yield (
        model_dtype != accumulation_dtype,
        f"gradients accumulate in {accumulation_dtype}, parameters are {model_dtype}",
        'Remove "data_types": {"grad_accum_dtype": ...}: shardfuse sums in fp32 if '
        '"optimizer": {"params": {"sharding": {"grad_sync_dtype": "float32"}}} says so.',
    )
    yield (
        engine.load_universal_checkpoint(),
        "DeepSpeed loads universal checkpoints at stages 1 and 2 only, and at stage 0 neither "
        "them nor the model",
        'Remove "checkpoint": {"load_universal": true}: what is saved at stage 0 loads at any '
        "number of ranks as it is.",
    )
    yield (
        not engine.gradient_average,
        "gradients are to be summed, and shardfuse takes their mean",
        'Remove "gradient_allreduce_op", or set it to "mean".',
    )
    yield (
        _offload_to(engine) != "none",
        "shardfuse keeps its shards where the parameters are",
        'Remove "offload_optimizer", or set "zero_optimization": {"stage": 1} or 2.',
    )


def _on_partitions(engine: Any) -> Iterator[Refusal]:
    model_dtype, accumulation_dtype = engine.get_data_types()
    offload = engine.zero_offload_optimizer()
    autocast_fp16 = engine.torch_autocast_enabled() and (
        engine.torch_autocast_dtype() == torch.float16
    )
    yield (
        _offload_to(engine) == "nvme",
        "states on NVMe are read by DeepSpeed's own optimizers alone",
        'Set "offload_optimizer": {"device": "cpu"}.',
    )
    yield (
        offload is not None and bool(getattr(offload, "super_offload", False)),
        "super_offload runs DeepSpeed's own Adam",
        'Remove "super_offload".',
    )
    yield (
        autocast_fp16,
        "under fp16 autocast DeepSpeed clips gradients before it undoes the loss scale, and each "
        "rank's scaler sees the overflows of its own partition",
        'Use "fp16": {"enabled": true} in place of "torch_autocast", or its dtype "bfloat16", or '
        '"zero_optimization": {"stage": 0}.',
    )
    yield (
        engine.zero_optimization_stage() == 1
        and model_dtype == torch.bfloat16
        and model_dtype != accumulation_dtype,
        "bf16 with fp32 accumulation at stage 1 is another wrapper of DeepSpeed's "
        "(BF16_Optimizer), whose partitions shardfuse does not read",
        'Set "zero_optimization": {"stage": 2}, or remove "data_types".',
    )


def check_rule(rule: Any, engine: Any, name: str) -> None:
    """Raise ValueError unless ``rule`` can run on flat partitions that DeepSpeed makes."""
    if isinstance(rule, RowRule):
        raise ValueError(
            f"shardfuse's {name} cannot be driven by this DeepSpeed configuration: it needs sums "
            "over rows of tensors, which a partition of DeepSpeed's cuts anywhere. Set "
            '"zero_optimization": {"stage": 0}.'
        )
    if engine.zero_elastic_checkpoint() and not rule.counts_in_groups:
        raise ValueError(
            f"DeepSpeed saves elastic checkpoints of {name} and cannot load them: it looks for the "
            'step in the groups, which LAMB alone has there. Remove "elastic_checkpoint".'
        )
    needs_norm = isinstance(rule, NormRule) and getattr(rule, "use_global_grad_norm", False)
    if needs_norm and not engine.zero_compute_grad_norm():
        raise ValueError(
            f"{name} with use_global_grad_norm clips by the norm that DeepSpeed takes of all "
            'gradients. Remove "zero_optimization": {"compute_grad_norm": false}.'
        )


def check_scheduler(optimizer: Any, engine: Any, name: str) -> None:
    """Raise if ``optimizer`` reads its learning rate from a scheduler that cannot work here.

    Raises:
        ValueError: DeepSpeed would write the rate too, or save checkpoints without the scheduler.
    """
    if getattr(optimizer, "_scheduler", None) is None:
        return
    if engine.client_lr_scheduler is not None or engine.scheduler_name() is not None:
        raise ValueError(
            f"{name} reads its learning rate from the scheduler it was given, at every step, and "
            "what DeepSpeed's lr_scheduler writes would be lost. Remove lr_scheduler and "
            '"scheduler": {...}, or give the optimizer a number as learning_rate.'
        )
    if engine.zero_optimization_stage() > 0 and (
        engine.zero_elastic_checkpoint() or engine.load_universal_checkpoint()
    ):
        raise ValueError(
            f"The scheduler that {name} was given would be missing from DeepSpeed's elastic and "
            'universal checkpoints. Remove "elastic_checkpoint" and "load_universal", or give the '
            "optimizer a number as learning_rate and DeepSpeed the lr_scheduler."
        )


def check_ranks(optimizer: Any, engine: Any, name: str) -> None:
    """Raise if ``optimizer`` is to reduce the engine's gradients, and has other ranks.

    Raises:
        ValueError: some ranks would train different parameters.
    """
    num_ranks = optimizer.communicator.world.world_size
    if num_ranks != engine.dp_world_size and optimizer._config.grads_are_reduced is not True:
        raise ValueError(
            f"{name} was built for {num_ranks} rank{'s' * (num_ranks > 1)}, the engine has "
            f"{engine.dp_world_size}: gradients would not be averaged over all. Call "
            "deepspeed.init_distributed() before the optimizer is built, and give it no "
            "process_group."
        )
