"""Interprets a program as one rank: a sharded optimizer, compared with a reference all the way."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.fuzz.compare import QUIET, difference, digest, state_difference
from tests.fuzz.job import Job, group_dict
from tests.fuzz.local import LOCAL
from tests.fuzz.program import Group, Op, Program, Spec
from tests.fuzz.ranks import InvalidProgramError
from tests.fuzz.reference import STALE, Norm, Reference, edit


class Outcome(NamedTuple):
    """How a program went on one rank."""

    status: str  # "ok", "mismatch", "error" or "invalid"
    op: int  # the operation at which that was seen, -1 for building the optimizer
    text: str
    seconds: float  # that the operation took
    digests: list[tuple[int, int]]  # (operation, number that stands for all parameters)


class Actor(Job):
    """A job that does the operations of a program; the reference does each after it."""

    def __init__(self, program: Program, rank: int, folder: Path) -> None:
        super().__init__(program, rank, folder)
        self.reference = Reference(program)
        self.expected_calls = 0  # of hooks that count
        self.first_rank = 0  # what the first rank's buffers are filled with
        self.is_broken = False  # whether a gradient is what the reference has no word for

    def apply(self, op: Op) -> Any:
        """Do ``op``, whose effect on the reference comes afterwards; return what it returned."""
        if op.name in LOCAL:
            self.local.apply(op)
            if op.name == "one_rank":
                self._break(**op.args)
            return None
        return getattr(self, op.name)(**op.args)

    def add_group(self, specs: Sequence[Spec], overrides: Mapping[str, Any]) -> None:
        """Add parameters to the model and the optimizer."""
        group = Group(tuple(specs), overrides)
        self.make(group)
        named = self.program.named
        self.optimizer.add_param_group(group_dict(group, self.local.params, named))

    def _break(self, kind: str, rank: int, names: Sequence[str], seed: int) -> None:
        """Do what only a sharded optimizer minds."""
        for _, param in self.local.named(names if self.rank == rank else ()):
            if kind == "realloc":
                param.data = param.data.clone()
            elif kind == "sparse":
                param.grad = torch.zeros_like(param).to_sparse()
                self.is_broken = True

    def zero_grad(self, to_none: bool, by_model: bool) -> None:
        """Clear gradients by the optimizer, or as a model does."""
        self.is_broken &= not to_none
        if not by_model:
            self.optimizer.zero_grad(set_to_none=to_none)
            return
        for param in self.local.params.values():
            if to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach().zero_()

    def set_option(self, group: int, key: str, value: Any) -> None:
        """Set a hyper-parameter."""
        if group < len(self.optimizer.param_groups):
            self.optimizer.param_groups[group][key] = value

    def decay_lr(self) -> None:
        """Step a scheduler."""
        if self.scheduler is None:
            scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
            self.scheduler = scheduler
        self.scheduler.step()

    def hook_step(self, kind: str) -> None:
        """Register a hook on step()."""
        self.is_broken = False  # whether a gradient is what the reference has no word for
        self.hooks.append(kind)
        self.register(kind)

    def delay(self, milliseconds: Sequence[int]) -> None:
        """Be late by as much as is said for this rank."""
        time.sleep(milliseconds[self.rank % len(milliseconds)] / 1000)

    def realloc(self, names: Sequence[str], raises: bool) -> None:
        """Re-allocate parameters, have step() say so, and take them back."""
        chosen = [param for _, param in self.local.named(names) if param.numel()]
        for param in chosen:
            param.data = param.data.clone()
        if raises and chosen and not self.hooks:
            _must_raise(self.optimizer.step, "re-allocated")
        self.optimizer.rebind()

    def edit_param(self, names: Sequence[str], how: str, seed: int) -> None:
        """Change parameters in place."""
        with torch.no_grad():
            for name, param in self.local.named(names):
                edit(param, self.program, self.local.specs[name], how, seed)

    def write_buffers(self, seed: int) -> None:
        """Write to buffers, on each rank something else."""
        self.first_rank += seed % 7
        for buffer in self.buffers.values():
            buffer.add_(seed % 7 + 3 * self.rank)

    def _check_buffers(self) -> None:
        if self.program.model:
            found = {name: buffer.unique().tolist() for name, buffer in self.buffers.items()}
            expected = {name: [self.first_rank] for name in found}
            assert found == expected, f"buffers are {found}, not the first rank's {expected}"

    def check_state(self) -> str:
        """Return where the full state differs from the reference's, if it does."""
        return state_difference(self.full_state()["state"], self.reference)

    def _reduce(self) -> None:
        """Average gradients over ranks, as DistributedDataParallel would have."""
        used = [
            name
            for name in self.local.params
            if any(model.params[name].grad is not None for model in self.reference.ranks)
        ]
        if not used or self.program.world == 1:
            return
        params = [self.local.params[name] for name in used]
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        flat = torch.cat([p.grad.double().flatten() for p in params])  # type: ignore[union-attr]
        parts = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, flat)  # HCCL adds no fp64 up
        flat = torch.stack(parts).sum(dim=0)
        flat /= self.program.world
        for param, mean in zip(params, flat.split([p.numel() for p in params]), strict=True):
            assert param.grad is not None
            param.grad.copy_(mean.view(param.shape))

    def grad_norm(self) -> Norm:
        """Return the norm of the mean gradient."""
        if self.program.sharding.get("grads_are_reduced"):
            self._reduce()
        return Norm(float(self.optimizer.grad_norm()))

    def _clip(self, limit: float, power: float) -> Norm:
        if self.program.optimizer.startswith("NpuFused"):
            return Norm(float(self.optimizer.clip_grad_norm_fused_(limit, power)))
        return Norm(float(self.optimizer.clip_grad_norm(limit)))

    def step(
        self,
        clip: float | None = None,
        power: float = 2.0,
        norm_first: bool = False,
        unscale: bool = False,
        closure: Mapping[str, Any] | None = None,
    ) -> list[Norm] | None:
        """Take a step; return the norms that were asked for."""
        if not self.reference.can_step():
            return None
        if self.program.sharding.get("grads_are_reduced") and closure is None:
            self._reduce()
        if unscale and self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        norms = [Norm(float(self.optimizer.grad_norm()))] if norm_first else []
        if clip is not None:
            norms.append(self._clip(clip, power))
        self.expected_calls += "count" in self.hooks
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.local.scale = self.scaler.get_scale()
        elif closure is not None:
            assert self.optimizer.step(lambda: self._closure(closure)) == "a loss"
        else:
            self.optimizer.step()
        self._check_buffers()
        return norms

    def _closure(self, backward: Mapping[str, Any]) -> str:
        self.zero_grad(to_none=True, by_model=True)
        self.local.apply(Op("backward", backward))
        return "a loss"

    def stale_clip(self) -> None:
        """Change gradients after a clip: step() must raise."""
        if self.reference.can_be_stale():
            if self.program.sharding.get("grads_are_reduced"):
                self._reduce()
            self._clip(1.0, 2.0)
            self.local.apply(STALE)
            _must_raise(self.optimizer.step, "Gradients changed")


