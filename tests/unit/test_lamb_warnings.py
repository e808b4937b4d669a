"""LAMB warns of what is legal but hardly meant, with names and the remedy, once, on one rank."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardfuse import ShardedLamb
from shardfuse.optim.paddle import Lamb
from tests.support.harness import RanksFailedError, run_procs, run_threads

ROOT = Path(__file__).parent.parent.parent

NOTHING_ADAPTED = "every trust ratio is 1"
VECTORS_ADAPTED = "fewer than two dimensions"


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def warned(build: Callable[[], Any]) -> list[str]:
    """Return the texts that ``build`` warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build()
    assert all(item.category is UserWarning for item in caught)
    return [str(item.message) for item in caught]


def lamb(**options: Any) -> ShardedLamb:
    return ShardedLamb(model().named_parameters(), **options)


@pytest.mark.parametrize(
    "options",
    [{"variant": "apex"}, {"variant": "paddle"}, {"always_adapt": False}],
    ids=str,
)
def test_no_decay_disables_apex_and_paddle(options: dict[str, Any]) -> None:
    """Where ratios need a decay and no parameter has one, LAMB would silently be Adam."""
    (text,) = warned(lambda: lamb(**options))
    assert NOTHING_ADAPTED in text
    assert "(0.weight, 0.bias, 1.weight, ...)" in text
    for remedy in ("weight_decay", "always_adapt=True", "adam=True"):
        assert remedy in text


def test_exclusions_may_leave_no_decay() -> None:
    """A decay that the exclusions take from every parameter is none; so are groups without."""
    excluded = {"variant": "apex", "weight_decay": 0.1, "exclude_from_weight_decay": [r"\d"]}
    assert NOTHING_ADAPTED in warned(lambda: lamb(**excluded))[0]

    def grouped() -> None:
        pairs = list(model().named_parameters())
        groups = [{"params": pairs[:2]}, {"params": pairs[2:]}]
        ShardedLamb(
            [{**group, "weight_decay": 0.0} for group in groups], variant="apex", weight_decay=0.1
        )

    assert NOTHING_ADAPTED in warned(grouped)[0]


@pytest.mark.parametrize("variant", ["npu", "apex", "nvlamb", "paddle", "deepspeed"])
def test_decayed_vectors(variant: str) -> None:
    """Biases and norms that are decayed and adapted are counted and named, with the remedy."""
    (text,) = warned(lambda: lamb(variant=variant, weight_decay=0.1))
    assert text.startswith("4 parameters of fewer than two dimensions")
    assert "(0.bias, 1.weight, 1.bias, ...)" in text
    for remedy in ("exclude_from_weight_decay", "exclude_from_layer_adaptation", "'google'"):
        assert remedy in text


def test_scalars_are_vectors_too() -> None:
    """A 0-D parameter counts; frozen and empty ones, which are not updated, do not."""
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    params = [nn.Parameter(torch.tensor(1.0)), frozen, nn.Parameter(torch.ones(0))]
    (text,) = warned(lambda: ShardedLamb(params, weight_decay=0.1))
    assert text.startswith("1 parameter of")
    assert "(param_groups[0][0])" in text


REMEDIES: list[dict[str, Any]] = [
    {"variant": "google"},
    {"variant": "apex", "exclude_from_weight_decay": ["bias", r"^1\."]},
    {
        "exclude_from_weight_decay": ["bias", r"^1\."],
        "exclude_from_layer_adaptation": ["bias", r"^1\."],
    },
    {"adam": True},
]


@pytest.mark.parametrize("options", REMEDIES, ids=str)
def test_remedies_silence(options: dict[str, Any]) -> None:
    """What the texts advise makes them go away."""
    excludes_norm = {"exclude_from_weight_decay": ["bias", r"^1\."]}
    if options.get("variant") == "google":
        # The exclusions of google go by BERT's names; those of nn.Sequential are numbers.
        options = {**options, **excludes_norm}
    assert warned(lambda: lamb(weight_decay=0.1, **options)) == []


