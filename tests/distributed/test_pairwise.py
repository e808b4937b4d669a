"""Pairwise collectives over real gloo: sums, bytes on the wire, errors."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfuse
from shardfuse.comm import communicator_for, gloo
from shardfuse.comm.gloo import RING_SIZE, PairwiseCommunicator
from shardfuse.comm.native import ProcessGroupCommunicator
from tests.support.harness import RanksFailedError, run_procs, run_threads

pytestmark = pytest.mark.gloo_only("about pairs of ranks")

CPU = torch.device("cpu")


def values(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Return integers that sum exactly over up to 8 ranks in any dtype, different per rank."""
    return ((torch.arange(numel) * (rank + 3)) % 17 - 8).to(dtype)


def collectives(dtype_name: str, n: int, choice: str) -> list[Tensor]:
    dtype = getattr(torch, dtype_name)
    comm = communicator_for(None, CPU, choice)
    assert isinstance(comm, PairwiseCommunicator)
    world_size = comm.world_size
    mine = values(comm.rank, world_size * n, dtype)
    before = mine.clone()
    whole, in_place = torch.empty(world_size * n, dtype=dtype), torch.zeros(world_size * n)
    in_place[comm.rank * n : (comm.rank + 1) * n] = comm.rank + 1
    # All in flight at once, waited for in another order, twice.
    handles = [
        comm.reduce_scatter(mine),
        comm.all_gather(whole, mine[:n]),
        comm.reduce_scatter(mine),
        comm.all_gather(in_place, in_place[comm.rank * n : (comm.rank + 1) * n]),
    ]
    for handle in (*reversed(handles), *handles):
        handle.wait()
    first, second = (torch.stack(handles[i].wait()).sum(0) for i in (0, 2))
    # Others may read the input of reduce_scatter() for longer; this is waited for after they have.
    comm.all_reduce(torch.zeros(1)).wait()
    assert torch.equal(mine, before)
    return [first, second, whole, in_place]


def check_collectives(world_size: int, dtype: str, n: int, choice: str) -> None:
    inputs = [values(rank, world_size * n, getattr(torch, dtype)) for rank in range(world_size)]
    total = torch.stack(inputs).sum(0)
    whole = torch.cat([part[:n] for part in inputs])
    ranks = torch.arange(1, world_size + 1).repeat_interleave(n).float()
    results = run_procs(world_size, collectives, dtype, n, choice, timeout=120)
    for rank, (summed, exchanged, gathered, in_place) in enumerate(results):
        expected = total[rank * n : (rank + 1) * n]
        assert torch.equal(summed, expected)
        assert torch.equal(exchanged, expected)
        assert torch.equal(gathered, whole)
        assert torch.equal(in_place, ranks)


def waits_in_its_own_order(choice: str) -> list[float]:
    comm = communicator_for(None, CPU, choice)
    found = []
    for step in range(3):
        mine, total = torch.full((2048,), comm.rank + 1.0 + step), torch.ones(4)
        parts = comm.reduce_scatter(mine)
        if comm.rank == 1:
            parts.wait()
        handle = comm.all_reduce(total)
        handle.wait()
        found += [float(sum(part[0] for part in parts.wait())), float(total[0])]
    return found


