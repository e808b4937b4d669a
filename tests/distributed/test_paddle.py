"""The drop-in for Paddle's Lamb: on shards, against double precision and against Paddle itself."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse.optim.paddle import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue, Lamb
from shardfuse.rules.lamb import LambScalars
from tests.support.counting import counted
from tests.support.harness import run_threads
from tests.support.models import MIXED, mean_grads, rank_grads
from tests.support.oracles import Grads, LambOracle, OracleParam
from tests.support.runs import (
    KERNELS,
    Case,
    assert_bitwise,
    max_relative_error,
    train_oracle,
    train_rank,
    train_unsharded,
)

pytestmark = pytest.mark.timeout(120)

TOLERANCE = 1e-6
ORACLE_TOLERANCES = {"schedule": 2e-6}
"""In the sixth step of this schedule, decay and moments of the tensor of one element cancel to a
hundredth. The second pass rounds u otherwise than the norm of u, so that |p| / |u| does not cancel
this rounding. With two and more elements per tensor it never does."""
# Paddle keeps beta ** step in fp32 and rounds elsewhere, for 25 steps.
PADDLE_TOLERANCE = 1e-6
NUM_STEPS = 10

ONE_GROUP = tuple(entry._replace(group=0) for entry in MIXED)
# What group 1 has of its own, in Paddle's words.
OWN = {"learning_rate": 0.5, "lamb_weight_decay": 0.0, "beta1": 0.8, "epsilon": 1e-3}


class StepDecay:
    """Paddle's scheduler of this name, as far as an optimizer sees it."""

    def __init__(self, learning_rate: float, step_size: int, gamma: float) -> None:
        self.base, self.step_size, self.gamma = learning_rate, step_size, gamma
        self.last_epoch = 0

    @property
    def last_lr(self) -> float:
        return float(self.base * self.gamma ** (self.last_epoch // self.step_size))

    def __call__(self) -> float:
        return self.last_lr

    def step(self) -> None:
        self.last_epoch += 1


def excluded(param: Any) -> bool:
    return "LayerNorm" in param.name or param.name.endswith("bias")


def build(groups: Any, *, decay: Sequence[Any] = (), sharding: Any, **options: Any) -> Lamb:
    """Return the optimizer; with `decay`, one whose scheduler goes on after every step."""
    if decay:
        options["learning_rate"] = StepDecay(*decay)
    optimizer = Lamb(parameters=groups, sharding=sharding, **options)
    if decay:
        optimizer.register_step_post_hook(lambda *_: options["learning_rate"].step())
    return optimizer


class PaddleOracle(LambOracle):
    """Paddle's options over LAMB in double precision."""

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        names: Sequence[Sequence[str]],
        decay: Sequence[Any] = (),
        always_adapt: bool = False,
        **options: Any,
    ) -> None:
        self.scheduler = StepDecay(*(decay or (options.get("learning_rate", 0.001), 1, 1.0)))
        fallback = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6, "lamb_weight_decay": 0.01}
        translated = []
        self.no_decay: Sequence[str] = []
        for group in groups:
            own = {"grad_clip": None, **fallback, **options, "learning_rate": 1.0, **group}
            translated.append(
                {
                    "params": group["params"],
                    "betas": (own["beta1"], own["beta2"]),
                    "eps": own["epsilon"],
                    "weight_decay": own["lamb_weight_decay"],
                    "factor": own["learning_rate"],
                    "l2": own.get("weight_decay", 0.0),
                    "grad_clip": own["grad_clip"],
                }
            )
        super().__init__(translated, names, "paddle", always_adapt=always_adapt)
        if options.get("exclude_from_weight_decay_fn"):
            self.no_decay = ["LayerNorm", "bias$"]

    def step(self, grads: Grads) -> None:
        for group in self.groups:
            group["lr"] = self.scheduler() * group["factor"]
        super().step(grads)
        self.scheduler.step()

    def prepare(self, ready: list[list[tuple[OracleParam, Tensor]]]) -> None:
        for group, members in zip(self.groups, ready, strict=True):
            clip = group["grad_clip"]
            norms = torch.stack([grad.norm() for _, grad in members])
            for (param, grad), norm in zip(members, norms, strict=True):
                if isinstance(clip, ClipGradByValue):
                    low = -clip.max if clip.min is None else clip.min
                    grad.copy_(torch.minimum(grad, torch.tensor(clip.max)).clamp(min=low))
                elif clip is not None:
                    whole = norms.norm() if isinstance(clip, ClipGradByGlobalNorm) else norm
                    grad *= clip.clip_norm / max(whole, clip.clip_norm)
                grad += group["l2"] * param.value


