"""The watchdog's thread: it waits for no device, and an error of a tick does not end it."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardfuse import ShardedAdamW
from shardfuse.comm import native
from shardfuse.comm import session as session_module
from shardfuse.comm import watchdog as watchdog_module
from shardfuse.comm.session import GroupState, PeerError
from shardfuse.comm.transport import Completion, Label, PartialSums
from shardfuse.comm.watchdog import Watchdog
from tests.support import placing
from tests.support.harness import STAYING, log_of_shardfuse, run_procs

pytestmark = pytest.mark.timeout(100)

PATIENCE_S = 20.0


class Work:
    """A collective that no peer joins: wait() returns when the transport is aborted."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def wait(self) -> None:
        assert self.aborted.wait(PATIENCE_S), "nobody has aborted it"
        raise RuntimeError("aborted")


def watched() -> tuple[Watchdog, Work, GroupState]:
    """Return the watchdog of rank 0, of two, whose peer has failed; and a collective of it."""
    store, work = dist.HashStore(), Work()
    state, peer = (GroupState(store, rank, world_size=2) for rank in range(2))
    watchdog = Watchdog(state, work.aborted.set, device=torch.device("cpu"))
    for one in (state, peer):
        one._enter("step()")
    peer.report_failure("failed in step(): KeyError: 'batch 17'")
    return watchdog, work, state


def test_a_tick_that_raises_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's do under set_sync_debug_mode("error"): told once, and the next ticks come."""
    (watchdog, work, state), told = watched(), log_of_shardfuse()
    find, errors = state._find_failure, iter([RuntimeError("of a tick")] * 3)

    def fail_first(*_: Any, **__: Any) -> None:
        error = next(errors, None)
        if error is not None:
            raise error
        monkeypatch.undo()
        state.poll_peers()

    monkeypatch.setattr(state, "poll_peers", fail_first)
    with pytest.raises(PeerError, match="rank 1 failed in step"):
        watchdog.wait(deque([work]))
    assert told == ["[rank 0] The watchdog goes on after an error."]
    assert find() is None  # of a region that has failed here, too


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_has_ended_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog, work, _ = watched()

    def end(*_: Any) -> bool:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(watchdog, "_tick", end)
        watchdog._start()
        thread = watchdog._thread
        assert thread is not None
        thread.join(PATIENCE_S)
    with pytest.raises(PeerError, match="rank 1 failed in step"):
        watchdog.wait(deque([work]))
    assert watchdog._thread is not thread


# Late ranks


def wait_until(condition: Any) -> bool:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return bool(condition())


def train(late: int) -> tuple[str, list[str]]:
    """Have one rank come late to a step, when it has been named; return what was logged."""
    native.LATE_S = session_module.LATE_S = 1.0  # type: ignore[misc]
    told, rank = log_of_shardfuse(), dist.get_rank()
    model = torch.nn.Linear(8, 8)
    optimizer = ShardedAdamW(
        model.named_parameters(), sharding={"kernel": "eager", "collectives": "native"}
    )
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):
        model(torch.ones(4, 8)).square().mean().backward()
        if step == 2 and rank == late and not wait_until(lambda: store.check(["named"])):
            return "was not named", told
        if step == 2 and (rank + 1) % dist.get_world_size() == late:
            naming = threading.Thread(target=_note, args=(told, store), daemon=True)
            naming.start()
        optimizer.step()
        optimizer.zero_grad()
        next(model.parameters()).sum().item()
    return "", told


def _note(told: list[str], store: Any) -> None:
    if wait_until(lambda: any("Not seen in this call" in line for line in told)):
        store.set("named", "")


@pytest.mark.parametrize("late", [0, 2])
def test_a_rank_that_waits_in_a_collective_names_a_late_one(late: int) -> None:
    """Within seconds, wherever the wait is: in the host's wait, or in the device's."""
    found = run_procs(3, train, late, timeout=50)
    assert [problem for problem, _ in found] == [""] * 3
    for rank, (_, told) in enumerate(found):
        lines = [line for line in told if "Not seen in this call" in line]
        assert len(lines) == ((rank + 1) % 3 == late)
        assert all(line.endswith(f"Not seen in this call: rank {late}.") for line in lines)
        assert all("step(): has waited for" in line for line in lines)


# The thread and its device


