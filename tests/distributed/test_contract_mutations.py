"""Faults planted into the library, each of which a training on the contract group must notice.

A mutation patches the library in every rank's process. The training then has to end with the
contract's refusal, or in parameters or gradients that are not the reference's. What is not mutated
passes, with and without zero-copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardfuse import ShardedLamb, layout
from shardfuse.comm import native as backend
from shardfuse.comm import select
from shardfuse.comm.native import BackendTraits
from shardfuse.comm.native import ProcessGroupCommunicator as Communicator
from shardfuse.comm.transport import BufferPool
from tests.support.harness import RanksFailedError, log_of_shardfuse, run_procs

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.cpu_only("mutations of what runs on either backend"),
]

NUM_STEPS = 3
TOLERANCE = 1e-5
DIFFERS = "differs"
"""What a mutation leads to that the group cannot refuse."""


class Outcome(NamedTuple):
    params: list[Tensor]
    grads: list[Tensor]  # as they are after the last step


def train(rank: int, world_size: int, *, overlap: bool = False) -> Outcome:
    """Train with this rank's part of each batch, by one norm per tensor and one over all."""
    sharding = {"bucket_cap_mb": 0.01, "kernel": "eager", "collectives": "native"}
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 5))
    optimizer = ShardedLamb(
        model.named_parameters(),
        lr=0.05,
        use_global_grad_norm=True,
        sharding={**sharding, "overlap_grad_sync": overlap, "overlap_param_sync": overlap},
    )
    for step in range(NUM_STEPS):
        torch.manual_seed(1 + step)
        batch = torch.randn(8, 40).chunk(world_size)[rank]
        model.zero_grad()
        model(batch).square().mean().backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        after = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        for mine, theirs in zip(before, after, strict=True):
            assert torch.equal(mine, theirs), "p.grad was changed by step()"
    return Outcome([p.detach().clone() for p in model.parameters()], after)


def is_same(found: list[Outcome], expected: Outcome) -> bool:
    return all(
        torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE)
        for outcome in found
        for mine, theirs in zip(outcome.params, expected.params, strict=True)
    )


# Mutations. Each patches this process.


def patch_all_reduce(change: Callable[[Any, Tensor, str], Any]) -> None:
    """Have all_reduce() be ``change(native, tensor, op)``."""
    native = Communicator.all_reduce

    def all_reduce(self: Any, tensor: Tensor, op: Any = "sum", **_: Any) -> Any:
        return change(lambda *args: native(self, *args), tensor, op)

    Communicator.all_reduce = all_reduce  # type: ignore[method-assign]


def fp64_norms() -> None:
    def change(native: Any, tensor: Tensor, op: str) -> Any:
        wide = tensor.double()
        handle = native(wide, op)
        handle.wait()
        tensor.copy_(wide)
        return handle

    patch_all_reduce(change)


def other_dtype_on_a_rank() -> None:
    patch_all_reduce(
        lambda native, tensor, op: native(tensor.half() if dist.get_rank() else tensor, op)
    )


def other_count_on_a_rank() -> None:
    patch_all_reduce(lambda native, tensor, op: native(tensor[dist.get_rank() :].clone(), op))


def other_op_on_a_rank() -> None:
    patch_all_reduce(lambda native, tensor, op: native(tensor, "max" if dist.get_rank() else op))


def strided_norms() -> None:
    patch_all_reduce(lambda native, tensor, op: native(torch.stack([tensor, tensor], 1)[:, 0], op))


def cuda_norms() -> None:
    patch_all_reduce(lambda native, tensor, op: native(tensor.cuda(), op))


def npu_norms() -> None:
    patch_all_reduce(lambda native, tensor, op: native(tensor.to("meta"), op))


def a_group_for_each() -> None:
    def change(native: Any, tensor: Tensor, op: str) -> Any:
        for _ in range(8):
            dist.all_reduce(torch.zeros(1), group=dist.new_group())
        return native(tensor, op)

    patch_all_reduce(change)


