"""A run of two phases: recipes, what a phase leaves to the next, kills on each side of the seam."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pretrain
import pytest
import torch
from pretraining.config import RunConfig, parse_config, write_stored_config
from pretraining.errors import UsageError
from pretraining.model import build_model
from pretraining.optimizers import attach_backend
from pretraining.phases import RECIPES, Carry, Phase
from pretraining.prepared import PreparedCorpus

from shardfuse import ShardedAdamW, ShardedLamb
from shardfuse.plan.models import shapes_of_module
from tests.launch import jobs
from tests.launch.test_bert_kills import contents
from tests.support.harness import run_procs

pytestmark = pytest.mark.timeout(200)

SHORT = {"seq_len": 24, "steps": 5, "global_batch_size": 12, "lr": 0.01, "warmup": 0.4}
LONG = {"seq_len": 40, "steps": 4, "global_batch_size": 8, "lr": 0.004, "warmup": 0.5}
SEAM, LAST = 5, 9
CARRIES: list[Carry] = ["moments", "weights", "all"]


def write_recipe(folder: Path, carry: str = "moments", **changes: Any) -> str:
    """Write a recipe of a short phase and a long one."""
    options = {"optimizer": "lamb", "lamb_variant": "apex", "dropout": 0.1}
    recipe = {"options": options, "phases": [SHORT, {**LONG, "carry": carry}], **changes}
    path = folder / "recipe.json"
    path.write_text(json.dumps(recipe))
    return str(path)


# Recipes


def test_phases_of_a_recipe(tmp_path: Path) -> None:
    """Each has its own values, and the defaults of what it lacks; the model is for the longest."""
    config = parse_config(["--recipe", write_recipe(tmp_path), "--decay-power", "1"][:2])
    first, second = config.phases
    assert (first.seq_len, first.lr, first.carry, first.decay_power) == (24, 0.01, "all", 1.0)
    assert (second.seq_len, second.global_batch_size, second.carry) == (40, 8, "moments")
    assert (config.steps, config.max_seq_len) == (9, 40)
    assert (config.lamb_variant, config.dropout) == ("apex", 0.1)


def test_options_beside_a_recipe_come_first(tmp_path: Path) -> None:
    """Micro-batches are the machine's: one size for all phases, or one for each."""
    recipe = ["--recipe", write_recipe(tmp_path)]
    config = parse_config([*recipe, "--dropout", "0", "--micro-batch-size", "3", "2"])
    assert config.dropout == 0.0
    assert [phase.micro_batch_size for phase in config.phases] == [3, 2]
    config = parse_config([*recipe, "--micro-batch-size", "2"])
    assert [phase.micro_batch_size for phase in config.phases] == [2, 2]
    with pytest.raises(UsageError, match="has 3 numbers for 2 phases"):
        parse_config([*recipe, "--micro-batch-size", "2", "2", "2"])


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"phases": []}, [], r'"phases" a list of one or more'),
        ({"phases": [{"sequence": 3}]}, [], r"phase 1 has sequence; a phase has seq_len, steps"),
        ({"phases": [SHORT, 3]}, [], r"phase 2 has 3;"),
        ({"phases": [{**SHORT, "lr": "high"}]}, [], r"lr of phase 1 must be a number, got 'high'"),
        ({"phases": [{**SHORT, "steps": 4.5}]}, [], r"steps of phase 1 must be a whole number"),
        ({"options": {"async_save": "no"}}, [], r"async_save must be true or false, got 'no'"),
        ({"options": {"betas": [0.9]}}, [], r"betas must be a list, each a number, got \[0.9\]"),
        ({"options": {"eval_every": 2.5}}, [], r"eval_every must be a whole number, got 2.5"),
        ({}, ["--timeout-seconds", "inf"], r"--timeout-seconds must be below 1e9, got inf"),
        ({"phases": [{**SHORT, "warmup": 2}]}, [], r"--warmup must be a share of the steps"),
        ({"phases": [{**SHORT, "carry": "half"}]}, [], r"--carry must be one of weights, moments"),
        ({"options": {"seq_len": 3}}, [], r"seq_len belong into the phases"),
        ({"options": {"speed": 3}}, [], r"has speed, which is no option"),
        ({"options": {"model_size": "huge"}}, [], r"model_size must be one of tiny, .* got huge"),
        ({"notes": ""}, [], r'an object of "about", "options" and "phases"'),
        ({}, ["--lr", "1", "--steps", "3"], r"--lr, --steps cannot be given beside phases"),
    ],
)
def test_a_wrong_recipe_is_refused(
    changes: dict[str, Any], arguments: list[str], message: str, tmp_path: Path
) -> None:
    """In one line, which names the file, the phase or the option."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_config(["--recipe", write_recipe(tmp_path, **changes), *arguments])
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere is no file, and none of .*nvidia-large"):
        parse_config(["--recipe", "nowhere"])
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UsageError, match=r"broken.json: Expecting"):
        parse_config(["--recipe", str(tmp_path / "broken.json")])


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.json")))
def test_our_recipes_are_whole(name: str) -> None:
    """Each says where it comes from, and is a run that so many ranks can split."""
    # What they need beside themselves is not needed to look at them.
    config = parse_config(["--recipe", name, "--micro-batch-size", "1", "--dry-run"])
    assert "about" in json.loads((RECIPES / f"{name}.json").read_text())
    config.check_batches(8)
    assert [phase.seq_len for phase in config.phases] in ([128, 512], [512])


def test_resume_takes_the_phases(tmp_path: Path, text_file: Path) -> None:
    """Without the recipe, or with the same; another one is refused, and so is a run of none."""
    arguments = ["--corpus", str(text_file), "--run-dir", str(tmp_path / "run")]
    config = parse_config([*arguments, "--recipe", write_recipe(tmp_path)])
    store(config)
    resume = ["--resume", "--run-dir", str(tmp_path / "run")]
    assert parse_config(resume).phases == config.phases
    resumed = parse_config([*resume, "--micro-batch-size", "3", "4"])
    assert [phase.micro_batch_size for phase in resumed.phases] == [3, 4]
    assert parse_config([*resume, "--recipe", write_recipe(tmp_path)]).phases == config.phases
    with pytest.raises(UsageError, match=r"--lr cannot be given beside phases"):
        parse_config([*resume, "--lr", "1"])
    other = write_recipe(tmp_path, phases=[SHORT, {**LONG, "lr": 1.0}])
    with pytest.raises(UsageError, match=r"made with --lr \[0.01, 0.004\], not \[0.01, 1.0\]"):
        parse_config([*resume, "--recipe", other])


def test_a_run_from_before_there_were_phases_resumes(tmp_path: Path, text_file: Path) -> None:
    """Its options are those of one phase."""
    config = parse_config(["--corpus", str(text_file), "--run-dir", str(tmp_path), "--lr", "0.5"])
    store(config)
    path = tmp_path / "config.json"
    stored = json.loads(path.read_text())
    (phase,) = stored.pop("phases")
    del phase["carry"]
    path.write_text(json.dumps({**stored, **phase}))
    assert parse_config(["--resume", "--run-dir", str(tmp_path)]).phases == config.phases


def store(config: RunConfig) -> None:
    config.run_dir.mkdir(exist_ok=True)
    write_stored_config(config, config.corpus, corpus_digest="abc")


def test_each_phase_warms_up_again() -> None:
    """The learning rate rises to the phase's own peak and falls to 0 by its power."""
    phase = Phase(**{**LONG, "micro_batch_size": 0, "decay_power": 0.5, "carry": "all"})
    assert [phase.lr_at(step) for step in range(4)] == [0.002, 0.004, 0.004, 0.004 * 0.5**0.5]