def make_case(overrides: Sequence[Mapping[str, Any]] = ({},), **options: Any) -> Case:
    entries = MIXED if len(overrides) > 1 else ONE_GROUP
    given = {"learning_rate": 0.05, "beta2": 0.99, "lamb_weight_decay": 0.1, **options}
    return Case(build, given, PaddleOracle, overrides=overrides, entries=entries, named=True)


CASES = {
    "plain": make_case(),
    "no-decay": make_case(lamb_weight_decay=0.0),
    "always-adapt": make_case(always_adapt=True, exclude_from_weight_decay_fn=excluded),
    "exclusions": make_case(exclude_from_weight_decay_fn=excluded),
    "schedule": make_case(decay=(0.1, 2, 0.5)),
    # The exclusions make two flats of the group, clipped by one norm.
    "global-norm": make_case(
        grad_clip=ClipGradByGlobalNorm(2.0), exclude_from_weight_decay_fn=excluded
    ),
    "global-norm-unreached": make_case(grad_clip=ClipGradByGlobalNorm(1e6)),
    "norm": make_case(grad_clip=ClipGradByNorm(0.7), exclude_from_weight_decay_fn=excluded),
    "value": make_case(grad_clip=ClipGradByValue(0.3)),
    "value-one-sided": make_case(grad_clip=ClipGradByValue(0.5, min=0.0)),
    "groups": make_case(({}, OWN)),
    "groups-global-norm": make_case(({}, OWN), grad_clip=ClipGradByGlobalNorm(2.0)),
    "groups-clips": make_case(
        ({"grad_clip": ClipGradByNorm(0.7)}, {"grad_clip": ClipGradByValue(0.2, -0.4)}),
        grad_clip=ClipGradByGlobalNorm(2.0),
    ),
    "groups-unclipped": make_case(
        ({}, {"grad_clip": ClipGradByGlobalNorm(1.0)}), grad_clip=ClipGradByNorm(0.5)
    ),
    "groups-l2": make_case(({}, {"weight_decay": 0.3}), grad_clip=ClipGradByNorm(0.5)),
}


@pytest.mark.filterwarnings("ignore:A trust ratio is taken only where")
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_follows_the_oracle(name: str, world_size: int) -> None:
    """Ten sharded steps stay within rounding of the float64 per-tensor reference."""
    case = CASES[name]
    expected = train_oracle(case, "floats", NUM_STEPS, world_size)
    start, tolerance = case.param_set().values(), ORACLE_TOLERANCES.get(name, TOLERANCE)
    for kernel in KERNELS:
        sharding = {"bucket_cap_mb": 0.04, "kernel": kernel}
        ranks = run_threads(world_size, train_rank, case, "floats", NUM_STEPS, sharding)
        for values in ranks:
            assert max_relative_error(values, expected, start) < tolerance
            assert_bitwise(values, ranks[0])


@pytest.mark.parametrize("name", ["norm", "value", "groups-clips"])
@pytest.mark.parametrize("bucket_cap_mb", [0.01, 25])
def test_sharded_is_unsharded(name: str, bucket_cap_mb: float) -> None:
    """On integer gradients cutting tensors over ranks and buckets changes the order of sums only.

    Elements without a gradient on any rank, and padding, stay as they are.
    """
    case = CASES[name]
    ranks = run_threads(3, train_rank, case, "integers", 5, {"bucket_cap_mb": bucket_cap_mb})
    expected = train_unsharded(case, "integers", 5, 3)
    start = case.param_set().values()
    unused = [i for i, entry in enumerate(case.entries) if entry.role in ("unused", "frozen")]
    for values in ranks:
        assert max_relative_error(values, expected, start) < TOLERANCE
        for index in unused:
            assert torch.equal(values[index], start[index])


def test_cases_differ() -> None:
    """Every option takes the oracle elsewhere, so that agreeing with it says something."""
    ends = {name: train_oracle(case, "floats", 3, 2) for name, case in CASES.items()}
    start = CASES["plain"].param_set().values()
    same = {
        (a, b) for a in ends for b in ends if max_relative_error(ends[a], ends[b], start) < 1e-4
    }
    assert {pair for pair in same if pair[0] < pair[1]} == {("global-norm-unreached", "plain")}


