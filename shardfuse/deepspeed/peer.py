"""The only importer of DeepSpeed, and the list of its private names that the plug-in uses.

The names below are those in the sources of the releases in CHECKED_VERSIONS. Each is probed before
its use. If one is missing, probe() raises, and nothing is attached.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module, metadata
from typing import Any

CHECKED_VERSIONS = ("0.19.8",)

OLDEST_VERSION = CHECKED_VERSIONS[0]
"""Up to 0.19.7, stages 1 and 2 give wrong updates where gradients are not contiguous."""

ENGINE_METHODS = {
    "_configure_optimizer": "builds the optimizer and wraps it; the plug-in goes around it",
    "_configure_basic_optimizer": "builds the optimizer that the JSON names",
    "_do_optimizer_sanity_check": "picks the wrapper; at stage 0 the plug-in wants none",
    "allreduce_gradients": "calls the optimizer's get_grads_for_reduction at stage 0",
    "clip_fp32_gradients": "clips p.grad before step() at stage 0; shardfuse clips by itself",
    "is_gradient_accumulation_boundary": "whether a backward is a step's last, at stage 0",
    "optimizer_name": "name in the JSON",
    "optimizer_params": "params in the JSON",
    "zero_optimization_stage": "0 to 3",
    "zero_elastic_checkpoint": "whether checkpoints of stages 1 and 2 hold states alone",
    "scheduler_name": "the scheduler block",
    "gradient_clipping": "1.0 by default since 0.19.3",
    "fp16_enabled": "the fp16 block",
    "bfloat16_enabled": "the bf16 block",
    "get_data_types": "dtypes of the model and of gradient accumulation",
    "torch_autocast_enabled": "the torch_autocast block",
    "torch_autocast_dtype": "its dtype",
    "zero_offload_optimizer": "the offload_optimizer block",
    "zenflow_config": "the zenflow block",
    "is_deepcompile_enabled": "the compile block",
    "zero_compute_grad_norm": "whether stages 1 and 2 take the norm of all gradients",
    "save_checkpoint": "begins and ends a checkpoint at stage 0; the plug-in ends a failed one",
    "load_checkpoint": "the same",
    "use_node_local_storage": "whether one rank of every node writes checkpoints",
    "load_universal_checkpoint": "whether checkpoints to load are universal ones",
}
"""Methods of DeepSpeedEngine."""

ENGINE_ATTRIBUTES = {
    "_config": "the whole configuration; its bfloat16_config has check_grad_overflow",
    "client_lr_scheduler": "the lr_scheduler given to initialize()",
    "param_names": "{parameter: name in the model}",
    "has_moe_layers": "mixture of experts",
    "pipeline_parallelism": "a PipelineModule",
    "dp_world_size": "ranks that share the data",
    "mp_world_size": "ranks that a tensor is split over",
    "sequence_parallel_size": "ranks that a sequence is split over",
    "gradient_average": "mean, not sum, over ranks",
    "torch_autocast_z0_gradscaler": "the loss scaler of stage 0 under fp16 autocast",
}
"""Attributes of a DeepSpeedEngine by the time it builds its optimizer."""

ZERO_ATTRIBUTES = {
    "optimizer": "the wrapped optimizer",
    "single_partition_of_fp32_groups": "this rank's flat fp32 partition of each group",
    "bit16_groups_flat": "all ranks' partitions of each group, the model's own memory",
    "round_robin_bit16_groups": "the parameters of each group, in flat order",
    "partition_size": "elements of a partition of each group",
    "real_dp_process_group": "the ranks that each group is partitioned over",
    "clip_grad": "bound of the gradient norm",
    "loss_scale": "the present loss scale",
    "_update_scale": "changes it, before gradients are divided by it",
    "unscale_and_clip_grads": "divides by it; the plug-in gives it the one before",
    "_global_grad_norm": "norm of all gradients before clipping, loss scale undone",
}
"""Attributes of the optimizer of ZeRO stages 1 and 2."""


def version() -> str | None:
    """Return DeepSpeed's version; None where it is not installed, without importing it."""
    if importlib.util.find_spec("deepspeed") is None:
        return None
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def engine_class() -> Any:
    """Return DeepSpeedEngine, after a probe of every method of ENGINE_METHODS.

    Raises:
        RuntimeError: this DeepSpeed is too old, or has other internals.
    """
    from packaging.version import InvalidVersion, Version

    found = version()
    with suppress(InvalidVersion):
        if found is not None and Version(found) < Version(OLDEST_VERSION):
            raise RuntimeError(
                f"DeepSpeed {found} is older than shardfuse.deepspeed was checked with. Install "
                f"deepspeed>={OLDEST_VERSION}, or do not import shardfuse.deepspeed."
            )
    engine = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    probe(engine, "DeepSpeedEngine", ENGINE_METHODS)
    return engine


def zero_class() -> Any:
    """Return the optimizer of ZeRO stages 1 and 2."""
    return import_module("deepspeed.runtime.zero.stage_1_and_2").DeepSpeedZeroOptimizer


def supported_optimizers() -> list[type]:
    """Return the list of classes that ZeRO accepts without zero_allow_untested_optimizer."""
    utils = import_module("deepspeed.runtime.zero.utils")
    probe(utils, "deepspeed.runtime.zero.utils", ["ZERO_SUPPORTED_OPTIMIZERS"])
    found: list[type] = utils.ZERO_SUPPORTED_OPTIMIZERS
    return found


def is_fused_lamb(optimizer: Any) -> bool:
    """Return whether ``optimizer`` is an instance of DeepSpeed's FusedLamb."""
    return isinstance(optimizer, import_module("deepspeed.ops.lamb").FusedLamb)


def probe(owner: Any, name: str, attributes: Iterable[str]) -> None:
    """Raise RuntimeError unless ``owner`` has all ``attributes``."""
    missing = [attribute for attribute in attributes if not hasattr(owner, attribute)]
    if missing:
        raise RuntimeError(
            f"DeepSpeed {version()} has no {name}.{missing[0]}, which shardfuse.deepspeed needs. "
            f"It was checked with deepspeed {', '.join(CHECKED_VERSIONS)}: install that, or "
            "call shardfuse.deepspeed.unregister() to use DeepSpeed without shardfuse."
        )
