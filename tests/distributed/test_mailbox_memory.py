"""Memory that ranks share is looked at twice before anything is written to it."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import shardfuse
from shardfuse.comm import communicator_for, gloo
from shardfuse.comm.gloo import MessageRing
from shardfuse.comm.session import GroupState
from tests.support.harness import log_of_shardfuse, run_procs

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.gloo_only("about memory that ranks read"),
]

CPU = torch.device("cpu")
HOST_ID = "from shardfuse.comm import gloo; print(gloo.host_id())"


@pytest.mark.parametrize("is_same_size", [True, False])
def test_a_strangers_file_is_not_written(is_same_size: bool, tmp_path: Path) -> None:
    """Where the descriptor is of another file, as with the /proc of strangers, that stays as is."""
    shared = gloo.create_shared(2)
    size = os.fstat(shared[0]).st_size if is_same_size else 100
    os.close(shared[0])
    path = tmp_path / "of another program"
    path.write_bytes(b"x" * size)
    board: Any = SimpleNamespace()
    with path.open("r+b") as file, pytest.raises(OSError, match="not what rank 0 shares"):
        MessageRing(1, [os.getpid()] * 2, (file.fileno(), shared[1]), 1.0, board, [0, 1])
    assert path.read_bytes() == b"x" * size


def test_shared_memory_cannot_be_cut_off() -> None:
    """A rank that read what is no more there was killed by SIGBUS."""
    descriptor, nonce = gloo.create_shared(2)
    for nbytes in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, nbytes)
    os.close(descriptor)
    unsealed = os.memfd_create("shardfuse")
    os.ftruncate(unsealed, gloo._num_words(2) * 8)
    os.pwrite(unsealed, nonce.to_bytes(8, "little"), 0)
    board: Any = SimpleNamespace()
    with pytest.raises(OSError, match=r"can be cut off|Invalid argument"):
        MessageRing(1, [os.getpid()] * 2, (unsealed, nonce), 1.0, board, [0, 1])
    os.close(unsealed)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the system has none")
def test_the_memory_of_another_process_of_that_number_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = gloo.create_shared(2)
    board = GroupState(dist.HashStore(), 0, world_size=2)
    child = subprocess.Popen(["sleep", "60"])
    box = MessageRing(0, [os.getpid(), child.pid], shared, 1.0, board, [0, 1])
    os.close(shared[0])
    child.kill()
    child.wait()
    read: list[int] = []
    monkeypatch.setattr(gloo, "read_memory", lambda pid, address, out: read.append(pid))
    monkeypatch.setattr(gloo, "is_running", lambda pid: True)
    monkeypatch.setattr(box, "wait", lambda *letter: 4096)
    with pytest.raises(RuntimeError, match="rank 1 has ended in the middle"):
        box.read_part(1, 0, 5, torch.empty(1))
    assert read == []


def test_the_proc_of_another_namespace_is_not_used() -> None:
    """In a process namespace that has the host's /proc, process ids name others there."""
    unshare = shutil.which("unshare")
    command = [sys.executable, "-c", HOST_ID]
    root = Path(__file__).parents[2]
    if unshare is None:
        pytest.skip("there is no unshare")
    options: Any = {"capture_output": True, "text": True, "cwd": root, "timeout": 60}
    if subprocess.run([unshare, "--pid", "--fork", "true"], **options).returncode:
        pytest.skip("process namespaces are not allowed here")
    assert subprocess.run(command, **options).returncode == 0
    inside = subprocess.run([unshare, "--pid", "--fork", *command], **options)
    assert "OSError: /proc is that of another process namespace" in inside.stderr


def train_with(fault: str, struck: int) -> tuple[bool, list[str], list[float]]:
    """All-gather after a trial in which ``fault`` strikes a rank; return what the log says."""
    lines = log_of_shardfuse(logging.INFO)
    logging.getLogger("shardfuse").setLevel(logging.INFO)
    comm: Any = communicator_for(None, CPU)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if fault == "no descriptors" and comm.rank == struck:
        used = len(os.listdir("/proc/self/fd")) - 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
    elif fault == "odd error" and comm.rank == struck:

        def broken(*args: Any) -> None:
            raise ValueError("mmap length is greater than file size")

        gloo.read_memory = broken
    result = torch.empty(2 * comm.world_size)
    try:
        comm.all_gather(result, torch.full((2,), float(comm.rank))).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return comm._exchange is not comm._sockets, lines, result.tolist()


@pytest.mark.parametrize("struck", [0, 1])
@pytest.mark.parametrize(
    ("fault", "text"),
    [("no descriptors", "Too many open files"), ("odd error", "mmap length is greater")],
)
def test_every_surprise_means_sockets_on_all_ranks(fault: str, text: str, struck: int) -> None:
    """Whatever one rank meets in the trial, all use sockets; its log tells what it was."""
    results = run_procs(2, train_with, fault, struck)
    for uses_memory, lines, values in results:
        assert not uses_memory
        assert values == [0.0, 0.0, 1.0, 1.0]
        assert not any("several hosts" in line for line in lines)
    assert any(text in line for line in results[struck][1])


def train_in_turns(optimizers: list[Any], rank: float) -> list[Tensor]:
    """Train three steps of each; return the params. ``rank`` adds to the gradients."""
    params = [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]
    for step in range(3):
        for index, param in enumerate(params):
            param.grad = torch.full_like(param, rank + step + index)
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach().clone() for param in params]


def adam(**sharding: Any) -> Any:
    param = torch.nn.Parameter(torch.arange(4000.0) / 1000)
    return shardfuse.ShardedAdam([param], lr=0.1, sharding={"bucket_cap_mb": 0.004, **sharding})


def count_rings() -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Return numbers of rings, and params, of three optimizers, and of a fourth after an error."""
    rings = []
    original = MessageRing.__init__

    def counted(self: MessageRing, *args: Any) -> None:
        rings.append(self)
        original(self, *args)

    MessageRing.__init__ = counted  # type: ignore[method-assign]
    rank = dist.get_rank()
    optimizers = [adam() for _ in range(3)]
    before, counts = train_in_turns(optimizers, rank), [len(rings)]
    first = optimizers.pop(0)
    with contextlib.suppress(RuntimeError):
        gradient = torch.ones(4000)
        first.param_groups[0]["params"][0].grad = gradient if rank else gradient.to_sparse()
        first.step()
    after = train_in_turns([*optimizers, adam()], rank)
    return [*counts, len(rings)], before, after


def test_optimizers_of_a_group_share_memory() -> None:
    """One ring serves all of them; after an error a new one serves those that are built then."""
    optimizers = [adam(process_group="alone") for _ in range(3)]
    before = train_in_turns(optimizers, 0.5)
    after = train_in_turns([*optimizers[1:], adam(process_group="alone")], 0.5)
    for counts, *found in run_procs(2, count_rings, timeout=60):
        assert counts == [1, 2]
        assert all(map(torch.equal, [*found[0], *found[1]], [*before, *after]))
