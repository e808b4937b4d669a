"""What code around an optimizer expects of torch's own, beside state dicts and steps.

The keywords that all classes of torch.optim have, signatures that show them, repr(), scalers and
frameworks that ask who undoes a loss scale, graph capture, and torch's Join for uneven inputs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn, TypedDict, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from shardfuse.optim.stateful import StatefulOptimizer
from shardfuse.untraced import untraced


class TorchOptions(TypedDict, total=False):
    """Keywords of torch.optim's classes, [Note: torch's keys] in rules/base.py."""

    maximize: bool
    foreach: bool | None
    fused: bool | None
    capturable: bool
    differentiable: bool


_DEFAULTS = TorchOptions(
    maximize=False, foreach=None, fused=None, capturable=False, differentiable=False
)


def checked(options: Mapping[str, Any], cls: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``defaults`` and what the constructor of ``cls`` was given of TorchOptions.

    Raises:
        TypeError: another name.
    """
    for name in options:
        if name not in _DEFAULTS:
            near = get_close_matches(name, inspect.signature(cls).parameters, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument '{name}'.{hint}")
    return {**defaults, **options}


class _HandlesUnscaling:
    """``_step_supports_amp_scaling``, which may be set on an instance, too."""

    def __get__(self, optimizer: Any, owner: type) -> bool:
        """Return True, but False to a framework that asks whether it may change ``p.grad``.

        [Note: who unscales] torch.amp.GradScaler takes True for "leave overflows to step()", and
        gets that: no rank skips alone. Lightning takes it for "gradients are scaled until step(),
        and cannot be clipped before", with no scaler about, too. Where ``p.grad`` is the mean over
        ranks that is wrong: it may be unscaled, and clipped, as under any optimizer. Where it is
        not, clipping it is what must not be done.
        """
        if optimizer is not None and optimizer._foreign is not None:
            return False  # who shards undoes loss scales, too
        if optimizer is None or not optimizer._are_reduced:
            return True
        return hasattr(sys._getframe(1).f_locals.get("self"), "unscale_")  # torch's, torch_npu's


class TorchLike(StatefulOptimizer, Joinable):
    """What torch's optimizers have; ShardedOptimizer adds the step."""

    _step_supports_amp_scaling: Any = _HandlesUnscaling()
    _params: list[Tensor]
    _clip_coefficient: Tensor | None = None  # () scales the mean gradient of the next step
    _has_unscaled = False  # whether a scaler has reached gradients that have left
    _is_shadow = False  # this rank has joined and only takes part in the others' steps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show each of TorchOptions in the signature, where the constructor takes them."""
        super().__init_subclass__(**kwargs)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        *before, last = list(inspect.signature(cls.__init__).parameters.values())[1:]
        signature = None
        if last.name == "torch_options" and before[-1].kind is keyword_only:
            own = [inspect.Parameter(n, keyword_only, default=d) for n, d in _DEFAULTS.items()]
            signature = inspect.Signature([*before[:-1], *own, before[-1]])
        cls.__signature__ = signature  # type: ignore[attr-defined]

    def _patch_step_function(self) -> None:
        """Leave untraced, too, the wrapper of step() that torch adds for its hooks."""
        is_first = not hasattr(type(self).step, "hooked")
        super()._patch_step_function()
        if is_first:
            cast(Any, type(self)).step = untraced(type(self).step)

    def __repr__(self) -> str:
        """Return torch's text, with the rule's switches and how the optimizer is sharded."""
        head, newline, groups = super().__repr__().partition("\n")
        own = [self._rule.describe(), f"world_size={self.communicator.world_size}, {self._config}"]
        return "\n".join([head, *own]) + newline + groups

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or deep-copied: its buffers are the model's "
            "parameters. Save state_dict(), and build a new optimizer for a copied model."
        )

    # Before each step

    def _begin(self, *lines: str) -> None:
        raise NotImplementedError

    def _before_step(self) -> None:
        """Refuse a graph capture; under Join, take part in what it counts.

        Raises:
            RuntimeError: a CUDA graph is being captured, or a scaler is used under Join.
        """
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"step() of {type(self).__name__} cannot be captured in a CUDA graph: the learning "
                "rate and the step count would stay those of the capture. Capture forward and "
                "backward alone, and call step() between replays."
            )
        if self._are_partitioned:
            self._check_partitioned()
        if not self._notifies_join:
            return
        self._left_join = False
        if self.__dict__.get("found_inf") is not None:
            self._refuse_in_join("step() under a gradient scaler")
        if not self._is_shadow:
            Join.notify_join_context(self)

    @property
    def _notifies_join(self) -> bool:
        """Whether each step() takes part in what Join counts: in one, and from then on."""
        return self._join_config is not None and self._join_config.enable

    @contextmanager
    def _ends_if_it_fails(self) -> Iterator[None]:
        """Leave nothing of a step that fails to the next one.

        That would undo the old loss scale, too, or be taken for one under a scaler: torch drops
        what a scaler has set after other steps only. And where values lie beside parameters, it
        would go on with them, and not with what was loaded into the parameters since.
        """
        try:
            yield
        except BaseException:
            for state in self._flats:
                state.codec.rollback()
            self.__dict__.pop("found_inf", None)
            self.__dict__.pop("grad_scale", None)
            raise

    @property
    def _are_reduced(self) -> bool:
        """Whether p.grad is the mean over ranks."""
        return self._config.grads_are_reduced is True

    @property
    def _are_partitioned(self) -> bool:
        """Whether gradients leave under backward."""
        return self._config.stage == 2 and self.communicator.world_size > 1

    def _check_partitioned(self) -> None:
        """Refuse what works on p.grad, which has left at stage 2.

        Raises:
            RuntimeError: another scaler than ShardedGradScaler.
        """
        is_scaled = self.__dict__.get("found_inf") is not None
        if is_scaled and not self._has_unscaled:
            raise RuntimeError(
                "This gradient scaler found no gradients: they are in the ranks' shards (stage=2). "
                "Use shardfuse.ShardedGradScaler, which reaches them, or stage=1."
            )
        self._has_unscaled = False

    @torch.no_grad()
    def _unscale_shards(self, inverse: Tensor | None) -> Tensor | None:
        """Multiply gradients that have left by ``inverse`` (); return 0.0 () if they are finite.

        None where none leave before step(). For ShardedGradScaler. Collective.

        Raises:
            RuntimeError: they are scaled still, and were clipped; on all ranks. Or DeepSpeed
                shards, which has a loss scale of its own.
        """
        self._refuse_if_foreign("ShardedGradScaler")
        if inverse is not None and self._clip_coefficient is not None:
            raise RuntimeError(
                "clip_grad_norm() measured gradients that are still scaled by the loss scale. Call "
                "scaler.unscale_(optimizer) before it."
            )
        with self.communicator.session.region("unscaling by ShardedGradScaler"):
            if not self._are_partitioned:
                self._grads.control.flush()
                return None
            self._begin()
            self._has_unscaled = True
            return self._grads.unscale(inverse)

    # torch.distributed.algorithms.Join

    @untraced
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that torch.distributed.algorithms.Join runs after a rank's inputs end.

        Such a rank has no gradients, which count as zero. The mean is still over all ranks, as
        DistributedDataParallel's is by default (divide_by_initial_world_size).

        Args:
            kwargs: of Join; they have no effect here.

        Raises:
            RuntimeError: with ``grads_are_reduced``, because a rank that has joined has no mean
                gradient; or at stage 2, which sums during backward.
        """
        self._refuse_if_foreign("torch.distributed.algorithms.Join")
        if self._are_reduced:
            raise RuntimeError(
                f"{type(self).__name__} cannot be given to Join with grads_are_reduced=True: "
                "DistributedDataParallel gives no gradients to ranks that have joined. Train "
                "without it, Join([optimizer]), and with grads_are_reduced=False."
            )
        if self._config.stage == 2:
            raise RuntimeError(
                f"{type(self).__name__} cannot be given to Join with stage=2: gradients are summed "
                "during backward, which a rank whose inputs have ended does not run. Use stage=1."
            )
        self._left_join = False
        own = weakref.ref(self)
        self._grads.control.join_active = lambda: getattr(own(), "_notifies_join", False)
        return _JoinHook(self)

    @property
    def join_device(self) -> torch.device:
        """The device of Join's own small collectives."""
        return self._device

    @property
    def join_process_group(self) -> Any:
        """The ranks that share the states."""
        return self._config.process_group or torch.distributed.group.WORLD


class _JoinHook(JoinHook):
    """Steps without gradients, for the collectives' sake, until all ranks have joined."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Take part in a step of the others."""
        optimizer = self._optimizer
        optimizer._is_shadow = True
        try:
            optimizer.zero_grad(set_to_none=True)  # those of the last input have been applied
            optimizer.step()
        finally:
            optimizer._is_shadow = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Allow what Join forbids. Parameters are equal on all ranks after every step."""
        self._optimizer._left_join = True
