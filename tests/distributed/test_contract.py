"""The contract group itself: what HCCL refuses, in its words, and what it may do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardfuse.comm.native import all_gather_single, reduce_scatter_single
from tests.support import contract
from tests.support.contract_terms import Terms
from tests.support.harness import RanksFailedError, run_procs, run_threads
from tests.support.placing import device_type

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("its terms where waits block; of the device's tensors: test_stand_in_npu"),
]


def each(body: Callable[[], Any], world_size: int = 2) -> list[Any]:
    return run_threads(world_size, body, backend="hccl", timeout=20)


def message(body: Callable[[], Any]) -> str:
    """Return what all of two ranks are told."""
    texts = []

    def rank() -> None:
        with pytest.raises(RuntimeError) as caught:
            body()
        texts.append(str(caught.value))

    each(rank)
    assert len(texts) == 2
    assert len(set(texts)) == 1 or "inconsistent" in texts[0]
    return texts[0]


def rank() -> int:
    return dist.get_rank()


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "fp64": (lambda: dist.all_reduce(torch.ones(4).double()), "Unsupported data type.*float64"),
    "fp64 scatter": (
        lambda: reduce_scatter_single(torch.ones(2).double(), torch.ones(4).double()),
        "Unsupported data type.*float64",
    ),
    "AVG": (lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.AVG), "ReduceOp.AVG"),
    "BAND": (lambda: dist.all_reduce(torch.ones(4).int(), dist.ReduceOp.BAND), "ReduceOp.BAND"),
    "PREMUL_SUM": (
        lambda: dist.all_reduce(torch.ones(4), dist._make_nccl_premul_sum(0.5)),
        "ReduceOp.PREMUL_SUM",
    ),
    "uneven gather": (lambda: all_gather_single(torch.ones(5), torch.ones(3)), "uneven sizes"),
    "uneven scatter": (lambda: reduce_scatter_single(torch.ones(2), torch.ones(5)), "uneven"),
    "uneven all-to-all": (lambda: dist.all_to_all_single(torch.ones(5), torch.ones(5)), "uneven"),
    "dtypes of one": (
        lambda: all_gather_single(torch.ones(4), torch.ones(2).half()),
        "identical type",
    ),
    "in place": (
        lambda: all_gather_single(whole := torch.ones(512), whole.chunk(2)[rank()]),
        r"recvBuf overlap|misalign",
    ),
    "off by 4 bytes": (lambda: dist.all_reduce(torch.ones(129)[1:]), "begins 4 bytes.*512"),
    "strided": (lambda: dist.all_reduce(torch.ones(4, 4).t()), "contiguous"),
    "sparse": (lambda: dist.all_reduce(torch.eye(2).to_sparse()), "dense"),
    "other device": (lambda: dist.all_reduce(torch.ones(2, device="meta")), "on meta"),
    "any source": (lambda: dist.recv(torch.ones(2)), "any source"),
    "counts": (lambda: dist.all_reduce(torch.ones(4 + rank())), "EI0005.*of [45] .*of [45] "),
    "dtypes": (
        lambda: dist.all_reduce(torch.ones(4, dtype=[torch.half, torch.float][rank()])),
        "EI0005.*float16.*float32|EI0005.*float32.*float16",
    ),
    "ops": (
        lambda: dist.all_reduce(torch.ones(4), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank()]),
        "EI0005.*SUM|EI0005.*MAX",
    ),
    "kinds": (
        lambda: dist.broadcast(torch.ones(4), 0) if rank() else dist.all_reduce(torch.ones(4)),
        "EI0005.*broadcast|EI0005.*all_reduce",
    ),
}


@pytest.mark.filterwarnings("ignore:You are using")
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    """What HCCL does not do is an error on every rank that says what it was."""
    body, words = REFUSALS[name]
    text = message(body)
    assert pytest.raises(AssertionError, match=words).matches(AssertionError(text)), text


def test_coalescing_is_refused() -> None:
    def body() -> None:
        with dist.distributed_c10d._coalescing_manager(device=torch.device(device_type())):
            dist.all_reduce(torch.ones(4))

    assert "HcclGroupStart" in message(body)


def test_another_device_is_the_only_one() -> None:
    """With a stand-in for an NPU the CPU's tensors are refused."""

    def body() -> None:
        contract.register(Terms(devices=("npu",)))
        dist.all_reduce(torch.ones(2), group=dist.new_group())

    assert "Tensors must be NPU and dense, not on cpu" in message(body)


