"""From what other libraries keep of parameters to torch.optim's form, nothing rounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfuse.checkpoint.errors import CheckpointError

MASTER = "param"
"""State key of the fp32 master of a parameter in low precision."""

LOW = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that have masters."""

_STATES = {
    "acc_delta",
    "exp_avg",
    "exp_avg_sq",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    MASTER,
}

_MOST_NUMBERS = 100_000
"""Of a hyper-parameter."""

_MOST_STEPS = 1 << 24  # whole numbers that fp32 has


def entry_of(states: Mapping[str, Any], step: Any, where: str) -> dict[str, Any]:
    """Return one parameter's entry: its states in fp32, and its step as an fp32 tensor ().

    Args:
        states: {name: tensor}, a step among them or not; None is left out.
        step: taken where ``states`` has none; None: it is not known, as in SGD.
        where: names the parameter and its file in errors.

    Raises:
        CheckpointError: a state of no optimizer of ours, or one that fp32 does not hold.
    """
    entry: dict[str, Any] = {}
    step = states.get("step", step)
    if step is not None:
        entry["step"] = _step(step, where)
    for name, value in states.items():
        if name == "step" or value is None:
            continue
        if name not in _STATES:
            raise CheckpointError(
                f"{where} has the state {name!r:.80}, which no optimizer here has. States that can "
                f"be read are {sorted(_STATES)}: those of Adam, AdamW, LAMB, SGD, RMSprop and "
                "Adadelta."
            )
        entry[name] = fp32(value, f"State {name} of {where}")
    return entry


def fp32(value: Any, what: str) -> Tensor:
    """Return a tensor in fp32, on the CPU; widened from bf16 or fp16, never rounded.

    Raises:
        CheckpointError: it is no plain tensor of such a dtype.
    """
    if not isinstance(value, Tensor) or type(value) not in (Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"{what} is a {type(value).__name__}, not a whole tensor. Save whole states "
            "(full_state_dict=True in torch.distributed.checkpoint.state_dict)."
        )
    if value.layout != torch.strided or value.device.type != "cpu":
        raise CheckpointError(f"{what} is {value.layout} on {value.device}, not a whole tensor.")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise CheckpointError(
            f"{what} has {value.numel():,} elements, of which the file does not have each."
        )
    if value.dtype in (torch.float32, *LOW):
        return value.detach().float()
    raise CheckpointError(
        f"{what} is {value.dtype}; states here are fp32, which would lose digits of it. If that is "
        "intended, convert it yourself (.float()), save the result, and import that."
    )


def _step(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float)
    if not is_number or not 0 <= value <= _MOST_STEPS or value != int(value):
        shown = repr(value) if is_number else f"a {type(value).__name__}"
        raise CheckpointError(f"The step of {where} is {shown:.80}, not a number of updates.")
    return torch.tensor(float(value))


def plain(value: Any) -> Any:
    """Return a hyper-parameter as plain numbers, where capturable optimizers have tensors.

    Raises:
        CheckpointError: it has more numbers than any hyper-parameter.
    """
    return _plain(value, iter(range(_MOST_NUMBERS)))


def _plain(value: Any, left: Iterator[int]) -> Any:
    if isinstance(value, Tensor):
        if value.numel() > _MOST_NUMBERS:
            raise _no_hyper_parameter()
        return value.tolist() if value.numel() != 1 else value.item()
    if next(left, None) is None:  # a list in a list in a list doubles its numbers each time
        raise _no_hyper_parameter()
    if isinstance(value, tuple | list):
        return type(value)(_plain(one, left) for one in value)
    return value


def _no_hyper_parameter() -> CheckpointError:
    return CheckpointError(f"A hyper-parameter has more than {_MOST_NUMBERS:,} numbers.")


# What fused optimizers keep in groups, and what alone is here; value: the key's remedy.
_SWITCHES = {
    "bias_correction": "no Adam here leaves it out",
    "grad_averaging": "no optimizer here leaves (1 - beta1) out",
}


def group_of(group: Mapping[str, Any], where: str, *, drop: Sequence[str] = ()) -> dict[str, Any]:
    """Return a group's hyper-parameters, without parameters, names and step.

    ``bias_correction`` and ``grad_averaging`` of fused optimizers are left out where they are
    True, which is what ours do, or named in ``drop``.

    Raises:
        CheckpointError: one of them is False.
    """
    for key, remedy in _SWITCHES.items():
        if key not in drop and not plain(group.get(key, True)):
            raise CheckpointError(
                f"{where} has {key}={group[key]!r}: {remedy}, so training would continue "
                "differently. Import nothing, and start with fresh states."
            )
    left_out = {"params", "param_names", "step", *_SWITCHES, *drop}
    return {key: plain(value) for key, value in group.items() if key not in left_out}


def steps_in(group: Mapping[str, Any]) -> Any:
    """Return the step that fused optimizers keep in a group, or None."""
    return plain(group.get("step"))
