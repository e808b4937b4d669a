"""Over DeepSpeed's partitions: methods that need buffers refuse, and no rank waits for another."""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedGradScaler, checkpoint, optim, training
from shardfuse.optim import ShardedOptimizer, npu, paddle
from tests.support import deepspeed_runs as runs
from tests.support.deepspeed_runs import Job
from tests.support.harness import run_procs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)

TIMEOUT = 200.0


class Constant:
    """A scheduler as Paddle's are."""

    def __call__(self) -> float:
        return 0.5

    def step(self) -> None:
        """Go on at the same rate."""


# What is given to public methods that need something.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "accumulates_while": (lambda: False,),
    "add_param_group": ({"params": []},),
    "broadcast_buffers": (torch.nn.Tanh(),),
    "clip_grad_norm": (1.0,),
    "clip_grad_norm_": ([], 1.0),
    "clip_grad_norm_fused_": (1.0,),
    "load_sharded_state_dict": ({},),
    "minimize": (torch.zeros((), requires_grad=True),),
    "set_lr": (0.5,),
    "set_lr_scheduler": (Constant(),),
    "profile_hook_step": (print,),
    "register_load_state_dict_post_hook": (print,),
    "register_load_state_dict_pre_hook": (print,),
    "register_state_dict_post_hook": (print,),
    "register_state_dict_pre_hook": (print,),
    "register_step_post_hook": (print,),
    "register_step_pre_hook": (print,),
}

# What works over partitions, too. Anything else that is public must refuse, a new method as well.
WORKS = {
    "accumulates_while",
    "clear_grad",
    "clear_gradients",
    "companions",
    "get_lr",
    "is_fused_optimizer",
    "is_params_grads_combined",
    "join_device",
    "join_process_group",
    "load_state_dict",
    "no_sync",
    "profile_hook_step",
    "register_load_state_dict_post_hook",
    "register_load_state_dict_pre_hook",
    "register_state_dict_post_hook",
    "register_state_dict_pre_hook",
    "register_step_post_hook",
    "register_step_pre_hook",
    "saves_are_arranged",
    "set_lr",
    "set_lr_scheduler",
    "set_state_dict",
    "state",
    "state_dict",
    "synchronize",
    "trust_ratios",
    "zero_grad",
}

# What refuses under another name than that of the method itself, followed by "()".
CALLED = {
    "grads_all_group_combined": "torch_npu's GradScaler",
    "join_hook": "torch.distributed.algorithms.Join",
    "last_overflow": "last_overflow",
    "parts": "shardfuse.checkpoint",
}

# What is done with an optimizer, not by a method of its own without further arguments.
USES: dict[str, Callable[[Any], Any]] = {
    "StepMonitor": training.StepMonitor,
    "Job": lambda optimizer: training.Job("none", {"optimizer": optimizer}, save_every=9),
    "ShardedGradScaler": lambda optimizer: unscale(optimizer),
    "shardfuse.checkpoint": lambda optimizer: checkpoint.save({"optimizer": optimizer}, "none"),
}
USES_OF_NPU: dict[str, Callable[[Any], Any]] = {
    "torch_npu's GradScaler": lambda optimizer: optimizer.step(grad_scaler=object())
}

# Those that need rows of tensors are refused as a whole.
CLASSES: dict[str, Callable[..., Any]] = {
    f"{module.__name__}.{name}": cls
    for module in (optim, npu, paddle)
    for name, cls in vars(module).items()
    if isinstance(cls, type)
    and issubclass(cls, ShardedOptimizer)
    and cls is not ShardedOptimizer
    and not name.startswith("_")
    and not issubclass(cls, optim.ShardedAdamP)
}


def unscale(optimizer: Any) -> None:
    """Unscale gradients as a loop without DeepSpeed does."""
    scaler = ShardedGradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)


def found_of(act: Callable[[], Any]) -> str:
    """Return what calling it ends in."""
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def use(optimizer: Any, name: str) -> None:
    """Read or call a public attribute as users do, with no more arguments than it needs."""
    value = getattr(optimizer, name)
    if name in ("load_state_dict", "set_state_dict"):
        value(optimizer.state_dict())
    elif callable(value) and not isinstance(value, type):
        result = value(*ARGUMENTS.get(name, ()))
        if hasattr(result, "__enter__"):
            with result:
                pass


