"""What `pytest --device npu` puts params on is a device, and asks what one asks of who uses it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardfuse import ShardedAdam, ShardedSGD
from shardfuse.checkpoint import async_save
from shardfuse.checkpoint import saving as saving_module
from shardfuse.checkpoint.storage import ShardWriter
from shardfuse.comm import communicator_for
from shardfuse.doctor import checks
from shardfuse.engine import gather as pending_params
from shardfuse.training import set_device
from tests.support import npu, placing
from tests.support.contract_terms import ContractError
from tests.support.harness import log_of_shardfuse, run_procs, run_threads
from tests.support.models import ParamSet, flat_buffers, lie_in, rank_grads

pytestmark = [
    pytest.mark.skipif(not placing.on_device(), reason="of the device of pytest --device npu"),
    pytest.mark.timeout(100),
]

NPU: Any = getattr(torch, "npu", None)


def test_is_a_device_of_its_own() -> None:
    there, here = torch.arange(6.0, device="npu"), torch.arange(6.0, device="cpu")
    assert (there.device.type, there.is_cpu, there.is_cuda) == ("npu", False, False)
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    for mixed in (lambda: there + here, lambda: here + there, lambda: torch.cat([there, here])):
        with pytest.raises(RuntimeError, match="at least two devices"):
            mixed()
    with pytest.raises(RuntimeError, match="at least two devices"):
        here.to("npu:1") + there
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.zeros((), device="cpu").add_(there.sum())
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        there.cuda()
    assert torch.equal(there * 2.0, (here * 2).to("npu"))  # numbers are of every device


def test_data_pass_by_copies() -> None:
    here = torch.arange(6.0, device="cpu")
    there = here.to("npu")
    back = there.cpu()
    assert len({tensor.data_ptr() for tensor in (here, there, back)}) == 3
    here.zero_()
    there.add_(1)
    assert back.tolist() == [0, 1, 2, 3, 4, 5]
    assert there.tolist() == [1, 2, 3, 4, 5, 6]


def placed_params() -> list[tuple[str, str, bool]]:
    """Return where this rank's params lie, and whether in buffers there."""
    params = ParamSet()
    optimizer = ShardedAdam(params.groups(), sharding={"kernel": "eager"})
    params.assign(rank_grads("integers", dist.get_world_size(), dist.get_rank(), 0))
    optimizer.step()
    model = torch.nn.Linear(3, 3)
    buffers = flat_buffers(optimizer)
    devices = {str(tensor.device) for tensor in [*params.params, *buffers, *model.parameters()]}
    assert len(devices) == 1
    grads = {str(p.grad.device) for p in params.params if p.grad is not None}
    return [(devices.pop(), grads.pop(), lie_in(params.params, buffers))]


def own_device() -> tuple[str, int]:
    device = set_device(dist.get_rank())
    return str(device), torch.accelerator.current_device_index()


def test_ranks_choose_devices_of_their_own() -> None:
    """set_device() makes a rank's own the current one."""
    assert run_procs(2, own_device) == [("npu:0", 0), ("npu:1", 1)]


def save_late() -> str:
    device = set_device(dist.get_rank())
    time.sleep(1.0 - dist.get_rank())
    found = checks.save_and_load(communicator_for(None, device), device)
    return f"{found.verdict}: {found.text}"


def test_the_doctor_waits_for_a_rank_that_is_late() -> None:
    """Before it looks for the folder that this one names: waits for a device block no host."""
    assert run_procs(2, save_late) == ["ok: a checkpoint comes back bit for bit"] * 2


@pytest.mark.parametrize("run", [run_threads, run_procs])
def test_the_option_places_params(run: Any) -> None:
    """Each rank has a device of its own, as on a machine with several."""
    assert torch.zeros(1).device == torch.device("npu:0")
    expected = [[(f"npu:{rank}", f"npu:{rank}", True)] for rank in range(2)]
    assert run(2, placed_params) == expected


def test_a_launch_waits_for_nothing() -> None:
    x = torch.zeros(5)
    with npu.held():
        x.add_(1)
        y = x * 3
        assert not NPU.current_stream().query()
    assert y.tolist() == [3.0] * 5


def test_streams_wait_for_events_and_for_nothing_else() -> None:
    x, side, end = torch.zeros(5), NPU.Stream(), NPU.Event()
    NPU.synchronize()
    with npu.held() as gate:
        x.add_(1)
        with NPU.stream(side):
            assert x.tolist() == [0.0] * 5  # on a stream that is not held
            side.wait_stream(NPU.default_stream())
            late = x * 3
        side.record_event(end)
        assert not end.query()
        gate.complete()
        end.synchronize()
    assert late.tolist() == [3.0] * 5


