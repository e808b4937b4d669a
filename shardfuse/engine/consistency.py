"""ConsistencyCheck: entries that must be equal on all ranks; and steps without gradients.

The hyper-parameters, the trained parameters, and the step of a loaded state are compared whole. Two
things are compared by samples, so that nothing large is read or sent:

* the parameters, by 64 elements of each flat buffer: on the CPU in every region, elsewhere (where
  reading them waits for the device) in the first region and after a state was loaded;
* gradients that DistributedDataParallel is said to have averaged, in the first two steps, by sums
  of a few of them: these are equal on all ranks if they are averaged, and hardly ever otherwise.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from shardfuse.comm import Communicator
from shardfuse.engine.params import FlatState
from shardfuse.runtime import stacklevel_of_caller


class ConsistencyCheck:
    """Declares them to the communicator, which sees to it that all ranks have the same.

    Args:
        comm: the ranks.
        are_reduced: whether gradients are averaged elsewhere, as ShardConfig says.
    """

    def __init__(self, comm: Communicator, are_reduced: bool) -> None:
        self._comm = comm
        self.hyper_params = HyperParams()
        self._unfrozen: list[str] = []  # what trains although it was frozen when it was added
        self._loaded: list[str] = []
        self._is_changed = True  # params and states may differ between ranks since the last call
        self.averaged = DdpCheck(comm, are_reduced)
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
        unfrozen: Sequence[FlatState],
        grads: Callable[[], Sequence[tuple[str, Tensor | None]]] | None,
    ) -> None:
        """Declare ``lines`` of the call itself, and all else.

        Args:
            lines: what this call is done with.
            groups: the optimizer's ``param_groups``.
            flats: what is trained up to now.
            unfrozen: flats that begin to train in it.
            grads: gives (name, gradient on this rank) of every parameter; None under a scaler,
                which skips the step where they overflow on one rank.
        """
        if self._comm.world_size == 1:
            return
        for state in unfrozen:
            names = [spec.name for spec in reversed(state.specs)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            line = f"unfrozen {', '.join(names[:3])}{more}"
            if line not in self._unfrozen:  # once more, where the call before has failed
                self._unfrozen.append(line)
        is_new, averaged = bool(unfrozen) or self._is_changed, []
        # In the order of the layout: after an error, what begins here may train elsewhere already.
        trained = sorted([*flats, *unfrozen], key=lambda state: state.flat.index)
        sampled = self._is_changed or any(s.device.type == "cpu" for s in trained)
        params = [_sample(state) for state in trained] if sampled else []
        self._is_changed = False
        if grads is not None and not self.averaged.is_over:
            is_new, averaged = True, self.averaged.lines(grads())
        options = self.hyper_params.entries(len(groups))
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


class HyperParams:
    """The hyper-parameters of all groups: which have changed, and an entry for each.

    A tensor on a device is not read, because the host would wait for it.
    """

    def __init__(self) -> None:
        self._values: dict[int, dict[str, Any]] = {}  # accepted ones, by group
        self._entries: dict[int, list[str]] = {}

    def changed(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the groups with other numbers, texts or flags than were accepted last."""
        return [i for i, group in enumerate(groups) if self._values.get(i) != _values_of(group)]

    def accept(self, index: int, group: Mapping[str, Any]) -> None:
        """Keep the values of a group that was checked."""
        self._values[index] = values = _values_of(group)
        self._entries[index] = [
            f"{key} = {_text(value)} in group {index}"
            for key, value in values.items()
            if value is not _OTHER
        ]

    def entries(self, num_groups: int) -> list[str]:
        """Return an entry for every number, text and flag in the groups.

        Numbers have six digits: hosts of several kinds may round a schedule differently. Other
        values, such as functions, may differ without harm and have no common text.
        """
        return [entry for index in range(num_groups) for entry in self._entries[index]]


def _values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _plain(group[key]) for key in group if key not in _NOT_COMPARED}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(_text(item) for item in value if item is not _OTHER) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_NOT_COMPARED = ("params", "param_names")
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


# Gradients that are averaged elsewhere


_NUM_SAMPLES = 8