def no_norm_at_all() -> None:
    patch_all_reduce(lambda native, tensor, op: native(tensor.clone(), op))


def patch_reduce_scatter(op: Any) -> None:
    native = backend.reduce_scatter_single
    assert native is not None
    backend.reduce_scatter_single = (  # type: ignore[assignment]
        lambda output, input, **options: native(output, input, op=op, **options)
    )


def averages() -> None:
    patch_reduce_scatter(dist.ReduceOp.AVG)


def multiplies_before() -> None:
    patch_reduce_scatter(dist._make_nccl_premul_sum(0.5))


def patch_gather(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    native = backend.all_gather_single
    assert native is not None

    def all_gather(output: Tensor, input: Tensor, **options: Any) -> Any:
        return native(*change(output, input), **options)

    backend.all_gather_single = all_gather  # type: ignore[assignment]


def uneven_gather() -> None:
    patch_gather(lambda output, input: (output, input[: -1 - dist.get_rank()]))


def gather_of_lists_in_place() -> None:
    """A gather whose input is a part of the output."""
    backend._TRAITS["hccl"] = BackendTraits(in_place_all_gather=True)


def coalesced_gathers() -> None:
    native = backend.all_gather_single
    assert native is not None

    def all_gather(output: Tensor, input: Tensor, **options: Any) -> Any:
        with dist.distributed_c10d._coalescing_manager(async_ops=True) as works:
            native(output, input)
        return works

    backend.all_gather_single = all_gather  # type: ignore[assignment]


def off_by_four_bytes() -> None:
    """BufferPool buffers begin one element late."""
    native = BufferPool.get

    def get(self: BufferPool, name: str, index: int, numel: int, like: Tensor) -> Tensor:
        return native(self, name, index, numel + 1, like)[1:]

    BufferPool.get = get  # type: ignore[method-assign]


def flats_off_by_four_bytes() -> None:
    """What is gathered into begins one element late."""
    patch_gather(lambda output, input: (torch.empty(output.numel() + 1)[1:], input))


def odd_blocks() -> None:
    """Slots, shards and buckets are of blocks of 100 elements."""
    layout.BLOCK = 100


def relies_on_inputs() -> None:
    """Zero-copy is not known of."""
    select.traits_of = backend.traits_of = lambda backend: BackendTraits(False)


def other_order_on_a_rank() -> None:
    """One rank launches every second scatter before the first."""
    native = backend.reduce_scatter_single
    assert native is not None
    held: list[Any] = []

    class Late:
        work: Any = None

        def wait(self) -> None:
            if self.work is None:
                held.pop()()
            self.work.wait()

    def scatter(output: Tensor, input: Tensor, **options: Any) -> Any:
        if dist.get_rank():
            return native(output, input, **options)
        if not held:
            late = Late()

            def launch() -> None:
                late.work = native(output, input, **options)

            held.append(launch)
            return late
        work = native(output, input, **options)
        held.pop()()
        return work

    backend.reduce_scatter_single = scatter  # type: ignore[assignment]


def bitwise_or() -> None:
    patch_reduce_scatter(dist.ReduceOp.BOR)


def from_any_rank() -> None:
    patch_all_reduce(lambda native, tensor, op: dist.recv(tensor))


PLAIN, ZERO_COPY = "hccl", "hccl-zero-copy"

# What a rank is told, or DIFFERS.
MUTATIONS: dict[Callable[[], None], tuple[str, str]] = {
    fp64_norms: (PLAIN, "hccl failed: .*Unsupported data type torch.float64"),
    other_dtype_on_a_rank: (PLAIN, "EI0005|the ranks disagree|collective 1 of rank"),
    other_count_on_a_rank: (PLAIN, "EI0005|collective 1 of rank"),
    other_op_on_a_rank: (PLAIN, "EI0005|by max"),
    strided_norms: (PLAIN, "Tensors must be contiguous"),
    cuda_norms: (PLAIN, "CUDA|NVIDIA"),  # a build without, or with, but no driver
    npu_norms: (PLAIN, "not on meta|pin_memory"),  # which a machine without a device lacks
    a_group_for_each: (PLAIN, "Use fewer process groups"),
    no_norm_at_all: (PLAIN, DIFFERS),
    averages: (PLAIN, "Cannot use ReduceOp.AVG with HCCL"),
    multiplies_before: (PLAIN, "Cannot use ReduceOp.PREMUL_SUM with HCCL"),
    bitwise_or: (PLAIN, "Cannot use ReduceOp.BOR with HCCL"),
    uneven_gather: (PLAIN, "uneven sizes are not supported"),
    gather_of_lists_in_place: (PLAIN, "sendBuf and recvBuf overlap"),
    coalesced_gathers: (PLAIN, "HcclGroupStart"),
    off_by_four_bytes: (ZERO_COPY, "begins 4 bytes into its storage"),
    flats_off_by_four_bytes: (PLAIN, "begins 4 bytes into its storage"),
    odd_blocks: (PLAIN, "not a multiple of 512"),
    relies_on_inputs: (ZERO_COPY, "p.grad was changed"),
    other_order_on_a_rank: (PLAIN, DIFFERS),
    from_any_rank: (PLAIN, "receiving from any source"),
}


def train_mutated(mutate: Callable[[], None] | None) -> Outcome:
    if mutate is not None:
        mutate()
    return train(dist.get_rank(), dist.get_world_size())


@pytest.fixture(scope="module")
def expected() -> Outcome:
    """Of one rank with all of the data."""
    return train(0, 1)


@pytest.mark.parametrize("backend", ["gloo", PLAIN, ZERO_COPY])
def test_what_is_not_mutated(backend: str, expected: Outcome) -> None:
    """The library keeps to the contract, and to the reference."""
    assert is_same(run_procs(2, train_mutated, None, backend=backend), expected)


def train_on_hidden_zero_copy(overlap: bool) -> tuple[Outcome, list[str]]:
    """Train where inputs are changed although no variable says so; return what was logged, too."""
    group: Any = dist.group.WORLD
    group.terms = replace(group.terms, modifies_input=True)
    make = type(group).__init__

    def changed(self: Any, options: Any, terms: Any) -> None:
        make(self, options, replace(terms, modifies_input=True))

    type(group).__init__ = changed  # the optimizer's own group is of the same machine
    told = log_of_shardfuse()
    return train(dist.get_rank(), dist.get_world_size(), overlap=overlap), told


@pytest.mark.parametrize("overlap", [False, True])
def test_zero_copy_that_nobody_told_of(overlap: bool, expected: Outcome) -> None:
    """The first reduce-scatter finds out: no step changes p.grad, and a warning says it, once."""
    results = run_procs(2, train_on_hidden_zero_copy, overlap, backend=PLAIN)
    assert is_same([outcome for outcome, _ in results], expected)
    for _, told in results:
        assert [text for text in told if "zero-copy" in text] == [
            "hccl changes the input of a reduce-scatter (zero-copy). From now on gradients are "
            "copied before they are sent, which takes a bucket's memory."
        ]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mutation_is_noticed(mutate: Callable[[], None], expected: Outcome) -> None:
    """A planted fault ends the training in the words expected, or gives other parameters."""
    backend, words = MUTATIONS[mutate]
    if words == DIFFERS:
        assert not is_same(run_procs(2, train_mutated, mutate, backend=backend), expected)
        return
    with pytest.raises(RanksFailedError, match=words):
        run_procs(2, train_mutated, mutate, backend=backend, timeout=20)


UNNOTICED = [fp64_norms, a_group_for_each, gather_of_lists_in_place, coalesced_gathers]
UNNOTICED += [off_by_four_bytes, relies_on_inputs]


@pytest.mark.parametrize("mutate", UNNOTICED, ids=lambda mutate: mutate.__name__)
def test_gloo_takes_it(mutate: Callable[[], None], expected: Outcome) -> None:
    """What only the contract tells: on gloo the mutated library trains as the whole one does."""
    assert is_same(run_procs(2, train_mutated, mutate, backend="gloo"), expected)
