"""Steps that DeepSpeed drives: torch's fused Adam under its ZeRO, and our optimizers by name."""

from __future__ import annotations

import functools
from typing import Any

import torch

from launch.bench import ours
from launch.bench.drivers import LR, ByHand, Driver, Method, tensors_nbytes
from launch.bench.synthetic import Model


def _drive(
    stage: int, model: Model, json: dict[str, Any], optimizer: torch.optim.Optimizer | None = None
) -> Driver:
    """Return a driver of the engine that ``json`` describes, with default bucket sizes."""
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": torch.distributed.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        **json,
    }
    engine, wrapper, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
    )

    def run() -> None:
        # What engine.backward() does after autograd has left the gradients in p.grad.
        if stage == 1:
            wrapper.setup_buckets()
        if stage == 2:
            engine._flush_coalesced_reduction_zero12(wrapper)
        else:
            engine.allreduce_gradients()
        engine.step()

    def state_nbytes() -> int:
        if stage == 0:
            return int(wrapper.memory_summary().state_nbytes)
        moments = tensors_nbytes(list(wrapper.optimizer.state.values()))
        return moments + tensors_nbytes(list(wrapper.single_partition_of_fp32_groups))

    return ByHand(model, run, state_nbytes)


def _fused_adam(stage: int, model: Model) -> Driver:
    adam = torch.optim.Adam(list(model.parameters()), lr=LR, fused=True)
    return _drive(stage, model, {}, adam)


def _ours(rule: str, stage: int, kernel: str, model: Model) -> Driver:
    import shardfuse.deepspeed  # noqa: F401  (makes the names known)

    cls, arguments = ours.RULES[rule]
    params = {**arguments, "sharding": {"kernel": kernel}}
    return _drive(stage, model, {"optimizer": {"type": cls.__name__, "params": params}})


def _our_method(rule: str, stage: int) -> Method:
    return Method(
        name=f"shardfuse {rule}, DeepSpeed stage {stage}",
        family=rule,
        build=functools.partial(_ours, rule, stage, "auto"),
        reference=ours.REFERENCES[rule],
        package="deepspeed",
        rehearse=functools.partial(_ours, rule, stage, "compile"),
    )


METHODS = [
    *(
        Method(
            name=f"DeepSpeed ZeRO-{stage} Adam fused",
            family="adam",
            build=functools.partial(_fused_adam, stage),
            reference=ours.REFERENCES["adam"],
            package="deepspeed",
        )
        for stage in (1, 2)
    ),
    *(_our_method(rule, stage) for rule in ("adam", "lamb") for stage in (0, 1)),
]
