"""From DeepSpeed's configuration to an optimizer that its engine can drive.

[Note: where the stage is known] DeepSpeed calls ``getattr(torch.optim, name)(params, **options)``.
The ZeRO stage, the dtype and gradient_clipping are no arguments of that call. After the call it is
too late, because ShardedLamb has moved the parameters into its buffers. The plug-in therefore wraps
``DeepSpeedEngine._configure_optimizer``: this method has the engine, its configuration, the
optimizer before it is built, and the wrapper afterwards. Nothing else is patched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardfuse.deepspeed import partitions, peer, refusals
from shardfuse.deepspeed.bridge import EngineBridge
from shardfuse.deepspeed.lamb import from_fused_lamb, from_lamb_options
from shardfuse.deepspeed.muon import forget_marks, from_muon_options
from shardfuse.optim import ShardedLamb, ShardedMuon, ShardedOptimizer
from shardfuse.optim.backend import external_layout


@dataclass
class Registration:
    """Arguments of register(), and the objects that unregister() restores."""

    engine: Any  # DeepSpeedEngine
    original: Callable[[Any, Any, Any], None]  # its _configure_optimizer
    classes: dict[str, type[ShardedOptimizer]]  # by name in the JSON
    replace_lamb: bool
    replace_muon: bool


def configure(active: Registration, engine: Any, client_optimizer: Any, params: Any) -> None:
    """Stand in for ``DeepSpeedEngine._configure_optimizer``.

    Raises:
        ValueError: the configuration cannot work with shardfuse's optimizer.
        RuntimeError: DeepSpeed's internals differ from those expected.
    """
    client = client_optimizer
    if client is not None and not isinstance(client, torch.optim.Optimizer):
        # As DeepSpeed would do. A callable is treated like the optimizer that it returns.
        client = client(params)
    if active.replace_lamb and client is not None and peer.is_fused_lamb(client):
        if getattr(engine.client_lr_scheduler, "optimizer", None) is client:
            raise ValueError(
                "The lr_scheduler was made for the FusedLamb that ShardedLamb replaces, and would "
                "change only that one. Pass a callable: lr_scheduler=lambda optimizer: ..."
            )
        groups, options = from_fused_lamb(client)
        plan = _Plan(engine, ShardedLamb, groups, options)
    elif isinstance(client, ShardedOptimizer):
        plan = _Plan(engine, type(client), client.param_groups, {}, client)
    elif client is None and active.replace_muon and engine.optimizer_name() == "muon":
        groups, options = from_muon_options(params, engine.optimizer_params() or {})
        plan = _Plan(engine, ShardedMuon, groups, options)
    elif client is None and (found := _by_name(active, engine)) is not None:
        plan = _Plan(engine, found[0], params, found[1])
    else:
        # The callable that returned the optimizer is not called again.
        given = client if client is None or client_optimizer is client else lambda params: client
        active.original(engine, given, params)
        return
    peer.probe(engine, "DeepSpeedEngine", peer.ENGINE_ATTRIBUTES)
    refusals.check(engine, plan.cls.__name__)
    if engine.zero_optimization_stage() == 0:
        plan.run_at_stage_0(active)
    else:
        plan.run_on_partitions(active)


def _by_name(
    active: Registration, engine: Any
) -> tuple[type[ShardedOptimizer], dict[str, Any]] | None:
    """Return (class, options) of the optimizer that the JSON names; None if it is not ours."""
    name, options = engine.optimizer_name(), dict(engine.optimizer_params() or {})
    if active.replace_lamb and name == "lamb":
        return ShardedLamb, from_lamb_options(options)
    cls = active.classes.get(name)
    if cls is None:
        return None
    if "max_grad_norm" in options:
        raise ValueError(
            f'"max_grad_norm" in the params of {name}: DeepSpeed removes it. Write '
            '"gradient_clipping" for the norm of all gradients, or "clip_grad_norm" for the '
            "max_grad_norm of the optimizer itself."
        )
    if "clip_grad_norm" in options:
        options["max_grad_norm"] = options.pop("clip_grad_norm")
    return cls, options


@dataclass
class _Plan:
    """How one engine gets its optimizer."""

    engine: Any  # configured as far as its optimizer
    cls: type[ShardedOptimizer]
    params: Any  # parameters or group dicts, as passed to DeepSpeed
    options: Mapping[str, Any]  # the other arguments of ``cls``
    instance: ShardedOptimizer | None = None  # the optimizer, if the user has built it

    def __post_init__(self) -> None:
        if self.instance is not None:
            refusals.check_scheduler(self.instance, self.engine, self.cls.__name__)

    def run_at_stage_0(self, active: Registration) -> None:
        """Let shardfuse shard, and the engine drive it."""
        engine, optimizer = self.engine, self.instance
        if optimizer is None:
            optimizer = self._build()
        else:
            _rebind(optimizer)
        # No wrapper: that of the bf16 block would pass copies of the parameters.
        overrides = {
            "_configure_basic_optimizer": lambda params: optimizer,
            "_do_optimizer_sanity_check": lambda basic: None,
        }
        refusals.check_ranks(optimizer, engine, self.cls.__name__)
        bridge = EngineBridge(engine, optimizer)
        with _overridden(engine, overrides):
            active.original(engine, self.instance, self.params)
        bridge.attach()

    def run_on_partitions(self, active: Registration) -> None:
        """Let DeepSpeed shard, and run our rule on its partitions."""
        engine, zero = self.engine, peer.zero_class()
        optimizer = self.instance
        if optimizer is None:
            with external_layout():
                optimizer = self._build()
        refusals.check_rule(optimizer._rule, engine, self.cls.__name__)
        forget_marks(optimizer._params)
        own = partitions.DeepSpeedBackend(optimizer)
        supported = peer.supported_optimizers()
        supported.append(type(optimizer))
        try:
            overrides = {"_configure_basic_optimizer": lambda params: optimizer}
            with _overridden(engine, overrides):
                active.original(engine, self.instance, self.params)
        finally:
            supported.remove(type(optimizer))
        wrapper = engine.optimizer
        if type(wrapper) is not zero:
            raise ValueError(
                f"shardfuse's {self.cls.__name__} was wrapped by {type(wrapper).__name__}, whose "
                'partitions it cannot read. Set "zero_optimization": {"stage": 1} or 2 with no '
                "further options, and see shardfuse/deepspeed/README.md."
            )
        peer.probe(wrapper, zero.__name__, peer.ZERO_ATTRIBUTES)
        partitions.bind(wrapper, optimizer, own)

    def _build(self) -> ShardedOptimizer:
        groups = _named(_groups(self.params), self.engine.param_names)
        make: Callable[..., ShardedOptimizer] = self.cls
        return make(groups, **self.options)


def _groups(params: Any) -> list[dict[str, Any]]:
    """Return group dicts without empty ones, which DeepSpeed would remove later."""
    entries = list(params)
    if not entries or not isinstance(entries[0], dict):
        entries = [{"params": entries}]
    groups = [{**group, "params": list(group["params"])} for group in entries]
    return [group for group in groups if group["params"]]


def _named(
    groups: list[dict[str, Any]], names: Mapping[Tensor, str]
) -> Sequence[Mapping[str, Any]]:
    """Return the groups with (name, parameter) pairs, if the model has names for all of them."""
    members = [param for group in groups for param in group["params"]]
    if not all(isinstance(param, Tensor) and param in names for param in members):
        return groups
    return [
        {
            **{key: value for key, value in group.items() if key != "param_names"},
            "params": [(names[param], param) for param in group["params"]],
        }
        for group in groups
    ]


def _rebind(optimizer: ShardedOptimizer) -> None:
    """Rebind parameters that the engine has moved since the user built ``optimizer``.

    Raises:
        ValueError: they have another dtype or device now, or a group is empty.
    """
    if any(not group["params"] for group in optimizer.param_groups):
        raise ValueError(
            f"{type(optimizer).__name__} has a parameter group without parameters, which "
            "DeepSpeed removes. Build the optimizer without that group."
        )
    try:
        optimizer.rebind()
    except TypeError as error:
        raise ValueError(
            f"DeepSpeed has moved or cast the model after {type(optimizer).__name__} was built: "
            f"{error} Move and cast the model first, or give DeepSpeed the optimizer by its name "
            'in "optimizer", or pass a callable: optimizer=lambda params: ...'
        ) from error


@contextmanager
def _overridden(owner: Any, overrides: Mapping[str, Any]) -> Iterator[None]:
    """Shadow methods of one object for a while."""
    for name, value in overrides.items():
        owner.__dict__[name] = value
    try:
        yield
    finally:
        for name in overrides:
            del owner.__dict__[name]
