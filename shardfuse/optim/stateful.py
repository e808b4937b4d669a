"""The state dicts of a sharded optimizer: torch's ordinary one, and one for distributed saving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardfuse.comm import Communicator
from shardfuse.layout import FlatLayout
from shardfuse.optim import state_io
from shardfuse.optim.flat_state import FlatState
from shardfuse.optim.rules import UpdateRule


class StatefulOptimizer(torch.optim.Optimizer):
    """Saving and loading; ShardedOptimizer sets what it is done with."""

    layout: FlatLayout
    """Where every parameter lies; grows by add_param_group()."""

    communicator: Communicator
    """The ranks that share the states."""

    _rule: UpdateRule
    _flats: list[FlatState]
    _consolidated: dict[str, Any] | None  # the full state, until the next step
    _is_fresh: bool  # no step was taken and no state loaded: alike on all ranks
    _join_config: Any = None  # set by torch.distributed.algorithms.Join, for good
    _left_join = True  # whether all ranks have left the last one

    def state_dict(self) -> dict[str, Any]:
        """Return torch's ordinary state dict: full per-parameter tensors, on the CPU.

        With one rank, or before the first step, this needs no other call. With several ranks
        consolidate_state_dict() has to be called first, on all of them; this method itself never
        communicates.

        Raises:
            RuntimeError: the state is not consolidated on this rank.
        """
        if self.communicator.world_size == 1:
            self.consolidate_state_dict(to=0)
        if self._consolidated is None and self._is_fresh:
            # Accelerate asks every optimizer that it is given; there is nothing to gather yet.
            return state_io.fresh(self.param_groups)
        if self._consolidated is None:
            raise RuntimeError(
                "The optimizer state is sharded and not consolidated on this rank. Call "
                "opt.consolidate_state_dict(to=rank) on all ranks after the last step() and "
                "state_dict() on that one; or save opt.sharded_state_dict() on all ranks with "
                "torch.distributed.checkpoint."
            )
        return self._consolidated

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Bring the full state to rank ``to`` of the group, for state_dict(). Collective.

        Goes bucket by bucket into CPU memory; ``to=None`` is every rank. Valid until the next step.
        """
        self._refuse_in_join("consolidate_state_dict()")
        if to is not None and not 0 <= to < self.communicator.world_size:
            raise ValueError(
                f"Invalid rank to: {to}. The group has {self.communicator.world_size} ranks."
            )
        with self.communicator.call("consolidate_state_dict()"):
            self.communicator.declare([f"to = {to}"])
            self._consolidated = state_io.consolidate(
                self.communicator, self.layout, self._flats, self.param_groups, self._rule, to
            )

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load torch's ordinary state dict, saved at any world size. Local: on every rank.

        Takes over hyper-parameters, steps and this rank's part of the states, without casting them
        to the parameters' dtype. Dicts of the torch optimizer of the same name are accepted.
        Parameters that were re-allocated are taken back first, as by rebind().

        Raises:
            ValueError: groups, shapes or states that do not fit; nothing is loaded then.
            TypeError: a parameter has another device, dtype or shape now; nothing is loaded.
        """
        # torch's own moves states to where their parameters are by now. Accelerate leans on that:
        # it moves the model, even from "cpu" to "cpu:0", and then loads the optimizer's own state.
        for state in self._flats:
            state.bind()
        state_io.restore(self.layout, self._flats, self.param_groups, self._rule, state_dict)
        self._consolidated = None
        self._is_fresh = not state_dict["state"]

    def sharded_state_dict(self) -> dict[str, Any]:
        """Return this rank's state for torch.distributed.checkpoint. Collective.

        Its tensors alias the state: save them before the next step(). To load, at any world size,
        pass it to ``torch.distributed.checkpoint.load``, then call load_sharded_state_dict().
        """
        self._refuse_in_join("sharded_state_dict()")
        with self.communicator.call("sharded_state_dict()"):
            return state_io.sharded(
                self.communicator, self.layout, self._flats, self.param_groups, self._rule
            )

    def load_sharded_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Finish loading a sharded_state_dict() that torch.distributed.checkpoint has filled."""
        state_io.load_sharded(self.layout, self._flats, self.param_groups, self._rule, state_dict)
        self._consolidated = None
        self._is_fresh = False

    def _refuse_in_join(self, what: str) -> None:
        """Raise RuntimeError inside a Join: a rank that has joined would not take part."""
        if self._join_config is not None and self._join_config.enable and not self._left_join:
            raise RuntimeError(
                f"{what} is a collective that a rank whose inputs have ended does not take part "
                "in, so that it is refused inside Join. Clip with "
                'sharding={"clip_grad_norm": max_norm}; save after the end of Join.'
            )
