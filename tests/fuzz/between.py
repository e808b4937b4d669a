"""What programs do between steps."""

from __future__ import annotations

from typing import Any

from tests.fuzz import choices
from tests.fuzz.draw import Draws
from tests.fuzz.program import LOW


class BetweenSteps(Draws):
    """Appends what changes hyper-parameters, parameters, groups, hooks, or the optimizer."""

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
        may_be_late = self.features["late_momentum_in_low_precision"] or self.all_params_fp32
        if self.optimizer.endswith("SGD") and not self.options["nesterov"] and may_be_late:
            values["momentum"] = [0.5, 0.9]
        if self.is_muon:
            values |= {"momentum": [0.5, 0.9], "ns_steps": [3, 5]}
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
        if self.features["added_groups"] and self.num_groups < self.most_groups:
            group = self.draw_group(0.2, is_added=True)
            self.add("add_group", specs=group.specs, overrides=group.overrides)

    def reload(self) -> None:
        """Append the moving of the state to a new optimizer."""
        if not self.features["reloads"]:
            return
        modes = ["same", "same", "copies", "first_rank"] + ["sharded"] * self.maybe(0.3)
        if choices.kind_of(self.optimizer).torch and set(self.dtypes) == {"float32"}:
            modes += ["torch", "torch"]
        if self.frozen or self.optimizer.startswith("NpuFused") or self.is_partitioned:
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
        # At stage 2, an old optimizer takes the gradients that autograd makes.
        keep = self.maybe(0.3) and not self.is_partitioned
        self.add("reload", mode=mode, sharding=sharding, keep=keep)

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
            names = self.some(self.names(), 0.3)
            # At stage 2, an error loses gradients until zero_grad().
            raises = self.maybe(0.5) and not self.is_partitioned
            self.add("realloc", names=names, raises=raises)

    def hook(self) -> None:
        """Append a hook, at most one of a kind."""
        kinds = {"count", "gradient"}
        if not self.scaler and not self.keeps and not (set(self.dtypes) & set(LOW)):
            kinds |= {"halve", "shift"} if self.all_fp32 else {"shift"}
        if self.is_partitioned:
            kinds -= {"halve"}
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
        may_be_stale = self.all_fp32 and self.features["clips"] and not self.is_partitioned
        if not self.scaler and not self.hooks and may_be_stale:
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
            kinds += ["realloc", "sparse"] if not self.reduced else ["realloc"]
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
