"""ConsistencyCheck: entries that must be equal on all ranks; and steps without gradients.

The hyper-parameters, the names of trained parameters, and the step of a loaded state are compared
completely. Two things are compared by samples, so that a rank reads and sends little:

* the parameters, by 64 elements of each flat buffer: on the CPU in every region, elsewhere (where
  reading them waits for the device) in the first region and after a state was loaded;
* gradients of the first two steps with grads_are_reduced, by sums of a few of them: the sums are
  equal on all ranks if DistributedDataParallel has averaged the gradients, and hardly ever else.
"""

from __future__ import annotations

import itertools
import operator
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardfuse.comm import Communicator
from shardfuse.engine.ddp import ModuleWatch, Owners
from shardfuse.engine.params import FlatState
from shardfuse.runtime import stacklevel_of_caller


class ConsistencyCheck:
    """Declares entries to the session, which verifies that they are equal on all ranks.

    Args:
        comm: the ranks.
        are_reduced: whether gradients are averaged elsewhere, as ShardConfig says.
    """

    def __init__(self, comm: Communicator, are_reduced: bool) -> None:
        self._comm = comm
        self.hyper_params = HyperParams()
        self._unfrozen: list[str] = []  # flats that were frozen when they were added
        self._loaded: list[str] = []
        self._is_changed = True  # params and states may differ between ranks since the last call
        self.flats: Sequence[FlatState] = ()
        """Those that train already."""
        self._samples: dict[int, str] = {}  # by index of the flat
        self.ddp_check = DdpCheck(comm, are_reduced)
        comm.session.on_restart(self._restart)

    def _restart(self) -> None:
        # Before the error, some ranks may have declared their entries, and their peers not.
        self._is_changed = True
        self._samples.clear()
        self.ddp_check.restart()

    def sample_on_device(self) -> None:
        """Read the sample of params that the next region compares, if it does. Local.

        In the region, reading waits for the device, and this for gradients that a peer may send
        only when it has compared its calls with this rank's.
        """
        if self._is_changed and not self._samples and self._comm.world_size > 1:
            on_device = [state for state in self.flats if state.device.type != "cpu"]
            self._samples = {state.flat.index: _sample(state) for state in on_device}

    def declare(
        self,
        lines: Iterable[str],
        groups: Sequence[Mapping[str, Any]],
        flats: Sequence[FlatState],
        unfrozen: Sequence[FlatState],
        grads: Callable[[], Sequence[tuple[str, Tensor | None]]] | None,
    ) -> None:
        """Declare ``lines`` of this region, and the entries that every region has.

        Args:
            lines: the arguments of this region.
            groups: the optimizer's ``param_groups``.
            flats: the flats that train already.
            unfrozen: flats that begin to train in this region.
            grads: returns (name, gradient on this rank) of every parameter; None under a scaler,
                because all ranks skip the step if the gradients of one overflow.
        """
        if self._comm.world_size == 1:
            return
        for state in unfrozen:
            names = [spec.name for spec in reversed(state.specs)]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            line = f"unfrozen {', '.join(names[:3])}{more}"
            if line not in self._unfrozen:  # it is, if the previous region failed
                self._unfrozen.append(line)
        must_verify, averaged = bool(unfrozen) or self._is_changed, []
        # In layout order: after an error, a flat that is unfrozen here may be in a peer's `flats`.
        trained = sorted([*flats, *unfrozen], key=lambda state: state.flat.index)
        sampled = self._is_changed or any(s.device.type == "cpu" for s in trained)
        known = self._samples
        params = [known.get(s.flat.index) or _sample(s) for s in trained] if sampled else []
        self._is_changed, self._samples = False, {}
        if grads is not None and not self.ddp_check.is_over:
            must_verify, averaged = True, self.ddp_check.lines(grads())
        options = self.hyper_params.entries(len(groups))
        entries = [*lines, *self._loaded, *options, *sorted(self._unfrozen), *params, *averaged]
        self._comm.session.declare(entries, must_verify=must_verify)

    def loaded(self, step: int) -> None:
        """Record that this rank has loaded a state after ``step`` updates."""
        self._loaded = [f"loaded a state of step {step}"]
        self._is_changed, self._samples = True, {}
        self.hyper_params.forget()  # some states may have to be allocated again


