"""A script moved from DistributedDataParallel: each habit is right, warned of, or refused.

Three ways to move it: the DDP line is dropped and parameters are passed; the model is passed in
place of its parameters; or the DDP line is kept. Each is compared with the script as it was.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import shardfuse
from shardfuse.engine import ddp as owners
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(240)

WAYS = ("dropped", "handed over", "kept")
SMALL = {"bucket_cap_mb": 0.001, "kernel": "eager"}


class Net(nn.Module):
    """Has a BatchNorm, a buffer of each kind, a frozen layer, and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())  # another one on each rank, as nanoGPT has it
        self.frozen = nn.Linear(6, 6, bias=False)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Linear(6, 12)
        self.out = nn.Linear(12, 1)
        self.register_buffer("noise", torch.randn(6))
        self.register_buffer("table", torch.arange(6.0)[None], persistent=False)
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.frozen(x) + self.noise + self.table[0])
        return self.out(torch.tanh(self.inner(x)))


class Script:
    """One training script: the original, or moved in one of the ways."""

    def __init__(self, way: str, optimizer: str = "AdamW", **sharding: Any) -> None:
        self.way = way
        self.model = Net()
        self.forward: Any = self.model
        if way in ("original", "kept"):
            self.forward = DistributedDataParallel(self.model)
        self.optimizers = [self.build(optimizer, **sharding)]
        self.generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def build(self, optimizer: str, **sharding: Any) -> Any:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if self.way == "original":
            return getattr(torch.optim, optimizer)(trained, 1e-2)
        params = self.model if self.way == "handed over" else trained
        cls = getattr(shardfuse, f"Sharded{optimizer}")
        return cls(params, 1e-2, sharding={**SMALL, **sharding})

    @property
    def optimizer(self) -> Any:
        return self.optimizers[0]

    def backward(self) -> None:
        x = torch.randn(5, 6, generator=self.generator)
        (
            self.forward(x) - (1 + dist.get_rank()) * x.sum(1, keepdim=True)
        ).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def no_sync(self) -> Any:
        return (self.forward if self.way in ("original", "kept") else self.optimizer).no_sync()

    def result(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def train(script: Script) -> dict[str, Tensor]:
    for _ in range(5):
        script.backward()
        script.step()
    return script.result()


def evaluate(script: Script) -> dict[str, Tensor]:
    """Evaluate on the first rank alone, in between."""
    for _ in range(4):
        script.backward()
        script.step()
        if dist.get_rank() == 0:
            script.model.eval()
            script.model(torch.ones(2, 6))
            script.model.train()
    return script.result()


def clip(script: Script) -> dict[str, Tensor]:
    for _ in range(5):
        script.backward()
        clip_grad_norm_(script.model.parameters(), 0.5)
        script.step()
    return script.result()


def clip_unscaled(script: Script) -> dict[str, Tensor]:
    """The recipe of torch.amp: unscale_(), clip, step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for _ in range(5):
        x = torch.randn(5, 6, generator=script.generator)
        y = (1 + dist.get_rank()) * x.sum(1, keepdim=True)
        scaler.scale((script.forward(x) - y).square().mean()).backward()
        scaler.unscale_(script.optimizer)
        clip_grad_norm_(script.model.parameters(), 0.5)
        scaler.step(script.optimizer)
        scaler.update()
        script.optimizer.zero_grad()
    return script.result()


def clip_by_ours(script: Script) -> dict[str, Tensor]:
    for step in range(6):
        script.backward()
        kind = (2.0, float("inf"), 3.0)[step % 3]
        ours = script.way != "original"
        norm = (script.optimizer.clip_grad_norm_ if ours else clip_grad_norm_)(
            script.model.parameters(), 0.5, kind, error_if_nonfinite=True
        )
        script.step()
    return script.result() | {"norm": norm}


def accumulate(script: Script) -> dict[str, Tensor]:
    for _ in range(4):
        with script.no_sync():
            script.backward()
            script.backward()
        script.backward()
        script.step()
    return script.result()


def save_on_first_rank(script: Script) -> dict[str, Tensor]:
    train(script)
    error = [""]
    if dist.get_rank() == 0:
        try:
            script.optimizer.state_dict()
        except RuntimeError as refusal:
            error = [str(refusal)]
    dist.broadcast_object_list(error, 0)
    if error[0]:
        raise RuntimeError(error[0])
    return script.result()


def compile_model(script: Script) -> dict[str, Tensor]:
    script.forward = torch.compile(script.forward, backend="aot_eager")
    return train(script)


def average_weights(script: Script) -> dict[str, Tensor]:
    average = copy.deepcopy(script.model)
    for _ in range(4):
        script.backward()
        script.step()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), script.model.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)
            for own, other in zip(average.buffers(), script.model.buffers(), strict=True):
                own.copy_(other)
    return script.result() | {f"average {n}": v for n, v in average.state_dict().items()}


def unfreeze(script: Script) -> dict[str, Tensor]:
    """DistributedDataParallel does not average what was frozen when it was built."""
    for step in range(6):
        if step == 3:
            script.model.frozen.requires_grad_(True)
            if script.way != "handed over":
                group = {"params": list(script.model.frozen.parameters())}
                script.optimizer.add_param_group(group)
        script.backward()
        if step >= 3 and script.way == "original":
            for param in script.model.frozen.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        script.step()
    return script.result()


def two_optimizers(script: Script) -> dict[str, Tensor]:
    model, way = script.model, script.way
    parts = [list(model.norm.parameters()), [*model.inner.parameters(), *model.out.parameters()]]
    if way == "original":
        script.optimizers = [torch.optim.SGD(parts[0], 1e-2), torch.optim.AdamW(parts[1], 1e-2)]
        return train(script)
    script.optimizers = [
        shardfuse.ShardedSGD(parts[0], 1e-2, sharding=SMALL),
        shardfuse.ShardedAdamW(parts[1], 1e-2, sharding=SMALL),
    ]
    if way == "handed over":
        script.optimizers[1].broadcast_buffers(model)
    return train(script)


RIGHT = ("right",) * 3
TABLE: dict[Callable[[Script], dict[str, Tensor]], tuple[str, str, str]] = {
    # dropped, handed over, kept
    train: ("warned", "right", "right"),  # buffers and frozen parameters
    evaluate: ("warned", "right", "right"),
    clip: ("warned", "warned", "right"),
    clip_unscaled: ("warned", "warned", "right"),
    clip_by_ours: ("warned", "right", "right"),
    accumulate: ("warned", "right", "right"),
    save_on_first_rank: ("refused",) * 3,
    compile_model: ("warned", "right", "right"),
    average_weights: ("warned", "right", "right"),
    unfreeze: ("warned", "right", "refused"),
    two_optimizers: ("warned", "right", "right"),
}


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Collect what is warned of and logged."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfuse").addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
        texts += [str(warning.message) for warning in caught]
    logging.getLogger("shardfuse").removeHandler(handler)


def outcome(feature: Callable[[Script], dict[str, Tensor]], way: str, **sharding: Any) -> str:
    """Return "right", or how this rank learns that it is not."""
    want = feature(Script("original", **{}))
    with told() as texts:
        try:
            got = feature(Script(way, **sharding))
        except (RuntimeError, ValueError) as error:
            return f"refused: {error}"
    wanted: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(wanted, want)
    if way != "kept":
        # DistributedDataParallel leaves other ranks' buffers as their last forward has made them;
        # it copies the first rank's before the next one.
        want = wanted[0]
    differ = [n for n, v in want.items() if not torch.allclose(v, got[n], rtol=1e-5, atol=1e-6)]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, differ)
    found = [text for text in texts if "ranks" in text and "consolidate" not in text]
    if found:
        return f"warned: {' '.join(found)}"
    return f"silently wrong: {every}" if any(every) else "right"


UNTRACED = pytest.mark.gloo_only("torch.compile of a DDP module does not trace the stand-in")


def outcomes(way: str, names: list[str], **sharding: Any) -> dict[str, str]:
    features = {feature.__name__: feature for feature in TABLE}
    result = {}
    for name in names:
        torch._dynamo.reset()
        result[name] = outcome(features[name], way, **sharding)
        dist.barrier()
    return result


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=[UNTRACED] if w == "kept" else []) for w in WAYS],
)
def test_no_habit_is_silently_wrong(way: str, collectives: str) -> None:
    """The table above, on both ranks; a feature alone is refused at the end of its process."""
    names = [feature.__name__ for feature in TABLE]
    ends = [f.__name__ for f in TABLE if TABLE[f][WAYS.index(way)] == "refused"]
    found: list[dict[str, str]] = [{}, {}]
    jobs = [[name for name in names if name not in ends], *([name] for name in ends)]
    for job in jobs:
        for rank, part in enumerate(run_procs(2, run_table, way, job, collectives, timeout=150)):
            found[rank].update(part)
    expected = {f.__name__: outcomes[WAYS.index(way)] for f, outcomes in TABLE.items()}
    for rank, results in enumerate(found):
        for name, result in results.items():
            kind = result.partition(":")[0]
            if rank == 0 or name in (
                "clip",
                "clip_unscaled",
                "unfreeze",
            ):  # the first rank alone tells of buffers
                assert kind == expected[name], (rank, name, result)
            if kind == "warned" and rank == 0:
                said = (
                    "clip_grad_norm_"
                    if name in ("clip", "clip_unscaled")
                    else "Tensors of the model differ"
                )
                assert said in result, result
            if name == "unfreeze" and kind == "refused":
                assert "DistributedDataParallel averages the gradients of" in result


def run_table(way: str, names: list[str], collectives: str) -> dict[str, str]:
    return outcomes(way, names, collectives=collectives)


def wrapped_here(is_late: bool, collectives: str) -> str:
    """Return what a rank hears where the other one finds no wrapper, as after gc.freeze()."""
    if dist.get_rank() == 0:
        owners._instances = lambda *bases: []
        owners.ModuleWatch.note = lambda self, module: None  # type: ignore[method-assign]
    model = nn.Linear(4, 4)
    wrapped = None if is_late else DistributedDataParallel(model)
    try:
        sharding = {"collectives": collectives, **SMALL}
        optimizer = shardfuse.ShardedAdamW(model.parameters(), lr=0.1, sharding=sharding)
        wrapped = wrapped or DistributedDataParallel(model)
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_ranks_that_find_different_wrappers(collectives: str) -> None:
    """At construction, or at the first gradient: an error on both."""
    for text in run_procs(2, wrapped_here, False, collectives):
        assert "disagree about the optimizer" in text
        assert "grads_are_reduced=auto" in text
    for text in run_procs(2, wrapped_here, True, collectives):
        assert "rank 0 has gradients are averaged here" in text
        assert "rank 1 has gradients are averaged elsewhere" in text
