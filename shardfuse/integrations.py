"""For Trainer and Accelerate, which save optimizers without letting ranks gather states first.

They also count every call of step(), which skips by itself under a gradient scaler.

Lightning does not need this: it calls ``consolidate_state_dict()`` itself, on all ranks.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from shardfuse.optim.stateful import StatefulOptimizer, no_word_of_saves


def trainer_callback() -> Any:
    """Return a TrainerCallback that gathers the states before Hugging Face's Trainer saves them.

        trainer = Trainer(..., optimizers=(optimizer, schedule), callbacks=[trainer_callback()])

    Use it for an optimizer under Trainer's DistributedDataParallel; DeepSpeed does not need it. It
    only consolidates the state when a checkpoint is due (``save_strategy`` "steps", "epoch" or
    "best"), and lets Trainer know of steps that are skipped under ``fp16``, in which its schedule
    is to stand still. A callback that itself sets ``control.should_save`` must come before it.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class ConsolidateCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Calls consolidate_state_dict() on all ranks before Trainer calls state_dict() on one."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for own in _unwrapped([kwargs.get("optimizer")]):
                own.saves_are_arranged()
            _tell_of_skips([kwargs.get("optimizer")])

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if control.should_save:
                _consolidate([kwargs.get("optimizer")], everywhere=args.save_on_each_node)

        on_epoch_end = on_step_end

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # Whether this is the best model so far is decided only after the callbacks.
            if control.should_save or args.save_strategy == "best":
                _consolidate([kwargs.get("optimizer")], everywhere=args.save_on_each_node)

    return ConsolidateCallback()


def consolidate_on_save(accelerator: Any) -> Any:
    """Make ``accelerator.save_state()`` save the whole states of shardfuse's optimizers.

    Accelerate asks every rank for states, so each rank holds the full state in CPU memory. On
    devices where parameters share one storage (Ascend), Accelerate would treat them as one tensor
    and save only the first. There it gets copies in CPU memory.

    After ``accelerator.prepare()``, this also lets Accelerate know of steps that are skipped under
    its gradient scaler, so that its schedulers stay where they are.

    Returns:
        A handle whose ``remove()`` undoes this.
    """

    def consolidate(models: Any, weights: Any, output_dir: Any) -> None:
        _consolidate(accelerator._optimizers, everywhere=True)
        for state in weights:
            _separate(state)

    if not accelerator._optimizers:  # it is called before prepare(), which will bring them
        no_word_of_saves()
    for optimizer in _unwrapped(accelerator._optimizers):
        optimizer.saves_are_arranged()
    _tell_of_skips(accelerator._optimizers)
    return accelerator.register_save_state_pre_hook(consolidate)


def _separate(state: dict[str, Any]) -> None:
    """Replace tensors that lie side by side in one storage by copies; tied ones stay tied."""
    # Not of subclasses, whose storages are not what they hold.
    tensors = {name: value for name, value in state.items() if type(value) in (Tensor, Parameter)}
    copies: dict[tuple[Any, ...], Tensor] = {}
    for name, value in tensors.items():
        if value.untyped_storage().nbytes() > value.nbytes:
            key = (value.device, value.data_ptr(), value.shape, value.stride())
            if key not in copies:
                copies[key] = value.detach().to("cpu", copy=True)
            state[name] = copies[key]


def _tell_of_skips(optimizers: list[Any]) -> None:
    """Have Accelerate's wrappers take a step that was skipped for none, as their schedules do."""
    for wrapper in optimizers:
        own = getattr(wrapper, "optimizer", None)
        if isinstance(own, StatefulOptimizer) and getattr(wrapper, "scaler", None) is not None:
            own.register_step_post_hook(functools.partial(_note_skip, weakref.ref(wrapper)))


def _note_skip(wrapper_ref: weakref.ref[Any], optimizer: Any, args: Any, kwargs: Any) -> None:
    wrapper = wrapper_ref()
    if wrapper is not None and optimizer._was_skipped:
        wrapper._accelerate_step_called = False  # set before step(), and looked at after it


def _unwrapped(optimizers: list[Any]) -> list[StatefulOptimizer]:
    """Return those that are ours, without Accelerate's wrapper."""
    inner = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    return [optimizer for optimizer in inner if isinstance(optimizer, StatefulOptimizer)]


def _consolidate(optimizers: list[Any], *, everywhere: bool) -> None:
    """Bring whole states to the first rank, or to all. Collective."""
    for optimizer in _unwrapped(optimizers):
        # DeepSpeed's engine has put a state_dict() of its own there, which gathers by itself.
        if "state_dict" not in vars(optimizer):
            optimizer.consolidate_state_dict(to=None if everywhere else 0)
