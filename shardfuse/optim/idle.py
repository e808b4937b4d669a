"""Steps in which no parameter of an optimizer had a gradient on any rank: one warning.

In the first such step, if modules held the parameters and none does now; else in the third in a
row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from shardfuse.comm import Communicator
from shardfuse.engine.intake import levels_to_caller

_TOPIC = "a step without gradients"


class IdleSteps:
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
        self._told = ""
        self._was_said = False
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
        if has_updated or is_used or self._was_said:
            self._num_idle = 0
            return
        if not any(param.requires_grad for param in params):  # frozen: that is what was meant
            return
        self._num_idle += 1
        if not self._has_asked:
            self._has_asked = True
            if are_in_no_module():
                self._was_said = True
                warnings.warn(
                    f"No module holds the parameters of this {name} any more, so what step() "
                    "updates is not used. The model has other Parameter objects since "
                    "load_state_dict(assign=True), or a conversion that replaces them. Build the "
                    "optimizer on the model's present parameters.",
                    UserWarning,
                    stacklevel=levels_to_caller(),
                )
                return
        if self._num_idle > 2 and self._have_all_told():
            self._was_said = True
            warnings.warn(
                f"No parameter of this {name} had a gradient in 3 steps in a row, on any rank: "
                "step() updates nothing. Does the model hold other Parameter objects than the "
                "optimizer was built with, as after load_state_dict(assign=True), a conversion "
                "that replaces them, or a new model? Build the optimizer after that, on the "
                "model's present parameters. If this is meant, call step() only where there are "
                "gradients.",
                UserWarning,
                stacklevel=levels_to_caller(),
            )
        elif self._num_idle > 1:
            self._told = f"{self._comm.session.generation}/{call}"
            self._comm.session.publish(_TOPIC, self._told)

    def _have_all_told(self) -> bool:
        """Return whether the step before was without gradients on every rank."""
        if self._comm.world_size == 1:
            return True
        return all(text == self._told for text in self._comm.session.read(_TOPIC))
