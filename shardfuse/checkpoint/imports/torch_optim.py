"""States of torch.optim, ZeroRedundancyOptimizer and apex, and helpers of all importers.

apex's layout is that of its public source (apex/optimizers/fused_adam.py, fused_lamb.py and
apex/fp16_utils/fp16_optimizer.py): torch.optim's, with one step per group, for all of its
parameters. FP16_Optimizer has this state dict under "optimizer_state_dict", and also the fp32
masters of each group's fp16 parameters.
"""

from __future__ import annotations

import argparse
import functools
import logging
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from shardfuse.checkpoint.index import MASTER, CheckpointError, DamagedCheckpoint

P = ParamSpec("P")
R = TypeVar("R")

_MAX_COMPRESSION = 100
"""Largest accepted ratio. torch.save() does not compress; a zip file can reach 1,032."""

_NUM_NAMED = 20
_WRONG_FORM_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,  # of torch, and RecursionError
    TypeError,
    ValueError,
)


def expects_form(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn errors of a reading function into CheckpointError that names the expected ``kind``.

    A file may have values of any type at any place. Where the function does not check a type, any
    exception means that the file has another form. The function's first argument is a path.
    """

    def decorate(read: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(read)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return read(*args, **kwargs)
            except CheckpointError:
                raise
            except _WRONG_FORM_ERRORS as error:
                path = args[0] if args else kwargs.get("path", kwargs.get("folder"))
                reason = (str(error).splitlines() or [""])[0][:200]
                raise CheckpointError(
                    f"{path} does not have the form of {kind} ({type(error).__name__}: {reason}). "
                    "Is it of another library or version?"
                ) from error

        return wrapped

    return decorate


def path_inside(folder: Path, name: Any, said_by: Path) -> Path:
    """Return the path of ``name``, which a file contains, in ``folder``.

    Raises:
        CheckpointError: the path would leave the folder, directly or by a link.
    """
    path = folder / str(name)
    if ".." in Path(str(name)).parts or not path.is_relative_to(folder) or "\0" in str(name):
        raise CheckpointError(f"{said_by} names {str(name)[:80]!r}, which is not in {folder}.")
    refuse_outside(path, folder)
    return path


def refuse_outside(path: Path, folder: Path) -> None:
    """Raise CheckpointError if a link leads from ``path`` out of ``folder``."""
    found = path.resolve()
    if not found.is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{path} leads to {found}, which is not in {folder}. Copy what belongs to the "
            "checkpoint there."
        )


def list_some(names: Iterable[Any]) -> str:
    """Return names for an error message; a forged file may have millions."""
    texts = sorted(str(name)[:80] for name in names)
    more = f" and {len(texts) - _NUM_NAMED} more" if len(texts) > _NUM_NAMED else ""
    return f"{texts[:_NUM_NAMED]}{more}"


class _OpaqueObject:
    """Placeholder for an object: its class is not imported, and its code does not run."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, Mapping) else {})


class _OpaqueInt(int):
    """Placeholder for an enum of integers."""


_APEX = ("apex.amp.scaler", "apex.fp16_utils.loss_scaler")
_DEEPSPEED = "deepspeed.runtime.fp16.loss_scaler"

# Placeholders of the same pickled form, so the library need not be installed.
_SAFE_GLOBALS: list[Any] = [
    (_OpaqueObject, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_OpaqueInt, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    *((_OpaqueObject, f"{_DEEPSPEED}.{n}") for n in ("LossScaler", "DynamicLossScaler")),
    *((_OpaqueObject, f"{_DEEPSPEED}.{n}") for n in ("LossScaleConfig", "LossScaleProfile")),
    *(
        (_OpaqueObject, f"{module}.{n}")
        for module in _APEX
        for n in ("LossScaler", "DynamicLossScaler")
    ),
    (argparse.Namespace, "argparse.Namespace"),
]


def read_file(path: Path, *, trusted: bool) -> Any:
    """Return the object in a file of torch.save(), on the CPU.

    Args:
        path: the file.
        trusted: unpickle the file, which imports and runs the code that it names. Otherwise only
            plain data are read, and loss scalers and the like become placeholders.

    Raises:
        CheckpointError: there is no such file; or it is not trusted, and has objects, or data that
            are compressed more than 100 times.
        DamagedCheckpoint: the file cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no file {path}.")
    try:
        if trusted:
            return torch.load(path, map_location="cpu", weights_only=False)
        with torch.serialization.safe_globals(_SAFE_GLOBALS):
            _refuse_compressed(path)
            _refuse_objects(path)
            return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds objects of a library that is not installed: {error}. Install it, or "
            "read the file without trusted=True."
        ) from error
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
            raise _objects_error(path, str(error).partition("GLOBAL ")[2].split()[:1]) from None
        raise DamagedCheckpoint(
            [f"{path} cannot be read ({reason})"], "Copy it again from where it was written."
        ) from error


def _refuse_compressed(path: Path) -> None:
    """Raise unless the unpacked sizes are plausible, before memory is allocated for them."""
    if not zipfile.is_zipfile(path):
        return
    nbytes = path.stat().st_size
    with zipfile.ZipFile(path) as file:
        entries = file.infolist()
    stored = [e for e in entries if e.compress_type == zipfile.ZIP_STORED]
    if sum(entry.file_size for entry in stored) > nbytes:
        raise DamagedCheckpoint([f"{path} says that it holds more bytes than it has"])
    for entry in entries:
        if entry.file_size > max(_MAX_COMPRESSION * entry.compress_size, nbytes):
            raise CheckpointError(
                f"{path} has {entry.filename[:80]!r}, {entry.file_size:,} bytes that are "
                f"compressed more than {_MAX_COMPRESSION} times. torch.save() compresses nothing. "
                "If you trust whoever wrote it, read it with trusted=True (--trusted)."
            )


def _refuse_objects(path: Path) -> None:
    if zipfile.is_zipfile(path):
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
        if found:
            raise _objects_error(path, sorted(found))


def _objects_error(path: Path, found: Sequence[str]) -> CheckpointError:
    return CheckpointError(
        f"{path} holds objects that are not plain data: {', '.join(found)}. Unpickling them runs "
        "what the file says. If you trust whoever wrote it, read it with trusted=True (--trusted)."
    )


def require_key(found: Any, path: Path, key: str) -> Any:
    """Return ``found[key]``.

    Raises:
        CheckpointError: the file has no such key.
    """
    if not isinstance(found, Mapping) or key not in found:
        advice = f"It has {list_some(found)}." if isinstance(found, Mapping) else ""
        raise CheckpointError(f"{path} has no {key!r}, so its layout is unknown. {advice}")
    return found[key]


LOW_PRECISION = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that have masters."""

_KNOWN_STATES = {
    "acc_delta",
    "exp_avg",
    "exp_avg_sq",
    "grad_avg",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    MASTER,
}

_MAX_NUMBERS = 100_000
"""Largest count of numbers in a hyper-parameter."""

_MAX_STEPS = 1 << 24  # fp32 represents integers up to this exactly


def param_entry(states: Mapping[str, Any], step: Any, where: str) -> dict[str, Any]:
    """Return one parameter's entry: its states in fp32, and its step as an fp32 tensor ().

    Args:
        states: {name: tensor}, with or without a step; None values are left out.
        step: used if ``states`` has none; None: unknown, as in SGD.
        where: parameter and file, for error messages.

    Raises:
        CheckpointError: no optimizer here has such a state, or fp32 cannot hold it.
    """
    entry: dict[str, Any] = {}
    step = states.get("step", step)
    if step is not None:
        entry["step"] = _step_tensor(step, where)
    for name, value in states.items():
        if name == "step" or value is None:
            continue
        if name not in _KNOWN_STATES:
            raise CheckpointError(
                f"{where} has the state {name!r:.80}, which no optimizer here has. States that can "
                f"be read are {sorted(_KNOWN_STATES)}: those of Adam, AdamW, LAMB, SGD, RMSprop "
                "and Adadelta."
            )
        entry[name] = to_fp32(value, f"State {name} of {where}")
    return entry


def to_fp32(value: Any, what: str) -> Tensor:
    """Return a full CPU tensor in fp32; bf16 and fp16 are widened, nothing is rounded.

    Raises:
        CheckpointError: the value is no such tensor.
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
    if value.dtype in (torch.float32, *LOW_PRECISION):
        return value.detach().float()
    raise CheckpointError(
        f"{what} is {value.dtype}; states here are fp32, which would lose digits of it. If that is "
        "intended, convert it yourself (.float()), save the result, and import that."
    )


def _step_tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    is_number = isinstance(value, int | float)
    if not is_number or not 0 <= value <= _MAX_STEPS or value != int(value):
        shown = repr(value) if is_number else f"a {type(value).__name__}"
        raise CheckpointError(f"The step of {where} is {shown:.80}, not a number of updates.")
    return torch.tensor(float(value))


def to_plain_numbers(value: Any) -> Any:
    """Return a hyper-parameter with tensors, which capturable optimizers use, replaced by numbers.

    Raises:
        CheckpointError: it has more numbers than any hyper-parameter.
    """
    return _to_plain_within(value, iter(range(_MAX_NUMBERS)))


def _to_plain_within(value: Any, left: Iterator[int]) -> Any:
    if isinstance(value, Tensor):
        if value.numel() > _MAX_NUMBERS:
            raise _too_many_numbers()
        return value.tolist() if value.numel() != 1 else value.item()
    if next(left, None) is None:  # nested references can double the count at each level
        raise _too_many_numbers()
    if isinstance(value, tuple | list):
        return type(value)(_to_plain_within(one, left) for one in value)
    return value


def _too_many_numbers() -> CheckpointError:
    return CheckpointError(f"A hyper-parameter has more than {_MAX_NUMBERS:,} numbers.")


# Options of fused optimizers with only one behaviour here, the default; value: text of the error.
_SWITCHES = {
    "bias_correction": "no Adam here leaves it out",
    "grad_averaging": "no optimizer here leaves (1 - beta1) out",
}


def group_options(
    group: Mapping[str, Any], where: str, *, drop: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a group's hyper-parameters, without parameters, names and step.

    ``bias_correction`` and ``grad_averaging`` of fused optimizers are removed if they are True, as
    in the optimizers here, or if ``drop`` names them.

    Raises:
        CheckpointError: one of them is False.
    """
    for key, remedy in _SWITCHES.items():
        if key not in drop and not to_plain_numbers(group.get(key, True)):
            raise CheckpointError(
                f"{where} has {key}={group[key]!r}: {remedy}, so training would continue "
                "differently. Import nothing, and start with fresh states."
            )
    left_out = {"params", "param_names", "step", *_SWITCHES, *drop}
    return {key: to_plain_numbers(value) for key, value in group.items() if key not in left_out}


def group_step(group: Mapping[str, Any]) -> Any:
    """Return the step that fused optimizers keep in a group, or None."""
    return to_plain_numbers(group.get("step"))


_STATE_DICT_KEYS = {"state", "param_groups"}


@expects_form("torch.optim's state_dict()")
def read_torch(
    path: str | Path, key: str | None = None, *, trusted: bool = False
) -> dict[str, Any]:
    """Return the state of a torch.optim optimizer from a file of torch.save(). Local.

    Supported are Adam, AdamW, SGD, RMSprop and Adadelta: the optimizers here have the same keys.

    Args:
        path: the file; it holds ``optimizer.state_dict()``, or a dict that contains it.
        key: its place in the dict, with dots: "optimizer", or "optimizer_states.0"; None: the
            file's top level, or else its "optimizer".
        trusted: see ``read_file``.

    Raises:
        CheckpointError: no such file or key; objects that are not trusted; states of another
            optimizer, or ones that fp32 cannot hold.
        DamagedCheckpoint: the file cannot be read.
    """
    path = Path(path)
    found = find_state_dict(read_file(path, trusted=trusted), path, key)
    return renumber_params(found, path)


def read_zero_redundancy(
    path: str | Path, key: str | None = None, *, trusted: bool = False
) -> dict[str, Any]:
    """Return the state of torch's ZeroRedundancyOptimizer. Local.

    The file is that of the rank ``to``: after ``consolidate_state_dict(to)`` its ``state_dict()``
    is torch.optim's, complete. Arguments and errors are those of read_torch(), and:

    Raises:
        CheckpointError: no parameter has a state.
    """
    found = read_torch(path, key, trusted=trusted)
    if not found["state"]:
        raise CheckpointError(
            f"{path} has no state of any parameter. Call consolidate_state_dict(to=rank) on all "
            "ranks before that rank saves state_dict()."
        )
    return found


def find_state_dict(found: Any, path: Path, key: str | None) -> Mapping[str, Any]:
    """Return the optimizer's state dict at ``key``.

    Raises:
        CheckpointError: there is none.
    """
    if key is None and not is_state_dict(found):
        key = "optimizer"
    found = value_at(found, path, key)
    if not is_state_dict(found):
        raise CheckpointError(
            f"{path} has no optimizer's state_dict(), {{'state', 'param_groups'}}, at {key!r}. "
            "Give its place with key= (--key)."
        )
    state_dict: Mapping[str, Any] = found
    return state_dict


def value_at(found: Any, path: Path, key: str | None) -> Any:
    """Return the value at a key with dots; None: everything.

    Raises:
        CheckpointError: there is no such key.
    """
    for part in key.split(".") if key else ():
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list | tuple) and (index := _index(part, len(found))) is not None:
            found = found[index]
        else:
            present = list_some(found) if isinstance(found, Mapping) else type(found).__name__
            raise CheckpointError(
                f"{path} has no {key!r:.80}: instead of {part!r:.80} there is {present}. Give the "
                "place of the optimizer's state_dict() with key= (--key)."
            )
    return found


def _index(text: str, length: int) -> int | None:
    """Return the list index that ``text`` denotes, or None.

    int() also accepts digits of other scripts, and refuses numbers of thousands of digits.
    """
    is_index = text.isascii() and text.isdigit() and len(text) <= len(str(length))
    return int(text) if is_index and int(text) < length else None


def is_state_dict(found: Any) -> bool:
    """Return whether ``found`` has the keys of torch.optim's state_dict()."""
    return isinstance(found, Mapping) and found.keys() >= _STATE_DICT_KEYS


def renumber_params(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a state dict with parameters numbered from 0, checked and in fp32."""
    state, groups = {}, []
    left = dict(found["state"])
    number = 0
    for index, group in enumerate(found["param_groups"]):
        first = number
        for param in group["params"]:
            states = left.pop(param, {})
            if any(value is not None for value in states.values()):
                state[number] = param_entry(states, None, f"parameter {number} in {path}")
            number += 1
        options = group_options(group, f"Group {index} in {path}")
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        groups.append({**options, **names, "params": list(range(first, number))})
    if left:
        raise CheckpointError(
            f"{path} has states of {list_some(left)}, which are in none of its groups."
        )
    return {"state": state, "param_groups": groups}


logger = logging.getLogger("shardfuse")

_INNER_KEY = "optimizer_state_dict"
_MASTERS_KEY = "fp32_from_fp16"
_LAMB_KEYS = ("max_grad_norm", "bias_correction")


@expects_form("apex's optimizers")
def read_apex(path: str | Path, key: str | None = None, *, trusted: bool = False) -> dict[str, Any]:
    """Return the state of apex's FusedAdam or FusedLAMB from a file of torch.save(). Local.

    FusedAdam's is for ShardedAdamW, or for ShardedAdam if it was built with adam_w_mode=False;
    FusedLAMB's is for ShardedLamb(variant="apex"). The log names options that apex keeps outside of
    its files, or that the optimizers here take in their constructor (FusedLAMB's clipping norm).

    Args:
        path: the file; it holds ``optimizer.state_dict()``, or a dict that contains it.
        key: its place in the dict, as for ``read_torch``.
        trusted: see ``read_file``.

    Raises:
        CheckpointError: as for read_torch(); a group without a step; options that the optimizers
            here lack; or masters that cannot be assigned to parameters.
        DamagedCheckpoint: the file cannot be read.
    """
    path = Path(path)
    found, masters = _find_apex_state(read_file(path, trusted=trusted), path, key)
    state: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    first = 0
    for index, group in enumerate(found["param_groups"]):
        states = [found["state"].get(param, {}) for param in group["params"]]
        where = f"group {index} in {path}"
        of_group = None if masters is None else _group_masters(masters, index, len(states), where)
        state |= _apex_entries(states, group_step(group), first, of_group, where)
        groups.append(_apex_group_options(group, where, range(first, first + len(states))))
        first += len(states)
    return {"state": state, "param_groups": groups}


def _find_apex_state(whole: Any, path: Path, key: str | None) -> tuple[Mapping[str, Any], Any]:
    """Return the optimizer's state dict, and FP16_Optimizer's masters or None."""
    if key is None and not is_state_dict(whole) and not _is_fp16(whole):
        key = "optimizer"
    found = value_at(whole, path, key)
    if not _is_fp16(found):
        return find_state_dict(whole, path, key), None
    if _MASTERS_KEY not in found:
        raise CheckpointError(
            f"{path} is of an FP16_Optimizer without {_MASTERS_KEY!r}. Only the layout of "
            f"apex.fp16_utils is known. The file has {list_some(found)}."
        )
    return find_state_dict(found[_INNER_KEY], path, None), found[_MASTERS_KEY]


def _is_fp16(found: Any) -> bool:
    return isinstance(found, Mapping) and _INNER_KEY in found


def _apex_entries(
    states: Sequence[Mapping[str, Any]],
    step: Any,
    first: int,
    masters: Sequence[Any] | None,
    where: str,
) -> dict[int, dict[str, Any]]:
    entries = {}
    for at, states_of_param in enumerate(states):
        name = f"parameter {first + at}, of {where},"
        if states_of_param:
            if step is None and "step" not in states_of_param:
                raise CheckpointError(
                    f"{name} has states, but no step, neither with them nor in the group. It is no "
                    "file of apex's FusedAdam or FusedLAMB."
                )
            entries[first + at] = param_entry(states_of_param, step, name)
        if masters is not None:
            entry = entries.setdefault(first + at, param_entry({}, 0, name))
            entry[MASTER] = to_fp32(masters[at], f"The master of {name}")
    return entries


def _group_masters(masters: Any, index: int, count: int, where: str) -> Sequence[Any] | None:
    """Return the masters of a group's parameters, in order; None: it has none."""
    found = masters[index] if index < len(masters) else []
    if len(found) not in (0, count):
        raise CheckpointError(
            f"{where} has {count} parameters and {len(found)} masters, and the file does not say "
            "which belong together. Save it with the fp16 parameters in their own groups."
        )
    return found or None


def _apex_group_options(
    group: Mapping[str, Any], where: str, numbers: Sequence[int]
) -> dict[str, Any]:
    """Return a group's options; FusedLAMB's keep the step, which apex's schedulers read."""
    if "grad_averaging" not in group:
        return {**group_options(group, where), "params": list(numbers)}
    given = {key: to_plain_numbers(group[key]) for key in _LAMB_KEYS if key in group}
    logger.warning(
        "%s is FusedLAMB's: build ShardedLamb(variant='apex', use_global_grad_norm=True, %s), and "
        "with always_adapt=True where it had use_nvlamb=True.",
        where,
        ", ".join(f"{key}={value!r}" for key, value in given.items()),
    )
    options = group_options(group, where, drop=_LAMB_KEYS)
    step = group_step(group)
    return {**options, **({} if step is None else {"step": int(step)}), "params": list(numbers)}
