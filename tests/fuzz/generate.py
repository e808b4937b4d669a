"""From a seed to a program, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.fuzz.between import BetweenSteps
from tests.fuzz.features import FEATURES
from tests.fuzz.program import Program


def generate(
    seed: int,
    worlds: Sequence[int] = (1, 2, 3),
    features: Mapping[str, bool] = FEATURES,
    optimizer: str = "",
) -> Program:
    """Return the program of a seed.

    Args:
        seed: any number.
        worlds: the sizes to choose among.
        features: what it may contain, as in features.py.
        optimizer: a class; empty to draw one.
    """
    return _Generator(seed, worlds, features, optimizer).program()


class _Generator(BetweenSteps):
    def program(self) -> Program:
        """Draw everything, in one order."""
        num_groups = min(self.chance.randint(1, 3), self.most_groups)
        groups = tuple(self.draw_group() for _ in range(num_groups))
        faulty = self.world > 1 and self.maybe(0.08) and not self.is_partitioned
        num_rounds = self.chance.randint(3, 8)
        fault_round = self.chance.randrange(num_rounds)
        for index in range(num_rounds):
            if faulty and index == fault_round:
                self.one_rank()
            self.round()
        self.add("check_state")
        google = self.options.get("variant") == "google"
        model = "told" if self.has_model else ""
        if self.has_model and len(groups) == 1 and not groups[0].overrides:
            model = "handed over"
        return Program(
            seed=self.seed,
            world=self.world,
            optimizer=self.optimizer,
            options=self.options,
            groups=groups,
            sharding=self.sharding,
            ops=tuple(self.ops),
            named=google or self.maybe(0.6) or model == "handed over",
            kind=self.kind,
            largest=self.largest,
            scaler=self.scaler,
            own_group=self.world > 1 and self.maybe(0.1) and not self.makes_groups,
            spoils=self.spoils,
            differs=self.maybe(0.3),
            model=model,
            joined=self.joined,
        )

    def round(self) -> None:
        """Append one step with what leads to it, and what is done between steps."""
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            self.between()
        closure = not self.scaler and not self.reduced and self.maybe(0.08)
        closure &= not self.is_partitioned
        if not closure:
            for _ in range(self.chance.choice([1, 1, 1, 2, 3])):
                self.backward()
                if self.maybe(0.3) and not self.is_partitioned:
                    self.handle_gradients()
        if self.has_model and self.more.random() < 0.6:
            self.add("write_buffers", seed=self.more.randrange(100))
        if self.clips_locally and not closure and self.more.random() < 0.5:
            self.add("clip_locally", limit=self.more.choice([0.1, 1.0, 1e6]))
        self.step(closure)
        cleared = self.scaler or self.maybe(0.75) or self.is_partitioned
        thirds = self.reduced and self.world == 3  # a mean of integers is not exact: adds no more
        if cleared or thirds:
            self.zero_grad()

    def backward(self) -> None:
        """Append a backward; under a scaler one that overflows, now and then."""
        self.spend(self.weight_of_backward())
        args = self.backward_args()
        if self.scaler and self.maybe(0.2):
            name = self.chance.choice(self.names())
            value = self.chance.choice([float("inf"), float("nan"), -float("inf")])
            args["overflow"] = (self.chance.randrange(self.world), name, value)
        if self.maybe(0.3, "delays"):
            self.add("delay", milliseconds=[self.chance.randint(0, 5) for _ in range(3)])
        self.add("backward", **args)

    def handle_gradients(self) -> None:
        """Append something that a caller does to gradients."""
        names = self.some(self.names(), 0.3)
        what = self.chance.choice(["set", "drop", "edit", "keep", "move", "norm"])
        if what == "set":
            self.spend(self.weight_of_backward())
            form = self.chance.choice(["contiguous", "transposed", "gapped", "channels_last"])
            seed = self.chance.randrange(10**6)
            self.add("set_grad", seed=seed, names=names, ranks=self.ranks(), form=form)
        elif what == "drop":
            self.add("drop_grad", names=names, ranks=self.ranks())
        elif what == "edit" and (self.kind == "floats" or self.spend(self.weight)):
            self.add("edit_grad", names=names, ranks=self.ranks(), factor=2.0)
        elif what == "keep" and self.keeps:
            drop = self.maybe(0.5)
            self.add("keep_grad", names=names, drop=drop)
            if not drop and not self.features["kept_gradients_accumulate"]:
                self.weight = 0
                self.add("zero_grad", to_none=True, by_model=False)
        elif what == "move" and self.keeps:
            self.move()
        elif what == "norm" and not self.scaler:
            self.add("grad_norm")

    def move(self) -> None:
        """Append the handing over of a gradient to a parameter of the same shape and dtype."""
        pairs = [
            (a.name, b.name)
            for a in self.specs
            for b in self.specs
            if a is not b and (a.shape, a.dtype) == (b.shape, b.dtype)
        ]
        if pairs:
            source, target = self.chance.choice(pairs)
            self.add("move_grad", source=source, target=target, swap=self.maybe(0.5))

    def step(self, closure: bool) -> None:
        """Append a step."""
        if self.maybe(0.2, "delays"):
            self.add("delay", milliseconds=[self.chance.randint(0, 5) for _ in range(3)])
        args: dict[str, Any] = {}
        may_unscale = bool(self.scaler) and "float16" not in self.dtypes
        if may_unscale and self.maybe(0.5):
            args["unscale"] = True
        sees_gradients = not self.scaler or "unscale" in args
        if sees_gradients and not closure and "halve" not in self.hooks:
            if self.maybe(0.2, "clips"):
                args["clip"] = self.chance.choice(self.max_norms)
                if self.optimizer.startswith("NpuFused"):
                    args["power"] = self.chance.choice([2.0, 2.0, 1.0, float("inf")])
            if self.maybe(0.15):
                args["norm_first"] = True
        if closure:
            self.weight = self.weight_of_backward()
            args["closure"] = self.backward_args()
        if "halve" in self.hooks:
            self.weight *= 2
        self.add("step", **args)
