"""State dicts that were edited by hand: loaded as they are, or refused before anything changes."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdam, ShardedAdamW, ShardedLamb, ShardedSGD
from shardfuse.optim import paddle
from tests.support.edited_dicts import KINDS, bits, build, edited, lost, through_json, train
from tests.support.harness import run_procs, run_threads

pytestmark = pytest.mark.timeout(120)

NAN, INF = float("nan"), float("inf")
NAMES = list(KINDS)
DTYPES = [torch.float32, torch.float32, torch.bfloat16]

# The rest of the 300 seeds are in the exhaustive tier.
SEEDS = range(300)
SHARES = [SEEDS[start : start + 60] for start in range(0, 300, 60)]


def outcome_of(seed: int) -> str:
    """Load the edited dict of a seed; return "refused" or "loaded", after checking which."""
    rng = random.Random(seed)
    kind = KINDS[NAMES[seed % len(NAMES)]]
    dtype = rng.choice(DTYPES)
    saved = copy.deepcopy(build(kind, 3, dtype).state_dict())
    what, told = edited(rng, saved)
    optimizer = build(kind, 1, dtype)
    before, own = bits(optimizer), copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(told) if isinstance(told, dict) else told
    case = f"seed {seed}, {kind.cls.__name__}, {what}"
    refusal = ""
    try:
        optimizer.load_state_dict(given)
    except (TypeError, ValueError) as error:
        refusal = str(error)
    if refusal:
        assert len(refusal) > 20, case
        assert bits(optimizer) == before, f"{case}: {refusal}"
        train(optimizer, 1)
        return "refused"
    assert lost(told, optimizer.state_dict(), own) == [], case
    return "loaded"


@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@pytest.mark.parametrize("seeds", SHARES, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_one_edit_at_a_random_place(seeds: range) -> None:
    """Each is refused without any change, in words, or what was loaded is what the dict says."""
    outcomes = [outcome_of(seed) for seed in seeds]
    assert outcomes.count("refused") > len(seeds) // 5
    assert outcomes.count("loaded") > len(seeds) // 10


@pytest.mark.parametrize("name", NAMES)
def test_no_edit(name: str) -> None:
    """What the class has saved loads as it is, also with keys of text, as JSON makes them."""
    for dtype in (torch.float32, torch.bfloat16):
        saved = copy.deepcopy(build(KINDS[name], 3, dtype).state_dict())
        for told in (saved, through_json(saved)):
            optimizer = build(KINDS[name], 1, dtype)
            own = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(copy.deepcopy(told))
            assert lost(told, optimizer.state_dict(), own) == []
            train(optimizer, 1)


def entry(saved: Any) -> Any:
    return saved["state"][0]


def group(saved: Any) -> Any:
    return saved["param_groups"][0]


EDITS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "entry of none": (
        lambda s: s["state"].update({99: entry(s)}),
        r"states of 99, which is not among the params .* remove them",
    ),
    "two entries": (
        lambda s: s["state"].update({"0": entry(s)}),
        r"states of 0\.w twice, as 0 and as '0'. Remove one",
    ),
    "one number twice": (
        lambda s: group(s).update(params=[0, 0]),
        r"has 0 twice among the params of its groups, last in group 0",
    ),
    "names for numbers": (
        lambda s: group(s).update(params=["a", "b"]),
        r"states of 0, which is not among the params",
    ),
    "no params": (
        lambda s: group(s).pop("params"),
        r"param_groups\[0\] .* must have a list 'params'",
    ),
    "few names": (
        lambda s: group(s).update(param_names=["0.w"]),
        r"param_names of param_groups\[0\] .* must be 2 names",
    ),
    "state of another class": (
        lambda s: entry(s).update(foo=torch.ones(3, 4)),
        r"State 'foo' of 0\.w .* none of AdamW's and would be lost",
    ),
    "list": (
        lambda s: entry(s).update(exp_avg=[1.0]),
        r"State exp_avg of 0\.w must be a tensor, got list .* torch\.tensor",
    ),
    "meta": (
        lambda s: entry(s).update(exp_avg=torch.ones(3, 4, device="meta")),
        r"State exp_avg of 0\.w is on the meta device.*Load the file on the CPU",
    ),
    "sparse": (
        lambda s: entry(s).update(exp_avg=torch.eye(3, 4).to_sparse()),
        r"State exp_avg of 0\.w is torch\.sparse_coo.*to_dense\(\)",
    ),
    "complex": (
        lambda s: entry(s).update(exp_avg=torch.ones(3, 4) * 1j),
        r"State exp_avg of 0\.w is of torch\.complex64",
    ),
    "too large for fp32": (
        lambda s: entry(s).update(exp_avg=torch.full((3, 4), 1e300, dtype=torch.float64)),
        r"State exp_avg of 0\.w has values that fp32, .*, does not hold",
    ),
    "below zero": (
        lambda s: entry(s).update(exp_avg_sq=torch.full((3, 4), -1.0)),
        r"State exp_avg_sq of 0\.w is an average of squares, and has values below 0",
    ),
    "untaken step": (
        lambda s: entry(s).update(step=0),
        r"State exp_avg\w* of 0\.w has had updates, and its step .* is 0",
    ),
    "no step": (lambda s: entry(s).pop("step"), r"no step for 0\.w"),
    **{
        f"step {value!r}": (
            lambda s, value=value: entry(s).update(step=value),
            r"step of 0\.w must be a whole number",
        )
        for value in (NAN, INF, -3, 1.5, 2**40, 10**30, "5", True, None, torch.ones(2), 1j)
    },
}


@pytest.mark.parametrize("name", EDITS)
def test_words(name: str) -> None:
    """An error names the parameter, state or group, and what to do."""
    kind = KINDS["ShardedAdamW"]
    edit, words = EDITS[name]
    saved = copy.deepcopy(build(kind, 3).state_dict())
    edit(saved)
    optimizer = build(kind, 1)
    before = bits(optimizer)
    with pytest.raises((TypeError, ValueError), match=words):
        optimizer.load_state_dict(saved)
    assert bits(optimizer) == before


@pytest.mark.parametrize("given", [None, "x", [], False, {}, {"state": {}}, {"param_groups": []}])
def test_no_state_dict(given: Any) -> None:
    """Something else in its place is told what to pass."""
    with pytest.raises((TypeError, ValueError), match=r"state.dict"):
        build(KINDS["ShardedAdamW"], 1).load_state_dict(given)


def test_a_state_that_is_not_in_use_is_kept() -> None:
    """As torch.optim keeps it: amsgrad or momentum was switched off, and may be on again."""
    for cls, on, off in (
        (ShardedAdam, {"amsgrad": True}, {"amsgrad": False}),
        (ShardedSGD, {"momentum": 0.9}, {"momentum": 0.0}),
    ):
        dicts = []
        for options in (on, off):
            param = nn.Parameter(torch.ones(3))
            optimizer: Any = cls([param], lr=0.1, **options)
            param.grad = torch.ones(3)
            optimizer.step()
            dicts.append(copy.deepcopy(optimizer.state_dict()))
        dicts[0]["param_groups"][0].update(off)
        optimizer.load_state_dict(dicts[0])
        assert lost(dicts[0], optimizer.state_dict(), dicts[1]) == []
        optimizer.load_state_dict(dicts[1])  # and is gone again with a dict that has none
        assert lost(dicts[1], optimizer.state_dict(), dicts[1]) == []


def test_what_is_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A log line names what a dict has beside its two parts, and the hyper-parameters it lacks."""
    optimizer = build(KINDS["ShardedAdamW"], 1)
    saved = {**copy.deepcopy(optimizer.state_dict()), "scaler": 1}
    del saved["param_groups"][1]["betas"]
    with caplog.at_level(logging.WARNING, "shardfuse"):
        optimizer.load_state_dict(saved)
    assert "scaler is left out" in caplog.text
    assert "param_groups[1] of the loaded state dict has no betas" in caplog.text