def test_dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It tells of phases, samples, memory and traffic, and leaves nothing but a picture."""
    monkeypatch.chdir(tmp_path)
    arguments = ["--recipe", write_recipe(tmp_path), "--dry-run", "4"]
    assert pretrain.main(arguments) == 0
    told = capsys.readouterr().out
    assert "batch of 12 samples of 24 tokens = 4 ranks x 1 micro-batches x 3; 60 samples" in told
    assert "up to 0.004 in 2 steps" in told
    assert "of the phase before: weights and moments; the count of steps begins anew" in told
    assert f"in all: 9 steps, {5 * 12 + 4 * 8} samples, {60 * 24 + 32 * 40:,} tokens" in told
    numel = sum(math.prod(shape) for _, shape in shapes_of_module(model_for(positions=40)))
    assert f"{numel:,} elements in 46 parameters on 4 ranks" in told
    assert "reduce-scatter of gradients" in told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dry-run.png", "recipe.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "5"], "cannot be split over 5 ranks"),
        (["--dry-run", "2", "--resume"], "--dry-run is of a new run"),
    ],
)
def test_a_dry_run_of_what_cannot_be(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pretrain.main(["--recipe", write_recipe(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]


def model_for(positions: int) -> torch.nn.Module:
    with torch.device("meta"):
        return build_model("tiny", 8192, positions, 0.1, 0)


# What a phase leaves to the next


def handed_over(cls: Any, carry: Carry) -> list[tuple[int, list[torch.Tensor]]]:
    """Return (step, all states of this rank) before and after."""
    torch.manual_seed(0)
    model = torch.nn.Linear(640, 8)
    optimizer = cls(model.named_parameters(), lr=0.01, sharding={"kernel": "eager"})
    for _ in range(3):
        model(torch.randn(4, 640)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    weights, found = model.weight.detach().clone(), []
    for _ in range(2):
        state = optimizer.state[model.weight]
        tensors = [state["exp_avg"], state["exp_avg_sq"]]
        found.append(
            (int(state["step"]), [piece.data.clone() for t in tensors for piece in t.pieces])
        )
        attach_backend(optimizer, carry)
    assert torch.equal(model.weight, weights)
    if cls is ShardedLamb:
        assert optimizer.param_groups[0].get("step", 0) == int(
            optimizer.state[model.weight]["step"]
        )
    return found


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("cls", [ShardedLamb, ShardedAdamW])
def test_hand_over(cls: Any, carry: Carry) -> None:
    """Weights always; moments, and the count of steps, as the recipe says."""
    num_values = 0
    for (step, before), (step_after, after) in run_procs(2, handed_over, cls, carry):
        assert (step, step_after) == (3, 3 if carry == "all" else 0)
        for old, new in zip(before, after, strict=True):
            num_values += int(old.count_nonzero())
            assert torch.equal(new, torch.zeros_like(old) if carry == "weights" else old)
    assert num_values > 2 * 640


# Kills


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _before_step(number: int) -> Callable[[], None]:
    def plant() -> None:
        from pretraining.training import Trainer

        native = Trainer._train_step

        def step(self: Any, leg: Any, step: int, *args: Any) -> Any:
            if step == number:
                _die()
            return native(self, leg, step, *args)

        Trainer._train_step = step  # type: ignore[method-assign]

    return plant


def _at_the_seam(name: str, *, is_after: bool) -> Callable[[], None]:
    """Die in the call that is made at the seam: the save there, or the handing over."""

    def plant() -> None:
        from pretraining import training

        holder: Any = training.Trainer if hasattr(training.Trainer, name) else training
        native = getattr(holder, name)

        def call(*args: Any) -> Any:
            is_there = name != "_save" or args[1] == SEAM
            if is_there and not is_after:
                _die()
            result = native(*args)
            if is_there:
                _die()
            return result

        setattr(holder, name, call)

    return plant


KILLS = {
    "phase 1": _before_step(3),
    "before the save at the seam": _at_the_seam("_save", is_after=False),
    "after the save at the seam": _at_the_seam("_save", is_after=True),
    "handing over": _at_the_seam("attach_backend", is_after=True),
    "first step of phase 2": _before_step(SEAM),
    "phase 2": _before_step(SEAM + 2),
}


@pytest.fixture(scope="module")
def run_of(
    tmp_path_factory: pytest.TempPathFactory, text_file: Path, corpus: PreparedCorpus
) -> Callable[[Carry], tuple[list[str], Path]]:
    """Return the options of a run of two phases, and one that nobody has killed."""
    runs: dict[str, tuple[list[str], Path]] = {}

    def get(carry: Carry) -> tuple[list[str], Path]:
        if carry not in runs:
            folder: Path = tmp_path_factory.mktemp("whole")
            inputs = ["--corpus", str(text_file), "--data-dir", str(corpus.folder.parent)]
            inputs += ["--recipe", write_recipe(folder, carry), "--vocab-size", "120"]
            inputs += ["--eval-samples", "12", "--eval-every", "3", "--save-every", "2"]
            inputs += ["--run-dir", "run", "--resume", "auto"]
            jobs.run(folder, inputs, 2)
            runs[carry] = inputs, folder / "run"
        return runs[carry]

    return get


@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("moment", KILLS)
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_on_both_sides_of_the_seam(
    tmp_path: Path,
    run_of: Callable[[Carry], tuple[list[str], Path]],
    carry: Carry,
    moment: str,
    rank: int,
) -> None:
    """One rank is killed; the same line goes on, and ends as the run that nobody has killed."""
    inputs, whole = run_of(carry)
    job = jobs.start(tmp_path, inputs, 2, lambda own: KILLS[moment]() if own == rank else None)
    codes = job.wait()
    assert codes[rank] == -signal.SIGKILL, job.output()
    assert codes[1 - rank] not in (None, 0), job.output()  # told of it, and not by a time-out
    jobs.run(tmp_path, inputs, 2)
    assert jobs.losses(tmp_path / "run") == jobs.losses(whole)
    told, expected = (jobs.records(run, "eval") for run in (tmp_path / "run", whole))
    assert told == expected
    steps = [(record["step"], record["phase"]) for record in told]
    assert steps == [(0, 1), (3, 1), (SEAM, 1), (SEAM, 2), (6, 2), (LAST, 2)]
    found = contents(tmp_path / "run", LAST)
    for key, value in contents(whole, LAST).items():
        assert torch.equal(found[key], value), key


def test_what_is_carried_decides_the_second_phase(
    run_of: Callable[[Carry], tuple[list[str], Path]],
) -> None:
    """All runs are alike up to the seam, and no two of them after it."""
    curves = [jobs.losses(run_of(carry)[1]) for carry in CARRIES]
    assert len({tuple(curve[: SEAM + 1]) for curve in curves}) == 1
    assert len({tuple(curve[SEAM + 1 :]) for curve in curves}) == len(CARRIES)