@pytest.mark.parametrize("choice", ["auto", "pairwise"])
def test_one_rank_waits_earlier(choice: str) -> None:
    """Who waits for a later collective first reads the earlier one, for which others may wait."""
    for found in run_procs(2, waits_in_its_own_order, choice, timeout=30):
        assert found == [3.0, 2.0, 5.0, 2.0, 7.0, 2.0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_collectives(world_size: int, dtype: str) -> None:
    """Sums and gathered parts are right with several collectives in flight, and input is kept."""
    check_collectives(world_size, dtype, 1536, "auto")


LARGE = (256 << 10) // 4 + 8


@pytest.mark.parametrize("choice", ["auto", "pairwise"])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_large_parts(world_size: int, choice: str) -> None:
    """Likewise for parts of more than a page, by memory and by sockets."""
    check_collectives(world_size, "float32", LARGE, choice)


def read_or_send(broken_rank: int) -> tuple[bool, int, list[Tensor]]:
    """Count what gloo.read_memory moves after the trial; on ``broken_rank`` it is refused."""
    nbytes = 0
    original = gloo.read_memory

    def read(pid: int, address: int, out: Tensor) -> None:
        nonlocal nbytes
        if dist.get_rank() == broken_rank:
            raise OSError(1, "Operation not permitted")
        original(pid, address, out)
        nbytes += out.nbytes if out.numel() > 1 else 0

    gloo.read_memory = read
    try:
        comm = communicator_for(None, CPU)
        assert isinstance(comm, PairwiseCommunicator)
        result = torch.empty(comm.world_size * LARGE)
        comm.all_gather(result, torch.full((LARGE,), float(comm.rank))).wait()
        _, received = comm.reduce_scatter(result).wait()
        comm.all_reduce(torch.zeros(1)).wait()
    finally:
        gloo.read_memory = original
    return comm._exchange is not comm._sockets, nbytes, [result, received]


def may_read_memory() -> bool:
    return all(can_read for can_read, _, _ in run_procs(2, read_or_send, -1))


@pytest.mark.parametrize("broken_rank", [-1, 0, 1])
def test_memory_is_read_by_all_or_none(broken_rank: int) -> None:
    """Where one rank may not read another's memory all of them use sockets; results are the same.

    Where they may, each part is read once.
    """
    if broken_rank == -1 and not may_read_memory():
        pytest.skip("this system does not let processes read each other's memory")
    results = run_procs(2, read_or_send, broken_rank)
    for rank, (can_read, nbytes, (gathered, received)) in enumerate(results):
        assert can_read == (broken_rank == -1)
        assert nbytes == (2 * LARGE * 4 if can_read else 0)
        assert torch.equal(gathered, torch.arange(2.0).repeat_interleave(LARGE))
        assert torch.equal(received, torch.full((LARGE,), float(rank)))


def step_and_count(name: str, collectives: str) -> tuple[list[Tensor], int, int]:
    """Train two steps; return parameters, bytes that this rank sent in the second, and buckets."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(size)) for size in (70_000, 3, 5_000)]
    optimizer = getattr(shardfuse, name)(
        params, lr=0.1, sharding={"collectives": collectives, "bucket_cap_mb": 0.1}
    )
    sent = 0
    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((gloo, "_send"), (dist, "isend")):  # of parts, and of the call

            def counted(tensor: Tensor, *args: Any, own: Any, **kwargs: Any) -> Any:
                nonlocal sent
                sent += tensor.nbytes
                return own(tensor, *args, **kwargs)

            patch.setattr(module, function, partial(counted, own=getattr(module, function)))
        for step in range(2):
            sent = 0
            for param in params:
                param.grad = torch.full_like(param, float(dist.get_rank() + step))
            optimizer.step()
    return [param.detach() for param in params], sent, len(optimizer.layout.buckets)


@pytest.mark.parametrize("name", ["ShardedAdam", "ShardedLamb"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bytes_on_the_wire(world_size: int, name: str) -> None:
    """A step sends 2 (W - 1) / W of the parameters' bytes, and equals one by gloo's collectives.

    LAMB's norms, two floats of each of three parameters, go to every other rank besides, and a
    float for each bucket, whether it has changed since it was sent, and for each parameter,
    whether it has a gradient. gloo's
    own collectives pass one message of eight bytes to a neighbour: the call, which is compared.
    """
    lamb = name == "ShardedLamb"
    slot = 512 if lamb else 16  # blocks of their own where norms are taken, else a cache line
    padded = sum(-(-size // slot) * slot for size in (70_000, 3, 5_000))
    padded = -(-padded // (512 * world_size)) * 512 * world_size
    native = run_procs(world_size, step_and_count, name, "native")
    for (params, sent, num_buckets), (expected, compared, _) in zip(
        run_procs(world_size, step_and_count, name, "pairwise"), native, strict=True
    ):
        norms = 2 * len(params) * 4 * (world_size - 1) if lamb else 0
        agreed = (num_buckets + len(params)) * 4 * (world_size - 1)
        assert sent == 2 * padded * 4 * (world_size - 1) // world_size + norms + agreed
        assert compared == 8
        for param, value in zip(params, expected, strict=True):
            # gloo sums the norms of three ranks in another order, and elements cross zero.
            inexact = lamb and world_size > 2
            limit = 1e-6 * float(value.abs().max()) if inexact else 0.0
            torch.testing.assert_close(param, value, rtol=0, atol=limit)


def choices() -> list[str]:
    group = dist.new_group(backend="gloo")
    kinds = [
        type(communicator_for(None, CPU)),
        type(communicator_for(None, CPU, "native")),
        type(communicator_for(group, CPU)),
    ]
    return [kind.__name__ for kind in kinds]


def test_who_is_served_how() -> None:
    """gloo on the CPU exchanges in pairs unless told not to."""
    pairwise, native = PairwiseCommunicator.__name__, ProcessGroupCommunicator.__name__
    assert run_procs(2, choices)[0] == [pairwise, native, pairwise]


def threaded_choice() -> str:
    return type(communicator_for(None, CPU)).__name__


def test_other_backends_keep_their_collectives() -> None:
    """A backend that is not known to be slow, or that cannot send, is called as it is."""
    assert set(run_threads(2, threaded_choice)) == {ProcessGroupCommunicator.__name__}


def many_in_flight() -> list[Tensor]:
    """Launch more all-gathers than a mailbox has room for; wait for them from the last on."""
    comm = communicator_for(None, CPU)
    results = [torch.empty(4) for _ in range(3 * RING_SIZE)]
    handles = [
        comm.all_gather(result, torch.full((2,), 10.0 * index + comm.rank))
        for index, result in enumerate(results)
    ]
    for handle in reversed(handles):
        handle.wait()
    return results


def test_many_in_flight() -> None:
    """Nothing is lost, and nothing waits for ever, however many collectives are in flight."""
    for results in run_procs(2, many_in_flight, timeout=60):
        for index, result in enumerate(results):
            assert result.tolist() == [10.0 * index] * 2 + [10.0 * index + 1] * 2


def train_with_slow_reader(collectives: str) -> Tensor:
    """Train LAMB, gradients sent in bf16; the last rank reads 20 ms after it was told."""
    original = gloo.read_memory

    def read(pid: int, address: int, out: Tensor) -> None:
        if dist.get_rank() > 0 and out.numel() > 1:
            time.sleep(0.02)
        original(pid, address, out)

    gloo.read_memory = read
    try:
        param = torch.nn.Parameter(torch.arange(1 << 16).float() % 7 + 1)
        sharding = {
            "collectives": collectives,
            "bucket_cap_mb": 0.03,
            "grad_sync_dtype": torch.bfloat16,
        }
        optimizer = shardfuse.ShardedLamb([param], lr=0.1, sharding=sharding)
        for step in range(2):
            param.grad = values(dist.get_rank() + step, 1 << 16, torch.float32)
            optimizer.step()
    finally:
        gloo.read_memory = original
    return param.detach()


def test_slow_readers() -> None:
    """What is sent stays as it is until the slowest rank has read it."""
    (expected, *_), results = (
        run_procs(2, train_with_slow_reader, choice, timeout=60) for choice in ("native", "auto")
    )
    for result in results:
        assert torch.equal(result, expected)


def absent_peer(choice: str, *, ends: bool) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2 if not ends else 60))
    comm = communicator_for(group, CPU, choice)
    comm.reduce_scatter(torch.ones(8)).wait()
    if dist.get_rank() == 0:
        comm.reduce_scatter(torch.ones(8)).wait()
    elif ends:
        os._exit(3)
    else:
        time.sleep(4)


def peer_that_ends_unread() -> None:
    comm = communicator_for(dist.group.WORLD, CPU, "auto")
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    comm.reduce_scatter(torch.ones(8)).wait()
    handle = comm.reduce_scatter(torch.ones(8))
    if dist.get_rank() == 1:
        os._exit(3)
    while gloo.is_running(pids[1]):
        time.sleep(0.01)
    handle.wait()


def test_a_peer_that_ends_before_it_is_read() -> None:
    """A rank that has told where its part lies, and ended, is reported as ended."""
    if not may_read_memory():
        pytest.skip("processes may not read each other's memory here")
    with pytest.raises(RanksFailedError) as failed:
        run_procs(2, peer_that_ends_unread, timeout=30)
    assert "rank 1 has ended" in failed.value.failures[0]


@pytest.mark.parametrize("choice", ["auto", "pairwise"])
@pytest.mark.parametrize("ends", [False, True])
def test_a_missing_peer_is_an_error(choice: str, ends: bool) -> None:
    """Where a rank does not take part, the others raise after the group's timeout; none hangs.

    Where its process has ended they do not even wait for that.
    """
    with pytest.raises(RanksFailedError) as failed:
        run_procs(2, partial(absent_peer, choice, ends=ends), timeout=30)
    message = failed.value.failures[0]
    assert "did not finish" not in message
    if choice == "auto" and may_read_memory():
        assert ("has ended" if ends else "did not take part in a collective") in message


def posted(stage: int) -> list[tuple[int, int]]:
    """Return, after steps with more and more groups, numbers of posted receives and of buckets."""
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.01, "kernel": "eager", "stage": stage}
    params = [torch.nn.Parameter(torch.ones(3000)) for _ in range(5)]
    optimizer: Any = shardfuse.ShardedSGD(params[:1], lr=0.1, sharding=sharding)
    found = []
    for number in range(1, 5):
        optimizer.add_param_group({"params": [params[number]]})
        torch.stack([p.sum() for p in params[: number + 1]]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        comm, of_agreement = optimizer.communicator, optimizer._grads._agreement._comm
        found.append((len(comm._sockets._posted), len(optimizer.layout.buckets)))
        assert not comm._gathered
        assert len(of_agreement._gathered) == (stage == 1)
        assert len(of_agreement._sockets._posted) == (stage == 1)
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_posted_receives_of_an_old_order_are_freed(stage: int) -> None:
    """add_param_group() numbers the buckets anew; nobody sends to what was posted before."""
    for found in run_procs(2, posted, stage):
        for num_posted, num_buckets in found:
            assert num_posted == (num_buckets if stage == 1 else 2)


def train_apart(stage: int) -> tuple[list[list[str]], int]:
    """Return the launches on each process group of a step of two optimizers, and new groups."""
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.01, "kernel": "eager", "stage": stage}
    launches: dict[Any, list[str]] = {}
    num_groups = len(dist.distributed_c10d._world.pg_names)
    models = [torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(4))) for _ in range(2)]
    optimizers = [shardfuse.ShardedSGD(m.parameters(), lr=0.1, sharding=sharding) for m in models]
    num_groups = len(dist.distributed_c10d._world.pg_names) - num_groups
    for step in range(3):
        if step == 2:
            for name in ("send", "recv"):
                record_launches(name, launches)
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 60)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    return list(launches.values()), num_groups


def record_launches(name: str, launches: dict[Any, list[str]]) -> None:
    """Note the sizes of messages in ``launches``, by process group."""
    original = getattr(dist.ProcessGroup, name)

    def recorded(group: Any, tensors: list[torch.Tensor], *args: Any) -> Any:
        launches.setdefault(group, []).append(f"{name} {tensors[0].numel()}")
        return original(group, tensors, *args)

    setattr(dist.ProcessGroup, name, recorded)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_agreement_has_connections_of_its_own(stage: int) -> None:
    """It does not wait behind buckets in flight; both optimizers use one more group."""
    for launches, num_groups in run_procs(2, train_apart, stage):
        assert num_groups == 1
        of_buckets, of_agreement = launches
        assert len(of_agreement) == 4
        num_facts = int(of_agreement[0].split()[1])
        assert num_facts < 50
        assert all(line.endswith(f" {num_facts}") for line in of_agreement)
        assert not any(line.endswith(f" {num_facts}") for line in of_buckets)


def fail_in_agreement(stage: int, *, ends: bool) -> str:
    """Return this rank's error, after rank 1 has ended or raised where the others agree."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    sharding = {"collectives": "pairwise", "bucket_cap_mb": 0.01, "kernel": "eager", "stage": stage}
    model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(4)))
    options = {**sharding, "process_group": group}
    optimizer: Any = shardfuse.ShardedSGD(model.parameters(), lr=0.1, sharding=options)
    for step in range(4):
        model(torch.ones(2, 60)).sum().backward()
        if step == 2 and dist.get_rank() == 1:
            optimizer._grads._agreement.launch = partial(fail, ends=ends)
        try:
            optimizer.step()
        except (RuntimeError, MemoryError) as error:
            if ends:
                raise
            return f"{type(error).__name__} in step {step}: {error}"
        optimizer.zero_grad()
    return "no error"


def fail(*args: Any, ends: bool) -> None:
    if ends:
        os._exit(3)
    raise MemoryError("no memory for the facts")


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_fails_in_the_agreement(stage: int, ends: bool) -> None:
    """The others name it, long before the group's timeout, after which run_procs() has ended."""
    if ends:
        with pytest.raises(RanksFailedError) as failed:
            run_procs(2, partial(fail_in_agreement, ends=True), stage, timeout=40)
        assert "PeerError" in failed.value.failures[0]
        assert "rank 1" in failed.value.failures[0]
        return
    first, second = run_procs(2, partial(fail_in_agreement, ends=False), stage, timeout=40)
    assert first.startswith("PeerError in step 2"), first
    assert "rank 1" in first
    assert "no memory for the facts" in first
    assert second.startswith("MemoryError in step 2")