def _must_raise(function: Any, text: str) -> None:
    said = ""
    try:
        function()
    except RuntimeError as error:
        said = str(error)
    assert text in said, f"no error about {text!r}: {said!r}"


def run_program(program: Program, rank: int, folder: Path) -> Outcome:
    """Run a program on this rank; after a mismatch go on, so that no other rank waits."""
    state: dict[str, Any] = {"op": -1, "begin": time.monotonic()}
    digests: list[tuple[int, int]] = []
    actor: Actor | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            actor = Actor(program, rank, folder)
            mismatch = _run_ops(actor, state, digests)
    except InvalidProgramError as error:
        return Outcome("invalid", state["op"], str(error), 0.0, digests)
    except BaseException:  # torch.distributed.checkpoint's own errors are no Exceptions
        seconds = time.monotonic() - state["begin"]
        return Outcome("error", state["op"], traceback.format_exc(), seconds, digests)
    finally:
        if actor is not None:
            actor.close()
    if mismatch is not None:
        return Outcome("mismatch", *mismatch, 0.0, digests)
    return Outcome("ok", len(program.ops), "", 0.0, digests)


def _run_ops(
    actor: Actor, state: dict[str, Any], digests: list[tuple[int, int]]
) -> tuple[int, str] | None:
    """Do all operations; return the first (operation, text) at which this rank differed."""
    mismatch = None
    for index, op in enumerate(actor.program.ops):
        state.update(op=index, begin=time.monotonic())
        got = actor.apply(op)
        expected = actor.reference.apply(op)
        if op.name in QUIET and not got:
            continue
        digests.append((index, digest(actor.local)))
        text = "" if mismatch is not None else difference(actor, got, expected)
        if text:
            mismatch = index, text
    return mismatch
