"""watch_step(): what a step did to each parameter."""

from __future__ import annotations

from shardfuse.engine.step import StepNorms
from shardfuse.layout import FlatLayout
from shardfuse.optim.clipping import Clipped
from shardfuse.scaling import ScaledStep
from shardfuse.untraced import untraced


class Watched(Clipped):
    """Has norms of gradients, weights and updates taken in a step that is asked for them."""

    layout: FlatLayout
    _watch: StepNorms | None = None

    @untraced
    def watch_step(self) -> StepNorms:
        """Record norms of every parameter in the next step(); return the object that gets them.

        Local, but call it before the same step on every rank. That step needs one more all-reduce,
        of 4 floats per parameter, and a copy of one bucket's shard at a time. If a gradient scaler
        skips the step, the next one is watched instead. Who asks for the same step gets the same
        object.

        Raises:
            RuntimeError: DeepSpeed shards the parameters (its ZeRO stages 1 and 2), or torch's Join
                is entered.
        """
        self._refuse_if_foreign("watch_step()")
        self._refuse_in_join("watch_step()")
        names = tuple(spec.name for spec in self.layout.specs)
        if self._watch is None or self._watch.names != names:
            self._watch = StepNorms(names)
        return self._watch

    @property
    def _watched(self) -> str:
        """What the ranks are told of it, to follow "clipped gradients"."""
        return "" if self._watch is None else ", watched"

    def _watching(self, scaled: ScaledStep) -> StepNorms | None:
        """Return what notes the step that is about to be made."""
        watch, self._watch = self._watch, None
        if watch is not None and scaled.is_equal:
            watch.inverse = scaled.inverse
        return watch