class Schedule:
    """A scheduler with Paddle's methods."""

    def __init__(self) -> None:
        self.last_lr, self.inner = 0.1, [1]

    def __call__(self) -> float:
        return self.last_lr

    def step(self) -> None:
        self.last_lr /= 2

    def state_dict(self) -> dict[str, Any]:
        return {"last_lr": self.last_lr, "inner": list(self.inner)}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.inner[0] = state["inner"][0]  # before it fails
        self.last_lr = state["last_lr"]


@pytest.mark.parametrize("edit", ["last_lr", -0.1, NAN, "0.1"])
def test_a_scheduler_that_cannot_load(edit: Any) -> None:
    """Nor is anything else of the dict loaded, and the scheduler stays what it was."""
    params = [nn.Parameter(torch.ones(3))]
    optimizer = paddle.Lamb(learning_rate=Schedule(), parameters=params)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["LR_Scheduler"]["inner"] = [2]
    if edit == "last_lr":
        del saved["LR_Scheduler"]["last_lr"]
    else:
        saved["LR_Scheduler"]["last_lr"] = edit
    before = bits(optimizer), optimizer.state_dict()["LR_Scheduler"]
    with pytest.raises(ValueError, match="LR_Scheduler of the loaded state dict does not fit"):
        optimizer.set_state_dict(saved)
    assert (bits(optimizer), optimizer.state_dict()["LR_Scheduler"]) == before