class _Ops(TorchDispatchMode):
    """Notes operators on tensors of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            self.found.append(str(func))
        return out


@contextmanager
def _watched_ticks() -> Iterator[tuple[list[int], list[str], list[int]]]:
    """Yield a list that grows by each tick, the operators of ticks, and the thread's devices."""
    from tests.support import npu

    tick, ticks, ops, devices = Watchdog._tick, list[int](), list[str](), list[int]()

    def noted(watchdog: Watchdog, idle_since: float) -> bool:
        devices.append(torch.npu.current_device())  # type: ignore[attr-defined]
        with _Ops() as mode, npu.host_syncs() as syncs:
            result = tick(watchdog, idle_since)
        ops.extend([*mode.found, *syncs])
        ticks.append(1)
        return result

    Watchdog._tick = noted  # type: ignore[method-assign]
    try:
        yield ticks, ops, devices
    finally:
        Watchdog._tick = tick  # type: ignore[method-assign]


def fail_late() -> tuple[str, list[str], set[int], str]:
    """Have rank 0's device wait for rank 1, which fails once rank 0's thread has ticked thrice."""
    placed = torch.npu.current_device()  # type: ignore[attr-defined]
    model = torch.nn.Linear(8, 8)
    optimizer = ShardedAdamW(model.named_parameters(), sharding={"kernel": "eager"})
    store, rank, problem, error = (
        dist.distributed_c10d._get_default_store(),
        dist.get_rank(),
        "",
        "",
    )
    with _watched_ticks() as (ticks, ops, devices):
        for step in range(4):
            model(torch.ones(4, 8)).square().mean().backward()
            if step == 2 and rank == 1 and not wait_until(lambda: store.check(["ticked"])):
                problem = "rank 0's thread was held up"
            try:
                optimizer.step(_fail if step == 2 and rank == 1 else None)
            except (ArithmeticError, PeerError) as raised:
                error = str(raised)
                break
            if step == 2:
                before = len(ticks)
                if wait_until(lambda before=before: len(ticks) >= before + 3):  # type: ignore[misc]
                    store.set("ticked", "")
                with_error = wait_until(lambda: optimizer_is_closed(optimizer))
                problem = "" if with_error else "rank 0 was not told"
            optimizer.zero_grad()
    return problem, ops, {device - placed for device in devices}, error


def optimizer_is_closed(optimizer: Any) -> bool:
    state: GroupState = optimizer.communicator.world.session.group
    return state.closed is not None


def _fail() -> None:
    raise ArithmeticError("of rank 1")


@pytest.mark.skipif(not placing.on_device(), reason="of the device of pytest --device npu")
def test_the_thread_waits_for_no_device() -> None:
    """It launches nothing there either; so it reads of the error of a rank that came late."""
    found = run_procs(2, fail_late, timeout=80)
    for rank, (problem, ops, devices, error) in enumerate(found):
        assert problem == "", rank
        assert ops == []
        assert devices == {0}  # of this rank
        assert "of rank 1" in error


# What is in flight when a region fails


def test_a_work_is_not_kept() -> None:
    """It holds its tensors: of the last all-gather, the parameters."""
    state, work = GroupState(dist.HashStore(), 0, world_size=2), Work()
    watchdog, noted = Watchdog(state, _fail, device=torch.device("cuda")), weakref.ref(work)
    watchdog.note_launch(work)
    del work
    assert noted() is None


def fail_with_one_in_flight(launches: list[bool], busy_s: float = 0.0) -> tuple[float, str, str]:
    """Fail on every rank, after this one has launched a reduce-scatter or not; then synchronize.

    With ``busy_s``, the device first gets kernels for so many seconds, and the watchdog waits for
    half a second. Return the seconds that synchronize() took, its error, and the next region's.
    """
    if busy_s:
        watchdog_module.LATE_S = 0.5  # type: ignore[misc]
    device = torch.device(placing.device_type())
    comm = native.ProcessGroupCommunicator(None, device)
    gradients, pending = torch.ones(2 * 1024), None
    comm.reduce_scatter(gradients).wait()  # the first one waits for the device
    torch.accelerator.synchronize()
    if busy_s:
        _keep_busy(busy_s)
    with suppress(ArithmeticError), comm.session.region("step()"):
        if launches[comm.rank]:
            pending = comm.reduce_scatter(gradients, label=Label("gradients", 0))
        # Together: else a thread may read of the peer's error before this rank has raised its own.
        dist.distributed_c10d._get_default_store().set(f"launched {comm.rank}", "")
        dist.distributed_c10d._get_default_store().wait([f"launched {1 - comm.rank}"])
        raise ArithmeticError("of every rank")
    began_s = time.monotonic()
    errors = [_error_of(torch.accelerator.synchronize)]
    took_s = time.monotonic() - began_s
    del pending
    errors.append(_error_of(lambda: _reduce_in_region(comm)))
    return took_s, errors[0], errors[1]


