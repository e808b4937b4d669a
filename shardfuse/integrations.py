"""Hooks for Trainer and Accelerate, which call ``state_dict()`` without a collective before it.

They also count each call of step() as a step, even one that a gradient scaler skips.

Lightning needs none of this: it calls ``consolidate_state_dict()`` itself, on all ranks.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from shardfuse.optim.stateful import StatefulOptimizer, silence_save_notice


def trainer_callback() -> Any:
    """Return a TrainerCallback that gathers the states before Hugging Face's Trainer saves them.

        trainer = Trainer(..., optimizers=(optimizer, schedule), callbacks=[trainer_callback()])

    Use it for an optimizer under Trainer's DistributedDataParallel; DeepSpeed does not need it. It
    consolidates the state only when a checkpoint is due (``save_strategy`` "steps", "epoch" or
    "best"). It also reports skipped steps under ``fp16`` to Trainer, so that its schedule does not
    advance. A callback that itself sets ``control.should_save`` must come before it.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class ConsolidateCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Calls consolidate_state_dict() on all ranks before Trainer calls state_dict() on one."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for own in _sharded_optimizers([kwargs.get("optimizer")]):
                own.saves_are_arranged()
            _report_skipped_steps([kwargs.get("optimizer")])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                _consolidate([kwargs.get("optimizer")], everywhere=args.save_on_each_node)

        on_epoch_end = on_step_end

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Trainer decides only after the callbacks whether this model is the best so far.
            if control.should_save or args.save_strategy == "best":
                _consolidate([kwargs.get("optimizer")], everywhere=args.save_on_each_node)

    return ConsolidateCallback()


def consolidate_on_save(accelerator: Any) -> Any:
    """Make ``accelerator.save_state()`` save the full states of shardfuse's optimizers.

    Accelerate reads the states on each rank, so each rank holds the full state in CPU memory. On
    devices where parameters share one storage (Ascend), Accelerate would treat them as one tensor
    and save only the first. There it gets copies in CPU memory.

    After ``accelerator.prepare()``, this also reports steps that the gradient scaler has skipped to
    Accelerate, so that its schedulers do not advance.

    Returns:
        A handle; its ``remove()`` undoes this.
    """

    def consolidate(models: Any, weights: Any, output_dir: Any) -> None:
        _consolidate(accelerator._optimizers, everywhere=True)
        for state in weights:
            _copy_shared_storage(state)

    if not accelerator._optimizers:  # called before prepare(), which registers them
        silence_save_notice()
    for optimizer in _sharded_optimizers(accelerator._optimizers):
        optimizer.saves_are_arranged()
    _report_skipped_steps(accelerator._optimizers)
    return accelerator.register_save_state_pre_hook(consolidate)


def _copy_shared_storage(state: dict[str, Any]) -> None:
    """Replace tensors that share a larger storage by copies; tied tensors stay tied."""
    # Exact types only: the storage of a subclass is not its data.
    tensors = {name: value for name, value in state.items() if type(value) in (Tensor, Parameter)}
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, value in tensors.items():
        if value.untyped_storage().nbytes() > value.nbytes:
            key = (value.device, value.data_ptr(), value.shape, value.stride())
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            state[name] = copies[key]


def _report_skipped_steps(optimizers: list[Any]) -> None:
    """Let Accelerate's wrappers treat a skipped step as not called, as their schedules do."""
    for wrapper in optimizers:
        own = getattr(wrapper, "optimizer", None)
        if isinstance(own, StatefulOptimizer) and getattr(wrapper, "scaler", None) is not None:
            own.register_step_post_hook(
                functools.partial(_mark_step_not_called, weakref.ref(wrapper))
            )


def _mark_step_not_called(
    wrapper_ref: weakref.ref[Any], optimizer: Any, args: Any, kwargs: Any
) -> None:
    wrapper = wrapper_ref()
    if wrapper is not None and optimizer._was_skipped:
        wrapper._accelerate_step_called = False  # set before step(), read after it


def _sharded_optimizers(optimizers: list[Any]) -> list[StatefulOptimizer]:
    """Return shardfuse's optimizers, without Accelerate's wrapper."""
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    return [optimizer for optimizer in inner if isinstance(optimizer, StatefulOptimizer)]


def _consolidate(optimizers: list[Any], *, everywhere: bool) -> None:
    """Gather full states on the first rank, or on all ranks. Collective."""
    for optimizer in _sharded_optimizers(optimizers):
        # DeepSpeed's engine has replaced state_dict() by its own, which gathers by itself.
        if "state_dict" not in vars(optimizer):
            optimizer.consolidate_state_dict(to=None if everywhere else 0)
