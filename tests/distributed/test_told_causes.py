"""Faults of the caller's that are easy to make: each is named, with its remedy, on every rank."""

from __future__ import annotations

import logging
import re
import textwrap
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardfuse import ShardedAdam, ShardedSGD
from tests.support.harness import run_procs, run_scripts

pytestmark = pytest.mark.timeout(180)

SHARDINGS: list[dict[str, Any]] = [
    {"stage": 1},
    {"stage": 1, "collectives": "pairwise"},
    {"stage": 2},
    {"stage": 2, "collectives": "pairwise"},
    {"grads_are_reduced": True},
]

# Cast after the optimizer was built


def by_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data.bfloat16()


CASTS: dict[str, Callable[[nn.Module], Any]] = {
    "bfloat16()": lambda model: model.bfloat16(),
    "half()": lambda model: model.half(),
    "double()": lambda model: model.double(),
    "to()": lambda model: model.to(torch.bfloat16),
    ".data": by_data,
}


def attempt(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def cast(alone: bool, shardings: list[dict[str, Any]], names: list[str]) -> dict[str, str]:
    found = {}
    for sharding in shardings:
        for name, edit in [(name, CASTS[name]) for name in names]:
            model = nn.Linear(4, 4)
            options = {"bucket_cap_mb": 1e-5, **sharding}
            optimizer = ShardedAdam(model.named_parameters(), sharding=options)
            if not alone or dist.get_rank() == 1:
                edit(model)

            def step(model: nn.Module = model, optimizer: Any = optimizer) -> None:
                for _ in range(2):  # p.grad of the first is there in the second
                    inputs = torch.ones(1, 4, dtype=next(model.parameters()).dtype)
                    model(inputs).sum().backward()
                optimizer.step()

            found[f"{sharding} {name}"] = attempt(step)
    return found


def assert_is_said(found: list[dict[str, str]], number: int) -> None:
    for texts in found:
        assert len(texts) == number
        for case, text in texts.items():
            assert "ShardedAdam: 2 parameters were cast" in text, (case, text)
            assert "bias is now (4,) torch." in text, (case, text)
            assert "before building the optimizer" in text, (case, text)


def test_cast_after_building() -> None:
    """By whatever call, at each stage: the parameter, the class and the remedy, on every rank."""
    found = run_procs(2, cast, False, SHARDINGS, list(CASTS))
    assert_is_said(found, len(SHARDINGS) * len(CASTS))


@pytest.mark.parametrize(
    "sharding",
    # Fast: on a device its gradients have a communicator of their own, to be aborted, too.
    [pytest.param(s, marks=[pytest.mark.fast] if s == {"stage": 2} else []) for s in SHARDINGS],
    ids=str,
)
def test_cast_on_one_rank(sharding: dict[str, Any]) -> None:
    """The other rank, which waits for it in step(), says the same."""
    assert_is_said(run_procs(2, cast, True, [sharding], ["bfloat16()"]), 1)


# Parameters that cannot be trained


def refused(meta_on: int | None) -> dict[str, str]:
    found = {}
    for stage in (1, 2):
        on_meta = meta_on is None or dist.get_rank() == meta_on
        model = nn.Linear(4, 4, device="meta" if on_meta else None)
        params = [*nn.Linear(4, 4).named_parameters("first"), *model.named_parameters("second")]
        found[f"all {stage}"] = attempt(
            lambda m=model, s=stage: ShardedAdam(m.named_parameters(), sharding={"stage": s})
        )
        found[f"some {stage}"] = attempt(
            lambda p=params, s=stage: ShardedAdam(p, sharding={"stage": s})
        )
    return found


@pytest.mark.parametrize("meta_on", [None, 0, 1])
def test_meta_is_said_on_every_rank(meta_on: int | None) -> None:
    """Also where one rank alone has not materialised its model, or a part of it."""
    for found in run_procs(2, refused, meta_on):
        for case, text in found.items():
            assert "weight is on the meta device. Materialise" in text, (case, text)


DTYPES = {
    torch.complex64: "view_as_real",
    torch.complex128: "view_as_real",
    torch.int64: "buffer",
    torch.uint8: "buffer",
    torch.bool: "buffer",
    torch.float64: "model.float()",
    torch.float8_e4m3fn: "model.float()",
    torch.float8_e5m2: "model.float()",
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_advice_for_a_dtype_is_right(dtype: torch.dtype) -> None:
    """It names what helps, and that does help."""
    # On the CPU: the stand-in has no complex numbers.
    param = nn.Parameter(torch.zeros(3, device="cpu").to(dtype), requires_grad=False)
    with pytest.raises(TypeError) as caught:
        ShardedSGD([param], lr=0.1)
    assert DTYPES[dtype] in str(caught.value)
    model = nn.Module()
    model.weight = param
    if DTYPES[dtype] == "model.float()":
        ShardedSGD([model.float().weight], lr=0.1)
    else:
        assert "float()" not in str(caught.value)
        assert model.float().weight.dtype == dtype  # it would not have helped
    if dtype.is_complex:
        ShardedSGD([nn.Parameter(torch.view_as_real(param).float())], lr=0.1)


# Sent twice


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))))


