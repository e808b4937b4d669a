"""What a program has been drawn to be so far, and the drawing of its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from tests.fuzz import choices
from tests.fuzz.program import LOW, Group, Op, Spec, names_of

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
_MATRICES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((2, 7), (17, 40), (40, 24), (30, 50), (1, 24), (0, 5), (120, 33)),
    2: ((2, 7), (30, 50), (2, 17, 40), (40, 24)),
    3: ((30, 50), (3, 5, 7), (3, 24, 10)),
}
"""By ShardedMuon's ``split``."""
_SUFFIXES = ("weight", "weight", "weight", "bias", "LayerNorm.weight", "scale")
# Sums over ranks of integers stay below what these hold exactly.
_BUDGET = {"float32": 1 << 20, "float16": 2048, "bfloat16": 256}


class Draws:
    """One random sequence, and what follows from what was drawn.

    Args:
        seed: any number.
        worlds: the sizes to choose among.
        features: what programs may contain.
        optimizer: a class; empty to draw one.
    """

    has_empty = True
    """Whether matrices may have no elements."""

    def __init__(
        self,
        seed: int,
        worlds: Sequence[int],
        features: Mapping[str, bool],
        optimizer: str = "",
    ) -> None:
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
        self.optimizer = optimizer or choices.optimizer(self.chance)
        if not optimizer and Random(f"{seed}, muon").random() < 0.08:
            self.optimizer = "ShardedMuon"
        self.is_muon = self.optimizer == "ShardedMuon"
        self.options = choices.options(self.chance, self.optimizer)
        self.kind = self.chance.choice(["integers", "integers", "floats"])
        self.dtypes = self.draw_dtypes()
        if self.is_muon:  # see MuonEngine: compared by bits alone
            self.kind, self.dtypes = "integers", self.dtypes[:1]
        if self.kind == "floats" and set(self.dtypes) & set(LOW):
            # Parameters on a coarse grid: a gradient may cancel its decay to the last digit, and
            # what is left is divided by a root no larger than itself.
            for key in {"eps", "e"} & set(self.options):
                self.options[key] = 1e-3
        self.scaler = self.chance.choice(["torch", "sharded"]) if self.maybe(0.2, "scalers") else ""
        self.sharding = self.draw_sharding()
        self.reduced = bool(self.sharding.get("grads_are_reduced"))
        self.all_params_fp32 = set(self.dtypes) == {"float32"}
        self.all_fp32 = self.budget() == _BUDGET["float32"]
        self.largest = 3 if self.all_fp32 else 1
        unequal = self.scaler == "torch" and self.world > 1
        self.spoils = unequal and not self.features["gradients_under_unequal_scales"]
        self.keeps = self.maybe(0.4, "kept_gradients") and not self.spoils
        # By draws of their own, so that a seed is the program that it was, and these.
        more = Random(f"{seed}, more")
        self.more = more
        self.has_model = features["modules"] and not self.reduced and more.random() < 0.4
        self.joined = features["joined"] and more.random() < 0.4
        is_plain = self.kind == "floats" and self.all_params_fp32 and not self.scaler
        self.clips_locally = features["torch_clips"] and is_plain and more.random() < 0.4
        self.is_partitioned = False
        if self.is_muon and not self.reduced:
            self.sharding["overlap_grad_sync"] = more.choice(["auto", True])
            self.is_partitioned = self.scaler != "torch" and more.random() < 0.35
        if self.is_partitioned:
            # Of gradients only their sums are there, until the step, and which rank had an overflow
            # is not known.
            self.sharding |= {"stage": 2, "report_overflow": False}
            self.keeps = False

    def maybe(self, probability: float, feature: str = "") -> bool:
        """Return True as often as said, unless the feature is off."""
        hit = self.chance.random() < probability
        return hit and (not feature or self.features[feature])

    def some(self, items: Sequence[Any], probability: float) -> list[Any]:
        """Return each of ``items`` as often as said."""
        return [item for item in items if self.chance.random() < probability]

    def draw_dtypes(self) -> tuple[str, ...]:
        """Return the dtypes of parameters."""
        kinds = (("float32",), ("bfloat16",), ("float16",), ("float32", *LOW))
        drawn = self.chance.choices(kinds, [6, 1, 1, 2])[0]
        return drawn if self.features["low_precision"] else ("float32",)

    def draw_group(self, frozen_share: float = 0.15, *, is_added: bool = False) -> Group:
        """Return a group of new parameters; ``is_added``: of an optimizer that is built."""
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
        overrides = {}
        if self.maybe(0.4):
            overrides["lr"] = self.chance.choice([0.02, 0.05])
        if self.maybe(0.4):
            overrides["weight_decay"] = self.chance.choice([0.0, 0.2])
        if self.is_muon:
            specs, own = self._as_muon(specs, is_added)
            overrides |= own
        if not self.num_groups:
            # One at least that trains.
            specs[0] = specs[0]._replace(frozen=False)
        self.num_groups += 1
        self.specs += specs
        self.frozen |= {spec.name for spec in specs if spec.frozen}
        self.once_frozen |= self.frozen
        return Group(tuple(specs), overrides)

    @property
    def makes_groups(self) -> bool:
        """Whether the optimizer may make a process group, whose name torch takes of their number.

        Torch raises for a name that it gave before another group was destroyed.
        """
        return self.is_partitioned or self.sharding.get("overlap_grad_sync") is True

    @property
    def most_groups(self) -> int:
        """How many groups may be drawn: more kinds of matrices would share calls of kernels."""
        return 2 if self.is_muon else 5

    @property
    def max_norms(self) -> list[float]:
        """The bounds of clips to choose among; of ShardedMuon's none that rounds gradients."""
        return [1e6] if self.is_muon else [0.5, 10.0, 1e6]

    def _as_muon(self, specs: list[Spec], is_added: bool) -> tuple[list[Spec], dict[str, Any]]:
        """Return a group's parameters and options for ShardedMuon: of two shapes of matrices.

        Added groups must be of one kind. In one that is divided, matrices come first.
        """
        kinds = ["muon", "adamw"] + ["divided"] * 2 * (not is_added)
        kind, split = self.chance.choice(kinds), self.chance.choice([1, 1, 2, 3])
        if kind == "adamw":
            return specs, {"use_muon": False, "eps": self.chance.choice([1e-8, 1e-3])}
        known = [shape for shape in _MATRICES[split] if self.has_empty or 0 not in shape]
        shapes = self.chance.sample(known, 2)
        layouts = ["contiguous", "contiguous", "gapped", "transposed"]
        drawn, others = [], []
        for spec in specs:
            if kind == "divided" and len(spec.shape) not in (2, 3) and self.maybe(0.5):
                others.append(spec)
                continue
            shape, layout = self.chance.choice(shapes), self.chance.choice(layouts)
            drawn.append(spec._replace(shape=shape, layout=layout))
        options = {"split": split} if split > 1 else {}
        if kind == "muon":
            options["use_muon"] = True
        return [*drawn, *others], options

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

    def add(self, name: str, **args: Any) -> None:
        """Append an operation."""
        self.ops.append(Op(name, args))

    def names(self) -> list[str]:
        """Return all parameters' names so far."""
        return names_of(self.specs)

    def spend(self, weight: int) -> bool:
        """Count gradients that are added up; return whether they still fit."""
        if self.kind == "integers" and self.weight + weight > self.budget():
            self.zero_grad()
        self.weight += weight
        return self.weight <= self.budget()

    def zero_grad(self) -> None:
        """Append the clearing of gradients."""
        in_place = not self.keeps or self.features["zero_in_place_after_keep"]
        to_none = not in_place or self.maybe(0.6)
        by_model = self.maybe(0.3)
        if self.frozen and not by_model and not self.features["zero_in_place_while_frozen"]:
            to_none = True
        if self.is_partitioned:
            to_none, by_model = True, False
        self.weight = 0
        self.add("zero_grad", to_none=to_none, by_model=by_model)

    def weight_of_backward(self) -> int:
        """Return the largest sum over ranks that a backward adds."""
        return self.largest * self.world**2 * 2 * self.hooked

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
        if self.is_partitioned:  # every rank runs as many backwards
            first = self.names()[0]
            absent = {rank: [n for n in names if n != first] for rank, names in absent.items()}
        absent = {rank: names for rank, names in absent.items() if names}
        drawn: dict[str, Any] = {"seed": self.chance.randrange(10**6), "absent": absent}
        if self.maybe(0.2):
            drawn["zero"] = self.some(self.names(), 0.3)
        return drawn

    def ranks(self) -> list[int]:
        """Return all ranks, or some."""
        everyone = list(range(self.world))
        # Gradients that have been averaged are no multiples of the world size any more.
        return everyone if self.reduced or self.maybe(0.6) else self.some(everyone, 0.5)
