"""What is under way when a rank leaves, fails or is stopped: nothing is lost, nothing is silent."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedSGD
from shardfuse.comm.session import PeerError
from shardfuse.comm.transport import Completion, Label
from shardfuse.engine.gather import PendingParam
from tests.support import placing
from tests.support.harness import STAYING, run_procs, run_scripts, run_threads
from tests.support.lazy import LazyCommunicator, Post

pytestmark = pytest.mark.timeout(120)

LEAVES = """
import os, signal, subprocess, sys
import torch
import torch.distributed as dist
from shardfuse import ShardedSGD
from shardfuse.engine.gather import PendingParam
from tests.support.harness import join_world

rank, how = int(sys.argv[1]), sys.argv[3]
join_world(rank, 2, sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(6)))
stage = int(sys.argv[4])
sharding = {"collectives": "pairwise", "bucket_cap_mb": 8, "kernel": "eager", "stage": stage}
optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)
pids = [None, None]
dist.all_gather_object(pids, os.getpid())
expected = [param.detach() - 0.5 for param in model.parameters()]
for param in model.parameters():
    param.grad = torch.ones_like(param)
dist.barrier()
optimizer.step()
if rank == 1:
    os.kill(pids[0], signal.SIGSTOP)  # it takes nothing any more
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {pids[0]}"])
    assert any(type(param) is PendingParam for param in model.parameters())
else:
    assert all(map(torch.equal, model.parameters(), expected))
if how == "destroys its group":
    dist.destroy_process_group()
"""


@pytest.mark.gloo_only("about pairs of ranks")
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("how", ["destroys its group", "just ends"])
def test_a_rank_leaves_right_after_its_last_step(how: str, stage: int, tmp_path: Path) -> None:
    """What it owes to a slow rank is sent all the same, before its process ends."""
    ended = run_scripts(LEAVES, 2, tmp_path, how, stage, timeout=100)
    assert [code for code, _ in ended] == [0, 0], ended


ENDS_FIRST = """
import sys, time
import torch
from shardfuse import ShardedSGD
from shardfuse.comm.native import ProcessGroupCommunicator, _lost_by_gloo
from shardfuse.comm.session import PeerError
from tests.support.harness import join_world

rank, is_stepping, posted = int(sys.argv[1]), False, 0
join_world(rank, 2, sys.argv[2])
launch = ProcessGroupCommunicator._launch

def launch_late(self, function, *args, is_ahead=False, **options):
    global posted, state
    state = self._state
    if is_stepping and is_ahead and args[0].numel() < 64:  # agreement of a next step
        while not _lost_by_gloo(self._live_group()):
            time.sleep(0.01)
        posted += 1
    return launch(self, function, *args, is_ahead=is_ahead, **options)

torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(6)))
expected = [param.detach() - 0.5 for param in model.parameters()]
sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.004, "kernel": "eager"}
if rank == 0:
    ProcessGroupCommunicator._launch = launch_late
optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)
for param in model.parameters():
    param.grad = torch.ones_like(param)
is_stepping = True
optimizer.step()
assert all(map(torch.equal, model.parameters(), expected))
if rank == 0:
    assert posted == 1 and state.closed is None, (posted, state.closed)
    try:
        optimizer.step()
    except PeerError as error:
        assert str(error).startswith("[rank 0] step(): rank 1 ended"), error
    else:
        raise AssertionError("a step alone")
"""


@pytest.mark.gloo_only("about pairs of ranks")
def test_a_receive_is_posted_for_a_rank_that_has_ended(tmp_path: Path) -> None:
    """The last step of the run goes through; only another one raises, and names the rank."""
    ended = run_scripts(ENDS_FIRST, 2, tmp_path, timeout=100)
    assert [code for code, _ in ended] == [0, 0], ended


DIES = """
import os, sys
import torch
from shardfuse import ShardedSGD
from tests.support.harness import join_world

