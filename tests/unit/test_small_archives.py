"""Archives of small tensors, which are filled in and not written by torch.save()."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardfuse.checkpoint.archives import SMALL_NBYTES, read_small, write_small

NUM_BEFORE_A_TEMPLATE = 10

TENSORS = {
    "fp32": torch.arange(35.0).view(5, 7),
    "bf16": torch.arange(33).bfloat16(),
    "fp16": torch.arange(9).half().view(3, 3),
    "int64 scalar": torch.tensor(7),
    "bool": torch.arange(17) > 5,
    "complex": torch.arange(5) * (1 + 2j),
    "largest": torch.arange(SMALL_NBYTES // 4, dtype=torch.float32),
}


def archive_of(tensor: Tensor) -> bytes | None:
    """Return what the last of many equal tensors is written as."""
    return [write_small(tensor) for _ in range(NUM_BEFORE_A_TEMPLATE)][-1]


@pytest.mark.parametrize("name", TENSORS)
def test_torch_reads_them(name: str) -> None:
    tensor = TENSORS[name]
    archive = archive_of(tensor)
    assert archive is not None
    for found in (
        torch.load(io.BytesIO(archive), weights_only=True),
        read_small(archive, tensor.dtype, tuple(tensor.shape)),
    ):
        assert found is not None
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_torch_without_numpy(tmp_path: Path) -> None:
    """Torch warns of it when it is imported; small tensors are saved and loaded as ever."""
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError(name='numpy')")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch; from shardfuse.checkpoint import load, save\n"
        "state = {f'x{i}': torch.tensor([float(i)]) for i in range(12)}\n"
        "save(state, sys.argv[1] + '/saved'); found = dict.fromkeys(state, torch.zeros(1))\n"
        "load(found, sys.argv[1] + '/saved'); print(sum(found.values()).item())"
    )
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "66.0\n"), done.stderr


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(0, 3),
        torch.ones(SMALL_NBYTES // 4 + 1),
        torch.ones(6, 4).t(),
        (torch.arange(5) * 1j).conj(),
        (torch.arange(5) * 1j).conj().imag,
    ],
    ids=["empty", "larger", "transposed", "conjugate", "negative"],
)
def test_others_are_left_to_torch(tensor: Tensor) -> None:
    assert archive_of(tensor) is None
