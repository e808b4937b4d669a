"""The state dicts of a sharded optimizer: torch's ordinary one, and one for distributed saving."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch

from shardfuse.agreement import agree
from shardfuse.comm import Communicator
from shardfuse.comm.numbers import Counter
from shardfuse.comm.session import PeerError
from shardfuse.config import ShardConfig
from shardfuse.engine import sharded_state, torch_state
from shardfuse.engine.consistency import ConsistencyCheck
from shardfuse.engine.dtensor_fragments import DTensorCheckpointState
from shardfuse.engine.dtensors import DTensorShards
from shardfuse.engine.params import FlatState, OwnShards, rebind
from shardfuse.engine.sharded_state import LocalCheckpointState
from shardfuse.engine.torch_state import StateView
from shardfuse.fragments import FragmentTensor, is_stateful_of_torch, torch_request
from shardfuse.grads.source import GradSource
from shardfuse.layout import FlatLayout
from shardfuse.optim.backend import ExternalBackend, ExternalLayout, own_layout
from shardfuse.rules import UpdateRule
from shardfuse.runtime import untraced

logger = logging.getLogger("shardfuse")

_logged = set[str]()
"""Topics of warnings that this process has logged."""


def silence_save_notice() -> None:
    """Suppress the first step's warning about state_dict() on rank 0 alone, in this process."""
    _logged.add("rank 0")


def warn_of_saves_on_one_rank(name: str) -> None:
    """Warn once in this process that state_dict() on rank 0 alone will raise, and name the remedy.

    Without the warning, the error would come with the first checkpoint, hours after the start.
    There is no warning if the program saves in a supported way, or shows no sign of saving: then
    state_dict() itself raises, with the same remedy.
    """
    if "rank 0" in _logged:
        return
    _logged.add("rank 0")
    if may_save_on_one_rank():
        logger.warning("%s: state_dict() on rank 0 alone will raise. %s.", name, remedy())


def _has_fragments(state_dict: Any) -> bool:
    """Return whether this is a sharded_state_dict(), which has a load method of its own."""
    is_dict = isinstance(state_dict, Mapping)
    return is_dict and any(isinstance(value, FragmentTensor) for value in state_dict.values())


