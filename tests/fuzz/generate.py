"""From a seed to a program, the same on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from tests.fuzz import choices
from tests.fuzz.features import FEATURES
from tests.fuzz.program import LOW, Group, Op, Program, Spec, names_of

_SHAPES: tuple[tuple[int, ...], ...] = (
    (),
    (1,),
    (0,),
    (0, 5),
    (5,),
    (513,),
    (1500,),
    (17, 40),
    (30, 50),
    (3, 5, 7),
    (6, 3, 4, 4),
    (2, 7),
)
_SUFFIXES = ("weight", "weight", "weight", "bias", "LayerNorm.weight", "scale")
# Sums over ranks of integers stay below what these hold exactly.
_BUDGET = {"float32": 1 << 20, "float16": 2048, "bfloat16": 256}


def generate(
    seed: int, worlds: Sequence[int] = (1, 2, 3), features: Mapping[str, bool] = FEATURES
) -> Program:
    """Return the program of a seed.

    Args:
        seed: any number.
        worlds: the sizes to choose among.
        features: what it may contain, as in features.py.
    """
    return _Generator(seed, worlds, features).program()


class _Generator:
    def __init__(self, seed: int, worlds: Sequence[int], features: Mapping[str, bool]) -> None:
        self.seed = seed
        self.chance = Random(seed)
        self.features = features
        self.world = self.chance.choice(list(worlds))
        self.ops: list[Op] = []
        self.num_specs = 0
        self.num_groups = 0
        self.specs: list[Spec] = []
        self.frozen: set[str] = set()
        self.once_frozen: set[str] = set()
        self.weight = 0  # upper bound of a sum of integer gradients over ranks
        self.hooked = 1
        self.hooks: set[str] = set()

    def maybe(self, probability: float, feature: str = "") -> bool:
        """Return True as often as said, unless the feature is off."""
        hit = self.chance.random() < probability
        return hit and (not feature or self.features[feature])

    def some(self, items: Sequence[Any], probability: float) -> list[Any]:
        """Return each of ``items`` as often as said."""
        return [item for item in items if self.chance.random() < probability]

    # Parts

    def draw_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of parameters."""
        kinds = (("float32",), ("bfloat16",), ("float16",), ("float32", *LOW))
        drawn = self.chance.choices(kinds, [6, 1, 1, 2])[0]
        return drawn if self.features["low_precision"] else ("float32",)

    def draw_group(self, frozen_share: float = 0.15) -> Group:
        """Return a group of new parameters."""
        specs = []
        for _ in range(self.chance.randint(1, 5)):
            shape = self.chance.choice(_SHAPES)
            layouts = ["contiguous"] * 3 + ["gapped"] * (len(shape) > 0)
            layouts += ["channels_last"] * 3 if len(shape) == 4 else []
            layouts += ["transposed"] * 2 if len(shape) == 2 else []
            specs.append(
                Spec(
                    name=f"p{self.num_specs}.{self.chance.choice(_SUFFIXES)}",
                    shape=shape,
                    dtype=self.chance.choice(self.dtypes),
                    layout=self.chance.choice(layouts),
                    frozen=self.maybe(frozen_share, "freezing"),
                    uses=2 if self.maybe(0.15) else 1,
                    init=self.chance.choice([0.0, 1.0, 1.5]) if self.maybe(0.2) else None,
                )
            )
            self.num_specs += 1
        if not self.num_groups:
            # One at least that trains.
            specs[0] = specs[0]._replace(frozen=False)
        overrides = {}
        if self.maybe(0.4):
            overrides["lr"] = self.chance.choice([0.02, 0.05])
        if self.maybe(0.4):
            overrides["weight_decay"] = self.chance.choice([0.0, 0.2])
        self.num_groups += 1
        self.specs += specs
        self.frozen |= {spec.name for spec in specs if spec.frozen}
        self.once_frozen |= self.frozen
        return Group(tuple(specs), overrides)

    def draw_sharding(self) -> dict[str, Any]:
        """Return sharding options; a wire that rounds only where gradients are integers."""
        drawn = choices.sharding(self.chance)
        low = set(self.dtypes) & set(LOW)
        if self.kind == "floats" and low:
            drawn["grad_sync_dtype"] = "float32"
        elif self.kind == "integers" and self.maybe(0.25):
            drawn["grad_sync_dtype"] = self.chance.choice(["float32", *LOW])
        integers = self.kind == "integers"
        if integers and self.scaler != "torch" and self.maybe(0.15, "reduced_elsewhere"):
            drawn["grads_are_reduced"] = True
        return drawn

    def budget(self) -> int:
        """Return what the sums over ranks of integer gradients may come to."""
        wires = {self.sharding.get("grad_sync_dtype"), *self.dtypes} - {None}
        return min(_BUDGET[str(wire)] for wire in wires)

    # The program

    def program(self) -> Program:
        """Draw everything, in one order."""
        self.optimizer = choices.optimizer(self.chance)
        self.options = choices.options(self.chance, self.optimizer)
        self.kind = self.chance.choice(["integers", "integers", "floats"])
        self.dtypes = self.draw_dtypes()
        self.scaler = self.chance.choice(["torch", "sharded"]) if self.maybe(0.2, "scalers") else ""
        self.sharding = self.draw_sharding()
        self.reduced = bool(self.sharding.get("grads_are_reduced"))
        self.all_fp32 = self.budget() == _BUDGET["float32"]
        self.largest = 3 if self.all_fp32 else 1
        unequal = self.scaler == "torch" and self.world > 1
        self.spoils = unequal and not self.features["gradients_under_unequal_scales"]
        self.keeps = self.maybe(0.4, "kept_gradients") and not self.spoils
        groups = tuple(self.draw_group() for _ in range(self.chance.randint(1, 3)))
        faulty = self.world > 1 and self.maybe(0.08)
        num_rounds = self.chance.randint(3, 8)
        fault_round = self.chance.randrange(num_rounds)
        for index in range(num_rounds):
            if faulty and index == fault_round:
                self.one_rank()
            self.round()
        self.add("check_state")
        google = self.options.get("variant") == "google"
        return Program(
            seed=self.seed,
            world=self.world,
            optimizer=self.optimizer,
            options=self.options,
            groups=groups,
            sharding=self.sharding,
            ops=tuple(self.ops),
            named=google or self.maybe(0.6),
            kind=self.kind,
            largest=self.largest,
            scaler=self.scaler,
            own_group=self.world > 1 and self.maybe(0.1),
            spoils=self.spoils,
            differs=self.maybe(0.3),
        )

    def add(self, name: str, **args: Any) -> None:
        """Append an operation."""
        self.ops.append(Op(name, args))

    def names(self) -> list[str]:
        """Return all parameters' names so far."""
        return names_of(self.specs)

    def round(self) -> None:
        """Append one step with what leads to it, and what is done between steps."""
        for _ in range(self.chance.choice([0, 0, 1, 2])):
            self.between()
        closure = not self.scaler and not self.reduced and self.maybe(0.08)
        if not closure:
            for _ in range(self.chance.choice([1, 1, 1, 2, 3])):
                self.backward()
                if self.maybe(0.3):
                    self.handle_gradients()
        self.step(closure)
        if self.scaler or self.maybe(0.75):
            self.zero_grad()

    def spend(self, weight: int) -> bool:
        """Count gradients that are added up; return whether they still fit."""
        if self.kind == "integers" and self.weight + weight > self.budget():
            self.zero_grad(force=True)
        self.weight += weight
        return self.weight <= self.budget()

    def backward_args(self) -> dict[str, Any]:
        """Return the arguments of a backward."""
        absent: dict[int, list[str]] = {}
        pattern = self.chance.random()
        for rank in range(self.world):
            share = 0.0 if pattern < 0.4 else 0.2
            absent[rank] = self.some(self.names(), share)
        if pattern > 0.85:
            # On one rank only, or on none.
            lonely = self.chance.randrange(self.world)
            name = self.chance.choice(self.names())
            for rank in range(self.world):
                if rank != lonely or pattern > 0.95:
                    absent[rank] = [*absent[rank], name]
        if self.maybe(0.05):
            absent[self.chance.randrange(self.world)] = self.names()
        absent = {rank: names for rank, names in absent.items() if names}
        drawn: dict[str, Any] = {"seed": self.chance.randrange(10**6), "absent": absent}
        if self.maybe(0.2):
            drawn["zero"] = self.some(self.names(), 0.3)
        return drawn

    def weight_of_backward(self) -> int:
        """Return the largest sum over ranks that a backward adds."""
        return self.largest * self.world**2 * 2 * self.hooked

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

    def ranks(self) -> list[int]:
        """Return all ranks, or some."""
        everyone = list(range(self.world))
        # Gradients that have been averaged are no multiples of the world size any more.
        return everyone if self.reduced or self.maybe(0.6) else self.some(everyone, 0.5)

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
            self.add("keep_grad", names=names, drop=self.maybe(0.5))
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

    def zero_grad(self, force: bool = False) -> None:
        """Append the clearing of gradients."""
        in_place = not self.keeps or self.features["zero_in_place_after_keep"]
        to_none = not in_place or self.maybe(0.6)
        self.weight = 0
        self.add("zero_grad", to_none=to_none, by_model=self.maybe(0.3))

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
                args["clip"] = self.chance.choice([0.5, 10.0, 1e6])
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

    # Between steps

    def between(self) -> None:
        """Append something that is done between steps."""
        chosen = self.chance.choice(
            [
                self.set_option,
                self.decay_lr,
                self.freeze,
                self.freeze,
                self.add_group,
                self.reload,
                self.reload,
                self.edit_param,
                self.realloc,
                self.hook,
                self.stale_clip,
                self.check_state,
            ]
        )
        chosen()

    def set_option(self) -> None:
        """Append the change of a hyper-parameter."""
        group = self.chance.randrange(self.num_groups)
        values: dict[str, list[Any]] = {"lr": [0.01, 0.04], "weight_decay": [0.0, 0.1]}
        if self.optimizer.endswith("SGD") and not self.options["nesterov"]:
            values["momentum"] = [0.5, 0.9]
        key = self.chance.choice(list(values))
        self.add("set_option", group=group, key=key, value=self.chance.choice(values[key]))

    def decay_lr(self) -> None:
        """Append a scheduler's step."""
        self.add("decay_lr")

    def freeze(self) -> None:
        """Append freezing or unfreezing on all ranks."""
        if not self.features["freezing"]:
            return
        ranks = list(range(self.world))
        if self.frozen and self.maybe(0.6):
            names = self.some(sorted(self.frozen), 0.7)
            self.frozen -= set(names)
            self.add("train", names=names, value=True, ranks=ranks, drop=False)
            return
        names = self.some(self.names()[1:], 0.3)
        # What was frozen before may be without gradients of its own, as if it had never trained.
        drop = bool(self.once_frozen & set(names)) or self.maybe(0.7)
        self.frozen |= set(names)
        self.once_frozen |= set(names)
        self.add("train", names=names, value=False, ranks=ranks, drop=drop)

    def add_group(self) -> None:
        """Append a new group."""
        if self.features["added_groups"] and self.num_groups < 5:
            group = self.draw_group(0.2)
            self.add("add_group", specs=group.specs, overrides=group.overrides)

    def reload(self) -> None:
        """Append the moving of the state to a new optimizer."""
        if not self.features["reloads"]:
            return
        modes = ["same", "same", "copies", "first_rank"] + ["sharded"] * self.maybe(0.3)
        if choices.kind_of(self.optimizer).torch and set(self.dtypes) == {"float32"}:
            modes += ["torch", "torch"]
        if self.frozen or self.optimizer.startswith("NpuFused"):
            # A gradient that is absent because it was zeroed is so to the old optimizer only; one
            # of a frozen parameter must not be there on some ranks alone.
            self.weight = 0
            self.add("zero_grad", to_none=True, by_model=False)
        sharding = {}
        if self.maybe(0.5):
            drawn = choices.sharding(self.chance)
            sharding = {key: drawn[key] for key in ("bucket_cap_mb", "collectives", "kernel")}
        mode = self.chance.choice(modes)
        if mode == "copies":
            self.weight = 0
        self.add("reload", mode=mode, sharding=sharding, keep=self.maybe(0.3))

    def edit_param(self) -> None:
        """Append a change of parameters in place."""
        if not self.features["edits"]:
            return
        names = self.some(self.names(), 0.3)
        how = self.chance.choice(["scale", "add", "overwrite"])
        if set(self.dtypes) & set(LOW):
            how = "overwrite"
        self.add("edit_param", names=names, how=how, seed=self.chance.randrange(10**6))

    def realloc(self) -> None:
        """Append a re-allocation of parameters, with an error first or not."""
        if self.features["edits"]:
            self.add("realloc", names=self.some(self.names(), 0.3), raises=self.maybe(0.5))

    def hook(self) -> None:
        """Append a hook, at most one of a kind."""
        kinds = {"count", "gradient"}
        if not self.scaler and not self.keeps and not (set(self.dtypes) & set(LOW)):
            kinds |= {"halve", "shift"} if self.all_fp32 else {"shift"}
        free = sorted(kinds - self.hooks)
        if not self.features["hooks"] or not free:
            return
        kind = self.chance.choice(free)
        self.hooks.add(kind)
        if kind == "gradient":
            self.hooked = 2
            self.add("hook_grad", names=self.some(self.names(), 0.4), factor=2.0)
        else:
            self.add("hook_step", kind=kind)

    def stale_clip(self) -> None:
        """Append a clip whose gradients change before the step, which is an error."""
        if not self.scaler and not self.hooks and self.all_fp32 and self.features["clips"]:
            self.add("stale_clip")
            self.weight *= 2

    def check_state(self) -> None:
        """Append a comparison of the full state."""
        self.add("check_state")

    def one_rank(self) -> None:
        """Append what one rank alone does."""
        kinds: list[str] = []
        if self.features["one_rank_faults"]:
            kinds += ["unfreeze", "freeze", "gradient"]
        if self.features["local_errors"]:
            kinds += ["realloc", "sparse"]
        if not kinds:
            return
        kind = self.chance.choice(kinds)
        frozen = sorted(self.frozen)
        names = self.some(self.names()[1:] if kind == "freeze" else frozen, 0.6)
        if kind in ("realloc", "sparse"):
            names = self.some(self.names(), 0.5) or self.names()[:1]
        rank = self.chance.randrange(self.world)
        self.spend(self.weight_of_backward())
        seed = self.chance.randrange(10**6)
        self.add("one_rank", kind=kind, rank=rank, names=names, seed=seed)
