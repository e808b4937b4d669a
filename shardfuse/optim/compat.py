"""TorchCompat: the interface of torch optimizers besides state dicts and steps.

The keywords that all classes of torch.optim have, signatures that show them, repr(), gradient clips
and norms, the attribute by which scalers and frameworks choose the side that undoes a loss scale,
graph capture, and torch's Join for uneven inputs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, TypedDict, cast

import torch
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from shardfuse.engine.step import StepDriver
from shardfuse.engine.step_norms import StepNorms
from shardfuse.optim.backend import own_layout
from shardfuse.optim.stateful import StatefulOptimizer
from shardfuse.rules.base import number
from shardfuse.runtime import untraced


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
    """Return ``defaults`` with the TorchOptions that the caller passed to ``cls``.

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
        """Return True to gradient scalers, and to frameworks if ``p.grad`` is local to this rank.

        [Note: unscaling] torch.amp.GradScaler reads True as "step() handles overflows". That is so:
        no rank skips a step alone. Lightning, also without a scaler, reads True as "gradients are
        scaled until step(), and must not be clipped before". That is wrong where ``p.grad`` is the
        mean over ranks: it may be unscaled and clipped, as under any optimizer. It is right
        elsewhere, because ``p.grad`` of one rank must not be clipped.
        """
        if optimizer is not None and optimizer._stepped_by is not None:
            return False  # the external backend undoes loss scales
        if optimizer is None or not optimizer._are_reduced:
            return True
        return hasattr(sys._getframe(1).f_locals.get("self"), "unscale_")  # the reader is a scaler


@dataclass(frozen=True, slots=True)
class MemorySummary:
    """Bytes that the optimizer holds on this rank, and the bytes of its unsharded state.

    Args:
        world_size: number of ranks that the state is sharded over.
        num_buckets: number of buckets of parameters, each with its own collective.
        param_nbytes: bytes of the flat buffers of parameters.
        grad_nbytes: bytes of gradients.
        state_nbytes: bytes of moments and fp32 masters on this rank.
        unsharded_state_nbytes: bytes of the same on a single rank.
    """

    world_size: int
    num_buckets: int
    param_nbytes: int
    grad_nbytes: int
    state_nbytes: int
    unsharded_state_nbytes: int

    def __str__(self) -> str:
        mib = 1 / (1 << 20)
        return (
            f"{self.num_buckets} buckets over {self.world_size} ranks; per rank: params "
            f"{self.param_nbytes * mib:.1f} MiB, gradients {self.grad_nbytes * mib:.1f} MiB, "
            f"optimizer state {self.state_nbytes * mib:.1f} MiB "
            f"(unsharded {self.unsharded_state_nbytes * mib:.1f} MiB)"
        )


