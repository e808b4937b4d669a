"""Stage 0: DeepSpeed's engine drives an optimizer that shards by itself.

The engine reads attributes of the optimizer and of itself by name, so the bridge sets them on both:

    get_grads_for_reduction()       gradients the engine is to all-reduce: none
    overflow                        whether all ranks skipped the last step
    _global_grad_norm               before clipping, of the last step
    checkpoint_event_*, state_dict  on all ranks; one rank writes the result of rank 0
    load_state_dict                 on all ranks, with that dict
    save_checkpoint, load_checkpoint    the engine's own; a checkpoint that fails ends, too
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from shardfuse.optim import ShardedOptimizer
from shardfuse.scaling import ShardedGradScaler


class EngineBridge:
    """Connects one engine and one optimizer; keeps neither alive.

    Raises:
        ValueError: the optimizer is driven by another engine.
    """

    def __init__(self, engine: Any, optimizer: ShardedOptimizer) -> None:
        if "overflow" in optimizer.__dict__:
            raise ValueError(
                f"This {type(optimizer).__name__} is driven by another DeepSpeed engine. Build a "
                "new one for this engine."
            )
        self._engine = weakref.ref(engine)
        self._optimizer = weakref.ref(optimizer)
        self._in_checkpoint = False
        self._is_gathered = False
        self._skips = False  # whether all ranks skip the current step

    def attach(self) -> None:
        """Set the attributes that the engine reads."""
        engine, optimizer = self._engine(), self._optimizer()
        assert engine is not None
        assert optimizer is not None
        attributes: dict[str, Any] = {
            "overflow": False,
            "_global_grad_norm": None,
            "checkpoint_event_prologue": self._begin_checkpoint,
            "checkpoint_event_epilogue": self._end_checkpoint,
            "state_dict": self._state_dict,
            "load_state_dict": self._load_state_dict,
        }
        if optimizer._config.grads_are_reduced is not True:
            # (dense gradients, those of experts): none, because step() reduces them.
            attributes["get_grads_for_reduction"] = lambda: ([], {})
        optimizer.__dict__.update(attributes)
        optimizer.accumulates_while(self._accumulates)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)
        # The engine would clip p.grad, which is this rank's gradient and not the mean.
        engine.__dict__["clip_fp32_gradients"] = lambda: None
        for name in ("save_checkpoint", "load_checkpoint"):
            engine.__dict__[name] = functools.partial(self._in_full, name)
        scaler = engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            # The plain scaler of a rank would find only the overflows of that rank.
            device = optimizer._device.type
            engine.torch_autocast_z0_gradscaler = ShardedGradScaler(
                device,
                init_scale=scaler.get_scale(),
                process_group=optimizer._config.process_group,
            )

    def _accumulates(self) -> bool:
        """Return whether another backward follows the current one before the next step."""
        engine = self._engine()
        return engine is not None and not engine.is_gradient_accumulation_boundary()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Clip as ``gradient_clipping`` says, by the norm of the mean gradient."""
        engine = self._engine()
        self._skips = False
        optimizer._global_grad_norm = None
        if engine is None:
            return
        max_norm = float(engine.gradient_clipping())
        # The wrapper of the bf16 block does so at other stages.
        checks = engine.bfloat16_enabled() and engine._config.bfloat16_config.check_grad_overflow
        # With clipping on, the engine has undone the loss scale before it calls step().
        if max_norm > 0 or checks:
            norm = optimizer.clip_grad_norm(max_norm if max_norm > 0 else math.inf)
            optimizer._global_grad_norm = norm
            self._skips = checks and not bool(torch.isfinite(norm))
        if self._skips:  # on all ranks: they have the same norm
            optimizer.found_inf = torch.ones((), device=norm.device)
            optimizer._has_unscaled = True

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record whether the step was skipped; the sharded scaler decides for all ranks."""
        found = optimizer.__dict__.get("found_inf")
        optimizer.overflow = found is not None and bool(found > 0)
        if optimizer.overflow:
            optimizer._global_grad_norm = float("inf")
        if self._skips:
            del optimizer.found_inf

    def _in_full(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the engine that begins a checkpoint; end the checkpoint if it raises."""
        engine = self._engine()
        assert engine is not None
        try:
            return getattr(type(engine), name)(engine, *args, **kwargs)
        finally:
            if self._in_checkpoint:
                self._end_checkpoint()

    def _begin_checkpoint(self) -> None:
        self._in_checkpoint = True
        self._is_gathered = False

    def _end_checkpoint(self) -> None:
        self._in_checkpoint = False
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._consolidated = None  # frees a full copy of the states, which is written

    def _state_dict(self) -> dict[str, Any]:
        """Return torch's state dict; collective while the engine saves a checkpoint.

        Then every rank calls it, and ranks that write nothing get a dict without states. At other
        times it is ShardedOptimizer.state_dict(), which never communicates.
        """
        engine, optimizer = self._engine(), self._optimizer()
        assert optimizer is not None
        kind = type(optimizer)
        if not self._in_checkpoint or engine is None:
            return kind.state_dict(optimizer)
        if not self._is_gathered:  # not `_consolidated is None`: ranks may differ in that
            everywhere = bool(engine.use_node_local_storage())
            optimizer.consolidate_state_dict(to=None if everywhere else 0)
            self._is_gathered = True
        if optimizer._consolidated is None:
            return {"state": {}, "param_groups": []}
        return kind.state_dict(optimizer)

    def _load_state_dict(
        self, state_dict: Mapping[str, Any], load_optimizer_states: bool = True
    ) -> None:
        """Load a result of _state_dict() on rank 0, at any world size."""
        optimizer = self._optimizer()
        assert optimizer is not None
        if not load_optimizer_states:
            return
        if "param_groups" not in state_dict:
            raise ValueError(
                "The checkpoint's optimizer is a wrapper of DeepSpeed's, not shardfuse at stage 0. "
                "Load it with load_optimizer_states=False to take the model alone."
            )
        type(optimizer).load_state_dict(optimizer, state_dict)