@pytest.mark.parametrize("reduced", [False, True], ids=["alone", "presynced"])
def test_collectives(reduced: bool) -> None:
    """By value costs nothing, by norm one float per tensor, by global norm one per flat."""

    def count(clip: Any) -> list[int]:
        params = CASES["plain"].param_set()
        sharding = {"kernel": "eager", "grads_are_reduced": reduced, "process_group": counted()}
        optimizer = CASES["plain"].build(params, sharding)
        optimizer.param_groups[0]["grad_clip"] = clip
        optimizer.communicator.calls.clear()
        params.assign(mean_grads("floats", 2, 0, ONE_GROUP))
        optimizer.step()
        return [call.numel for call in optimizer.communicator.calls if call.op == "all_reduce"]

    def rank() -> list[list[int]]:
        return [count(clip) for clip in (None, ("value", 1.0, -1.0), ("norm", 1.0, 0.0))] + [
            count(("global_norm", 1.0, 0.0))
        ]

    plain, by_value, by_norm, by_global_norm = run_threads(2, rank)[0]
    assert plain == by_value == [2 * len(MIXED)]
    assert by_norm == [len(MIXED), *plain]
    assert len(by_global_norm) == 2
    assert by_global_norm[0] <= 2


@pytest.mark.parametrize("name", ["norm", "value", "global-norm"])
def test_bfloat16(name: str) -> None:
    """Gradients of low precision are clipped in fp32: only the parameters' own rounding is left."""
    case = replace(CASES[name], dtype=torch.bfloat16)
    expected = train_oracle(case, "integers", 3, 2)
    start = case.param_set().values()
    for values in run_threads(2, train_rank, case, "integers", 3):
        assert max_relative_error(values, expected, start) < 2**-8


def test_compiled_clip() -> None:
    """The compiled kernels take a factor per block as the eager ones do."""
    case = make_case(grad_clip=ClipGradByNorm(0.7))
    params, reference = case.param_set(), case.param_set()
    compiled = case.build(params, {"kernel": "compile"})
    eager = case.build(reference, {"kernel": "eager"})
    for step in range(2):
        for target, optimizer in ((params, compiled), (reference, eager)):
            target.assign(mean_grads("floats", 2, step, case.entries))
            optimizer.step()
    assert compiled._kernels.choice == "compile"
    start = case.param_set().values()
    assert max_relative_error(params.values(), reference.values(), start) < TOLERANCE


def test_bounds_as_tensors() -> None:
    """Bounds limit the gradient also where they are tensors, as in compiled kernels."""
    optimizer = CASES["value"].build(CASES["value"].param_set(), {"kernel": "eager"})
    rule, group = optimizer._rule, optimizer.param_groups[0]
    settings = rule.settings(group, "", 1)
    assert isinstance(settings.h, LambScalars)
    as_tensors = LambScalars(*torch.tensor(settings.h).unbind())
    moments = []
    for h in (settings.h, as_tensors):
        state = torch.zeros(2, 1, 3)
        rule.moments(settings.flags, h, state[0], torch.tensor([[-2.0, 0, 2]]), *state)
        moments.append(state)
    assert torch.equal(*moments)
    assert torch.allclose(moments[0][0], torch.tensor([-0.03, 0.0, 0.03]))


def test_clip_after_clip_grad_norm() -> None:
    """Clipping by hand and by norm per tensor: the second sees what the first has left."""

    def ends(by_hand: bool) -> list[Tensor]:
        params = CASES["norm"].param_set()
        optimizer = CASES["norm"].build(params, {"kernel": "eager"})
        grads = list(rank_grads("floats", dist.get_world_size(), dist.get_rank(), 0, ONE_GROUP))
        if not by_hand:
            mean = mean_grads("floats", dist.get_world_size(), 0, ONE_GROUP)
            norm = torch.stack([grad.norm() for grad in mean if grad is not None]).norm()
            grads = [None if grad is None else grad * float(20 / norm) for grad in grads]
        params.assign(grads)
        if by_hand:
            optimizer.clip_grad_norm(20.0)
        optimizer.step()
        return params.values()

    start = CASES["norm"].param_set().values()
    for by_hand, scaled in run_threads(2, lambda: (ends(True), ends(False))):
        assert max_relative_error(by_hand, scaled, start) < TOLERANCE