def test_communicators_take_memory() -> None:
    """A group takes its buffers at its first collective, and gives them back in the end."""

    def body() -> None:
        contract.register(Terms(memory_mb=1200))
        groups = [dist.new_group() for _ in range(4)]
        for group in groups[:3]:
            dist.all_reduce(torch.ones(1), group=group)
        with pytest.raises(RuntimeError, match=r"out of memory.*fewer process groups"):
            dist.all_reduce(torch.ones(1), group=groups[3])
        dist.barrier(groups[0])
        dist.destroy_process_group(groups[0])
        dist.all_reduce(torch.ones(1), group=groups[3])

    each(body)


def test_any_offset_where_it_may_be() -> None:
    def body() -> float:
        contract.register(Terms(align=1))
        tensor = torch.ones(129)[1:]
        dist.all_reduce(tensor, group=dist.new_group())
        return float(tensor[0])

    assert each(body) == [2.0, 2.0]


def scattered() -> tuple[Tensor, Tensor]:
    output, input = torch.zeros(3), torch.arange(6.0)
    work = reduce_scatter_single(output, input, async_op=True)
    work.wait()
    return output, input


def test_zero_copy_changes_the_input() -> None:
    """The sum is right, and what it was made of is lost."""
    kept = run_procs(2, scattered, backend="hccl")
    lost = run_procs(2, scattered, backend="hccl-zero-copy")
    for rank in range(2):
        expected = 2 * torch.arange(6.0).chunk(2)[rank]
        assert torch.equal(kept[rank][0], expected)
        assert torch.equal(lost[rank][0], expected)
        assert torch.equal(kept[rank][1], torch.arange(6.0))
        assert not (lost[rank][1] == torch.arange(6.0)).any()


def test_objects_messages_and_lists() -> None:
    """What else torch and users call works as with HCCL."""

    def body() -> Any:
        me, other = rank(), 1 - rank()
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, {"rank": me})
        found = [{"from": me}]
        dist.broadcast_object_list(found, src=1)
        sent, got = torch.full((3,), float(me)), torch.empty(3)
        works = [dist.isend(sent, other), dist.irecv(got, other)]
        for work in works:
            work.wait()
        parts = [torch.empty(2) for _ in range(2)]
        dist.all_gather(parts, torch.full((2,), float(me)))
        swapped = torch.empty(4)
        dist.all_to_all_single(swapped, torch.arange(4.0) + 10 * me)
        # One element from rank 0 to each, two from rank 1.
        uneven = torch.empty(3)
        mine = torch.arange(2.0 + 2 * me) + 10 * me
        dist.all_to_all_single(uneven, mine, [1, 2], [1 + me, 1 + me])
        swaps = swapped.tolist(), uneven.tolist()
        return objects, found, got.tolist(), torch.cat(parts).tolist(), swaps

    for me, (objects, found, got, parts, (swapped, uneven)) in enumerate(each(body)):
        assert objects == [{"rank": 0}, {"rank": 1}]
        assert found == [{"from": 1}]
        assert got == [1.0 - me] * 3
        assert parts == [0, 0, 1, 1]
        assert swapped == [2.0 * me, 2.0 * me + 1, 10 + 2.0 * me, 11 + 2.0 * me]
        assert uneven == [me, 10 + 2.0 * me, 11 + 2.0 * me]


def test_another_message_than_expected() -> None:
    """A message of another size or dtype than its receiver's is an error, not what was sent."""

    def body() -> None:
        if rank():
            dist.isend(torch.ones(3), 0)
        else:
            with pytest.raises(RuntimeError, match=r"EI0005.*of 4 float32.*of 3 float32"):
                dist.recv(torch.ones(4), 1)
        dist.barrier()

    each(body)


def test_an_abort_ends_a_wait() -> None:
    """A collective that a peer never joins ends by HCCL's own call, and nothing follows it."""

    def body() -> None:
        dist.barrier()
        if rank() == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            backend = dist.group.WORLD._get_backend(torch.device(device_type()))
            backend.abort()  # does nothing
            backend.abort_hccl_comm("a test")
            for call in (work.wait, dist.barrier):
                with pytest.raises(RuntimeError, match="HCCL communicator was aborted: a test"):
                    call()

    each(body)


def averaged_by_ddp() -> Tensor:
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    model(torch.full((3, 4), 1.0 + rank())).sum().backward()
    grad = model.module.weight.grad
    assert grad is not None
    return grad


def test_ddp() -> None:
    """torch's own reducer, which is C++, goes over it."""
    for grad in run_procs(2, averaged_by_ddp, backend="hccl"):
        assert torch.equal(grad, torch.full((2, 4), 4.5))


def die_or_wait() -> None:
    if rank() == 1:
        raise SystemExit(1)
    dist.all_reduce(torch.ones(1))


def test_a_lost_peer() -> None:
    with pytest.raises(RanksFailedError):
        run_procs(2, die_or_wait, backend="hccl", timeout=10)
