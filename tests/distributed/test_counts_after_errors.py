"""An error comes to one rank alone, late in a step; what ranks count is alike again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardfuse import ShardedAdamW, ShardedGradScaler
from shardfuse.checkpoint import async_save, save
from shardfuse.comm import transport
from shardfuse.comm.session import PeerError
from shardfuse.training import StepMonitor
from tests.support.harness import run_procs

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("where waits do not block the host, ranks hear of it in a later call"),
]


class Loop:
    """Trains, and goes on after errors.

    Args:
        sharding: of the optimizer.
        num_weights: each of about one bucket.
    """

    def __init__(self, sharding: dict[str, Any], num_weights: int = 3) -> None:
        self.rank = dist.get_rank()
        self.weights = [torch.nn.Parameter(torch.ones(600)) for _ in range(num_weights)]
        options = {"bucket_cap_mb": 0.004, "kernel": "eager", "consolidate_every": 0, **sharding}
        self.optimizer = ShardedAdamW(self.weights, lr=0.1, sharding=options)
        self.found: list[str] = []

    def step(self, before: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        torch.cat(self.weights).sum().backward()
        before()
        try:
            self.optimizer.step()
            self.found.append("ok")
        except (ArithmeticError, PeerError) as error:
            self.found.append(type(error).__name__)


def once(owner: Any, name: str) -> None:
    """Have a method of an object fail when it is called next, as by a signal."""

    def fail(*_: Any, **__: Any) -> None:
        delattr(owner, name)
        raise ArithmeticError("of this rank alone")

    setattr(owner, name, fail)


def send_late_ones_again() -> list[str]:
    """Have gradients that came after their buckets had left, at stage 2."""
    loop = Loop({"stage": 2})

    def add() -> None:
        with loop.optimizer.no_sync():
            loop.weights[0].sum().backward()

    for step in range(5):
        if step == 2 and loop.rank == 1:
            grads: Any = loop.optimizer._grads
            once(grads, "_resend")
        loop.step(add)
    return loop.found


def test_buckets_that_leave_once_more() -> None:
    """Ranks took those of a count of their own for those of another collective, in every step."""
    found = run_procs(2, send_late_ones_again, timeout=30, backend="gloo")
    assert found[0] == ["ok", "ok", "PeerError", "ok", "ok"]
    assert found[1] == ["ok", "ok", "ArithmeticError", "ok", "ok"]


def consolidate() -> list[str]:
    """Fail on one rank once its step is made, and counted on the other."""
    loop = Loop({"consolidate_every": 3})
    for step in range(9 - loop.rank):  # the other hears of it in a step of its own
        if step == 1 and loop.rank == 1:
            once(loop.optimizer, "_after_step")
        loop.step()
    return loop.found


def test_steps_to_the_next_consolidation() -> None:
    """One rank consolidated a step before the other, which failed on both, time and again."""
    found = run_procs(2, consolidate, timeout=30, backend="gloo")
    assert found[0] == ["ok", "ok", "PeerError", *["ok"] * 6]
    assert found[1] == ["ok", "ArithmeticError", *["ok"] * 6]


def watch(how: str) -> tuple[list[str], int]:
    """Fail on one rank once its step is made, and watched on both."""
    loop = Loop({})
    hook = loop.optimizer.register_step_post_hook(lambda *_: None)
    monitor = StepMonitor(loop.optimizer, every=3)
    for step in range(12 - (loop.rank if how == "in step()" else 0)):
        if step == 2 and loop.rank == 1 and how == "in step()":
            once(loop.optimizer, "_after_step")
        if step == 2 and loop.rank == 1 and how == "in a hook":
            hook.remove()
            hook = loop.optimizer.register_step_post_hook(fail)
            loop.optimizer._optimizer_step_post_hooks.move_to_end(hook.id, last=False)
        loop.step()
        if step == 2:
            hook.remove()
    return loop.found, len(monitor.close())


def fail(*_: Any) -> None:
    raise ArithmeticError("of this rank alone")


def test_steps_to_the_next_that_is_watched() -> None:
    """One rank watched the next step, too, and the other did not: all later ones failed."""
    (found, num_records), (other, other_num) = run_procs(
        2, watch, "in step()", timeout=30, backend="gloo"
    )
    assert found == ["ok"] * 3 + ["PeerError"] + ["ok"] * 8
    assert other == ["ok"] * 2 + ["ArithmeticError"] + ["ok"] * 8
    assert num_records == other_num == 4


def test_a_hook_that_fails_after_a_watched_step() -> None:
    """The monitor came after it, and took the step for one that is to be watched once more."""
    (found, num_records), (other, other_num) = run_procs(
        2, watch, "in a hook", timeout=30, backend="gloo"
    )
    assert found == ["ok"] * 12
    assert other == ["ok"] * 2 + ["ArithmeticError"] + ["ok"] * 9
    assert num_records == other_num == 4


def save_alone(folder: str) -> list[str]:
    """Begin to save what no optimizer is in, on one rank; go on, and save on all."""
    loop, found = Loop({}), []
    model = torch.nn.Linear(4, 4)
    loop.step()
    if loop.rank == 1:
        async_save({"model": model}, f"{folder}/alone")
    loop.step()
    loop.step()
    for name in ("a", "b"):
        save({"model": model}, f"{folder}/{name}")
        found.append(name)
    loop.step()
    return [*loop.found, *found]


def test_groups_that_one_rank_has_used_alone(tmp_path: Path) -> None:
    """Their users had other numbers than on other ranks, and nothing could be saved any more."""
    for found in run_procs(2, save_alone, str(tmp_path), timeout=30, backend="gloo"):
        assert found == ["ok", "PeerError", "ok", "ok", "a", "b"]


def scale(failing: int) -> tuple[list[str], float]:
    """Fail on one rank once its step is made; where the scale grows it does so on the other."""
    loop = Loop({"stage": 2})
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=3)
    for step in range(10 - loop.rank):
        if step == failing and loop.rank == 1:
            once(loop.optimizer, "_after_step")
        loop.optimizer.zero_grad()
        scaler.scale(torch.cat(loop.weights).sum()).backward()
        try:
            scaler.step(loop.optimizer)
            scaler.update()
            loop.found.append("ok")
        except (ArithmeticError, RuntimeError) as error:
            loop.found.append(type(error).__name__)
    return loop.found, scaler.get_scale()


@pytest.mark.parametrize(("failing", "num_unequal"), [(1, 0), (2, 1)])
def test_steps_to_the_next_loss_scale(failing: int, num_unequal: int) -> None:
    """At stage 2 every step failed once the scales were apart, and advised to use this scaler."""
    (found, one), (other, two) = run_procs(2, scale, failing, timeout=30, backend="gloo")
    unequal = ["RuntimeError"] * num_unequal
    rest = ["ok"] * (8 - failing - num_unequal)
    assert found == ["ok"] * (failing + 1) + ["PeerError", *unequal, *rest]
    assert other == ["ok"] * failing + ["ArithmeticError", *unequal, *rest]
    assert one == two > 4.0


def load_scale() -> float:
    """Load an earlier scale after a look at gradients that no update() has followed."""
    loop = Loop({"stage": 2})
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.cat(loop.weights).sum()).backward()
    scaler.unscale_(loop.optimizer)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 16.0})
    return float(scaler.scale(torch.ones(())))


def test_a_loss_scale_that_is_loaded_stays() -> None:
    """Whatever the ranks agreed on before."""
    assert run_procs(2, load_scale, timeout=30, backend="gloo") == [16.0, 16.0]


def fail_in(collective: str) -> tuple[list[str], list[int], int]:
    """Have the second collective of a kind fail on one rank; return what each step found, the
    number of the iteration after each, and how many works are kept.
    """
    loop = Loop({}, num_weights=12)
    comm: Any = loop.optimizer.communicator
    usual, left = getattr(comm, collective), [-1]

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise ArithmeticError("of this rank alone")
        return usual(*args, **kwargs)

    setattr(comm, collective, counted)
    numbers = []
    for step in range(6):
        left[0] = 2 if step in (1, 3) and loop.rank == 1 else -1
        loop.step()
        for weight in loop.weights:  # ranks have updated other buckets, and would be told so
            weight.data.fill_(1.0)
        if step not in (1, 3):
            grads: Any = loop.optimizer._grads
            numbers.append(grads._iteration.value)
    return loop.found, numbers, len(transport._unfinished)


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_a_collective_that_fails(collective: str) -> None:
    """The next step waited for what the peers had forgotten until the process group's timeout."""
    (first, numbers, kept), (second, others, also) = run_procs(
        2, fail_in, collective, timeout=30, backend="gloo"
    )
    assert first == ["ok", "PeerError", "ok", "PeerError", "ok", "ok"]
    assert second == ["ok", "ArithmeticError", "ok", "ArithmeticError", "ok", "ok"]
    assert numbers == others
    assert kept == also == 0