def send_twice(cause: str) -> list[str]:
    torch.manual_seed(0)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfuse").addHandler(handler)
    model, generator = Two(), nn.Linear(40, 40)
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.002, "overlap_grad_sync": True}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
    other = ShardedSGD(generator.named_parameters(), lr=0.1, sharding=sharding)
    for _ in range(6):
        x = torch.ones(2, 40) * (1 + dist.get_rank())
        if cause == "nested":
            y = x.requires_grad_()
            for _ in range(2):
                y = checkpoint(model, y, use_reentrant=True)
            model.c(y).sum().backward()
        elif cause == "not reentrant":
            y = x.requires_grad_()
            for _ in range(2):
                y = checkpoint(model, y, use_reentrant=False)
            model.c(y).sum().backward()
        elif cause in ("cleared", "held back"):
            with optimizer.no_sync() if cause == "held back" else nullcontext():
                model.c(model(generator(x))).sum().backward()
            other.step()
            other.zero_grad()
            optimizer.zero_grad()
            model.c(model(x)).sum().backward()
        elif cause == "written":
            model.c(model(x)).sum().backward()
            for param in model.parameters():
                param.grad.mul_(0.5)
        else:
            for _ in range(2):
                model.c(model(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [line for line in lines if "sent twice" in line]


CAUSES = {
    "again": "a second backward()",
    "nested": "reentrant checkpoints",
    "cleared": "zero_grad() cleared",
    "written": "p.grad was written",
}


@pytest.mark.parametrize("cause", [*CAUSES, "not reentrant", "held back"])
def test_why_gradients_are_sent_twice(cause: str) -> None:
    """The cause that there was is named, and no other; what the remedies give is quiet."""
    for lines in run_procs(2, send_twice, cause):
        assert len(lines) == int(cause in CAUSES)
        for line in lines:
            assert [name for name, text in CAUSES.items() if text in line] == [cause]


# Steps without gradients


def idle(name: str, sharding: dict[str, Any]) -> tuple[list[str], float]:
    torch.manual_seed(0)
    flags = torch.__future__
    model: nn.Module = Two()
    optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
    rank, twin = dist.get_rank(), Two()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(7):
            if step == 1 and name == "assign":
                model.load_state_dict(
                    {k: v.clone() for k, v in model.state_dict().items()}, assign=True
                )
            if step == 1 and name == "overwrite":
                flags.set_overwrite_module_params_on_conversion(True)
                model.double().float()
                flags.set_overwrite_module_params_on_conversion(False)
            if step == 1 and name == "new model":
                model = twin
            if name == "frozen":
                model.requires_grad_(step < 1)
            before = [param.detach().clone() for param in model.parameters()]
            is_idle = {"one rank": rank == 0, "twice": step in (2, 3), "by turns": step % 3 != 0}
            if not is_idle.get(name, False) and name != "frozen":
                model.c(model(torch.ones(2, 40))).sum().backward()  # type: ignore[operator]
            if name == "cleared":
                optimizer.zero_grad()
            optimizer.step()
            optimizer.zero_grad()
        pairs = zip(before, model.parameters(), strict=True)
        moved = max(float((a - b).detach().abs().max()) for a, b in pairs)
    words = ("had a gradient", "No module holds the parameters")
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if any(word in text for word in words)], moved


@pytest.mark.parametrize("sharding", SHARDINGS[::2], ids=str)
@pytest.mark.parametrize(
    ("name", "is_said"),
    [
        ("assign", True),
        ("overwrite", True),
        ("new model", True),
        ("good", False),
        ("twice", False),
        ("by turns", False),
        ("one rank", False),
        ("frozen", False),
        ("cleared", False),
    ],
)
def test_a_model_with_other_parameters(name: str, is_said: bool, sharding: dict[str, Any]) -> None:
    """One warning on every rank, and none where steps without gradients have other reasons."""
    if sharding.get("grads_are_reduced") and name in ("one rank", "cleared"):
        pytest.skip("reduced gradients are alike on all ranks, and autograd's are not seen")
    for texts, moved in run_procs(2, idle, name, sharding):
        assert len(texts) == int(is_said)
        assert all("load_state_dict(assign=True)" in text for text in texts)
        if is_said:
            assert moved == 0


# One predicate for both stages


def accumulate(stage: int, how: str) -> tuple[int, list[Tensor], bool]:
    torch.manual_seed(0)
    model = Two()
    sharding = {"stage": stage, "collectives": "pairwise", "bucket_cap_mb": 0.002}
    optimizer = ShardedSGD(
        model.named_parameters(), lr=0.1, sharding={**sharding, "overlap_grad_sync": True}
    )
    micro, sent = 0, 0
    if how == "condition":
        optimizer.accumulates_while(lambda: micro < 2)
    # Of the class: where gradients overlap on a device, they have a communicator of their own.
    sender: Any = type(optimizer.communicator)
    original, stays = sender.reduce_scatter, True

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += 1
        return original(*args, **kwargs)

    sender.reduce_scatter = counted
    for step in range(3):
        for micro in range(3):
            is_held = how == "no_sync" and micro < 2
            with optimizer.no_sync() if is_held else nullcontext():
                x = torch.ones(2, 40) * (1 + dist.get_rank() + micro + step)
                model.c(model(x)).sum().backward()
            if micro < 2:
                stays &= all(p.grad is not None for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return sent, [p.detach().clone() for p in model.parameters()], stays


@pytest.mark.parametrize("stage", [1, 2])
def test_accumulates_while_is_no_sync(stage: int) -> None:
    """As many buckets leave, gradients stay until then, and the results are the same bits."""
    found = run_procs(2, accumulate, stage, "condition")
    for (sent, values, stays), (others, expected, _) in zip(
        found, run_procs(2, accumulate, stage, "no_sync"), strict=True
    ):
        assert sent == others > 0
        assert stays
        assert all(map(torch.equal, values, expected))


def differ() -> str:
    """One rank's condition never holds: it sends in each of its backwards."""
    model = Two()
    sharding = {"stage": 2, "collectives": "pairwise", "bucket_cap_mb": 0.002}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.1, sharding=sharding)
    micro = 0
    optimizer.accumulates_while(lambda: dist.get_rank() == 0 and micro < 2)

    def train() -> None:
        nonlocal micro
        for _ in range(2):
            for number in range(3):
                micro = number
                model.c(model(torch.ones(2, 40))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return attempt(train)


def test_a_condition_that_differs() -> None:
    """Ranks that differ in it get an error or the right sum, on every rank, and no hang."""
    texts = run_procs(2, differ, timeout=60)
    assert len({text == "" for text in texts}) == 1, texts
    assert all(text == "" or "rank" in text for text in texts), texts


# Saving on one rank

PROGRAM = """
import logging, sys
import torch
import torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
logging.basicConfig(level=logging.WARNING, format="LINE %(message)s")
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
from shardfuse import ShardedSGD
model = torch.nn.Linear(4, 4)
optimizer = ShardedSGD(model.named_parameters(), lr=0.1)
def train(optimizer=optimizer):
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
def save(optimizer=optimizer):
    try:
        optimizer.state_dict()
    except RuntimeError as error:
        print("ERROR", error, file=sys.stderr)
"""

BODIES = {
    "plain": ("train(); save()", 1, "Call consolidate_state_dict() on all ranks before it"),
    "two": (
        "other = ShardedSGD(torch.nn.Linear(4, 4).parameters(), lr=0.1)\ntrain(); other.step()",
        1,
        "Call consolidate_state_dict() on all ranks before it",
    ),
    "later": ("def end():\n    optimizer.consolidate_state_dict()\ntrain(); end()", 0, ""),
    "checkpoint": ("import shardfuse.checkpoint\ntrain()", 0, ""),
    "callback": (
        "from shardfuse.integrations import consolidate_on_save\ntrain()\n"
        "def main(accelerator):\n    consolidate_on_save(accelerator)",
        0,
        "",
    ),
    "lightning": (
        "import types\nm = types.ModuleType('lightning.fabric.wrappers')\n"
        "exec('def call(f): return f()', vars(m))\nm.call(train)",
        0,
        "",
    ),
    "accelerate": (
        "from accelerate import Accelerator\nfrom accelerate.optimizer import AcceleratedOptimizer"
        "\nAccelerator(cpu=True)\nwrapped = AcceleratedOptimizer(optimizer)\n"
        "train(wrapped); save(wrapped)",
        1,
        "Call shardfuse.integrations.consolidate_on_save(accelerator) after prepare()",
    ),
    "trainer": (
        "import types\nm = types.ModuleType('transformers.trainer')\n"
        "exec('def call(f): return f()', vars(m))\nm.call(train); m.call(save)",
        1,
        "Pass callbacks=[shardfuse.integrations.trainer_callback()] to Trainer",
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_saving_on_one_rank(name: str, tmp_path: Any) -> None:
    """One line on the first rank, once, and not where states are gathered; the error agrees."""
    if name == "accelerate":
        pytest.importorskip("accelerate")
    body, number, remedy = BODIES[name]
    source = textwrap.dedent(PROGRAM) + body + "\ndist.barrier()\n"
    ranks = run_scripts(source, 2, tmp_path / "store", timeout=100)
    for rank, (code, text) in enumerate(ranks):
        assert code == 0, text
        lines = [line for line in text.splitlines() if "state_dict() on rank 0 alone" in line]
        assert len(lines) == (number if rank == 0 else 0), text
        assert all(remedy in line and len(line) < 160 for line in lines)
        errors = [line for line in text.splitlines() if line.startswith("ERROR")]
        assert len(errors) == int(bool(re.search(r"\bsave\(|call\(save", body)))
        assert all(remedy in line for line in errors)


@pytest.mark.parametrize(
    ("body", "number"),
    [("train()", 0), ("def keep(io):\n    io.save_all(optimizer)\ntrain()", 1)],
    ids=["no", "by another package"],
)
def test_a_sign_of_saving(body: str, number: int, tmp_path: Any) -> None:
    """A program that has no name for it is not told of saves."""
    source = textwrap.dedent(PROGRAM).partition("def save")[0] + body + "\ndist.barrier()\n"
    (code, text), _ = run_scripts(source, 2, tmp_path / "store", timeout=100)
    assert code == 0, text
    assert text.count("state_dict() on rank 0 alone") == number, text
