"""Fixtures every test relies on."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator

# Before torch reads it. More threads than cores are slow, and a rank that is forked from a process
# with a pool of them waits for that forever.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

from tests.support import contract, lateness, placing
from tests.support.tiers import EXHAUSTIVE, FAST, NIGHTLY, left_out


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    # Ranks are threads or processes of one machine: each one gets a single core.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    with placing.placed():
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the transport of the ranks, and where their tensors lie, be chosen."""
    parser.addoption(
        "--backend",
        choices=["gloo", "hccl", "hccl-zero-copy"],
        default="gloo",
        help="what joins ranks: gloo, or a stand-in for HCCL (tests/support/contract.py)",
    )
    parser.addoption(
        "--device",
        choices=["cpu", "npu"],
        default="cpu",
        help="where params lie: npu is a stand-in (tests/support/npu), whose ranks HCCL's joins",
    )
    parser.addoption(
        "--late",
        metavar="SEED",
        type=int,
        default=0,
        help="pauses of ranks, collectives and kernels, at random (tests/support/lateness.py)",
    )
    parser.addoption(
        "--part",
        metavar="K/N",
        default="1/1",
        help="of N parts of the tests, which are equal but for chance, run the K-th",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hand the choice to all ranks, before the first is started."""
    os.environ[lateness.VARIABLE] = str(config.getoption("--late"))
    lateness.begin()
    choice = config.getoption("--backend")
    os.environ[placing.VARIABLE] = config.getoption("--device")
    if placing.on_device():
        choice = "hccl" if choice == "gloo" else choice
        from tests.support import npu

        npu.load()
    os.environ[contract.VARIABLE] = choice
    if choice == "hccl-zero-copy":
        os.environ[contract.ZERO_COPY_VARIABLE] = "1"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what is about gloo itself, where ranks are joined by something else."""
    marker = item.get_closest_marker("gloo_only")
    if marker is not None and contract.chosen() != "gloo":
        pytest.skip(f"gloo only: {marker.args[0]}")
    marker = item.get_closest_marker("cpu_only")
    if marker is not None and placing.on_device():
        pytest.skip(f"CPU only: {marker.args[0]}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests into their tiers, before those that were not asked for are left out."""
    enough = left_out(item.nodeid for item in items)
    for item in items:
        if FAST.search(item.nodeid):
            item.add_marker("fast")
        if NIGHTLY.search(item.nodeid):
            item.add_marker("nightly")
        elif EXHAUSTIVE.search(item.nodeid) or item.nodeid in enough:
            item.add_marker("exhaustive")
        if "test_deepspeed" in item.nodeid:
            item.add_marker(pytest.mark.cpu_only("DeepSpeed knows no such accelerator"))
    part, parts = (int(number) for number in config.getoption("--part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {part}/{parts}: the part is 1 to {parts}")
    # By the test's name, so that each test is in one part for every tier and every selection.
    own: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        (own if zlib.crc32(item.nodeid.encode()) % parts == part - 1 else others).append(item)
    if others:
        items[:] = own
        config.hook.pytest_deselected(items=others)


_MANY_OBJECTS = 20_000


def pytest_collection_finish() -> None:
    """Leave imported modules and collected tests out of every later garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _imported_modules_are_frozen() -> None:
    """Do the same for modules that a test imports: each optimizer scans all objects twice."""
    if len(gc.get_objects()) > _MANY_OBJECTS:
        gc.collect()
        gc.freeze()