@dataclass
class DdpCheck:
    """Compares gradients of the first steps between ranks, if they are the mean already."""

    comm: Communicator  # the ranks that share the optimizer
    are_reduced: bool  # whether something else averages the gradients
    _num_seen: int = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return not self.are_reduced or self._num_seen > 1 or self.comm.world_size == 1

    def restart(self) -> None:
        """Look once more: an error may have kept some ranks from having looked."""
        self._num_seen = 0

    def lines(self, grads: Sequence[tuple[str, Tensor | None]]) -> list[str]:
        """Return what ranks must have in common in the first step, if gradients are reduced.

        Args:
            grads: (name, gradient on this rank) of every parameter.
        """
        self._num_seen += 1
        if self._num_seen > 1:
            return []
        return [
            f"a gradient of {name} that sums to {total} (grads_are_reduced=True is for "
            "gradients that DistributedDataParallel or the like has averaged; it is set by itself "
            "where a DistributedDataParallel holds the parameters, whose own forward must be "
            "called, then)"
            for name, total in _sample_sums(grads)
        ]


def _sample_sums(grads: Sequence[tuple[str, Tensor | None]]) -> list[tuple[str, str]]:
    """Return (name, sum to three digits) of a few dense gradients, evenly spaced."""
    present = [(name, g) for name, g in grads if g is not None and g.layout == torch.strided]
    step = max(1, -(-len(present) // _NUM_SAMPLES))
    return [(name, f"{float(grad.sum(dtype=torch.float32)):.3g}") for name, grad in present[::step]]


# Steps without gradients


_TOPIC = "a step without gradients"


class GradlessSteps:
    """Warns, once and on every rank, in the third such step in a row.

    torch allows steps without gradients, and one or two have good reasons: a step that lets a
    scheduler begin, a batch without a loss. A model that holds other parameters has them for ever.
    What a rank knows by itself is whether it has a gradient, and whether any came to its shard. In
    the second such step in a row it tells the others, and in the third it hears of them: by then
    the step's own messages have come from every rank. A step with a gradient tells nothing.

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.world
        self._num_idle = 0  # steps in a row
        self._num_made = 0  # gradients that autograd had made by the last step
        self._published = ""
        self._was_warned = False
        self._has_asked = False

    def note(
        self,
        params: Sequence[Tensor],
        num_made: int,
        *,
        call: int,
        has_updated: bool,
        name: str,
        are_in_no_module: Callable[[], bool],
    ) -> None:
        """Take note of a step, and warn if it is time to. Local.

        Args:
            params: all of the optimizer.
            num_made: gradients that autograd has made in all; if more than before, the parameters
                are in use, and the caller has cleared the gradients.
            call: of step(), alike on all ranks.
            has_updated: whether a parameter had a gradient, as far as this rank knows.
            name: of the optimizer's class.
            are_in_no_module: tells whether modules held the parameters once, and none does now; it
                is asked once, as it looks at all objects of this process.
        """
        is_used, self._num_made = num_made != self._num_made, num_made
        if has_updated or is_used or self._was_warned:
            self._num_idle = 0
            return
        if not any(param.requires_grad for param in params):  # frozen: that is what was meant
            return
        self._num_idle += 1
        if not self._has_asked:
            self._has_asked = True
            if are_in_no_module():
                self._was_warned = True
                warnings.warn(
                    f"No module holds the parameters of this {name} any more, so what step() "
                    "updates is not used. The model has other Parameter objects since "
                    "load_state_dict(assign=True), or a conversion that replaces them. Build the "
                    "optimizer on the model's present parameters.",
                    UserWarning,
                    stacklevel=stacklevel_of_caller(),
                )
                return
        if self._num_idle > 2 and self._have_all_published():
            self._was_warned = True
            warnings.warn(
                f"No parameter of this {name} had a gradient in 3 steps in a row, on any rank: "
                "step() updates nothing. Does the model hold other Parameter objects than the "
                "optimizer was built with, as after load_state_dict(assign=True), a conversion "
                "that replaces them, or a new model? Build the optimizer after that, on the "
                "model's present parameters. If this is meant, call step() only where there are "
                "gradients.",
                UserWarning,
                stacklevel=stacklevel_of_caller(),
            )
        elif self._num_idle > 1:
            self._published = f"{self._comm.session.generation}/{call}"
            self._comm.session.publish(_TOPIC, self._published)

    def _have_all_published(self) -> bool:
        """Return whether the step before was without gradients on every rank."""
        if self._comm.world_size == 1:
            return True
        return all(text == self._published for text in self._comm.session.read(_TOPIC))


# Warnings where a DistributedDataParallel was dropped


_NUM_SAMPLES = 64
"""Elements of a tensor that are compared."""

_MAX_TENSORS = 500
"""Tensors that are compared: the text of a rank stays below 20 KB."""

_MAX_LOOKS = 3
"""Steps in which a rank looks whether others have written to gradients, too."""


class UnsyncedTensorsWarning:
    """Warns once if tensors of the model that the optimizer was not given differ between ranks.

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._names: list[str] = []  # of the tensors that this rank has told of
        self._others_have_told = False

    def tell(self, roots: Sequence[nn.Module], params: Sequence[Tensor]) -> None:
        """Tell the others of the tensors of ``roots`` that are not among ``params``.

        ``params`` are the tensors that any optimizer of ours keeps equal.
        """
        own = set(map(id, params))
        rest: dict[str, Tensor] = {}
        for root in roots:
            named = [*root.named_parameters(), *root.named_buffers()]
            rest |= {name: tensor for name, tensor in named if id(tensor) not in own}
        dense = [(n, t) for n, t in rest.items() if t.layout == torch.strided and t.numel() > 0]
        dense = [(n, t) for n, t in dense if t.device.type != "meta" and not t.is_quantized]
        dense = [(n, t) for n, t in dense if not hasattr(t, "device_mesh")][:_MAX_TENSORS]
        if dense:
            self._others_have_told = False
            self._names = [name for name, _ in dense]
            codes = [zlib.crc32(_bytes(tensor)) for _, tensor in dense]
            self._comm.session.publish(
                "rest of the model", " ".join(f"{code:08x}" for code in codes)
            )

    def warn(self) -> None:
        """Compare what the ranks have told, in the second call after tell(); the first rank warns.

        After the first one the ranks communicate, so that all have told.
        """
        if not self._names or not self._others_have_told:
            self._others_have_told = True
            return
        names, self._names = self._names, []
        if self._comm.world.rank != 0:
            return
        told = [
            text.split()
            for text in self._comm.session.read("rest of the model")
            if text is not None
        ]
        if any(len(codes) != len(names) for codes in told):
            return
        differ = [n for n, *codes in zip(names, *told, strict=True) if len(set(codes)) > 1]
        if differ:
            more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
            warnings.warn(
                f"Tensors of the model differ between ranks: {', '.join(differ[:3])}{more}. They "
                "are not among the parameters that the optimizer was given. "
                "DistributedDataParallel makes all parameters equal when it is built, and buffers "
                "before each forward; nobody does now. Pass the model in place of its parameters; "
                "where you pass parameter groups, call optimizer.broadcast_buffers(model) once. "
                "If they are to differ, pass sharding={'broadcast_buffers': False}.",
                UserWarning,
                stacklevel=stacklevel_of_caller(),
            )


class EditedGradsWarning:
    """Warns once, on every rank that does so, if several ranks write to p.grad after backward().

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._num_looks = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to look at."""
        return self._num_looks > _MAX_LOOKS or self._comm.world_size == 1

    def note(self, names: Sequence[str]) -> None:
        """Take note of the parameters whose gradients were written to before this step."""
        if not names:
            return
        self._num_looks += 1
        if self._num_looks == 1:
            self._comm.session.publish("written gradients", names[0])
            return
        told = self._comm.session.read("written gradients")
        ranks = [rank for rank, name in enumerate(told) if name is not None]
        if len(ranks) < 2:
            return
        self._num_looks = _MAX_LOOKS + 1
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"p.grad of {names[0]}{more} was written to between backward() and step(), on ranks "
            f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}. If this is "
            "torch.nn.utils.clip_grad_norm_() or clip_grad_value_(): they see the gradient of this "
            "rank alone, and not the mean over ranks, as they did under DistributedDataParallel. "
            "So each rank is clipped by another factor. Call optimizer.clip_grad_norm_() in their "
            "place. If each rank's own gradient is meant, as by a mask, nothing need be done.",
            UserWarning,
            stacklevel=stacklevel_of_caller(),
        )


@torch.no_grad()
def _bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a sample of ``tensor``."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    sample = flat[:: max(1, flat.numel() // _NUM_SAMPLES)].contiguous()
    return bytes(sample.view(torch.uint8).tolist())