@pytest.mark.parametrize("options", [{}, {"adam": True, "variant": "apex"}], ids=str)
def test_defaults_are_silent(options: dict[str, Any]) -> None:
    """The drop-in's default, no decay with ratios everywhere, is meant; so is adam=True."""
    assert warned(lambda: lamb(**options)) == []


def test_once_per_optimizer() -> None:
    """Groups added later warn of what is new, and only the first time."""
    vector = lambda name: {"params": [(name, nn.Parameter(torch.ones(3)))]}  # noqa: E731
    matrix = {"params": [("w", nn.Parameter(torch.ones(3, 3)))]}
    optimizer = ShardedLamb([matrix], weight_decay=0.1)
    (text,) = warned(lambda: optimizer.add_param_group(vector("a")))
    assert "(a)" in text
    assert warned(lambda: optimizer.add_param_group(vector("b"))) == []
    apex = ShardedLamb([vector("c")], variant="apex", adam=True)
    assert warned(lambda: apex.add_param_group(vector("d"))) == []


def test_points_at_the_caller() -> None:
    """The warning shows the line that built the optimizer, not one of this library."""
    with pytest.warns(UserWarning, match=VECTORS_ADAPTED) as caught:
        optimizer = lamb(weight_decay=0.1)
    assert caught[0].filename == __file__
    matrix = {"params": [nn.Parameter(torch.ones(3, 3))]}
    optimizer = ShardedLamb([matrix], weight_decay=0.1)
    with pytest.warns(UserWarning, match=VECTORS_ADAPTED) as caught:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert caught[0].filename == __file__


def test_paddles_lamb_names_its_own_arguments() -> None:
    """Paddle's class gives the remedies in Paddle's words."""
    (text,) = warned(lambda: Lamb(parameters=model().parameters()))
    assert "exclude_from_weight_decay_fn=lambda param: param.dim() < 2" in text
    assert "exclude_from_layer_adaptation" not in text
    (text,) = warned(lambda: Lamb(parameters=model().parameters(), lamb_weight_decay=0.0))
    assert NOTHING_ADAPTED in text
    assert "lamb_weight_decay" in text
    excluding = {"exclude_from_weight_decay_fn": lambda param: param.dim() < 2}
    assert warned(lambda: Lamb(parameters=model().parameters(), **excluding)) == []


def count_warnings() -> int:
    return len(warned(lambda: lamb(weight_decay=0.1)))


def test_only_the_first_rank_warns() -> None:
    """Three processes print one warning."""
    assert run_procs(3, count_warnings) == [1, 0, 0]


@pytest.mark.filterwarnings("error")
def test_as_an_error_it_reaches_all_ranks() -> None:
    """With -W error no rank is left waiting for the one that warned."""
    with pytest.raises(RanksFailedError) as caught:
        run_threads(3, lambda: lamb(weight_decay=0.1), timeout=20.0)
    assert "UserWarning: 4 parameters of fewer" in caught.value.failures[0]


def refused_group() -> tuple[str, int]:
    optimizer = ShardedLamb([("w", nn.Parameter(torch.ones(3, 3)))], weight_decay=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            optimizer.add_param_group({"params": [("b", nn.Parameter(torch.ones(3)))]})
        except (UserWarning, RuntimeError) as error:
            return type(error).__name__, len(optimizer.param_groups)
    return "none", 0


def test_as_an_error_it_refuses_the_group_on_all_ranks() -> None:
    """A group refused by -W error is taken back everywhere; the optimizer goes on as it was."""
    assert run_procs(2, refused_group) == [("UserWarning", 1), ("RuntimeError", 1)]


BERT_JOB = """
import sys
sys.path.insert(0, "launch/bert")
from pretraining.config import parse_config
from pretraining.model import build_model
from pretraining.optimizers import build_optimizer
config = parse_config([])
model = build_model("tiny", 500, 32, 0.1, 0)
build_optimizer(config, model.named_parameters(), config.shard_config())
print(config.optimizer, config.weight_decay > 0)
"""


def test_the_bert_job_does_not_warn() -> None:
    """The documented job excludes biases and norms, so its optimizer is built without a word."""
    pytest.importorskip("transformers")
    code = f"import warnings; warnings.filterwarnings('error', '.*trust ratio')\n{BERT_JOB}"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["lamb", "True"]