class StatefulOptimizer(torch.optim.Optimizer):
    """Saving and loading, with the layout and states of ShardedOptimizer."""

    layout: FlatLayout
    """The slot of every parameter; grows by add_param_group()."""

    communicator: Communicator
    """The ranks that share the states."""

    _config: ShardConfig
    _rule: UpdateRule
    _built: bool = False
    _device: torch.device
    _flats: list[FlatState]
    _grads: GradSource
    _shards: OwnShards | DTensorShards
    _consistency: ConsistencyCheck
    _external: ExternalLayout | None = None  # other code has laid out parameters and states
    _stepped_by: ExternalBackend | None = None  # that code makes the steps, too
    _consolidated: dict[int, dict[str, Any]] | None  # the full state, until the next step
    _is_fresh: bool  # no step and no load so far; equal on all ranks
    _join_config: Any = None  # set by torch.distributed.algorithms.Join, never reset
    _left_join = True  # whether all ranks are out of the last Join
    _num_calls: Counter  # of step(), since a state was loaded
    _was_skipped: bool = False  # whether all ranks skipped the last step, under a gradient scaler
    _can_be_saved: bool = False  # the program has prepared saves of full or sharded states

    @property
    def state(self) -> Any:
        """This rank's states, as {parameter: {"step": ..., "exp_avg": ...}}; see StateView.

        Raises:
            RuntimeError: another mapping was assigned.
        """
        if self._external is not None:
            return self._external.state
        if "_view" not in self.__dict__:
            self._view = StateView(self._flats)
        return self._view

    @state.setter
    def state(self, value: Any) -> None:
        if self._external is not None:
            self._external.state = value
        elif self._built and value is not self.state:
            self.state.clear()  # raises, with the remedy

    @untraced
    def state_dict(self) -> dict[str, Any]:
        """Return torch's ordinary state dict: full per-parameter tensors, on the CPU.

        With one rank, or before the first step, this needs no other call. With several ranks, call
        consolidate_state_dict() on all of them first, or let step() do so every
        ``ShardConfig.consolidate_every`` calls. This method does not communicate, except for
        torch.distributed.checkpoint, whose calls are collective: the functions of its module
        state_dict get full or sharded states, as requested, and its save() and load() of the
        optimizer itself get sharded_state_dict().

        Hooks of register_state_dict_pre_hook() and _post_hook() are called as by torch.

        Raises:
            RuntimeError: the state is not consolidated on this rank.
        """
        if self._external is None and is_stateful_of_torch():
            return self.sharded_state_dict()
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._collect()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            if changed is not None:
                state_dict = changed
        return state_dict

    def _collect(self) -> dict[str, Any]:
        """Return the state dict, before the post-hooks."""
        if self._external is not None:
            return self._external.collect()
        request = torch_request()
        if request is not None:
            self._can_be_saved = True
            return torch_state.for_torch(self._optimizer_state(), request)
        if self.communicator.world_size == 1:
            self.consolidate_state_dict(to=0)
        if self._consolidated is None and self._is_fresh:
            # Accelerate calls state_dict() of new optimizers; there is nothing to gather yet.
            return {"state": {}, "param_groups": torch_state.packed_groups(self.param_groups)}
        if self._consolidated is None:
            raise RuntimeError(
                "The optimizer state is sharded and not consolidated on this rank. "
                f"{remedy()}, after the last step(); or save by "
                f"shardfuse.checkpoint on all ranks. {self._when_consolidated()}"
            )
        # A new dict for every caller, because hooks change it in place. The groups are the current
        # ones, because a scheduler steps after the step() that consolidated the states.
        return {
            "state": {param: dict(entry) for param, entry in self._consolidated.items()},
            "param_groups": torch_state.packed_groups(self.param_groups),
        }

    def _optimizer_state(self) -> torch_state.OptimizerState:
        groups = self.param_groups
        return torch_state.OptimizerState(
            self.communicator, self.layout, self._flats, groups, self._rule
        )

    def _when_consolidated(self) -> str:
        every = self._config.consolidate_every
        if not every:
            return (
                "Where other code saves on rank 0, build the optimizer with "
                "sharding={'consolidate_every': steps between saves}."
            )
        return (
            f"With consolidate_every={every} the first rank has it after every {every} calls of "
            f"step(), of which there were {self._num_calls.value}: save there, or do as above."
        )

    @own_layout(in_join=False)
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Bring the full state to rank ``to`` of the group, for state_dict(). Collective.

        The state is copied to CPU memory, bucket by bucket. It is valid until the next step.

        Args:
            to: a rank of the group; None: every rank.

        Raises:
            ValueError: the group has no such rank.
        """
        num_ranks = self.communicator.world.world_size
        self._can_be_saved = True
        with self.communicator.session.region("consolidate_state_dict()"):
            if to is not None and not 0 <= to < num_ranks:
                raise ValueError(f"Invalid rank to: {to}. The group has {num_ranks} ranks.")
            self.communicator.session.declare([f"to = {to}"])
            self._consolidated = torch_state.consolidate(self._optimizer_state(), to)

    @untraced
    def saves_are_arranged(self) -> None:
        """Do not log the first step's warning about state_dict() on rank 0 alone. Local."""
        self._can_be_saved = True

    @untraced
    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load torch's ordinary state dict, saved at any world size. Collective.

        Loads hyper-parameters, steps and this rank's part of the states, without casting them to
        the parameters' dtype. Also accepts dicts of the torch optimizer of the same name, and dicts
        that torch.distributed.checkpoint.load() of the optimizer itself has filled. A state dict
        does not contain the class of its optimizer, as in torch: Adam's moments load into AdamW or
        LAMB without a warning. shardfuse.checkpoint.load() warns of that. Re-allocated parameters
        are moved back into the buffers first, as by rebind().

        Everything is checked before anything is changed. If a check fails on one rank, all ranks
        raise, and no rank loads anything. Keys of ``state`` may be numbers as text, as in JSON.

        Hooks of register_load_state_dict_pre_hook() and _post_hook() are called as by torch.

        Args:
            state_dict: the same on all ranks; of a sharded state, this rank's part.

        Raises:
            ValueError: groups, shapes, numbers or states do not fit.
            TypeError: an entry of the dict has another type; or a parameter has another device,
                dtype or shape now.
            RuntimeError: another rank could not load its dict.
        """
        if _has_fragments(state_dict):
            self.load_sharded_state_dict(state_dict)
            return
        load: Callable[[], None] | None = None
        error: Exception | None = None
        with self.communicator.session.region("load_state_dict()"):
            try:
                if self._stepped_by is None:
                    self._refuse_in_join("load_state_dict()")
                    self._grads.flush()
                load = self._prepared(self._hooked(state_dict))
            except Exception as raised:
                error = raised
            failure = self._agreed_error(error)
            if failure is None:
                assert load is not None
                load()
        # All ranks have agreed on the error, so the region has ended without one on every rank.
        if failure is not None:
            raise failure
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _agreed_error(self, error: Exception | None) -> Exception | None:
        """Return this rank's error, else an error that names those of peers, else None. Collective.

        Raises:
            PeerError: the ranks could not exchange their errors.
        """
        try:
            agree(self.communicator, self._device, [], error, to="load the state dict")
        except PeerError:
            raise
        except Exception as failure:
            return failure
        return None

    def _hooked(self, state_dict: Any) -> Mapping[str, Any]:
        """Return the state dict after the pre-hooks; TypeError if it is not a dict."""
        if not isinstance(state_dict, Mapping):
            kind = type(state_dict).__name__
            raise TypeError(f"state_dict must be a dict as state_dict() returns it, got {kind}.")
        hooked: dict[str, Any] = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, hooked)
            if changed is not None:
                hooked = changed
        return hooked

    def _prepared(self, state_dict: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state dict; return the function that loads it, and raises no error."""
        if self._stepped_by is not None:
            return self._stepped_by.prepared(state_dict)
        if self._external is not None:
            load_states = self._external.prepared(state_dict)
        else:
            load_states = torch_state.prepared(self._optimizer_state(), state_dict)
        self._warn_of_gaps(state_dict)
        is_fresh = not state_dict["state"]

        def load() -> None:
            # The user may have moved parameters out of the buffers. torch's load_state_dict() moves
            # states to the parameters' devices, and Accelerate relies on it: it moves the model,
            # even from "cpu" to "cpu:0", and then loads the optimizer's own state.
            rebind(self._flats)
            load_states()
            self._consolidated = None
            self._is_fresh = is_fresh
            self._num_calls.reset()
            self._consistency.loaded(self._most_steps())

        return load

    def _loaded_keys(self) -> set[str]:
        """Return the keys of a state dict that are loaded."""
        return {"state", "param_groups"}

    def _warn_of_gaps(self, state_dict: Mapping[str, Any]) -> None:
        """Warn on the first rank of ignored keys, and of missing hyper-parameters."""
        if self.communicator.world.rank != 0:
            return
        others = sorted(str(key) for key in state_dict.keys() - self._loaded_keys())
        if others:
            logger.warning("Of the loaded state dict, %s is left out.", ", ".join(others))
        rates = [k for k, v in self.defaults.items() if not isinstance(v, bool | str | None)]
        for index, group in enumerate(state_dict["param_groups"]):
            lacking = [key for key in rates if key not in group]
            if lacking:
                logger.warning(
                    "param_groups[%d] of the loaded state dict has no %s: the optimizer's own "
                    "stays.",
                    index,
                    ", ".join(lacking),
                )

    @own_layout(in_join=False)
    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's state for torch.distributed.checkpoint. Collective.

        Its tensors alias the state: save them before the next step(), or with async_save(), which
        copies them first. Give async_save() its own process group
        (``process_group=dist.new_group()``), because it communicates during training. To load, at
        any world size, pass the dict to ``torch.distributed.checkpoint.load``, then call
        load_sharded_state_dict(). State-dict hooks are not called, because they expect another
        format. An ``lr`` that is a tensor is saved as a number, and loads into either.
        """
        self._can_be_saved = True
        with self.communicator.session.region("sharded_state_dict()"):
            return sharded_state.sharded(self._optimizer_state())

    @own_layout("shardfuse.checkpoint", in_join=False)
    def parts(self) -> LocalCheckpointState:
        """Return this rank's state for shardfuse.checkpoint. Local.

        Raises:
            RuntimeError: inside Join; or under DeepSpeed, because its engine saves.
        """
        self._can_be_saved = True
        opt, loaded = self._optimizer_state(), self._note_loaded
        if isinstance(self._shards, DTensorShards):
            return DTensorCheckpointState(opt, loaded, self._shards)
        return LocalCheckpointState(opt, loaded)

    @untraced
    def companions(self) -> dict[str, Any]:
        """Return {name: object} for shardfuse.checkpoint to save with this optimizer. Local."""
        return {}

    @own_layout()
    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Finish loading a sharded_state_dict() that torch.distributed.checkpoint has filled.

        Local: call it on every rank. State-dict hooks are not called.

        Args:
            state_dict: the result of sharded_state_dict(), filled in place.

        Raises:
            ValueError: a state is missing, is another rank's part, or has no valid step.
            TypeError: groups or steps are of another kind.
        """
        sharded_state.load_sharded(self._optimizer_state(), state_dict)
        self._note_loaded()

    def _note_loaded(self) -> None:
        """Note that states and steps are others now."""
        self._consolidated = None
        self._is_fresh = False
        self._num_calls.reset()
        self._consistency.loaded(self._most_steps())

    def _most_steps(self) -> int:
        """Return the update count of the parameter that has had most. Local."""
        return self._shards.most_steps

    def _refuse_if_external(self, what: str) -> None:
        """Raise RuntimeError if ``what`` is not available under the external layout, if any."""
        if self._external is not None:
            self._external.check_available(what)

    def _refuse_in_join(self, what: str) -> None:
        """Raise RuntimeError inside a Join: joined ranks do not launch this collective."""
        if self._join_config is not None and self._join_config.enable and not self._left_join:
            raise RuntimeError(
                f"{what} is refused inside Join: it is a collective, and a rank whose inputs have "
                "ended does not take part in it. Clip with "
                'sharding={"clip_grad_norm": max_norm}; save after the end of Join.'
            )