def test_streams_are_of_a_pool() -> None:
    """As on real devices: 32 of them, and then the first once more. Each has a thread here."""
    first, *others = (NPU.Stream().stream_id for _ in range(33))
    assert len({first, *others}) == 32
    assert others[-1] == first


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_is_reused_under_another_stream_unless_recorded(is_recorded: bool) -> None:
    side, x = NPU.Stream(), torch.ones(1000)
    NPU.synchronize()
    with NPU.stream(side), npu.held():
        y = x + 1
        if is_recorded:
            x.record_stream(side)
        del x
        NPU.default_stream().synchronize()
    NPU.synchronize()
    assert bool(y.eq(2).all()) == is_recorded
    assert bool(y.isnan().all()) != is_recorded


def test_errors_of_kernels_are_heard_of_where_the_host_waits() -> None:
    values = torch.zeros(3)[torch.tensor([7])]
    with pytest.raises(RuntimeError, match=r"after its launch.*index 7 is out of bounds"):
        values.cpu()
    assert torch.ones(3).sum().item() == 3


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(3)
    state = NPU.get_rng_state()
    first = torch.randn(4, device="npu")
    torch.randn(4, device="cpu")
    NPU.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="npu"), first)


def test_waits_of_the_host_are_noted() -> None:
    x = torch.ones(4)
    with npu.host_syncs() as found:
        (x * 2).sqrt_().sum().div_(3)
    assert found == []
    with npu.host_syncs() as found:
        x.sum().item()
        torch.nonzero(x)
        x.cpu()
        x.add_(torch.ones(4, device="cpu").to("npu"))
    assert found == ["item", "aten::nonzero", "copy to the host", "copy to the device"]
    with npu.host_syncs(refused=True), pytest.raises(RuntimeError, match="waits for the device"):
        bool(x.any())


def reduce_behind_a_gate() -> tuple[bool, float]:
    """Return whether wait() came back before the collective could begin, and its result."""
    x = torch.ones(1024)
    with npu.held():
        work = dist.all_reduce(x.mul_(2), async_op=True)
        assert work is not None
        work.wait()
        x.add_(1)
        is_ahead = not NPU.current_stream().query()
        with pytest.raises(ContractError, match="must be NPU"):
            dist.all_reduce(torch.ones(1024, device="cpu"))
    return is_ahead, x.sum().item() / 1024


def test_collectives_are_of_streams_and_of_the_device_only() -> None:
    assert run_threads(2, reduce_behind_a_gate) == [(True, 5.0), (True, 5.0)]


def test_an_async_save_keeps_to_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread uses the device of its rank, and waits for no kernel that training launches."""
    write, used = ShardWriter.write, set[tuple[str, int, bool]]()

    def noted(planned: ShardWriter) -> Any:
        device = NPU.current_device()
        is_own = NPU.current_stream() != NPU.default_stream()
        used.add((threading.current_thread().name, device, is_own))
        return write(planned)

    monkeypatch.setattr(ShardWriter, "write", noted)

    def save() -> None:
        weight = nn.Parameter(torch.ones(3000))
        optimizer = ShardedAdam([("weight", weight)], lr=0.1)
        weight.grad = torch.ones(3000)
        optimizer.step()
        async_save({"optimizer": optimizer}, tmp_path / "a").wait()

    run_threads(2, save)
    assert used == {("shardfuse save", rank, True) for rank in range(2)}


def save_twice(folder: Path) -> tuple[int, list[str], bool, bool]:
    """Save twice beside a step.

    Returns the number of buffers, what the host waited for in the step, whether the second save
    used the buffers of the first, and whether they are freed with the optimizer.
    """
    params = [(f"p{i}", nn.Parameter(torch.ones(300))) for i in range(20)]
    optimizer = ShardedAdam(params, lr=0.1)
    addresses = []
    for index in range(2):
        for _, param in params:
            param.grad = torch.ones(300)
        optimizer.step()
        saving = async_save({"optimizer": optimizer}, folder / str(index))
        with npu.host_syncs() as found:
            optimizer.step()
        saving.wait()
        kept = [b for free in saving_module._host_buffers[optimizer]._free.values() for b in free]
        addresses.append(sorted(buffer.data_ptr() for buffer in kept))
    refs = [weakref.ref(buffer) for buffer in kept]
    del optimizer, saving, kept, params, param
    gc.collect()
    is_freed = all(ref() is None for ref in refs)
    return len(addresses[0]), found, addresses[0] == addresses[1], is_freed


def test_saves_share_host_memory_and_no_step_waits(tmp_path: Path) -> None:
    """One buffer for each arena of two states, for 20 params; the optimizer's last one frees it."""
    for result in run_threads(2, save_twice, tmp_path):
        assert result == (2, [], True, True)