class TorchCompat(StatefulOptimizer, Joinable):
    """Methods around the step: clips and norms, scalers, Join; ShardedOptimizer adds the step."""

    _step_supports_amp_scaling: Any = _HandlesUnscaling()
    _params: list[Tensor]
    _driver: StepDriver
    _watch: StepNorms | None = None
    _notifies_join: Any  # whether each step() takes part in the all-reduce of Join
    _are_reduced: Any  # whether p.grad is the mean over ranks
    _are_partitioned: Any  # whether gradients are sent and freed during backward (stage 2)
    _clip_coefficient: Tensor | None = None  # () scales the mean gradient of the next step
    _has_unscaled = False  # whether a ShardedGradScaler has told of this step's gradients
    _is_shadow = False  # this rank has joined: it launches only the collectives of a step

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Show each of TorchOptions in the signature, if the constructor accepts them."""
        super().__init_subclass__(**kwargs)
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        *before, last = list(inspect.signature(cls.__init__).parameters.values())[1:]
        signature = None
        if last.name == "torch_options" and before[-1].kind is keyword_only:
            own = [inspect.Parameter(n, keyword_only, default=d) for n, d in _DEFAULTS.items()]
            signature = inspect.Signature([*before[:-1], *own, before[-1]])
        cls.__signature__ = signature  # type: ignore[attr-defined]

    def _patch_step_function(self) -> None:
        """Exclude from tracing also the wrapper that torch puts around step() for its hooks."""
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

    def _refuse_changed(self, then: str) -> None:
        raise NotImplementedError

    def _notify_join(self) -> None:
        """Launch the all-reduce with which Join begins each step."""
        Join.notify_join_context(self)

    @own_layout("ShardedGradScaler")
    @torch.no_grad()
    def _unscale_shards(self, inverse: Tensor | None) -> Tensor | None:
        """Multiply the gradient shards of stage 2 by ``inverse`` (); return 0.0 () if finite.

        Return None at stage 1, where gradients stay in ``p.grad`` until step(). For
        ShardedGradScaler. Collective.

        Raises:
            RuntimeError: clip_grad_norm() measured them before they were unscaled, on all ranks; or
                DeepSpeed shards, which has a loss scale of its own.
        """
        if inverse is not None and self._clip_coefficient is not None:
            raise RuntimeError(
                "clip_grad_norm() measured gradients that are still scaled by the loss scale. Call "
                "scaler.unscale_(optimizer) before it."
            )
        with self.communicator.session.region("unscaling by ShardedGradScaler"):
            self._has_unscaled = True
            if not self._are_partitioned:
                self._grads.flush()
                if inverse is not None:  # which the scaler will do in p.grad
                    self._grads.note_unscaled(is_told=True)
                return None
            self._begin()
            return self._grads.unscale(inverse)

    # Norms and clips

    @own_layout()
    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """Return the L2 norm of the mean gradient over all parameters, () fp32. Collective.

        After clip_grad_norm(), the norm is that of the clipped gradient. At stage 1 this call
        reduces the gradients, and step() reduces them again. ``clip_grad_norm(math.inf)`` also
        returns the norm, and lets step() use the reduced gradients.
        """
        with self.communicator.session.region("grad_norm()"):
            norm = self._grad_norm()
        if self._clip_coefficient is None:
            self._grads.release()
        return norm

    def _grad_norm(self, max_norm: float | None = None) -> Tensor:
        self._refuse_in_join("The norm of the mean gradient")
        self._begin(f"max_norm = {max_norm}")
        self._refuse_changed("another norm of them")
        return self._clipped(self._driver.square_norms().sum().sqrt())

    def _p_norm(self, norm_type: float) -> Tensor:
        """Return the p-norm of the mean gradient, after the clips so far, () fp32."""
        self._refuse_in_join("The norm of the mean gradient")
        self._begin(f"norm_type = {norm_type}")
        self._refuse_changed("another norm of them")
        return self._clipped(self._driver.p_norm(norm_type))

    def _clipped(self, norm: Tensor) -> Tensor:
        """Return the norm () that a gradient of ``norm`` has after the clips made so far."""
        return norm if self._clip_coefficient is None else norm * self._clip_coefficient

    def _clip_by(self, coefficient: Tensor) -> None:
        """Have the next step() scale the mean gradient by ``coefficient`` (), too."""
        before = self._clip_coefficient
        self._clip_coefficient = coefficient if before is None else before * coefficient

    @own_layout()
    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the mean gradient of the next step() to an L2 norm of at most ``max_norm``.

        Collective; call it after backward and before step(). ``p.grad`` itself is not changed.
        The factor is ``min(1, max_norm / (norm + 1e-6))``, as in torch.nn.utils. Use the function
        of torch.nn.utils only with ``grads_are_reduced``, because it reads only ``p.grad``. If a
        loop cannot call this method, pass ``ShardConfig(clip_grad_norm=)``.

        Under a gradient scaler, call ``scaler.unscale_(optimizer)`` before. A change of gradients
        after this call is an error of step(), unscale_() or the next norm; to leave a step out,
        call the optimizer's own zero_grad(). On an accelerator, changes by torch's plain GradScaler
        or by ``p.grad.data`` are not detected, and step() ignores them.

        Args:
            max_norm: bound of the norm, above 0.

        Returns:
            The norm before clipping, () fp32.

        Raises:
            ValueError: ``max_norm`` is not above 0.
            RuntimeError: gradients changed since they were clipped before.
        """
        with self.communicator.session.region("clip_grad_norm()"):
            max_norm = number(max_norm, "max_norm")
            if not max_norm > 0:
                raise ValueError(f"Invalid max_norm: {max_norm}. Must be > 0.")
            norm = self._grad_norm(max_norm)
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._clip_by(coefficient)
        return norm

    @own_layout()
    @torch.no_grad()
    def clip_grad_norm_(
        self,
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip like torch.nn.utils.clip_grad_norm_() under DistributedDataParallel. Collective.

        The signature is torch's, so a script needs another name only. The norm is that of the mean
        gradient over ranks, which the next step() scales by ``min(1, max_norm / (norm + 1e-6))``;
        ``p.grad`` itself is not changed. See clip_grad_norm().

        Args:
            parameters: all parameters of this optimizer, such as model.parameters().
            max_norm: bound of the norm, above 0.
            norm_type: p of the p-norm, above 0; ``math.inf`` for the largest magnitude.
            error_if_nonfinite: raise if the norm is NaN or infinite, on all ranks; waits for the
                device.
            foreach: without effect.

        Returns:
            The norm before clipping, () fp32.

        Raises:
            ValueError: an argument out of range; or other parameters than this optimizer's.
            RuntimeError: gradients changed since they were clipped before; or a norm that is not
                finite, with ``error_if_nonfinite``.
        """
        with self.communicator.session.region("clip_grad_norm_()"):
            max_norm, norm_type = float(max_norm), float(norm_type)
            self._check_clipped(parameters)
            if not max_norm > 0:
                raise ValueError(f"Invalid max_norm: {max_norm}. Must be > 0.")
            if not norm_type > 0:
                raise ValueError(f"Invalid norm_type: {norm_type}. Must be > 0, or inf.")
            norm = self._grad_norm(max_norm) if norm_type == 2 else self._p_norm(norm_type)
            if error_if_nonfinite and not torch.isfinite(norm):
                self._grads.release()
                raise RuntimeError(
                    f"The total norm of order {norm_type} for gradients from `parameters` is "
                    f"non-finite ({float(norm)}), so it cannot be clipped. To disable this error "
                    "and scale the gradients by the non-finite norm anyway, set "
                    "`error_if_nonfinite=False`"
                )
        self._clip_by((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _check_clipped(self, parameters: Tensor | Iterable[Tensor]) -> None:
        """Raise ValueError unless these are all trained parameters of this optimizer."""
        if isinstance(parameters, int | float):
            raise TypeError(
                "clip_grad_norm_() has the signature of torch.nn.utils: parameters come before "
                f"max_norm. Call clip_grad_norm_(model.parameters(), {parameters}) or "
                f"clip_grad_norm({parameters})."
            )
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        # As in torch, parameters without a gradient do not matter: a model may have frozen ones.
        trained = {id(param) for param in given if param.requires_grad}
        own = [param for group in self.param_groups for param in group["params"]]
        missing = [param for param in own if param.requires_grad and id(param) not in trained]
        if missing or len(trained - set(map(id, own))) > 0:
            kind = "lack some" if missing else "have others, too"
            raise ValueError(
                f"The parameters to clip by one norm are not those of this optimizer: they {kind}. "
                "Pass all parameters that this optimizer trains. To clip parts of a model by norms "
                "of their own, give each part an optimizer."
            )

    # Norms of one step

    @own_layout(in_join=False)
    def watch_step(self) -> StepNorms:
        """Record norms of every parameter in the next step(); return the object that gets them.

        Local, but call it before the same step on every rank. That step needs one more all-reduce,
        of 4 floats per parameter, and a copy of one bucket's shard at a time. If a gradient scaler
        skips the step, the next one is watched instead. Calls before the same step return the
        same object.

        Raises:
            RuntimeError: DeepSpeed shards the parameters (its ZeRO stages 1 and 2), or torch's Join
                is entered.
        """
        names = tuple(spec.name for spec in self.layout.specs)
        if self._watch is None or self._watch.names != names:
            self._watch = StepNorms(names)
        return self._watch

    # torch.distributed.algorithms.Join

    @own_layout("torch.distributed.algorithms.Join")
    def join_hook(self, /, **kwargs: Any) -> JoinHook:
        """Return the hook that torch.distributed.algorithms.Join runs after a rank's inputs end.

        Such a rank has no gradients, which count as zero. The mean is still over all ranks, as
        DistributedDataParallel's is by default (divide_by_initial_world_size).

        Args:
            kwargs: of Join; they have no effect here.

        Raises:
            RuntimeError: with ``grads_are_reduced``, because a rank that has joined has no mean
                gradient; or at stage 2, which sums during backward.
        """
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
        """Launch the collectives of a step of the ranks that still have inputs."""
        optimizer = self._optimizer
        optimizer._is_shadow = True
        try:
            optimizer.zero_grad(set_to_none=True)  # the last step has used them
            optimizer.step()
        finally:
            optimizer._is_shadow = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Allow the methods that Join forbids: parameters are equal on all ranks after a step."""
        self._optimizer._left_join = True
