"""For Trainer and Accelerate, which save optimizers without letting ranks gather states first.

Lightning does not need this: it calls ``consolidate_state_dict()`` itself, on all ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from shardfuse.optim.stateful import StatefulOptimizer, no_word_of_saves


def trainer_callback() -> Any:
    """Return a TrainerCallback that gathers the states before Hugging Face's Trainer saves them.

        trainer = Trainer(..., optimizers=(optimizer, schedule), callbacks=[trainer_callback()])

    Use it for an optimizer under Trainer's DistributedDataParallel; DeepSpeed does not need it. It
    only consolidates the state when a checkpoint is due (``save_strategy`` "steps", "epoch" or
    "best"). A callback that itself sets ``control.should_save`` must come before it.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import TrainerCallback

    class ConsolidateCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Calls consolidate_state_dict() on all ranks before Trainer calls state_dict() on one."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for own in _unwrapped([kwargs.get("optimizer")]):
                own.saves_are_arranged()

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
