"""torch.optim's files, and ZeroRedundancyOptimizer's, which have the same form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardfuse.checkpoint.errors import CheckpointError
from shardfuse.checkpoint.imports.files import interprets, read_file, some_of
from shardfuse.checkpoint.imports.states import entry_of, group_of

_KEYS = {"state", "param_groups"}


@interprets("torch.optim's state_dict()")
def read_torch(
    path: str | Path, key: str | None = None, *, trusted: bool = False
) -> dict[str, Any]:
    """Return the state of a torch.optim optimizer from a file of torch.save(). Local.

    That of Adam, AdamW, SGD, RMSprop or Adadelta, whose keys ours share.

    Args:
        path: the file; it holds ``optimizer.state_dict()``, or a dict with that in it.
        key: where in the dict, with dots: "optimizer", or "optimizer_states.0"; None: the file's
            top, or else its "optimizer".
        trusted: see ``files.read_file``.

    Raises:
        CheckpointError: no such file or key; objects that are not trusted; states of another
            optimizer, or ones that fp32 does not hold.
        DamagedCheckpoint: the file cannot be read.
    """
    path = Path(path)
    found = optimizer_in(read_file(path, trusted=trusted), path, key)
    return numbered(found, path)


def read_zero_redundancy(
    path: str | Path, key: str | None = None, *, trusted: bool = False
) -> dict[str, Any]:
    """Return the state of torch's ZeroRedundancyOptimizer. Local.

    Of the file that the rank ``to`` wrote: after ``consolidate_state_dict(to)`` its
    ``state_dict()`` is torch.optim's, whole. Arguments and errors are those of read_torch(), and:

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


def optimizer_in(found: Any, path: Path, key: str | None) -> Mapping[str, Any]:
    """Return the state dict at ``key`` of what a file holds.

    Raises:
        CheckpointError: there is none.
    """
    if key is None and not is_state_dict(found):
        key = "optimizer"
    found = at_key(found, path, key)
    if not is_state_dict(found):
        raise CheckpointError(
            f"{path} has no optimizer's state_dict(), {{'state', 'param_groups'}}, at {key!r}. "
            "Give its place with key= (--key)."
        )
    state_dict: Mapping[str, Any] = found
    return state_dict


def at_key(found: Any, path: Path, key: str | None) -> Any:
    """Return what lies at a key with dots; None: all.

    Raises:
        CheckpointError: nothing does.
    """
    for part in key.split(".") if key else ():
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list | tuple) and (index := _index(part, len(found))) is not None:
            found = found[index]
        else:
            held = some_of(found) if isinstance(found, Mapping) else type(found).__name__
            raise CheckpointError(
                f"{path} has no {key!r:.80}: instead of {part!r:.80} there is {held}. Give the "
                "place of the optimizer's state_dict() with key= (--key)."
            )
    return found


def _index(text: str, length: int) -> int | None:
    """Return the index that a text is, or None. Python has more digits than 0 to 9, and no number
    of thousands of them."""
    is_index = text.isascii() and text.isdigit() and len(text) <= len(str(length))
    return int(text) if is_index and int(text) < length else None


def is_state_dict(found: Any) -> bool:
    """Return whether it has the form of torch.optim's."""
    return isinstance(found, Mapping) and found.keys() >= _KEYS


def numbered(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return a state dict with its parameters numbered from 0, checked and in fp32."""
    state, groups = {}, []
    left = dict(found["state"])
    number = 0
    for index, group in enumerate(found["param_groups"]):
        first = number
        for param in group["params"]:
            states = left.pop(param, {})
            if any(value is not None for value in states.values()):
                state[number] = entry_of(states, None, f"parameter {number} in {path}")
            number += 1
        options = group_of(group, f"Group {index} in {path}")
        names = {"param_names": list(group["param_names"])} if "param_names" in group else {}
        groups.append({**options, **names, "params": list(range(first, number))})
    if left:
        raise CheckpointError(
            f"{path} has states of {some_of(left)}, which are in none of its groups."
        )
    return {"state": state, "param_groups": groups}
