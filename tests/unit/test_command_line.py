"""``python -m shardfuse``: what its helps teach, what it refuses, and how variants are compared."""

from __future__ import annotations

import argparse
import configparser
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import shardfuse
from shardfuse import compare_lamb_variants
from shardfuse.__main__ import _parser, console, main
from shardfuse.plan.models import params_of, shapes_of

ROOT = Path(__file__).parents[2]
COMMANDS = {"doctor", "plan", "compare-variants", "inspect", "verify", "export", "import"}


def subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = (a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def options() -> Iterator[tuple[str, argparse.Action]]:
    for name, parser in subparsers().items():
        for action in parser._actions:
            yield f"{name} {action.option_strings or action.dest}", action


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a help prints."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with a line and an example that can be parsed."""
    text = printed(capsys, "--help")
    listing, examples = text.split("examples:")
    assert subparsers().keys() == COMMANDS
    for name in COMMANDS:
        assert re.search(rf"^    {name}\s+\w+", listing, flags=re.MULTILINE), name
        (example,) = re.findall(rf"^  (.* shardfuse {name}\b.*)$", examples, flags=re.MULTILINE)
        _parser().parse_args(shlex.split(example.partition("shardfuse ")[2]))
        assert example in printed(capsys, name, "--help")


def test_every_option_says_what_it_is_and_its_default() -> None:
    """As a value: None and flags have none to show."""
    seen = 0
    for name, action in options():
        assert action.help, name
        is_flag = isinstance(action, argparse._StoreTrueAction)
        has_value = not is_flag and action.default not in (None, argparse.SUPPRESS)
        assert has_value == ("%(default)s" in action.help), name
        seen += has_value
    assert seen > 10


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_no_help_shows_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, name, "--help")
    assert "None" not in text
    assert "%(" not in text


def test_defaults_of_variants_are_the_function_s() -> None:
    """The command and compare_lamb_variants() agree."""
    found = _parser().parse_args(["compare-variants", "npu", "--model", "bert-tiny"])
    given = inspect.signature(compare_lamb_variants).parameters
    for name in ("other", "eps", "weight_decay", "num_steps", "seed"):
        assert getattr(found, name) == given[name].default, name
    assert (found.beta1, found.beta2) == given["betas"].default


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("pln", "Did you mean 'plan'? "),
        ("compare", "Did you mean 'compare-variants'? "),
        ("verfy", "Did you mean 'verify'? "),
        ("zzz", ""),
    ],
)
def test_an_unknown_command(word: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == 2
    message = f"there is no command {word!r}. {hint}Commands: doctor, plan, "
    assert message in capsys.readouterr().err


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "required: COMMAND" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "--version") == f"shardfuse {shardfuse.__version__}\n"


def test_the_console_script_is_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds models in the working directory, too."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    script = config["options.entry_points"]["console_scripts"].strip()
    module, _, function = script.removeprefix("shardfuse = ").partition(":")
    assert getattr(import_module(module), function) is console
    (tmp_path / "model_in_cwd.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    words = ["shardfuse", "compare-variants", "npu", "--model", "model_in_cwd:build"]
    monkeypatch.setattr(sys, "argv", words)
    assert console() == 0
    assert "weight" in capsys.readouterr().out


@pytest.mark.timeout(120)
def test_as_a_process() -> None:
    """An unknown command is one line and no traceback."""
    command = [sys.executable, "-m", "shardfuse", "docter"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert result.returncode == 2
    assert "Did you mean 'doctor'?" in result.stderr
    assert "Traceback" not in result.stderr


def small() -> nn.Module:
    """Return a model for the import path, one parameter of it frozen."""
    model = nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 3))
    model[1].bias.requires_grad_(False)
    return model


def meta() -> nn.Module:
    """Return a model without values."""
    return nn.Linear(3, 2, device="meta")


def word() -> str:
    """Return what is no model."""
    return "a word"


def failing() -> nn.Module:
    """Raise, as a builder may."""
    raise ValueError("no such size")