rank, collectives = int(sys.argv[1]), sys.argv[3]
join_world(rank, 2, sys.argv[2], float(sys.argv[4]))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
sharding = {"collectives": collectives, "bucket_cap_mb": 0.004, "kernel": "eager", "stage": 2}
optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)
for step in range(2):
    if step == 1 and rank == 1:
        model[3].weight.register_hook(lambda grad: os._exit(7))
    model(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("collectives", ["auto", "pairwise", "native"])
def test_a_rank_dies_under_backward(collectives: str, tmp_path: Path) -> None:
    """At stage 2 the others wait under backward: they get an error in seconds, and end.

    Where waits do not block the host they do not wait there, but in the next call for a word in the
    store, which only the group's timeout ends.
    """
    timeout_s = 6.0 if placing.on_device() else 60.0
    ended = run_scripts(DIES, 2, tmp_path, collectives, timeout_s, timeout=50)
    assert [code for code, _ in ended] == [1, 7], ended
    found = ended[0][1].splitlines()[-1]
    assert "PeerError" in found, found


class Losing(LazyCommunicator):
    """Its gathers fail when they are waited for, once ``is_lost`` is set."""

    is_lost = False

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, label: Label | None = None
    ) -> Any:
        handle = super().all_gather(output, input, label=label)
        return Completion(lose) if self.is_lost else handle


def lose() -> None:
    """End the first wait; a second one says nothing, as torch's do."""
    raise PeerError("rank 1 has ended.")


def about_to_lose(post: Post) -> tuple[nn.Module, ShardedSGD]:
    """Return a model whose next step will not be gathered, and its optimizer."""
    comm = Losing(post, dist.get_rank(), 2)
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    sharding = {"process_group": comm, "bucket_cap_mb": 0.004, "overlap_param_sync": True}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    comm.is_lost = True
    return model, optimizer


def read_what_was_lost(post: Post) -> list[str]:
    """Return what each way to the parameters says, after a step whose gathers fail."""
    model, optimizer = about_to_lose(post)
    optimizer.step()
    weight = model[0].weight
    assert type(weight) is PendingParam
    ways: list[Callable[[], Any]] = [
        weight.sum,
        weight.sum,
        lambda: model(torch.ones(1, 30)),
        model.state_dict,
        optimizer.synchronize,
        optimizer.step,
    ]
    found = []
    for way in ways:
        try:
            found.append(f"no error but {way()}")
        except PeerError as error:
            found.append(str(error))
    return found


@pytest.mark.cpu_only("params of a device share a storage, so that step() waits for them")
def test_what_never_arrives_is_an_error_each_time_it_is_read() -> None:
    """A parameter whose owner has ended is never read as it is: PeerError, now and later."""
    for found in run_threads(2, read_what_was_lost, Post()):
        for text in found:
            assert "rank 1 has ended." in text


def step_that_waits(post: Post) -> None:
    model, optimizer = about_to_lose(post)
    # Another tensor with its memory; on a device out of tree all params have that.
    held = model[0].weight.data
    with pytest.raises(PeerError, match="rank 1 has ended"):
        optimizer.step()
    assert held.data_ptr() == model[0].weight.data_ptr()
    assert {type(param) for param in model.parameters()} == {nn.Parameter}


def test_what_never_arrives_is_an_error_of_a_step_that_waits() -> None:
    """Where params cannot be under way, step() itself raises."""
    run_threads(2, step_that_waits, Post())