def _keep_busy(seconds: float) -> None:
    """Launch kernels that take the device about so long."""
    matrix, took_s = torch.ones(1024, 1024), 0.0
    for _ in range(2):  # the first one takes longer
        began_s = time.monotonic()
        torch.mm(matrix, matrix)
        torch.accelerator.synchronize()
        took_s = time.monotonic() - began_s
    for _ in range(int(seconds / took_s)):
        torch.mm(matrix, matrix)


def _reduce_in_region(comm: native.ProcessGroupCommunicator) -> None:
    with comm.session.region("step()"):
        comm.all_reduce(torch.ones(4)).wait()
    torch.accelerator.synchronize()


def _error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not placing.on_device(), reason="of the device of pytest --device npu")
def test_a_failed_region_leaves_no_rank_waiting_for_its_device() -> None:
    """Rank 1 alone has launched: its transport is aborted, and the next region says so."""
    for rank, (took_s, _, error) in enumerate(
        run_procs(2, fail_with_one_in_flight, [False, True], timeout=60)
    ):
        assert (took_s < session_module.LATE_S / 2) == (rank == 0)
        assert "of every rank" in error
        assert "Start again from the last checkpoint" in error


@pytest.mark.skipif(not placing.on_device(), reason="of the device of pytest --device npu")
@pytest.mark.parametrize("launches", [True, False])
def test_ranks_go_on_after_a_failed_region(launches: bool) -> None:
    """Where all have launched the same, nothing is aborted."""
    for took_s, *errors in run_procs(2, fail_with_one_in_flight, [launches] * 2, timeout=60):
        assert took_s < session_module.LATE_S / 2
        assert errors == ["", ""]


@pytest.mark.skipif(not placing.on_device(), reason="of the device of pytest --device npu")
def test_a_device_that_is_behind_its_host_is_not_aborted() -> None:
    """Its kernels take longer than the watchdog waits for a device that a peer holds up."""
    for took_s, *errors in run_procs(2, fail_with_one_in_flight, [True] * 2, 8.0, timeout=90):
        assert took_s > 2.5  # half a second, and a tick or two of the thread
        assert errors == ["", ""]


def go_on_after_a_failure(launches: list[bool], in_part: bool) -> tuple[str, list[float]]:
    """Fail as above, and reduce other values at once; return that error, and these sums.

    With ``in_part`` of the ranks alone, as of a row of a mesh; a third one has no part.
    """
    whole = native.ProcessGroupCommunicator(None, torch.device(placing.device_type()))
    store, sums = dist.distributed_c10d._get_default_store(), list[float]()
    comm, part = whole, dist.new_group([0, 1]) if in_part else None
    if part is not None and whole.rank < 2:
        comm = native.ProcessGroupCommunicator(part, whole.device, parent=whole)

    def reduce(value: float) -> Completion[PartialSums]:
        return comm.reduce_scatter(torch.full((2 * 1024,), value), label=Label("gradients", 0))

    if whole.rank < 2:
        reduce(1.0).wait()
    with suppress(ArithmeticError), whole.session.region("step()"):
        if launches[whole.rank]:
            STAYING.append(reduce(1.0))
        store.set(f"launched {whole.rank}", "")
        store.wait([f"launched {rank}" for rank in range(whole.world_size)])
        raise ArithmeticError("of every rank")

    def go_on() -> None:
        with whole.session.region("step()"):
            for value in (2.0, 3.0) if whole.rank < 2 else ():
                (mine,) = reduce(value).wait()
                sums.append(mine[0].item())

    return _error_of(go_on), sums


@pytest.mark.parametrize("in_part", [False, True])
@pytest.mark.parametrize("launches", [[True, True], [False, False], [False, True], [True, False]])
def test_ranks_that_launched_unlike_numbers_do_not_go_on(
    launches: list[bool], in_part: bool
) -> None:
    """A reduce-scatter of one would meet an older one of the other: sums of 2 and 1, or no end."""
    launches = [*launches, False] if in_part else launches
    found = run_procs(len(launches), go_on_after_a_failure, launches, in_part, timeout=60)
    for rank, (error, sums) in enumerate(found):
        if launches[0] == launches[1]:
            assert (error, sums) == ("", [4.0, 6.0] if rank < 2 else [])
        else:
            assert "launched different numbers of collectives" in error
            assert "Start again from the last checkpoint" in error
            assert sums == []