def test_variants_of_a_model_by_import_path(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed is what the function finds, on the weights of the model."""
    words = ["--model", f"{__name__}:small", "--num-steps", "2", "--seed", "3"]
    torch.manual_seed(3)
    expected = compare_lamb_variants(small().named_parameters(), "npu", num_steps=2, seed=3)
    assert main(["compare-variants", "npu", *words]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert main(["compare-variants", "npu", "google", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in found["params"]] == ["0.weight", "0.bias", "1.weight"]
    assert found["lr_factor"] == expected.lr_factor
    assert found["params"][0]["ratio"] == expected.params[0].ratio


def test_switches_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A variant may be JSON; an infinite bound is npu without its clamp."""
    unbounded = '{"variant": "npu", "clamp_value": Infinity}'
    words = ["--model", "bert-tiny", "--json"]
    assert main(["compare-variants", "npu", unbounded, *words]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    ratios = {entry["name"]: entry["ratio"] for entry in found["params"]}
    # 0.02 sqrt(30522 * 128) = 39.5, which npu takes as 10.
    assert ratios["bert.embeddings.word_embeddings.weight"] == pytest.approx(10 / 39.53, rel=1e-2)
    assert min(ratios.values()) == ratios["bert.embeddings.word_embeddings.weight"]


def test_weights_of_named_models_are_drawn() -> None:
    """As BERT's first ones: 0.02 times normal matrices, gains of 1, biases of 0."""
    params = params_of("bert-tiny", seed=0)
    assert [(name, tuple(p.shape)) for name, p in params] == shapes_of("bert-tiny")
    for name, param in params:
        if param.ndim > 1:
            assert param.numel() < 1000 or float(param.detach().std()) == pytest.approx(
                0.02, rel=0.1
            )
        else:
            assert set(param.tolist()) == {float(name.endswith("weight"))}, name
    again, others = params_of("bert-tiny", seed=0), params_of("bert-tiny", seed=1)
    assert torch.equal(params[0][1], again[0][1])
    assert not torch.equal(params[0][1], others[0][1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["npuu", "--model", "bert-tiny"], "Invalid variant: 'npuu'. Use one of ('npu', "),
        (['{"clmp": 1}', "--model", "bert-tiny"], "clmp"),
        (["npu", "--model", "bert-huge"], "Invalid model: 'bert-huge'"),
        (["npu", "--model", "100000b"], "100000b takes "),
        (["npu", "--model", "nowhere:build"], "No module named 'nowhere'"),
        (["npu", "--model", f"{__name__}:nothing"], "nothing"),
        (["npu", "--model", f"{__name__}:word"], "returns 'a word', not a module"),
        (["npu", "--model", f"{__name__}:meta"], "weight on the meta device"),
        (["npu", "--model", f"{__name__}:failing"], "no such size"),
        (["npu", "--model", "bert-tiny", "--num-steps", "0"], "Invalid num_steps: 0"),
        (["npu", "--model", "bert-tiny", "--beta1", "1"], "beta"),
    ],
)
def test_what_cannot_be_compared(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and one line that says why."""
    assert main(["compare-variants", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("build", [meta, word])
def test_plans_take_meta_and_refuse_others(
    build: Callable[[], object], capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan needs shapes only."""
    words = ["plan", "--world-size", "2", "--model", f"{__name__}:{build.__name__}"]
    assert main(words) == (0 if build is meta else 2)
    assert ("not a module" in capsys.readouterr().err) == (build is word)


def test_json_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare-variants", "{npu}", "--model", "bert-tiny"])
    assert "'{npu}' is no JSON" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["nan", "inf", "0", "-1", "1e12"])
def test_the_doctor_s_limit_is_a_time(limit: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Some ended in a traceback, others in "nothing has come back for 0 s"."""
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", f"--limit-s={limit}"])
    assert f"--limit-s: {limit} is no number of seconds above 0" in capsys.readouterr().err