def train_on_two_streams(sharding: dict[str, Any] | None, is_second_first: bool) -> Any:
    """Train two layers, the second on a stream of its own, which is late in backward.

    Returns the parameters, and what was logged.
    """
    told = log_of_shardfuse()
    torch.manual_seed(0)
    first, second = nn.Linear(32, 32), nn.Linear(32, 32)
    params = nn.ModuleList([second, first] if is_second_first else [first, second])
    optimizer: Any = torch.optim.SGD(params.parameters(), lr=0.1)
    if sharding is not None:
        sharding = {"bucket_cap_mb": 0.006, **sharding}
        optimizer = ShardedSGD(params.named_parameters(), lr=0.1, sharding=sharding)
    module: Any = torch.npu  # type: ignore[attr-defined]  # of a rank, which loads it later
    main, side = module.current_stream(), module.Stream()
    for is_late in (False, True, True, True):  # not where ranks compare what they have
        x = torch.ones(2, 32)
        side.wait_stream(main)
        y = None if is_second_first else first(x)
        with module.stream(side):
            z = second(x)
        main.wait_stream(side)
        loss = (first(x) if y is None else y).square().mean() + z.square().mean()
        with module.stream(side), npu.held() if is_late else nullcontext(), module.stream(main):
            loss.backward()
            time.sleep(0.1)  # for what does not wait
        optimizer.step()
        side.wait_stream(main)  # which reads gradients in memory of the side's
        optimizer.zero_grad()
        module.synchronize()
    return [param.detach() for param in params.parameters()], told


@pytest.mark.parametrize("is_second_first", [False, True])
@pytest.mark.parametrize(
    "sharding", [{"overlap_grad_sync": True}, {"stage": 2}], ids=["stage 1", "stage 2"]
)
def test_gradients_of_several_streams_leave_when_all_are_made(
    sharding: dict[str, Any], is_second_first: bool
) -> None:
    """A bucket that leaves under backward has waited for each; its memory is not used again."""
    expected, _ = train_on_two_streams(None, is_second_first)
    for found, told in run_procs(2, train_on_two_streams, sharding, is_second_first):
        torch.testing.assert_close(placing.here(found), placing.here(expected), rtol=0, atol=1e-6)
        assert not any("sent twice" in line for line in told)  # as what stage 1 sends too early


def read_on_two_streams() -> tuple[list[Any], list[str]]:
    """Return what both read, the stream of step() after another; and what was logged."""
    told = log_of_shardfuse()
    pending_params.is_shared = lambda param: False  # as kernels that wait share it, here
    first, second = (nn.Parameter(torch.zeros(3000)) for _ in range(2))
    sharding = {"overlap_param_sync": True, "bucket_cap_mb": 0.02}
    params = [("first", first), ("second", second)]
    optimizer = ShardedSGD(params, lr=1.0, momentum=0.9, sharding=sharding)
    module: Any = torch.npu  # type: ignore[attr-defined]  # of a rank, which loads it later
    main, side = module.current_stream(), module.Stream()
    for is_late in (False, False, True):
        first.grad, second.grad = torch.ones(3000), torch.ones(3000)
        gate = npu.Deferred()
        if is_late and dist.get_rank() == 1:
            gate.block(module.current_device())
        optimizer.step()
        side.wait_stream(main)
        threading.Timer(0.3, gate.complete).start()
        with module.stream(side):
            found = [first * 1, second * 1]
        found += [first * 1, second * 1]
        module.synchronize()
        time.sleep(0.4)
    return found, told


def test_parameters_arrive_on_the_stream_of_step_as_well() -> None:
    """Whoever reads them first: others, on the stream of step(), need no order of their own."""
    for found, told in run_procs(2, read_on_two_streams):
        for value in placing.here(found):
            torch.testing.assert_close(value, torch.full((3000,), -5.61), rtol=0, atol=1e-5)
        assert sum("was read on another stream" in line for line in told) == 1