def _sample(state: FlatState) -> str:
    """Return a line with the checksum of a sample of a flat buffer's params."""
    data = state.params_buffer.data
    step = max(1, data.numel() // 64)
    code = zlib.crc32(repr(data[::step].tolist()).encode())
    first, last = state.spec_of[min(state.spec_of)].name, state.spec_of[max(state.spec_of)].name
    return f"params from {first} to {last}, by a sample with checksum {code:08x}"


class HyperParams:
    """The hyper-parameters of all groups: which have changed, and an entry for each.

    A tensor on a device is not read in each step, because the host would wait for it: it counts as
    changed when it is another object. An ``lr`` there, which schedules change, does not even then.
    """

    def __init__(self) -> None:
        self._accepted: dict[int, _AcceptedGroup] = {}  # by index of the group

    def changes(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return {index of a group: {key: value}} of changes since accept(), or of all before.

        A change is of a number, text or flag; also a key that is new or gone.
        """
        found = {}
        for index, group in enumerate(groups):
            own = self._accepted.get(index)
            if own is None:
                own = self._accepted[index] = _AcceptedGroup(f"in group {index}")
            values = own.changes(group)
            if values:
                found[index] = values
        return found

    def forget(self) -> None:
        """Have all groups count as changed."""
        self._accepted.clear()

    def accept(self, index: int, group: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Keep ``values`` of a group that was checked, as changes() has returned them."""
        self._accepted[index].update(group, values)

    def entries(self, num_groups: int) -> list[str]:
        """Return an entry for every number, text and flag in the groups.

        Numbers have six digits: hosts of several kinds may round a schedule differently. Other
        values, such as functions, may differ without harm and have no common text.
        """
        own = [self._accepted[index].entries.values() for index in range(num_groups)]
        return [*filter(None, itertools.chain.from_iterable(own))]


class _AcceptedGroup:
    """The values of one group, and an entry for each; a schedule changes one of many.

    Args:
        where: ends the entries.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._objects: dict[str, Any] = {}  # of the group; _VARIABLE if they can change themselves
        self._values: dict[str, Any] = {}
        self.entries: dict[str, str] = {}  # in the order of the group; "" for none

    def changes(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that are new, others, or gone, by key."""
        keys: Iterable[str] = group.keys() | self._values.keys()
        if [*group] == [*self._objects]:
            is_other = map(operator.is_not, group.values(), self._objects.values())
            keys = itertools.compress(group, is_other)
        known, found = self._values, {}
        for key in keys:
            value = _value_of(group, key)
            if value != known.get(key, _UNKNOWN):
                found[key] = value
        return found

    def update(self, group: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Take over some values."""
        if [*group] != [*self._objects]:
            # In the order of the group, which is that of other ranks, and not of the changes.
            self._objects = dict.fromkeys(group)
            self._values, self.entries = {}, {}
            values = {key: _value_of(group, key) for key in group}
        for key, value in values.items():
            own = group[key]
            cannot_change = _is_constant(own) or key in _NOT_COMPARED
            self._objects[key] = own if cannot_change else _VARIABLE
            self._values[key] = value
            has_text = type(value) is float or _has_text(value)
            self.entries[key] = f"{key} = {_formatted(value)} {self._where}" if has_text else ""


def _value_of(group: Mapping[str, Any], key: str) -> Any:
    """Return ``group[key]`` as _comparable() does; _ABSENT if ranks do not compare it."""
    if key not in group or key in _NOT_COMPARED:
        return _ABSENT
    value = _comparable(group[key])
    return _NOT_COMPARABLE if key == "lr" and isinstance(value, _OnDevice) else value


def _is_constant(value: Any) -> bool:
    """Return whether an object is a number, text or flag, or a tuple of them."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANT_TYPES


def _formatted(value: Any) -> str:
    if type(value) is float:
        return f"{value:.6g}"
    if isinstance(value, tuple):
        return "(" + ", ".join(_formatted(item) for item in value if _has_text(item)) + ")"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_NOT_COMPARED = ("params", "param_names")
_CONSTANT_TYPES = frozenset({float, bool, int, str, type(None)})
_NOT_COMPARABLE, _ABSENT, _UNKNOWN, _VARIABLE = object(), object(), object(), object()


class _OnDevice:
    """A tensor on a device, equal to itself alone."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnDevice) and self._tensor is other._tensor

    __hash__ = None  # type: ignore[assignment]


def _has_text(value: Any) -> bool:
    """Return whether ranks compare a value of _comparable()."""
    is_object = value is _NOT_COMPARABLE or value is _ABSENT
    return not is_object and not isinstance(value, _OnDevice)


def _comparable(value: Any) -> Any:
    """Return a value as numbers, texts, flags, tensors on a device, and tuples of these.

    For anything else, _NOT_COMPARABLE.
    """
    if type(value) is float or isinstance(value, (bool, int, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return _OnDevice(value)  # the host would wait for its value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return _NOT_COMPARABLE


# Gradients that are averaged elsewhere


_NUM_SAMPLES = 8


@dataclass
class DdpCheck:
    """Compares the gradients of the first steps between ranks, with grads_are_reduced."""

    comm: Communicator  # the ranks that share the optimizer
    are_reduced: bool  # by DistributedDataParallel or the like
    _num_seen: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the remaining steps need no comparison."""
        return not self.are_reduced or self._num_seen > 1 or self.comm.world_size == 1

    def restart(self) -> None:
        """Compare again: some ranks may not have compared before an error."""
        self._num_seen = 0

    def lines(self, grads: Sequence[tuple[str, Tensor | None]]) -> list[str]:
        """Return the entries of this step that must be equal on all ranks.

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
    """Warns, once and on every rank, in the third step in a row without gradients.

    torch allows such steps, and one or two have good reasons: a scheduler wants a step before its
    first rate, a batch has no loss. They never end if the model has other Parameter objects than
    the optimizer. A rank knows only whether it has a gradient itself, and whether its shard got
    one. In the second such step in a row the rank publishes that. In the third it reads its peers'
    entries: they were published before the messages of the third step, which it has received. In a
    step with a gradient it publishes nothing.

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm.world
        self._num_gradless = 0  # steps in a row
        self._num_made = 0  # gradients that autograd had made by the last step
        self._published = ""
        self._was_warned = False
        self._has_searched = False

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
        """Record a step; warn if no rank had a gradient in three steps. Local.

        Args:
            params: all parameters of the optimizer.
            num_made: gradients that autograd has made so far. If the number has grown, the model
                uses the parameters, and the caller has cleared the gradients.
            call: number of the step() call, equal on all ranks.
            has_updated: whether a parameter had a gradient, as far as this rank knows.
            name: of the optimizer's class.
            are_in_no_module: returns whether modules had the parameters once, and none has them
                now. Called once, because it searches all objects of this process.
        """
        is_used, self._num_made = num_made != self._num_made, num_made
        if has_updated or is_used or self._was_warned:
            self._num_gradless = 0
            return
        if not any(param.requires_grad for param in params):  # all are frozen: intended
            return
        self._num_gradless += 1
        if not self._has_searched:
            self._has_searched = True
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
        if self._num_gradless > 2 and self._have_all_published():
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
        elif self._num_gradless > 1:
            self._published = f"{self._comm.session.generation}/{call}"
            self._comm.session.publish(_TOPIC, self._published)

    def _have_all_published(self) -> bool:
        """Return whether the previous step was without gradients on every rank."""
        if self._comm.world_size == 1:
            return True
        return all(text == self._published for text in self._comm.session.read(_TOPIC))


# Warnings for scripts that no longer use DistributedDataParallel


_NUM_SAMPLES = 64
"""Elements of a tensor that are compared."""

_MAX_TENSORS = 500
"""Tensors that are compared: the text of a rank stays below 20 KB."""

_MAX_CHECKS = 3
"""Steps in which a rank checks whether its peers have written to gradients, too."""


_MAX_CHECKS_OF_MODULES = 10


class UnsyncedTensorsWarning:
    """Warns once if tensors of the model that the optimizer was not given differ between ranks.

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._names: list[str] = []  # of the tensors in the last published text
        self._have_peers_published = False

    def publish(self, roots: Sequence[nn.Module], params: Sequence[Tensor]) -> None:
        """Publish checksums of the tensors of ``roots`` that are not among ``params``.

        ``params`` are the tensors that an optimizer of this process keeps equal on all ranks.
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
            self._have_peers_published = False
            self._names = [name for name, _ in dense]
            checksums = [zlib.crc32(_bytes(tensor)) for _, tensor in dense]
            self._comm.session.publish(
                "rest of the model", " ".join(f"{code:08x}" for code in checksums)
            )

    def warn(self) -> None:
        """Compare the checksums, in the second call after publish(); the first rank warns.

        The ranks communicate after the first call, so all of them have published by the second.
        """
        if not self._names or not self._have_peers_published:
            self._have_peers_published = True
            return
        names, self._names = self._names, []
        if self._comm.world.rank != 0:
            return
        published = [
            text.split()
            for text in self._comm.session.read("rest of the model")
            if text is not None
        ]
        if any(len(checksums) != len(names) for checksums in published):
            return
        differ = [
            n for n, *checksums in zip(names, *published, strict=True) if len(set(checksums)) > 1
        ]
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


class ReplacedParamsWarning:
    """Warns once, on each rank concerned, if others have the place of parameters in the model.

    DistributedDataParallel raises an error in the next forward: it waits for gradients. A model
    that was dropped as a whole has no others: torch.func.functional_call() needs no module of its
    own.

    Args:
        watch: the modules that may hold the parameters.
        params: (name, parameter) of the optimizer.
        owners: the modules that hold them now.
    """

    def __init__(
        self, watch: ModuleWatch, params: Sequence[tuple[str, Tensor]], owners: Owners
    ) -> None:
        self._watch: ModuleWatch | None = watch
        self._params = params
        self._params_by_root = [
            (weakref.ref(root), positions) for root, positions in owners.params_by_root()
        ]
        self._num_checks = 0

    def warn(self) -> None:
        """Look whether modules still hold the parameters, if any has changed since the last call.

        Some code changes modules in each step, and puts everything back: that is not followed.
        """
        if self._watch is None or not self._watch.has_changed:
            return
        self._watch.has_changed = False
        held = self._watch.held([param for _, param in self._params])
        models = [
            positions
            for root, positions in self._params_by_root
            if root() is not None or any(held[position] for position in positions)
        ]
        expected = set[int]().union(*models)
        gone = [
            name
            for position, (name, _) in enumerate(self._params)
            if position in expected and not held[position]
        ]
        self._num_checks += 1
        if gone or self._num_checks == _MAX_CHECKS_OF_MODULES:
            self._watch = None
        if gone:
            more = f" and {len(gone) - 3} more" if len(gone) > 3 else ""
            warnings.warn(
                f"No module has the parameters {', '.join(gone[:3])}{more} any more. Since the "
                "optimizer was built they were replaced, as by a new head, by resized embeddings "
                "or by a parametrization. The optimizer still has the old parameters, and does not "
                "train the new ones. Build the optimizer after the last change of the model.",
                UserWarning,
                stacklevel=stacklevel_of_caller(),
            )


class EditedGradsWarning:
    """Warns once, on each rank concerned, if several ranks write to p.grad after backward().

    Args:
        comm: the ranks that share the optimizer.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._num_checks = 0

    @property
    def is_over(self) -> bool:
        """Whether the remaining steps need no check."""
        return self._num_checks > _MAX_CHECKS or self._comm.world_size == 1

    def note(self, names: Sequence[str]) -> None:
        """Record the parameters with gradients that the user wrote to before this step."""
        if not names:
            return
        self._num_checks += 1
        if self._num_checks == 1:
            self._comm.session.publish("written gradients", names[0])
            return
        published = self._comm.session.read("written gradients")
        ranks = [rank for rank, name in enumerate(published) if name is not None]
        if len(ranks) < 2:
            return
        self._num_checks = _MAX_CHECKS + 1
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
