"""The saved state: modules, optimizers and values, and how each is saved and loaded.

[Note: other masters] The model may be in another precision than the saved one, or its params may
be communicated in other bits. If the checkpoint has masters of params that are fp32 here, the
masters become the params. If it lacks masters, the model's saved values become the masters; they
are not rounded if they were fp32. Without a model in the state, the present params are copied into
the masters. Rounding errors (error feedback) that the checkpoint lacks become 0.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardfuse.checkpoint.index import CheckpointError
from shardfuse.engine.dtensors import is_dtensor, local_of
from shardfuse.engine.sharded_state import LocalCheckpointState, is_auxiliary, plain_number
from shardfuse.optim.base import ShardedOptimizer


class PerRank:
    """A value that differs between ranks, such as the position of a data loader.

    Each rank's value is saved, and each rank gets its own back.

    Args:
        value: an object with state_dict(), which returns plain data, and load_state_dict().
        on_resize: called with (saved number of ranks, present number of ranks) instead of
            load_state_dict() if the two differ. None: that is an error.

    Raises:
        TypeError: the value lacks these methods.
    """

    def __init__(self, value: Any, *, on_resize: Callable[[int, int], None] | None = None) -> None:
        if not hasattr(value, "state_dict") or _load_method(value) is None:
            kind = type(value).__name__
            raise TypeError(
                f"PerRank takes an object with state_dict() and load_state_dict(), got {kind}."
            )
        self.value = value
        self.on_resize = on_resize


class TrainingState:
    """The objects of one checkpoint by key, and how each is saved and loaded.

    * A ShardedOptimizer saves its shards. The shards of its params replace those of the module.
    * A module saves ``state_dict()``, after DistributedDataParallel and torch.compile() are
      unwrapped. Entries that it computes for the caller, such as copies and extra state, are loaded
      by its ``load_state_dict()``.
    * A PerRank saves the state of its value on each rank.
    * Anything else with ``state_dict()`` and ``load_state_dict()``, or Paddle's
      ``set_state_dict()``, saves that; the first rank's is written. The same holds for any other
      value, which load() replaces in the caller's dict. Both are saved as one item, because their
      keys may differ when they are loaded. An optimizer's companions are such objects, too.

    Args:
        objects: {key: object}.
        rank: this process's rank among those that save or load together.
    """

    def __init__(self, objects: Mapping[str, Any], rank: int) -> None:
        self.objects = dict(objects)
        self._rank_key = f"rank-{rank}"
        self._world_sizes: tuple[int, int] | None = None
        self.parts: dict[str, LocalCheckpointState] = {}
        for key, value in objects.items():
            if isinstance(value, ShardedOptimizer):
                value.synchronize()
                self.parts[key] = value.parts()
                beside = value.companions()
                self.objects |= {f"{key}.{name}": other for name, other in beside.items()}
        modules = {k: _unwrapped(v) for k, v in self.objects.items() if isinstance(v, nn.Module)}
        self._entries = {key: module.state_dict(keep_vars=True) for key, module in modules.items()}
        """By key of the module: the value of state_dict()."""
        self._computed = {k: _computed_state(v, self._entries[k]) for k, v in modules.items()}
        self._refuse_copies()
        _refuse_without_load_method(self.objects)

    def _refuse_copies(self) -> None:
        """Raise CheckpointError if a module's state_dict() has copies of an optimizer's params.

        Each rank saves and loads its shard of a param in place, which does not reach a copy.
        """
        for key, computed in self._computed.items():
            if computed:
                params = dict(_unwrapped(self.objects[key]).named_parameters())
                names = [name for name in computed if id(params.get(name)) in self._sharded]
                if names:
                    raise CheckpointError(
                        f"state_dict() of {key!r} has a copy of {names[0]}, of which every rank "
                        "saves and loads its own part in place. Pass a module whose state_dict() "
                        "has the parameters themselves."
                    )

    @cached_property
    def _sharded(self) -> set[int]:
        """The ids of params that each rank saves and loads a part of."""
        return {id(param) for parts in self.parts.values() for param in parts.params()}

    @property
    def optimizers(self) -> list[ShardedOptimizer]:
        """The sharded optimizers among the objects."""
        return [value for value in self.objects.values() if isinstance(value, ShardedOptimizer)]

    def to_write(self) -> dict[str, Any]:
        """Return this rank's entries as nested dicts; tensors alias the live state."""
        written = self._param_fragments(to_write=True)
        result: dict[str, Any] = {}
        for key, value in self.objects.items():
            if key in self.parts:
                result[key] = self.parts[key].to_write()
            elif isinstance(value, nn.Module):
                result[key] = self._module_entries(key, written)
            elif isinstance(value, PerRank):
                result[key] = {self._rank_key: _as_single_item(value.value)}
            else:
                result[key] = value if isinstance(value, Tensor) else _as_single_item(value)
        return result

    def check_world_size(self, saved: int, present: int) -> None:
        """Prepare to load a checkpoint of ``saved`` ranks on ``present`` ranks.

        Raises:
            CheckpointError: they differ, and a PerRank has no ``on_resize``.
        """
        if saved == present:
            return
        self._world_sizes = (saved, present)
        for key in self.per_rank_keys():
            if self.objects[key].on_resize is None:
                raise CheckpointError(
                    f"each of {saved} ranks saved its own {key!r}, and there are {present} now. "
                    f"Load with {saved} ranks, or pass PerRank(..., on_resize=...)."
                )

    def staged_copies(
        self, saved: Mapping[str, Tensor] | None = None, counts: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return nested dicts of copies that are read and checked before anything changes.

        They are everything but the live tensors of modules and optimizers.

        Args:
            saved: allocated tensors for values that are tensors in the checkpoint; None: the
                checkpoint does not list them, and the present values' shapes are used.
            counts: keys of step counts that need not be read.
        """
        result: dict[str, Any] = {}
        for key, value in self.objects.items():
            if key in self.parts:
                steps = [k for k in self.parts[key].step_keys() if f"{key}.{k}" not in counts]
                result[key] = {name: torch.tensor(0) for name in steps}
                result[key]["param_groups"] = self.parts[key].groups_to_fill()
            elif isinstance(value, nn.Module):
                result[key] = copy.deepcopy(self._computed[key])
            elif isinstance(value, PerRank):
                result[key] = {} if self._world_sizes else {self._rank_key: (None,)}
            elif saved is None:
                result[key] = value.clone() if isinstance(value, Tensor) else (None,)
            else:  # of any type; the present value may be of another
                is_replaced = _load_method(value) is None
                result[key] = saved.get(key, (None,)) if is_replaced else (None,)
        return result

    def group_lists(self) -> dict[str, list[Any]]:
        """Return the lists in the optimizers' groups, as of parameters' names, by saved key."""
        return {
            f"{key}.param_groups.{index}.{name}": value
            for key, parts in self.parts.items()
            for index, group in enumerate(parts.groups())
            for name, value in group.items()
            if isinstance(value, list)
        }

    def known_counts(self, counts: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """Return those step counts of the optimizers that are among ``counts``."""
        return {
            key: {k: counts[f"{key}.{k}"] for k in parts.step_keys() if f"{key}.{k}" in counts}
            for key, parts in self.parts.items()
        }

    def live_tensors(self) -> dict[str, Any]:
        """Return nested dicts of the live tensors of modules and optimizers that this rank fills.

        Of sharded ones it fills its fragments, and has no key where it has none.
        """
        live = self._param_fragments(to_write=False)
        result: dict[str, Any] = {}
        for key in self.objects:
            if key in self.parts:
                result[key] = self.parts[key].tensors_to_fill()
            elif key in self._entries:
                entries = self._module_entries(key, live)
                result[key] = {k: v for k, v in entries.items() if k not in self._computed[key]}
        return result

    def set_saved_shapes(self, saved: Mapping[str, Sequence[int]]) -> None:
        """Fill states in the form of a checkpoint with tensors of the shapes ``saved``."""
        for key, parts in self.parts.items():
            prefix = f"{key}.state."
            boxes = {k: s for k, s in saved.items() if len(s) > 1 and k.startswith(prefix)}
            parts.set_saved_shapes({k.removeprefix(f"{key}."): s for k, s in boxes.items()})

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all live tensors by key, of whichever rank fills them."""
        found = {
            f"{key}.{name}": shape
            for key, parts in self.parts.items()
            for name, shape in parts.shapes().items()
        }
        for key, entries in self._entries.items():
            for name, value in entries.items():
                if isinstance(value, Tensor) and name not in self._computed[key]:
                    found[f"{key}.{name}"] = tuple(value.shape)
        return found

    def _load_per_rank(self, value: PerRank, staged: Mapping[str, Any]) -> None:
        if self._world_sizes is None:
            load = _load_method(value.value)
            assert load is not None  # else it was refused
            load(staged[self._rank_key][0])
        elif value.on_resize is not None:
            value.on_resize(*self._world_sizes)

    def per_rank_keys(self) -> list[str]:
        """Return the keys of PerRank objects."""
        return [key for key, value in self.objects.items() if isinstance(value, PerRank)]

    def select_saved(self, live: Mapping[str, Any], saved: Collection[str]) -> dict[str, Any]:
        """Return ``live`` without the masters and rounding errors that are not among ``saved``.

        See [Note: other masters].
        """
        return {
            key: {
                name: v
                for name, v in values.items()
                if key not in self.parts or not is_auxiliary(name) or f"{key}.{name}" in saved
            }
            for key, values in live.items()
        }

    def check_shapes(self, saved: Mapping[str, Sequence[int]]) -> set[str]:
        """Return the keys of all live tensors, of whichever rank fills them.

        All ranks check all tensors, because a rank reads the tensors of its fragments only.

        Raises:
            CheckpointError: a live tensor is not among ``saved``, or has another shape.
        """
        shapes = self.shapes
        for key, shape in shapes.items():
            if key not in saved:
                if is_auxiliary(key) and any(key.startswith(f"{own}.") for own in self.parts):
                    continue
                raise CheckpointError(f"Missing key in checkpoint state_dict: {key}.")
            if tuple(saved[key]) != shape:
                raise CheckpointError(
                    f"Size mismatch between saved {torch.Size(saved[key])} and current: "
                    f"{torch.Size(shape)} for {key}"
                )
        return set(shapes)

    def advice_on_unfrozen(self, saved: Collection[str]) -> str:
        """Return advice if a param that is trained here has no states among ``saved``; else ""."""
        have_any = {key.rpartition(".")[0] for key in saved if not key.endswith(".step")}
        for key, parts in self.parts.items():
            for name, shape in parts.shapes().items():
                if not shape:  # a step
                    continue
                of_param = f"{key}.{name}".rpartition(".")[0]
                if of_param not in have_any and f"{of_param}.step" in saved:
                    param = of_param.removeprefix(f"{key}.state.")
                    return (
                        f" When {param} was saved it had no states: it was frozen, or the hyper-"
                        "parameters were others. Build the optimizer as it was, load, and then "
                        "unfreeze the parameter or change them."
                    )
        return ""

    def master_reads(self, saved: Collection[str]) -> dict[str, Any]:
        """Return nested dicts of tensors that are read last, from another object's key.

        See [Note: other masters].
        """
        places = {
            id(value): (key, name)
            for key, entries in self._entries.items()
            for name, value in entries.items()
        }
        result: dict[str, Any] = {}
        for key, parts in self.parts.items():
            for master in parts.masters(_PrefixedKeys(key, saved)):
                if not master.is_kept:
                    result.setdefault(key, {})[master.key] = master.place
                elif id(master.param) in places:
                    other, name = places[id(master.param)]
                    result.setdefault(other, {})[name] = master.place
        return result

    def master_keys(self) -> set[str]:
        """Return the keys of masters that any rank reads into a parameter that is fp32 here."""
        return {
            f"{key}.{name}" for key, parts in self.parts.items() for name in parts.master_keys()
        }

    def fill_missing_masters(self, saved: Collection[str]) -> None:
        """Copy params into masters that are not saved; set rounding errors that are not to 0."""
        for key, parts in self.parts.items():
            for name, residual in parts.residuals().items():
                if f"{key}.{name}" not in saved:
                    residual.zero_()
            for master in parts.masters(_PrefixedKeys(key, saved)):
                if master.is_kept:
                    master.place.copy_(master.own)

    def complete_keys(self) -> list[str]:
        """Return the keys of modules and optimizers, which must be loaded completely."""
        return [*self.parts, *self._entries]

    def check(self, staged: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked groups and steps of each optimizer, for load_optimizers().

        Raises:
            ValueError: the staged copies do not fit the optimizers.
        """
        return {key: parts.check(staged[key]) for key, parts in self.parts.items()}

    def load_optimizers(
        self, staged: Mapping[str, Any], checked: Mapping[str, Any], rules: Mapping[str, str]
    ) -> None:
        """Load groups and steps into the optimizers, and send params to all ranks. Collective.

        Args:
            staged: the result of staged_copies(), filled.
            checked: the result of check().
            rules: {key: update rule of the saved optimizer}.
        """
        for key, parts in self.parts.items():
            parts.publish()
            parts.load(staged[key], checked[key], rules.get(key, ""))

    def load_values(self, staged: Mapping[str, Any]) -> dict[str, Any]:
        """Load everything but optimizers; return the values without a method for that. Local.

        Raises:
            CheckpointError: such a method has raised.
        """
        values: dict[str, Any] = {}
        for key in (key for key in self.objects if key not in self.parts):
            try:
                self._load_value(key, staged[key], values)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise CheckpointError(f"state[{key!r}] cannot be loaded: {reason}") from error
        return values

    def _load_value(self, key: str, staged: Any, values: dict[str, Any]) -> None:
        value = self.objects[key]
        if isinstance(value, nn.Module):
            _load_computed_state(_unwrapped(value), staged)
        elif isinstance(value, PerRank):
            self._load_per_rank(value, staged)
        elif (load := _load_method(value)) is not None:
            load(_moved_like(staged[0], value.state_dict()))
        else:
            values[key] = _moved_like(staged[0] if isinstance(staged, tuple) else staged, value)

    def _param_fragments(self, *, to_write: bool) -> dict[int, Tensor]:
        """Return {id(param): this rank's fragments of it} for all optimizers."""
        lists = [parts.param_fragments(to_write=to_write) for parts in self.parts.values()]
        return {id(param): part for pairs in lists for param, part in pairs}

    def _module_entries(self, key: str, fragments: Mapping[int, Tensor]) -> dict[str, Any]:
        """Return a module's entries, sharded ones as fragments, without those of peers alone."""
        return {
            name: fragments[id(value)] if id(value) in fragments else _detached(value)
            for name, value in self._entries[key].items()
            if id(value) in fragments or id(value) not in self._sharded
        }


def _refuse_without_load_method(objects: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an object that has state_dict() but cannot load it."""
    for key, value in objects.items():
        if hasattr(value, "state_dict") and _load_method(value) is None:
            raise CheckpointError(
                f"state[{key!r}] has state_dict() but no load_state_dict(). Give "
                f"{type(value).__name__} that method, or pass what state_dict() returns."
            )


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel and torch.compile() wrappers."""
    while True:
        is_ddp = isinstance(module, nn.parallel.DistributedDataParallel)
        inner = getattr(module, "module" if is_ddp else "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return module
        module = inner


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


class _PrefixedKeys(Container[str]):
    """The keys of ``saved`` below ``key``, without it."""

    def __init__(self, key: str, saved: Container[str]) -> None:
        self._key, self._saved = key, saved

    def __contains__(self, name: object) -> bool:
        return f"{self._key}.{name}" in self._saved


def _load_method(value: Any) -> Callable[[Any], Any] | None:
    """Return the method that loads a result of state_dict(), or None."""
    load = getattr(value, "load_state_dict", None)
    return getattr(value, "set_state_dict", None) if load is None else load  # Paddle's name


def _as_single_item(value: Any) -> tuple[Any]:
    """Wrap a value, or its state_dict(), into a tuple, which torch's planners save as one item.

    The planners flatten dicts. Then only the keys that exist at load time would be read, and an
    optimizer that has not made a step has none.
    """
    state = value.state_dict() if hasattr(value, "state_dict") else value
    return (tree_map(_to_plain_cpu, state),)


def _to_plain_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else plain_number(value)


def _moved_like(new: Any, own: Any) -> Any:
    """Return ``new`` with its tensors on the devices of the corresponding tensors of ``own``."""
    if isinstance(new, Tensor) and isinstance(own, Tensor):
        return new.to(own.device)
    if isinstance(new, dict) and isinstance(own, Mapping):
        new.update({key: _moved_like(new[key], own[key]) for key in new if key in own})
    elif isinstance(new, list) and isinstance(own, list):
        new[: len(own)] = [_moved_like(*pair) for pair in zip(new, own, strict=False)]
    return new


def _computed_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that state_dict() computes for its caller: extra state, and tensor copies.

    A copy has other memory at each call; filling it does not reach the module.

    Args:
        module: not wrapped.
        state: a result of its state_dict().
    """
    again = module.state_dict(keep_vars=True)
    return {
        name: _detached(value)
        for name, value in state.items()
        if name.endswith("_extra_state")
        or (again[name] is not value and not _shares_memory(value, again[name]))
    }


def _shares_memory(value: Any, other: Any) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    if is_dtensor(value) and is_dtensor(other):
        value, other = local_of(value), local_of(other)
    return not value.numel() or value.data_ptr() == other.data_ptr()


def _load_computed_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the entries that the module's state_dict() had computed."""
    if state:
        module.load_state_dict(state, strict=False)