def drop_under_way(overlaps: bool) -> list[torch.Tensor]:
    """Leave buckets under way behind: of an optimizer that is dropped, and of a step that fails."""
    sharding = {
        "collectives": "pairwise",
        "bucket_cap_mb": 0.004,
        "kernel": "eager",
        "overlap_grad_sync": overlaps,
        "overlap_param_sync": overlaps,
    }
    found = []
    for is_last in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        model[1].requires_grad_(False)
        optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)

        def backward(model: nn.Module = model) -> None:
            model(torch.ones(2, 40) * (dist.get_rank() + 1)).square().mean().backward()

        for step in range(4):
            backward()
            if step == 2:
                optimizer.clip_grad_norm(1.0)
                backward()
                with pytest.raises(RuntimeError, match="Gradients changed"):
                    optimizer.step()
                optimizer.zero_grad()
                model[1].requires_grad_(True)  # and only one rank has gradients in the next step
            else:
                optimizer.step(None if step == 3 and dist.get_rank() else backward)
                optimizer.zero_grad()
        if not is_last and dist.get_rank() == 0:
            backward()  # on this rank alone, and no step follows
        found += [param.detach().clone() for param in model.parameters()]
        del optimizer, model, backward
        gc.collect()
    return found


@pytest.mark.gloo_only("its ranks launch in another order")
def test_what_is_dropped_under_way_harms_nobody() -> None:
    """The next optimizer of the group, and the next step, begin anew; the bits are the same."""
    for found, expected in zip(
        run_procs(2, drop_under_way, True), run_procs(2, drop_under_way, False), strict=True
    ):
        assert all(map(torch.equal, found, expected))


def fail_under_backward(collectives: str, stage: int) -> tuple[str, float]:
    """Fail on rank 1 while a bucket is sent, and stay; return what each rank is told, and when."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    sharding = {
        "collectives": collectives,
        "bucket_cap_mb": 0.004,
        "kernel": "eager",
        "overlap_grad_sync": True,
        "stage": stage,
    }
    optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)
    if dist.get_rank() == 1:

        def fail(**_: Any) -> bool:
            raise MemoryError("no room for bucket 0")

        if stage == 1:
            optimizer._grads._send_early = fail
        else:
            optimizer._grads._send_next = fail
    start = time.monotonic()
    try:
        model(torch.ones(2, 40)).square().mean().backward()
        optimizer.step()
    except Exception as error:
        seconds = time.monotonic() - start
        STAYING.append(error)  # its connections stay open: nothing else could tell the others
        return f"{type(error).__name__}: {error}", seconds
    return "no error", 0.0


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("collectives", ["pairwise", "native"])
def test_a_rank_that_fails_under_backward(collectives: str, stage: int) -> None:
    """Sending fails on one rank, which does not end: the others are told within seconds."""
    (waiting, seconds), (failing, _) = run_procs(
        2, fail_under_backward, collectives, stage, timeout=40.0
    )
    assert "no room for bucket 0" in failing
    assert waiting.startswith("PeerError"), waiting
    assert "rank 1 failed in backward(): MemoryError: no room for bucket 0" in waiting
    assert seconds < 4.0


def send_after_a_failure() -> tuple[int, int]:
    """Return how many buckets have left when a second backward ends, and how many there are."""
    unused, used = nn.Linear(64, 64), nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = nn.ModuleList([unused, used])
    sharding = {"collectives": "native", "bucket_cap_mb": 0.004, "overlap_grad_sync": True}
    optimizer = ShardedSGD(model.named_parameters(), lr=0.5, sharding=sharding)
    launched = []
    grads: Any = optimizer._grads
    launch = grads._sender.reduce_scatter

    def counting(*args: Any, **kwargs: Any) -> Any:
        launched.append(args)
        return launch(*args, **kwargs)

    grads._sender.reduce_scatter = counting

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    hook = used[0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        used(torch.ones(2, 64)).sum().backward()
    hook.remove()
    optimizer.zero_grad()
    used(torch.ones(2, 64)).sum().backward()
    num_left = len(launched)
    optimizer.step()
    return num_left, len(optimizer.layout.buckets)


@pytest.mark.gloo_only("its collectives go in order, and are counted")
@pytest.mark.cpu_only("a hook that fails ends another way there")
def test_a_failed_backward_keeps_nothing_back() -> None:
    """In order, all leave by the end of a backward: the end of the next one was not waited for."""
    for num_left, num_buckets in run_procs(2, send_after_a_failure):
        assert num_left == num_buckets > 4
