"""What ranks must hold in common in a call: hyper-parameters, params, states, what trains.

Two of these are told from samples, so that nothing large is read or sent:

* the params, by 64 elements of each flat buffer: on the CPU in every call, elsewhere (where reading
  them waits for the device) in the first call and after a state was loaded;
* how gradients are averaged, in the first two steps; see averaged.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.engine.averaged import AveragedCheck
from shardfuse.engine.flat_state import FlatState


class Terms:
    """Declares them to the communicator, which sees to it that all ranks have the same.

    Args:
        comm: the ranks.
        are_reduced: whether gradients are averaged elsewhere, as ShardConfig says.
    """

    def __init__(self, comm: Communicator, are_reduced: bool) -> None:
        self._comm = comm
        self._options = _Options()
        self._unfrozen: list[str] = []  # what trains although it was frozen when it was added
        self._loaded: list[str] = []
        self._is_changed = True  # params and states may differ between ranks since the last call
        self.averaged = AveragedCheck(comm, are_reduced)
        comm.session.on_restart(self._restart)

    def _restart(self) -> None:
        # Before the error, some ranks may have declared, and others not.
        self._is_changed = True
        self.averaged.restart()

    def declare(
        self,
        lines: Iterable[str],
        groups: Sequence[Mapping[str, Any]],
        flats: Sequence[FlatState],
        woken: Sequence[FlatState],
        grads: Callable[[], Sequence[tuple[str, Tensor | None]]] | None,
    ) -> None:
        """Declare ``lines`` of the call itself, and all else.

        Args:
            lines: what this call is done with.
            groups: the optimizer's ``param_groups``.
            flats: what is trained up to now.
            woken: flats that begin to train in it.
            grads: gives (name, gradient on this rank) of every parameter; None under a scaler,
                which skips the step where they overflow on one rank.
        """
        if self._comm.world_size == 1:
            return
        for state in woken:
            names = [spec.name for spec in reversed(state.specs)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            line = f"unfrozen {', '.join(names[:3])}{more}"
            if line not in self._unfrozen:  # once more, where the call before has failed
                self._unfrozen.append(line)
        is_new, averaged = bool(woken) or self._is_changed, []
        # In the order of the layout: after an error, what begins here may train elsewhere already.
        trained = sorted([*flats, *woken], key=lambda state: state.flat.index)
        sampled = self._is_changed or any(s.device.type == "cpu" for s in trained)
        params = [_sample(state) for state in trained] if sampled else []
        self._is_changed = False
        if grads is not None and not self.averaged.is_over:
            is_new, averaged = True, self.averaged.lines(grads())
        options = self._options.lines(groups)
        held = [*lines, *self._loaded, *options, *sorted(self._unfrozen), *params, *averaged]
        self._comm.session.declare(held, is_new=is_new)

    def loaded(self, step: int) -> None:
        """Note that this rank has loaded a state, whose params were updated ``step`` times."""
        self._loaded = [f"loaded a state of step {step}"]
        self._is_changed = True


def _sample(state: FlatState) -> str:
    """Return a line that tells the params of a flat buffer from others, by a few of them."""
    data = state.params_buffer.data
    step = max(1, data.numel() // 64)
    code = zlib.crc32(repr(data[::step].tolist()).encode())
    first, last = state.specs[-1].name, state.specs[0].name  # laid out in reverse
    return f"params from {first} to {last}, by a sample with checksum {code:08x}"


class _Options:
    """The hyper-parameters, a line each; made anew on a change."""

    def __init__(self) -> None:
        self._values: dict[int, dict[str, Any]] = {}
        self._lines: dict[int, list[str]] = {}

    def lines(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return a line for every number, text and flag in ``groups``.

        Numbers have six digits: hosts of several kinds may round a schedule differently. What else
        users keep in groups, functions say, may differ without harm and has no common text.
        """
        for index, group in enumerate(groups):
            values = {key: _plain(group[key]) for key in group if key not in _NOT_TERMS}
            if self._values.get(index) != values:
                self._values[index] = values
                self._lines[index] = [
                    f"{key} = {_text(value)} in group {index}"
                    for key, value in values.items()
                    if value is not _OTHER
                ]
        return [line for index in range(len(groups)) for line in self._lines[index]]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(item) for item in value if item is not _OTHER) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_NOT_TERMS = ("params", "param_names")
_OTHER = object()


def _plain(value: Any) -> Any:
    """Return a hyper-parameter as numbers, texts, flags and tuples of them; else _OTHER."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
        return float(value)
    if isinstance(value, tuple | list):
        return tuple(_plain(item) for item in value)
    return _OTHER