def interrupt_backward(clears: bool) -> list[str]:
    """Interrupt a wait under backward at stage 2, and go on."""
    loop = Loop({"stage": 2}, num_weights=12)
    usual = transport.Completion.wait
    left = [-1]

    def wait(completion: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return usual(completion)

    transport.Completion.wait = wait  # type: ignore[method-assign]
    for step in range(4):
        try:
            left[0] = 2 if step == 1 else -1
            torch.cat(loop.weights).sum().backward()
            left[0] = -1
        except KeyboardInterrupt:
            left[0] = -1
            loop.found.append("interrupted")
            if clears:
                loop.optimizer.zero_grad()
                continue
        try:
            loop.optimizer.step()
            loop.found.append("ok")
        except (RuntimeError, PeerError) as error:
            loop.found.append("lost" if "is lost" in str(error) else str(error))
        loop.optimizer.zero_grad()
    return loop.found


@pytest.mark.parametrize("clears", [True, False])
def test_an_interrupt_under_backward(clears: bool) -> None:
    """zero_grad() mends it; without it, no step uses a sum that lacks a bucket."""
    for found in run_procs(2, interrupt_backward, clears, timeout=30, backend="gloo"):
        assert found == ["ok", "interrupted", *([] if clears else ["lost"]), "ok", "ok"]


def fail_to_restart() -> list[str]:
    """Have a rank under a monitor fail as it restarts after an error."""
    loop = Loop({})
    monitor = StepMonitor(loop.optimizer, every=2)
    grads: Any = loop.optimizer._grads
    for step in range(6):
        if loop.rank == 1 and step in (1, 2):
            once(*((grads, "_launch") if step == 1 else (grads, "_begin_iteration")))
        loop.step()
        for weight in loop.weights:
            weight.data.fill_(1.0)
    monitor.close()
    return loop.found


def test_a_restart_that_fails_under_a_monitor() -> None:
    """The peers went on without this rank, one batch apart."""
    first, second = run_procs(2, fail_to_restart, timeout=30, backend="gloo")
    assert first == ["ok", *["PeerError"] * 2, "ok", "ok", "ok"]
    assert second == ["ok", *["ArithmeticError"] * 2, "ok", "ok", "ok"]