# On ranks


def load_one_bad(name: str, stage: int, bad_rank: int) -> list[tuple[str, bool]]:
    """Give one rank dicts that are not right; return every error, and whether anything changed."""
    kind = KINDS[name]
    optimizer = build(kind, 2, stage=stage)
    optimizer.consolidate_state_dict(to=None)
    good = copy.deepcopy(optimizer.state_dict())
    train(optimizer, 1)
    found = []
    for edit in (
        lambda s: s.pop("state"),
        lambda s: s["state"].update({99: {}}),
        lambda s: s["state"][3].update(step=-1, momentum_buffer=[0.0]),
        lambda s: s["state"][3].update({next(iter(s["state"][3])): torch.ones(5)}),
        lambda s: s["param_groups"][1].update(lr=NAN),
        lambda s: s["param_groups"][1].update(lr="0.1"),
    ):
        told = copy.deepcopy(good)
        if dist.get_rank() == bad_rank:
            edit(told)
        before = bits(optimizer)
        try:
            optimizer.load_state_dict(told)
        except (TypeError, ValueError, RuntimeError) as error:
            found.append((f"{type(error).__name__}: {error}", bits(optimizer) == before))
    optimizer.load_state_dict(good)
    train(optimizer, 2)
    optimizer.consolidate_state_dict(to=None)
    assert lost(optimizer.state_dict(), resumed(kind, good), good) == []
    return found


def resumed(kind: Any, good: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict of a new optimizer that goes on from ``good`` in its third step."""
    optimizer = build(kind, 2)
    train(optimizer, 1)
    optimizer.load_state_dict(copy.deepcopy(good))
    train(optimizer, 2)
    optimizer.consolidate_state_dict(to=None)
    state_dict: dict[str, Any] = optimizer.state_dict()
    return state_dict


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["ShardedAdamW", "NpuFusedSGD", "ShardedLamb", "Lamb of Paddle"])
def test_one_rank_has_a_bad_dict(name: str, stage: int) -> None:
    """Every rank raises, nothing has changed on any, and training goes on as if never."""
    for bad_rank in (0, 1):
        results = run_threads(2, load_one_bad, name, stage, bad_rank)
        for rank, found in enumerate(results):
            assert len(found) == 6
            for text, is_same in found:
                assert is_same, text
                if rank != bad_rank:
                    assert "Another rank failed to load the state dict" in text
                    assert f"rank {bad_rank}: " in text


def edit_on_one(key: str, value: Any) -> tuple[str, bool]:
    """Edit a group on one rank, and step; return the error, and whether anything changed."""
    optimizer = ShardedLamb([nn.Parameter(torch.ones(3000))], lr=0.1, weight_decay=0.1)
    train(optimizer, 1)
    if dist.get_rank() == 1:
        optimizer.param_groups[0][key] = value
    before = bits(optimizer)
    try:
        train(optimizer, 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}", bits(optimizer) == before
    return "no error", False


@pytest.mark.cpu_only("a rank whose host ran ahead of its device hears in a later call")
@pytest.mark.parametrize(("key", "value"), [("lr", NAN), ("lr", "0.1"), ("betas", (0.9, INF))])
def test_an_edited_group_on_one_rank(key: str, value: Any) -> None:
    """All ranks hear of it in the next step(), before it changes anything."""
    for text, is_same in run_procs(2, edit_on_one, key, value):
        assert "[rank 1] param_groups[0]: " in text
        assert is_same, text


def test_torchs_dicts_load_with_text_keys() -> None:
    """A dict of torch.optim that went through JSON, tensors made again by the user."""
    param = nn.Parameter(torch.ones(3))
    theirs = torch.optim.AdamW([param], lr=0.1)
    param.grad = torch.ones(3)
    theirs.step()
    ours: Any = ShardedAdamW([nn.Parameter(torch.ones(3))], lr=0.1)
    told = through_json(theirs.state_dict())
    ours.load_state_dict(told)
    assert lost(told, ours.state_dict(), told) == []
