"""ZeRO stages 1 and 2: our optimizers over partitions that DeepSpeed makes.

DeepSpeed gives the optimizer it wraps one flat fp32 partition per group in place of the group's
parameters, and calls step() once per group. States lie in ``self.state`` as torch keeps them, each
of the partition's shape: DeepSpeed's checkpoints, universal ones too, find what they expect.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from shardfuse.agreement import agree
from shardfuse.comm import communicator_for
from shardfuse.config import ShardConfig
from shardfuse.engine import intake
from shardfuse.engine.foreign_shards import ForeignShards
from shardfuse.engine.step import StepEngine
from shardfuse.layout import FlatLayout, ParamSpec
from shardfuse.optim import ShardedOptimizer
from shardfuse.optim.torch_like import TorchOptions, checked

if TYPE_CHECKING:
    from typing_extensions import Unpack


class _Ratios:
    """What ShardedLamb.trust_ratios() reads: (num_params,), 1 where none was taken."""

    ratio: Tensor | None = None


class _Partition(NamedTuple):
    """A partition that DeepSpeed has made."""

    shards: ForeignShards
    engine: StepEngine
    positions: list[int]  # of its group's parameters in the layout


class Partitioned(ShardedOptimizer):
    """Between an optimizer class and ShardedOptimizer: moves no parameter, allocates nothing.

    A parameter that had no gradient counts as one of gradient zero: DeepSpeed fills it in.
    """

    # DeepSpeed undoes loss scales itself.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        make_rule: Callable[[], Any],
        sharding: ShardConfig | Mapping[str, Any] | None,
        **torch_options: Unpack[TorchOptions],
    ) -> None:
        error: Exception | None = None
        entries: list[str] = []
        self._config = ShardConfig()
        self._device = intake.fallback_device()
        specs: list[ParamSpec] = []
        self._params = []
        try:
            self._config = ShardConfig.of(sharding)
            _check_config(self._config)
            self._rule = make_rule()
            defaults = {**defaults, **checked(torch_options, type(self))}
            torch.optim.Optimizer.__init__(self, params, defaults)
            self._device = intake.common_device(self.param_groups)
            added = intake.read(self.param_groups, 0, self._rule)
            specs = [spec for _, spec in added]
            self._params = [param for param, _ in added]
            entries = intake.describe(self.param_groups, 0, self._rule, self._config, added)
        except Exception as failure:
            error = failure
        self.communicator = communicator_for(self._config.process_group, self._device)
        try:
            if error is None:
                rank = self.communicator.rank
                intake.warn(rank, self._rule, self.param_groups, 0, specs)
        except Exception as failure:
            error = failure
        agree(self.communicator, self._device, entries, error)
        self._start(specs)

    @property
    def state(self) -> Any:
        """{partition: its states}, torch's own."""
        return self.__dict__["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self.__dict__["state"] = value

    def _start(self, specs: list[ParamSpec]) -> None:
        self._partitions: dict[int, _Partition] = {}
        self._engine = _Ratios()  # type: ignore[assignment]
        # Names only: there are no buffers.
        empty = FlatLayout.empty(world_size=self.communicator.world_size, bucket_nbytes=1)
        self.layout = replace(empty, specs=tuple(specs))
        self._built = True
        self._patch_step_function()  # for step hooks
        for group in self.param_groups:
            group.pop("param_names", None)  # names of what DeepSpeed is about to replace

    def bind(
        self, flat: Tensor, shards: ForeignShards, engine: StepEngine, positions: list[int]
    ) -> None:
        """Take over the partition ``flat``; ``positions`` are its group's parameters in layout."""
        self._partitions[id(flat)] = _Partition(shards, engine, positions)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the partitions in ``param_groups``. Collective where norms are needed.

        Raises:
            RuntimeError: a group holds what no partition was bound to.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refresh_groups()
        for group in self.param_groups:
            flat = group["params"][0]
            if id(flat) not in self._partitions or flat.grad is None:
                raise RuntimeError(
                    f"{type(self).__name__} was given a flat partition that it knows no tensors "
                    "of, or no gradient for it. Build it through deepspeed.initialize() with "
                    "shardfuse.deepspeed imported, and leave the steps to the engine."
                )
            self._update(flat, group)
        return loss

    def _update(self, flat: Tensor, group: dict[str, Any]) -> None:
        state = self.state[flat]
        for name, value in self._rule.initial_states(group).items():
            if name not in state:
                state[name] = torch.full_like(flat, value, requires_grad=False)
                if not self._rule.counts_steps:
                    state["step"] = 0  # momentum was set above 0 later: its first update comes now
        step = int(state.get("step", 0)) + 1
        own = self._partitions[id(flat)]
        states = [state[name] for name in self._rule.state_names(group)]
        own.engine.ratio = None
        own.shards.set_step(group, states, step)
        own.engine.run(None, None)
        state["step"] = step
        if self._rule.counts_in_groups:
            group["step"] = step
        ratios = self._engine.ratio
        if ratios is None:
            ratios = torch.ones(len(self.layout.specs), device=flat.device)
        ratios[own.positions] = 1.0 if own.engine.ratio is None else own.engine.ratio
        self._engine.ratio = ratios

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the partitions; DeepSpeed clears the model's."""
        torch.optim.Optimizer.zero_grad(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's partitions of the states, as torch keeps them. Local."""
        return torch.optim.Optimizer.state_dict(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's state_dict(). Local.

        Raises:
            ValueError: a hyper-parameter out of range; nothing is loaded then.
        """
        for group in state_dict["param_groups"]:
            self._rule.check(group)
        torch.optim.Optimizer.load_state_dict(self, dict(state_dict))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while being built; refused afterwards."""
        if self._built:
            self._refuse("add_param_group()")
        torch.optim.Optimizer.add_param_group(self, param_group)

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} is not there while DeepSpeed shards (ZeRO stage 1 and 2): ask the engine, or "
            'set "zero_optimization": {"stage": 0}.'
        )

    def rebind(self) -> None:
        """Refuse: the parameters are DeepSpeed's."""
        self._refuse("rebind()")

    def grad_norm(self) -> Tensor:
        """Refuse: see engine.get_global_grad_norm()."""
        self._refuse("grad_norm()")

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Refuse: see gradient_clipping."""
        self._refuse("clip_grad_norm()")

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Refuse: see engine.save_checkpoint()."""
        self._refuse("consolidate_state_dict()")

    def sharded_state_dict(self) -> dict[str, Any]:
        """Refuse: see engine.save_checkpoint()."""
        self._refuse("sharded_state_dict()")

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse: see engine.load_checkpoint()."""
        self._refuse("load_sharded_state_dict()")

    def minimize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: all ranks take the engine's steps; see engine.backward() and engine.step()."""
        self._refuse("minimize(), or torch.distributed.algorithms.Join,")

    join_hook = minimize

    def memory_summary(self) -> NoReturn:
        """Refuse: the buffers are DeepSpeed's."""
        self._refuse("memory_summary()")


def _check_config(config: ShardConfig) -> None:
    """Raise ValueError if ``config`` has what only shardfuse's own steps do."""
    if config.clip_grad_norm is not None:
        raise ValueError(
            'sharding={"clip_grad_norm": ...} is for loops without DeepSpeed, whose engine clips '
            'at ZeRO stages 1 and 2: write "gradient_clipping" in its configuration.'
        )


_classes: dict[Any, type[ShardedOptimizer]] = {}


def partitioned_class(cls: type[ShardedOptimizer]) -> type[ShardedOptimizer]:
    """Return ``cls`` with Partitioned between it and ShardedOptimizer.

    The methods of Partitioned are put in the new class itself: torch gives every optimizer class a
    ``step`` of its own when it is first used, which would come before that of a later base. What
    ``cls`` itself reads at a step, or adds to a state dict, stays.
    """
    if issubclass(cls, Partitioned):
        return cls
    if cls in _classes:
        return _classes[cls]
    own: dict[str, Any] = {
        name: value
        for name, value in vars(Partitioned).items()
        if callable(value) and name not in ("__init__", "state_dict", "load_state_dict")
    }
    own["__doc__"] = cls.__doc__
    own["__module__"] = cls.__module__
    made = _classes[cls] = type(cls.__name__, (cls, Partitioned), own)
    return made


def hand_over(optimizer: ShardedOptimizer) -> None:
    """Make an optimizer that the user has built one over partitions, in place.

    It stays the same object, so that learning-rate schedulers made for it go on to work. Its
    buffers are given up; the parameters keep their memory until DeepSpeed moves them into its own.

    Raises:
        ValueError: it was stepped, or is over partitions already.
    """
    if isinstance(optimizer, Partitioned):
        raise ValueError(
            f"This {type(optimizer).__name__} is driven by another DeepSpeed engine. Build a new "
            "one for this engine."
        )
    _check_config(optimizer._config)
    layout = optimizer.layout
    if any(state.step_of(slot.param) for state in optimizer._flats for slot in state.flat.slots):
        raise ValueError(
            f"This {type(optimizer).__name__} was stepped already. Pass a fresh one to "
            "deepspeed.initialize(), and load its state through engine.load_checkpoint()."
        )
    for name in (
        "_flats",
        "_view",
        "_grads",
        "_gather",
        "_engine",
        "_shards",
        "_overflows",
        "_buffers",
    ):
        optimizer.__dict__.pop(name, None)
    optimizer.__class__ = partitioned_class(type(optimizer))
    assert isinstance(optimizer, Partitioned)
    optimizer.state = defaultdict(dict)
    optimizer._start(list(layout.specs))
    _keep_schedulers(optimizer)


def _keep_schedulers(optimizer: Partitioned) -> None:
    """Replace the ``step`` that a scheduler has put on the instance, which is the old class's."""
    wrapped = optimizer.__dict__.pop("step", None)
    if wrapped is None:
        return
    optimizer_ref = weakref.ref(optimizer)

    @functools.wraps(wrapped)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        own = optimizer_ref()
        assert own is not None
        own._opt_called = True  # type: ignore[attr-defined]
        return type(own).step(own, closure)

    optimizer.__dict__["step"] = step