# Whether the program saves states in a supported way


_SAVING_METHODS = {
    "consolidate_on_save",
    "consolidate_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "sharded_state_dict",
    "trainer_callback",
}
"""A program that names one of these saves the states of all ranks."""

_SIGNS_OF_SAVING = ("state_dict", "save", "checkpoint")
"""A program that saves has a name with one of these in it, or another package saves for it."""

_CONSOLIDATING_CALLERS = ("lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Modules that call consolidate_state_dict() themselves."""

_PACKAGE_PATHS = ("site-packages", "dist-packages")
_INSTALLED_PATHS = (*_PACKAGE_PATHS, os.path.dirname(os.__file__))
"""Parts of paths of installed modules."""


def remedy() -> str:
    """Return the remedy if one rank calls state_dict(); it depends on the calling framework."""
    callers = _names_of_callers()
    if any(name.startswith("transformers.trainer") for name in callers):
        return "Pass callbacks=[shardfuse.integrations.trainer_callback()] to Trainer"
    if any(name.startswith("accelerate.") for name in callers):
        return "Call shardfuse.integrations.consolidate_on_save(accelerator) after prepare()"
    return "Call consolidate_state_dict() on all ranks before it"


def may_save_on_one_rank() -> bool:
    """Return whether the calling program may save, and has not arranged that on all ranks.

    It may save if its own code has a name such as save_model, or if another package, such as
    Trainer, calls step(). It has arranged it if its own code names a method for that, if it has
    imported shardfuse.checkpoint, or if Lightning is among the callers. This reads code, and runs
    none: that of the calling frames, and of functions in their modules and beside the main program.
    It takes milliseconds.
    """
    if "shardfuse.checkpoint" in sys.modules:
        return False
    if any(name.startswith(_CONSOLIDATING_CALLERS) for name in _names_of_callers()):
        return False
    names = {name for code in _own_code() for name in code.co_names}
    if names & _SAVING_METHODS:
        return False
    has_sign = any(sign in name.lower() for name in names for sign in _SIGNS_OF_SAVING)
    return has_sign or any(_is_third_party(frame.f_globals) for frame in _callers())


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _names_of_callers() -> list[str]:
    return [str(frame.f_globals.get("__name__")) for frame in _callers()]


def _own_code() -> Iterator[CodeType]:
    """Yield the calling program's own code: not torch's, ours, or that of installed modules."""
    main = sys.modules["__main__"]
    folder = os.path.dirname(os.path.abspath(getattr(main, "__file__", None) or "x"))
    spaces: dict[int, Mapping[str, Any]] = {}
    for frame in _callers():
        if _is_own(frame.f_globals):
            spaces[id(frame.f_globals)] = frame.f_globals
            yield from _nested(frame.f_code)
    for module in list(sys.modules.values()):
        space = getattr(module, "__dict__", None)
        path = space.get("__file__") if type(space) is dict else None
        if type(path) is str and path.startswith(folder + os.sep) and _is_own(space or {}):
            spaces[id(space)] = space or {}
    for space in spaces.values():
        for value in list(space.values()):
            members = [value, *vars(value).values()] if type(value) is type else [value]
            for member in members:
                if type(member) is FunctionType and member.__module__ == space.get("__name__"):
                    yield from _nested(member.__code__)


def _is_own(space: Mapping[str, Any]) -> bool:
    """Return whether a module belongs to the program, by its globals."""
    path = str(space.get("__file__", ""))
    return not _is_torch_or_ours(space) and not any(part in path for part in _INSTALLED_PATHS)


def _is_third_party(space: Mapping[str, Any]) -> bool:
    """Return whether a module belongs to another package than torch and ours, by its globals."""
    path = str(space.get("__file__", ""))
    return not _is_torch_or_ours(space) and any(part in path for part in _PACKAGE_PATHS)


def _is_torch_or_ours(space: Mapping[str, Any]) -> bool:
    return str(space.get("__name__")).partition(".")[0] in ("shardfuse", "torch")


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
