"""Drop-in for paddle.optimizer.Lamb and paddle.nn.ClipGradBy*, over torch parameters, sharded.

from shardfuse.optim.paddle import ClipGradByGlobalNorm, Lamb

Nothing here imports paddle; checked against paddlepaddle 3.3.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from torch import Tensor

from shardfuse.config import ShardConfig
from shardfuse.optim.backend import own_layout
from shardfuse.optim.base import ShardedOptimizer
from shardfuse.rules import PaddleLambRule
from shardfuse.rules.base import check_lr, number
from shardfuse.rules.lamb import GroupClip
from shardfuse.runtime import untraced


class LRScheduler(Protocol):
    """A scheduler for ``learning_rate``: any of paddle.optimizer.lr, or one with these methods.

    If it also has ``state_dict()`` and ``set_state_dict()``, the optimizer saves and loads it.
    """

    def __call__(self) -> float:
        """Return the present learning rate."""

    @untraced
    def step(self) -> None:
        """Advance to the next rate; the user calls it after the optimizer's step()."""


@dataclass(frozen=True)
class _ClipByNorm:
    """A clip by a bound on a norm."""

    clip_norm: float

    def __post_init__(self) -> None:
        if not number(self.clip_norm, "clip_norm") > 0:
            raise ValueError(f"Invalid clip_norm: {self.clip_norm}. Must be > 0.")


@dataclass(frozen=True)
class ClipGradByGlobalNorm(_ClipByNorm):
    """Scale the mean gradient by clip_norm / max(norm, clip_norm), with the norm of all parameters.

    If parameters are given as group dicts, each group is clipped by its own norm, as in Paddle.
    Costs one all-reduce a step, of one float, or of one for each group.

    Args:
        clip_norm: bound of the L2 norm; ValueError unless it is above 0.
    """


@dataclass(frozen=True)
class ClipGradByNorm(_ClipByNorm):
    """Scale each tensor's mean gradient by clip_norm / max(norm, clip_norm), with its own norm.

    Costs one all-reduce of one float per parameter and step.

    Args:
        clip_norm: bound of the L2 norm; ValueError unless it is above 0.
    """


@dataclass(frozen=True)
class ClipGradByValue:
    """Limit every element of the mean gradient to [min, max].

    Args:
        max: at least 0.
        min: at most 0; -max unless given.

    Raises:
        ValueError: 0 lies outside the bounds. (Paddle would make zero gradients non-zero.)
    """

    max: float
    min: float | None = None

    def __post_init__(self) -> None:
        upper = number(self.max, "max")
        if self.min is None:
            object.__setattr__(self, "min", -self.max)
        assert self.min is not None
        lower = number(self.min, "min")
        if not lower <= 0 <= upper or lower == upper:
            raise ValueError(f"Invalid bounds: [{self.min}, {self.max}]. 0 must lie between them.")


GradClip = ClipGradByGlobalNorm | ClipGradByNorm | ClipGradByValue


