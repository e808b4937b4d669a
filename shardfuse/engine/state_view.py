"""What ``optimizer.state`` shows: this rank's state of every parameter, looked up when asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from shardfuse.buffers import ShardArena
from shardfuse.engine.flat_state import FlatState
from shardfuse.engine.state_io import arenas_of, fragment_tensors, is_trained
from shardfuse.fragments import shaped_pieces

_REMEDY = (
    "States lie in flat buffers, a part on each rank, and what optimizer.state holds only shows "
    'them: nothing can be put in its place. Use load_state_dict() on all ranks (with "state": {} '
    "it starts afresh), or change its tensors in place."
)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Say what to do in place of replacing or removing states; a method of both classes."""
    raise RuntimeError(_REMEDY)


class ParamState(dict[str, Any]):
    """One parameter's state on this rank: ``step``, and tensors that alias the optimizer's own.

    With one rank they have the parameter's shape. With several they are FragmentTensors of it,
    whose ``pieces`` are what this rank has. Assigning what is there already is allowed, as those do
    who move states to the device where they are; anything else would have no effect, and is
    refused.

    Raises:
        RuntimeError: a value was replaced or removed.
    """

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or value is not self[key]:
            _refuse()

    __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (dict(self),)  # so that a copy is a plain dict


class StateView(Mapping[Tensor, ParamState]):
    """{parameter: its state on this rank} of all parameters that are trained.

    There is an entry before the first step, too, with step 0. The mapping is true, also where no
    parameter has an entry: states exist as soon as they are needed, and nobody has to take a step
    to make them (as torch.distributed.checkpoint.state_dict does where ``optimizer.state`` is
    false).

    Args:
        flats: what this rank holds; may grow.
    """

    def __init__(self, flats: Sequence[FlatState]) -> None:
        self._flats = flats
        self._places: dict[int, tuple[FlatState, int]] = {}
        self._num_indexed = 0

    def __getitem__(self, param: Tensor) -> ParamState:
        """Return the state of ``param``: empty for one that is frozen.

        Raises:
            KeyError: it is not a parameter of this optimizer.
        """
        for state in self._flats[self._num_indexed :]:
            self._places.update((id(p), (state, at)) for at, p in enumerate(state.params))
        self._num_indexed = len(self._flats)
        if id(param) not in self._places:
            raise KeyError("not a parameter of this optimizer")
        state, position = self._places[id(param)]
        if not is_trained(state):
            return ParamState()
        values: dict[str, Any] = {"step": state.step_of(state.flat.slots[position].param)}
        for name, arena in arenas_of(state).items():
            values[name] = _shown(state, arena, position)
        return ParamState(values)

    __setitem__ = __delitem__ = clear = _refuse

    def __iter__(self) -> Iterator[Tensor]:
        for state in self._flats:
            if is_trained(state):
                yield from state.params

    def __len__(self) -> int:
        return sum(len(state.params) for state in self._flats if is_trained(state))

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"StateView({len(self)} parameters; a part of each on this rank)"


def _shown(state: FlatState, arena: ShardArena, position: int) -> Tensor:
    """Return one state of the parameter at ``position``, as ParamState has it."""
    slot, spec = state.flat.slots[position], state.specs[position]
    if arena.data.numel() == state.flat.numel:  # one rank, whose segments are the flat
        start = arena.data.storage_offset() + slot.start
        return arena.data.as_strided(spec.shape, spec.stride, start)
    return fragment_tensors(state, arena.view, shaped_pieces, position)[0]