# What Paddle itself does: in another process, since its libraries and torch's need not get along.
PADDLE_SCRIPT = """
import pickle, sys
import paddle

def clip_of(clip):
    return None if clip is None else getattr(paddle.nn, clip[0])(*clip[1:])

def excluded(param):
    return "LayerNorm" in param.name or param.name.endswith("bias")

def train(job):
    params = []
    for name, value in zip(job["names"], job["values"]):
        init = paddle.nn.initializer.Assign(value)
        param = paddle.create_parameter(list(value.shape), "float32", default_initializer=init)
        param.name = name
        params.append(param)
    options = dict(job["options"])
    options["grad_clip"] = clip_of(options["grad_clip"])
    if options.pop("exclusions"):
        options["exclude_from_weight_decay_fn"] = excluded
    decay = options.pop("decay")
    if decay:
        options["learning_rate"] = paddle.optimizer.lr.StepDecay(*decay)
    members = params
    if job["overrides"]:
        members = []
        for positions, own in zip(job["groups"], job["overrides"]):
            if "grad_clip" in own:
                own = {**own, "grad_clip": clip_of(own["grad_clip"])}
            members.append({"params": [params[i] for i in positions], **own})
    optimizer = paddle.optimizer.Lamb(parameters=members, **options)
    for grads in job["grads"]:
        pairs = [(p, g) for p, g in zip(params, grads) if g is not None]
        sum((p * paddle.to_tensor(g)).sum() for p, g in pairs).backward()
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        if decay:
            options["learning_rate"].step()
    return [p.numpy().copy() for p in params]

with open(sys.argv[1], "rb") as file:
    jobs = pickle.load(file)
with open(sys.argv[2], "wb") as file:
    pickle.dump({name: train(job) for name, job in jobs.items()}, file)
"""


def paddle_job(case: Case, num_steps: int, world_size: int) -> dict[str, Any]:
    """Return what PADDLE_SCRIPT needs to train `case` on the mean gradients, without torch."""

    def describe(clip: Any) -> Any:
        return clip and (type(clip).__name__, *vars(clip).values())

    options = {"decay": (), **case.options}
    options["exclusions"] = options.pop("exclude_from_weight_decay_fn", None) is not None
    options["grad_clip"] = describe(options.get("grad_clip"))
    overrides = [
        {key: describe(value) if key == "grad_clip" else value for key, value in own.items()}
        for own in case.overrides
    ]
    grads = [mean_grads("floats", world_size, step, case.entries) for step in range(num_steps)]
    return {
        "names": [entry.name for entry in case.entries],
        "values": [value.numpy() for value in case.param_set().values()],
        "groups": [[i for i, e in enumerate(case.entries) if e.group == g] for g in range(2)],
        "overrides": overrides if len(overrides) > 1 else None,
        "options": options,
        "grads": [[None if g is None else g.float().numpy() for g in row] for row in grads],
    }


# Paddle has no parameters without elements.
PADDLE_CASES = {
    name: replace(case, entries=tuple(e for e in case.entries if e.shape != (0, 5)))
    for name, case in CASES.items()
}


@pytest.fixture(scope="module")
def paddle_ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """All parameters after 25 steps of paddle.optimizer.Lamb, by case; one process for all."""
    folder = tmp_path_factory.mktemp("paddle")
    source, result = folder / "jobs.pickle", folder / "ends.pickle"
    jobs = {name: paddle_job(case, 25, 2) for name, case in PADDLE_CASES.items()}
    source.write_bytes(pickle.dumps(jobs))
    command = [sys.executable, "-c", PADDLE_SCRIPT, str(source), str(result)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    ends = pickle.loads(result.read_bytes())
    return {name: [torch.from_numpy(value) for value in ends[name]] for name in ends}


@pytest.mark.skipif(find_spec("paddle") is None, reason="paddlepaddle is not installed")
@pytest.mark.filterwarnings("ignore:A trust ratio is taken only")
@pytest.mark.parametrize("name", PADDLE_CASES)
def test_follows_paddle(name: str, paddle_ends: dict[str, list[Tensor]]) -> None:
    """25 steps on two ranks end where Paddle's own Lamb ends on the mean gradient, in fp32."""
    case = PADDLE_CASES[name]
    start = case.param_set().values()
    for values in run_threads(2, train_rank, case, "floats", 25):
        error = max_relative_error(values, paddle_ends[name], start)
        print(f"{name}: {error:.1e} of the tensor's largest value")
        assert error < PADDLE_TOLERANCE
