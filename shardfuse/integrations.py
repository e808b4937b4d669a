"""For trainers that save optimizers on one rank, without a call in which ranks could gather states.

Lightning needs nothing of this: it calls ``consolidate_state_dict()`` itself, on all ranks.
"""

from __future__ import annotations

from typing import Any

from shardfuse.optim.stateful import StatefulOptimizer


def trainer_callback() -> Any:
    """Return a TrainerCallback that brings the states to where Hugging Face's Trainer saves them.

        trainer = Trainer(..., optimizers=(optimizer, schedule), callbacks=[trainer_callback()])

    It is for an optimizer under Trainer's DistributedDataParallel, and not needed with DeepSpeed.
    It consolidates when a checkpoint is due, by ``save_strategy`` "steps", "epoch" or "best", and
    does nothing else. A callback that sets ``control.should_save`` itself goes before it.

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

    It asks every rank for them, so that each gets all: the full state in CPU memory, once a rank.

    Returns:
        What has ``remove()``, to undo this.
    """

    def consolidate(models: Any, weights: Any, output_dir: Any) -> None:
        _consolidate(accelerator._optimizers, everywhere=True)

    return accelerator.register_save_state_pre_hook(consolidate)


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