class Lamb(ShardedOptimizer):
    """paddle.optimizer.Lamb with its state sharded over ranks; constructor as in Paddle 3.3.

        g = clip(g);    m = beta1 * m + (1 - beta1) * g;    v = beta2 * v + (1 - beta2) * g^2
        u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + lamb_weight_decay * p
        p -= learning_rate * ||p|| / ||u|| * u

    The ratio of norms is 1 where either norm is 0, or the decay is 0 without always_adapt (arXiv
    1904.00962). Gradients are torch's, of this rank; step() takes their mean before the clip.

    Differs from Paddle: fp16 and bf16 parameters always have fp32 masters; learning_rate may be an
    int; exclude_from_weight_decay_fn is called once, not in every step; the state dict is torch's,
    with ``LR_Scheduler`` added if a scheduler is attached.

    Args:
        learning_rate: a number, or a scheduler that every step() calls.
        lamb_weight_decay, beta1, beta2, epsilon: as in the formula.
        parameters: parameters; (name, parameter) pairs; or dicts with ``params`` and, optionally,
            any of lamb_weight_decay, beta1, beta2, epsilon, grad_clip,
            exclude_from_weight_decay_fn, ``learning_rate`` (a factor on that of the optimizer) and
            ``weight_decay`` (Paddle's L2 decay: that much of p is added to the clipped gradient).
        grad_clip: ClipGradByGlobalNorm, ClipGradByNorm or ClipGradByValue of this module.
        exclude_from_weight_decay_fn: gets a parameter, returns True if it has no decay. During the
            call the parameter has a ``.name``: that of ``parameters``, or a generated one.
        multi_precision: accepted as in Paddle, without effect; masters are always fp32.
        always_adapt: use the ratio also where the decay is 0.
        name: accepted as in Paddle, without effect.
        sharding: a ShardConfig, or a plain dict with its keys.

    Raises:
        AttributeError: no ``parameters``.
        TypeError: arguments of another type than these.
        ValueError: a hyper-parameter is out of range or NaN; or the ranks disagree.
    """

    _rule: PaddleLambRule

    def __init__(
        self,
        learning_rate: float | LRScheduler = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Iterable[Any] | None = None,
        grad_clip: GradClip | None = None,
        exclude_from_weight_decay_fn: Callable[[Tensor], bool] | None = None,
        multi_precision: bool = False,
        always_adapt: bool = False,
        name: str | None = None,
        *,
        sharding: ShardConfig | Mapping[str, Any] | None = None,
    ) -> None:
        self._scheduler: LRScheduler | None = None
        self._grads_seen: tuple[int, list[int | None]] = (0, [])
        self._fallback = {
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
            "lamb_weight_decay": lamb_weight_decay,
            "grad_clip": grad_clip,
            "exclude_from_weight_decay_fn": exclude_from_weight_decay_fn,
        }
        defaults: dict[str, Any] = {}

        def make_rule() -> PaddleLambRule:
            if parameters is None:
                text = "parameters argument given to the Optimizer should not be None."
                raise AttributeError(text)
            if isinstance(parameters, dict):
                raise TypeError("parameters should be a list of dicts, not one dict.")
            if callable(learning_rate):
                self._scheduler = _checked_scheduler(learning_rate)
            defaults["lr"] = (
                self._scheduler_lr() if self._scheduler else _checked_number(learning_rate)
            )
            return PaddleLambRule(always_adapt=always_adapt)

        super().__init__(parameters, defaults, make_rule, sharding)

    @untraced
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with the keys that ``parameters`` may have. Collective."""
        undecayed = set(self._rule.undecayed)
        try:
            super().add_param_group(param_group)
        except Exception:
            self._rule.undecayed = undecayed
            raise

    def _read_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return Paddle's group dict with the rule's keys; record the parameters without decay."""
        foreign = {"lr", "betas", "eps"} & group.keys()
        if foreign:
            raise ValueError(
                f"A group of Paddle's has no {sorted(foreign)[0]!r}. Use learning_rate (a factor "
                "on the optimizer's), beta1, beta2, epsilon."
            )
        options = {**self._fallback, **group}
        exclude = options.pop("exclude_from_weight_decay_fn")
        params = options.pop("params")
        params = [params] if isinstance(params, Tensor) else list(params)
        if exclude is not None:
            named = _named(params, len(self.param_groups))
            self._rule.undecayed |= {name for name, p in named if _call_with_name(exclude, name, p)}
        decay = options.pop("weight_decay", None)
        return {
            "params": params,
            "lr": self.get_lr(),
            "betas": (options.pop("beta1"), options.pop("beta2")),
            "eps": options.pop("epsilon"),
            "weight_decay": options.pop("lamb_weight_decay"),
            "lr_scale": options.pop("learning_rate", 1.0),
            "l2": 0.0 if decay is None else _checked_number(decay, "weight_decay"),
            "grad_clip": _group_clip(options.pop("grad_clip")),
            **options,
        }

    # The step

    @untraced
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters at the present learning rate. See ShardedOptimizer.step()."""
        if self._scheduler is not None:
            self._write_lr(self._scheduler_lr())
        result = super().step(closure)
        self._grads_seen = self._grad_snapshot()
        return result

    @own_layout()
    def minimize(
        self,
        loss: Tensor,
        startup_program: None = None,
        parameters: None = None,
        no_grad_set: None = None,
    ) -> tuple[list[Any], list[tuple[Tensor, Tensor]]]:
        """Update the parameters to make ``loss`` smaller. Collective.

        Calls ``loss.backward()`` unless that has been done since the last step() or clear_grad().
        (Paddle's own minimize() never calls it in dynamic graphs.)

        Args:
            loss: scalar ().
            startup_program, parameters, no_grad_set: for static graphs; must be None.

        Returns:
            ``([], [(parameter, gradient), ...])`` for the parameters with gradients on this rank;
            none at stage 2, which has freed them.

        Raises:
            NotImplementedError: an argument of static graphs was given.
        """
        if any(x is not None for x in (startup_program, parameters, no_grad_set)):
            raise NotImplementedError(
                "minimize() takes only the loss. To leave parameters out, set requires_grad=False "
                "on them."
            )
        (num_seen, seen), (num_made, now) = self._grads_seen, self._grad_snapshot()
        are_set = any(at not in (None, before) for at, before in zip_longest(now, seen))
        if num_made == num_seen and not are_set:
            loss.backward()  # type: ignore[no-untyped-call]
        self.step()
        params = [param for group in self.param_groups for param in group["params"]]
        return [], [(param, param.grad) for param in params if param.grad is not None]

    @untraced
    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients to zero, or to None.

        A parameter with a gradient of zero is updated by step(), one with None is not.

        Args:
            set_to_zero: to zero; else to None.
        """
        self.zero_grad(set_to_none=not set_to_zero)

    clear_gradients = clear_grad

    @untraced
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, to None or to zero."""
        super().zero_grad(set_to_none)
        self._grads_seen = self._grad_snapshot()

    def _grad_snapshot(self) -> tuple[int, list[int | None]]:
        """Return the number of gradients made so far, and the addresses of the present ones."""
        grads = [param.grad for group in self.param_groups for param in group["params"]]
        return self._grads.num_made, [None if g is None else g.data_ptr() for g in grads]

    # The learning rate

    @untraced
    def get_lr(self) -> float:
        """Return the present learning rate, before the factors of groups."""
        if self._scheduler is not None:
            return self._scheduler_lr()
        return float((*self.param_groups, self.defaults)[0]["lr"])

    @untraced
    def set_lr(self, value: float) -> None:
        """Set the learning rate of the next steps. Local: call it on every rank.

        Args:
            value: at least 0.

        Raises:
            RuntimeError: a scheduler is attached.
            TypeError, ValueError: not a number; below 0.
        """
        if self._scheduler is not None:
            raise RuntimeError(
                "optimizer's learning rate can't be LRScheduler when invoke this API, because this "
                "will lead to conflict. Call set_lr_scheduler() with another one."
            )
        rate = _checked_number(value)
        check_lr({"lr": rate})
        self._write_lr(rate)

    @untraced
    def set_lr_scheduler(self, scheduler: LRScheduler) -> None:
        """Read the learning rate of the next steps from ``scheduler``, in place of any other.

        Args:
            scheduler: called in every step(); TypeError if it is not callable or has no step().
        """
        self._scheduler = _checked_scheduler(scheduler)
        self._write_lr(self._scheduler_lr())

    def _scheduler_lr(self) -> float:
        assert self._scheduler is not None
        return float(self._scheduler())

    def _write_lr(self, value: float) -> None:
        for group in self.param_groups:
            group["lr"] = value

    # State

    def _collect(self) -> dict[str, Any]:
        """Add the scheduler's state as ``LR_Scheduler``.

        sharded_state_dict() has no scheduler's state: save that separately.
        """
        state = super()._collect()
        saved = getattr(self._scheduler, "state_dict", None)
        return state if saved is None else {**state, "LR_Scheduler": saved()}

    @untraced
    def companions(self) -> dict[str, Any]:
        """Return the scheduler, if its state can be loaded. Local."""
        return {"LR_Scheduler": s} if hasattr(s := self._scheduler, "set_state_dict") else {}

    def _loaded_keys(self) -> set[str]:
        return super()._loaded_keys() | self.companions().keys()

    def _prepared(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check the scheduler's state, too; ValueError if there is none for the one attached."""
        scheduler: Any = self.companions().get("LR_Scheduler")
        if scheduler is not None and "LR_Scheduler" not in state_dict:
            raise ValueError("LR_Scheduler state must be included in the state dict.")
        load = super()._prepared(state_dict)
        if scheduler is None:
            return load
        _check_loads(scheduler, state_dict["LR_Scheduler"])

        def load_both() -> None:
            scheduler.set_state_dict(state_dict["LR_Scheduler"])
            load()

        return load_both

    set_state_dict = ShardedOptimizer.load_state_dict


def _group_clip(clip: GradClip | None) -> GroupClip | None:
    """Return a clip as a tuple of numbers and text, for a group and its state dict."""
    if clip is None:
        return None
    if isinstance(clip, ClipGradByValue):
        assert clip.min is not None
        return "value", float(clip.max), float(clip.min)
    if isinstance(clip, ClipGradByGlobalNorm | ClipGradByNorm):
        kind: Any = "norm" if isinstance(clip, ClipGradByNorm) else "global_norm"
        return kind, float(clip.clip_norm), 0.0
    raise TypeError(
        f"grad_clip should be a ClipGradBy... of shardfuse.optim.paddle, got {type(clip)}."
    )


def _checked_number(value: Any, name: str = "learning_rate") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        kinds = "Expected a number, or for the learning rate a scheduler"
        raise TypeError(f"{kinds}, as {name}, got {value!r}.")
    return number(value, name)


def _checked_scheduler(scheduler: Any) -> LRScheduler:
    if not callable(scheduler) or not hasattr(scheduler, "step"):
        raise TypeError(
            "A scheduler should return the learning rate when called, and have step(), got "
            f"{type(scheduler)}. Build torch's own schedulers over the optimizer instead."
        )
    return scheduler  # type: ignore[no-any-return]


def _check_loads(scheduler: Any, state: Any) -> None:
    """Raise ValueError if a copy of ``scheduler`` cannot load ``state``, or then has no valid rate.

    A scheduler that cannot be copied is not checked.
    """
    try:
        trial = copy.deepcopy(scheduler)
    except Exception:
        return
    try:
        trial.set_state_dict(copy.deepcopy(state))
        check_lr({"lr": trial()})
    except Exception as error:
        raise ValueError(
            f"LR_Scheduler of the loaded state dict does not fit {type(scheduler).__name__}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _named(params: Sequence[Any], group: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, parameter); parameters without names get those of error messages."""
    for position, item in enumerate(params):
        yield item if isinstance(item, tuple) else (f"param_groups[{group}][{position}]", item)


def _call_with_name(function: Callable[[Tensor], bool], name: str, param: Tensor) -> bool:
    """Return function(param), with ``param.name`` during the call.

    torch's own attribute ``name`` is read-only. Another tensor could have the name, but functions
    may compare parameters by identity. Hence the class of the parameter itself changes.
    """
    own = type(param)
    metaclass: Any = type(own)
    param.__class__ = metaclass(own.__name__, (own,), {"name": name})
    try:
        return bool(function(param))
    finally:
        param.__class__ = own
