"""Checkpoints of one optimizer loaded into another: a line that names both, or an error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardfuse import (
    ShardedAdam,
    ShardedAdamW,
    ShardedBertAdam,
    ShardedLamb,
    ShardedRMSprop,
    ShardedRMSpropTF,
    checkpoint,
)
from shardfuse.checkpoint.index import MANIFEST, encode_with_digest
from shardfuse.optim import paddle
from shardfuse.optim.npu import NpuFusedAdamW
from tests.support.harness import run_procs
from tests.support.runs import assert_bitwise

pytestmark = pytest.mark.timeout(100)

Found = tuple[str, list[str], list[Tensor]]


def lamb(params: Any, **options: Any) -> Any:
    return ShardedLamb(params, weight_decay=0.1, **options)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "Adam": ShardedAdam,
    "AdamW": ShardedAdamW,
    "NpuFusedAdamW": NpuFusedAdamW,
    "BertAdam": lambda params: ShardedBertAdam(params, lr=0.1),
    "apex": lambda params: lamb(params, variant="apex"),
    "npu": lamb,
    "Paddle": lambda params: paddle.Lamb(parameters=params),
    "RMSprop": lambda params: ShardedRMSprop(params, momentum=0.9),
    "RMSpropTF": lambda params: ShardedRMSpropTF(params, momentum=0.9),
}


def make(name: str, num_steps: int) -> dict[str, Any]:
    torch.manual_seed(num_steps)
    model = nn.Linear(30, 20)
    optimizer = MAKERS[name]([*model.named_parameters()])
    for _ in range(num_steps):
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def load(names: tuple[str, str], folder: Path, *, is_early: bool) -> Found:
    """Return how a load ends, what it logs, and by how much the weights differ from the saved."""
    saved, present = (make(name, num_steps) for name, num_steps in zip(names, (2, 0), strict=True))
    checkpoint.save(saved, folder)
    if is_early and saved["optimizer"].communicator.rank == 0:
        content = json.loads((folder / MANIFEST).read_bytes())["content"]
        del content["rules"]
        (folder / MANIFEST).write_bytes(encode_with_digest(content))
    torch.distributed.barrier()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardfuse").addHandler(handler)
    before = [param.detach().clone() for param in present["model"].parameters()]
    try:
        checkpoint.load(present, folder)
    except checkpoint.CheckpointError as error:
        after = [param.detach() for param in present["model"].parameters()]
        return str(error), said, [now - then for now, then in zip(after, before, strict=True)]
    finally:
        logging.getLogger("shardfuse").removeHandler(handler)
    pairs = zip(present["model"].parameters(), saved["model"].parameters(), strict=True)
    return "loaded", said, [(now - then).detach() for now, then in pairs]


def load_all(pairs: list[tuple[str, str]], folder: Path, is_early: bool) -> list[Found]:
    return [load(pair, folder / "-".join(pair), is_early=is_early) for pair in pairs]


WARNED = {
    ("AdamW", "Adam"): ("AdamWRule", "AdamRule"),
    ("Adam", "NpuFusedAdamW"): ("AdamRule", "AdamWRule"),
    ("apex", "npu"): ("LambRule(variant='apex'", "LambRule(variant='npu'"),
}
SILENT = [("AdamW", "AdamW"), ("NpuFusedAdamW", "AdamW"), ("apex", "apex"), ("Paddle", "Paddle")]
REFUSED = [
    ("AdamW", "BertAdam"),
    ("AdamW", "npu"),
    ("Paddle", "apex"),
    ("RMSprop", "RMSpropTF"),
    ("RMSpropTF", "RMSprop"),
]


def test_another_rule(tmp_path: Path) -> None:
    """With the same hyper-parameters: loaded, with one line. With others: refused as a whole."""
    pairs = [*WARNED, *SILENT, *REFUSED]
    for rank, results in enumerate(run_procs(2, load_all, pairs, tmp_path, False)):
        for pair, (end, said, differences) in zip(pairs, results, strict=True):
            assert_bitwise(differences, [torch.zeros_like(d) for d in differences])
            if pair in REFUSED:
                assert "does not fit" in end, pair
                continue
            assert end == "loaded", (pair, end)
            assert len(said) == (pair in WARNED and rank == 0), (pair, said)
            if said:
                saved, present = WARNED[pair]
                assert f"states are of {saved}" in said[0], said
                assert f"go on under {present}" in said[0], said


def test_checkpoints_that_do_not_say(tmp_path: Path) -> None:
    """Those of earlier versions load as ever."""
    pairs = [*WARNED, *SILENT]
    for results in run_procs(2, load_all, pairs, tmp_path, True):
        for pair, (end, said, _) in zip(pairs, results, strict=True):
            assert (end, said) == ("loaded", []), pair