def uses_of(optimizer: Any) -> dict[str, Callable[[], Any]]:
    """Return what is done with an optimizer, and with all that is public of it, by name."""
    names = [name for name in dir(type(optimizer)) if name.islower() and name[0] != "_"]
    uses = {**USES, **(USES_OF_NPU if isinstance(optimizer, npu._NpuFused) else {})}
    return {
        **{name: functools.partial(use, optimizer, name) for name in names},
        **{f"{what} used": functools.partial(act, optimizer) for what, act in uses.items()},
    }


def use_all() -> dict[str, dict[str, str]]:
    """Return, for every class at stage 1, what each public attribute and each use ends in."""
    deepspeed = runs.start_deepspeed()
    found = {}
    for key, cls in CLASSES.items():
        params = [*torch.nn.Linear(3, 2).named_parameters()]
        model = torch.nn.ParameterDict(dict(params))
        options = {"parameters": params} if cls is paddle.Lamb else {"params": params, "lr": 0.1}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=cls(**options), config=Job(how="instance", stage=1).config()
        )
        uses = uses_of(engine.basic_optimizer)
        found[key] = {name: found_of(act) for name, act in uses.items()}
    return found


def is_expected(name: str, text: str) -> bool:
    """Return whether a public attribute, or a use, of one name may end in ``text``."""
    if name in WORKS:
        return text == "no error"
    if name == "step":
        return text.startswith("RuntimeError: ") and "leave the steps to the engine" in text
    what = name.removesuffix(" used")
    called = what if what != name else CALLED.get(name, f"{name}()")
    return f"RuntimeError: {called} is not available while DeepSpeed shards (ZeRO" in text


def test_every_public_method_works_or_refuses_in_words() -> None:
    """All say whose they are, and what to do, on every rank; none looks for what is gone."""
    for ends in run_procs(runs.WORLD, use_all, timeout=TIMEOUT):
        assert ends.keys() == CLASSES.keys()
        wrong = [
            f"{key}: {name}: {text}"
            for key, found in ends.items()
            for name, text in found.items()
            if not is_expected(name, text)
        ]
        assert not wrong, "\n".join(wrong)


def watch_before() -> list[str]:
    """Return the errors where watch_step(), or a StepMonitor, came before DeepSpeed did."""
    deepspeed, job = runs.start_deepspeed(), Job(how="instance", stage=1)

    def begin(watch: Callable[[ShardedOptimizer], Any]) -> None:
        model = runs.Weights(runs.ENTRIES)
        optimizer = optim.ShardedSGD(model.parameters(), 0.1)
        watch(optimizer)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job.config())
        runs.train(job, engine, 0, 1)

    return [
        found_of(lambda: begin(lambda optimizer: optimizer.watch_step())),
        found_of(lambda: begin(lambda optimizer: training.StepMonitor(optimizer, every=50))),
    ]


def test_watched_before_deepspeed_takes_over() -> None:
    """Refused at once: the step would record nothing, the monitor would say so 50 steps later."""
    for watched, monitored in run_procs(runs.WORLD, watch_before, timeout=TIMEOUT):
        assert watched.startswith("ValueError: watch_step() was called for a step"), watched
        assert monitored.startswith("RuntimeError: StepMonitor is not available"), monitored


def fail_on_one_rank(job: Job) -> tuple[str, float]:
    """Spoil a state on rank 1, and return the error of the next step and the seconds it took."""
    engine, _ = runs.build(job)
    runs.train(job, engine, 0, 1)
    optimizer = engine.basic_optimizer
    flat = optimizer.param_groups[0]["params"][0]
    if dist.get_rank() == 1:
        optimizer.state[flat]["exp_avg"] = torch.zeros(3)
    dist.barrier()
    start = time.monotonic()
    try:
        runs.train(job, engine, 1, 2)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", 0.0


@pytest.mark.parametrize("stage", [1, 2])
def test_a_rank_that_fails_alone(stage: int) -> None:
    """One rank cannot update its partition: the other is told, and does not wait for its norms."""
    job = Job(stage=stage)
    (waiting, seconds), (failing, _) = run_procs(2, fail_on_one_rank, job, timeout=TIMEOUT)
    assert failing.startswith("RuntimeError"), failing
    assert "PeerError" in waiting, waiting
    assert "rank 1" in waiting, waiting
    assert seconds < 20, seconds
