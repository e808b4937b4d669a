"""Out to transformers and in again: the same bits, the same tokens, on any number of ranks."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import export
import pretrain
import pytest
import torch
from pretraining.config import parse_config
from pretraining.errors import UsageError
from pretraining.model import build_model
from pretraining.prepared import PreparedCorpus
from pretraining.samples import SampleStream
from transformers import (
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)

from shardfuse.checkpoint.export import read_model
from tests.launch import jobs
from tests.launch.conftest import SMALL_MODEL
from tests.launch.texts import flat_sentences

pytestmark = pytest.mark.timeout(200)

SENTENCE = "The OLD man, na\u00efve, sees an apple \u4e2d; it's 3.5!"
START = ("--seq-len", "24", "--global-batch-size", "12", "--eval-samples", "12", "--steps", "4")


@pytest.fixture(autouse=True)
def without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def exported(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what is exported of a run of ten steps by two ranks."""
    folder = tmp_path_factory.mktemp("exported") / "out"
    assert export.main([str(finished), str(folder)]) == 0
    return folder


# Out


def test_the_logits_are_the_run_s(exported: Path, finished: Path, corpus: PreparedCorpus) -> None:
    """Bit for bit, by AutoModelForPreTraining, with nothing missing."""
    model, found = AutoModelForPreTraining.from_pretrained(exported, output_loading_info=True)
    assert not any(found.values())
    assert isinstance(model, BertForPreTraining)
    ours = build_model("tiny", corpus.summary.vocab_size, 24, 0.0, seed=1)
    ours.load_state_dict(read_model(finished / "checkpoints" / "step-10"))
    stream = SampleStream(corpus.held_out, corpus.summary.vocab_size, 24, seed=0)
    batch = stream.batch(0, range(8))
    inputs = {
        "input_ids": batch.input_ids,
        "attention_mask": batch.attention_mask,
        "token_type_ids": batch.token_type_ids,
    }
    with torch.no_grad():
        got, wanted = model.eval()(**inputs), ours.eval()(**inputs)
    assert torch.equal(got.prediction_logits, wanted.prediction_logits)
    assert torch.equal(got.seq_relationship_logits, wanted.seq_relationship_logits)
    drawn = build_model("tiny", corpus.summary.vocab_size, 24, 0.0, seed=0).eval()
    assert not torch.allclose(got.prediction_logits, drawn(**inputs).prediction_logits, atol=0.01)


def test_the_tokenizer_is_the_run_s(
    exported: Path, corpus: PreparedCorpus, text_file: Path
) -> None:
    """It gives the ids that the text was prepared with, and pairs as BERT has them."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer.model_max_length == 24
    sentences = [line for line in text_file.read_text().splitlines() if line]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in sentences]
    prepared = [found for part in (corpus.train, corpus.held_out) for found in flat_sentences(part)]
    assert sorted(prepared) == sorted(ids)
    pair = tokenizer("the cat", "a dog")
    marks = [(tokenizer.cls_token_id, 0), (tokenizer.sep_token_id, 0), (tokenizer.sep_token_id, 1)]
    found = list(zip(pair["input_ids"], pair["token_type_ids"], strict=True))
    assert [item for item in found if item[0] in {mark[0] for mark in marks}] == marks
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)


def test_an_unfinished_run_is_said_to_be(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a damaged newest checkpoint the one before is taken, and both are told."""
    for part in (copied / "checkpoints" / "step-10").glob("*.distcp"):
        part.write_bytes(b"")
    assert export.main([str(copied), str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert f"exported {copied} at step 8 of 10, a run that is not finished" in told.out
    assert "passed over: " in told.err
    assert "step-10" in told.err
    assert told.err.count("\n") == 1


def test_nothing_is_left_of_an_export_that_fails(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder appears by its rename, when all is in it."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert export.main([str(copied), str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_export_that_does_not_fit(
    copied: Path, small_disk: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk is one line, and leaves nothing."""
    disk = small_disk("500k")
    assert export.main([str(copied), str(disk / "out")]) == 2
    error = capsys.readouterr().err
    assert f"OUT_DIR {disk / 'out'}: " in error
    assert "space" in error
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run: (run / "config.json").unlink(), "config.json cannot be read; name the folder"),
        (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint; train until"),
        (lambda run: shutil.rmtree(run / "tokenizer"), "has no tokenizer/: it is of an earlier"),
        (lambda run: (run.parent / "out").mkdir() or (run.parent / "out/a").touch(), "not empty"),
    ],
    ids=["config", "checkpoints", "tokenizer", "used"],
)
def test_what_cannot_be_exported(
    copied: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line, which names the folder."""
    spoil(copied)
    assert export.main([str(copied), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("export.py: error: ")
    assert error.count("\n") == 1
    assert message in error


def test_a_run_from_before_tokenizers_were_kept(copied: Path, tmp_path: Path) -> None:
    """Resumed once it has its tokenizer."""
    shutil.rmtree(copied / "tokenizer")
    jobs.run(tmp_path, jobs.RESUME, 0)
    assert export.main([str(copied), str(tmp_path / "out")]) == 0


# In


def test_a_run_goes_on_where_the_exported_one_ended(
    exported: Path, finished: Path, inputs: list[str], tmp_path: Path
) -> None:
    """Its first held-out loss is the other's last, bit for bit, on two ranks; and it learns.

    The folder may be gone afterwards: the run is resumed, and exported, all the same.
    """
    start = tmp_path / "start"
    shutil.copytree(exported, start)
    arguments = [*inputs, *START, "--init-from", str(start), "--run-dir", "again"]
    told = jobs.run(tmp_path, arguments, 2)
    assert f"weights: those of {start}" in told
    assert "drawn anew" not in told
    last = jobs.records(finished, "eval")[-1]
    first, *_, end = jobs.records(tmp_path / "again", "eval")
    scores = ("mlm_loss", "mlm_accuracy", "nsp_loss")
    assert [first[name] for name in scores] == [last[name] for name in scores]
    assert end["mlm_loss"] < first["mlm_loss"]

    whole = jobs.losses(tmp_path / "again")
    shutil.rmtree(start)
    options = [*arguments, "--save-every", "2", "--run-dir", "cut", "--init-from", str(exported)]
    jobs.run(tmp_path, options, 2)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-4")
    stored = tmp_path / "cut" / "config.json"
    stored.write_text(stored.read_text().replace(str(exported), str(start)))
    jobs.run(tmp_path, ["--resume", "--run-dir", "cut"], 2)
    assert jobs.losses(tmp_path / "cut") == whole
    again = ["--init-from", str(start), "--run-dir", "cut", "--resume", "auto"]
    jobs.run(tmp_path, [*inputs, *START, *again], 2)
    assert export.main([str(tmp_path / "cut"), str(tmp_path / "out")]) == 0
    shutil.rmtree(tmp_path / "cut" / "checkpoints")
    error = jobs.refused(jobs.start(tmp_path, ["--resume", "--run-dir", "cut"], 2))
    assert f"--init-from: the weights in {start} cannot be read" in error


@pytest.mark.parametrize("world_size", [0, 2])
def test_a_checkpoint_made_elsewhere(
    theirs: Callable[..., Path], inputs: list[str], tmp_path: Path, world_size: int
) -> None:
    """Another shape, special tokens in other places: out comes the same shape, trained."""
    folder = theirs()
    arguments = [*inputs, *START, "--init-from", str(folder), "--run-dir", "run", "--device", "cpu"]
    told = jobs.run(tmp_path, arguments, world_size)
    assert "model: BERT 2x48" in told
    assert export.main([str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (BertForPreTraining.from_pretrained(f) for f in (folder, tmp_path / "out"))
    for name in (*SMALL_MODEL, "vocab_size"):
        assert getattr(after.config, name) == getattr(before.config, name)
    weights = before.bert.embeddings.word_embeddings.weight
    assert not torch.equal(weights, after.bert.embeddings.word_embeddings.weight)
    assert torch.allclose(weights, after.bert.embeddings.word_embeddings.weight, atol=0.1)
    tokenizers = [AutoTokenizer.from_pretrained(f) for f in (folder, tmp_path / "out")]
    assert tokenizers[0](SENTENCE)["input_ids"] == tokenizers[1](SENTENCE)["input_ids"]


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertModel])
def test_heads_that_it_lacks_are_drawn(
    theirs: Callable[..., Path], inputs: list[str], tmp_path: Path, cls: Any
) -> None:
    """A line names them."""
    arguments = [*inputs, *START, "--init-from", str(theirs(cls)), "--run-dir", "run"]
    told = jobs.run(tmp_path, arguments, 2)
    (line,) = (line for line in told.splitlines() if "drawn anew" in line)
    assert "cls.seq_relationship.weight" in line
    assert ("cls.predictions.transform.dense.weight" in line) == (cls is BertModel)
    assert "encoder" not in line


def test_weights_in_torch_s_format(
    theirs: Callable[..., Path], inputs: list[str], tmp_path: Path
) -> None:
    """pytorch_model.bin, with the buffer that older checkpoints have."""
    folder = theirs()
    weights = BertForPreTraining.from_pretrained(folder).state_dict()
    weights["bert.embeddings.position_ids"] = torch.arange(40)[None]
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    told = jobs.run(tmp_path, [*inputs, *START, "--init-from", str(folder), "--run-dir", "run"], 0)
    assert f"weights: those of {folder}" in told


def _cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _not_finite(folder: Path) -> None:
    model = BertForPreTraining.from_pretrained(folder)
    with torch.no_grad():
        model.bert.pooler.dense.bias[3] = float("nan")
    model.save_pretrained(folder)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "damaged weights": (_cut_off, "the weights in .* cannot be read .*; restore them"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "weights in .* cannot be read"),
    "not finite": (_not_finite, r"bert.pooler.dense.bias is not finite"),
    "other shape": (
        _change_config(intermediate_size=96),
        r"intermediate.dense.bias of \(80,\), not \(96,\)",
    ),
    "lacks layers": (_change_config(num_hidden_layers=3), r"lacks bert.encoder.layer.2.*no whole"),
    "more layers": (_change_config(num_hidden_layers=1), r"has bert.encoder.layer.1.*has not"),
    "other model": (_change_config(model_type="roberta"), r"of model_type roberta; only bert"),
    "decoder": (_change_config(is_decoder=True), r"has is_decoder True; it must be False"),
    "segments": (_change_config(type_vocab_size=1), r"type_vocab_size 1; pairs .* need 2"),
    "no number": (_change_config(hidden_size="a"), r"has hidden_size a; restore it"),
    "no JSON": (lambda f: (f / "config.json").write_text("{"), r"config.json is damaged"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config.json"),
    "no tokenizer": (lambda f: (f / "vocab.txt").unlink(), r"has no tokenizer.json and no vocab"),
    "small vocabulary": (
        _change_config(vocab_size=16),
        r"has \d+ tokens, the model a vocabulary of 16; they are not of one checkpoint",
    ),
    "gone": (shutil.rmtree, r"is not a folder; a name of a hub is not downloaded .*hf download"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_taken(
    theirs: Callable[..., Path], inputs: list[str], tmp_path: Path, fault: str
) -> None:
    """Both ranks end, with one line that names what is wrong and what to do."""
    folder = theirs()
    spoil, message = FAULTS[fault]
    spoil(folder)
    arguments = [*inputs, *START, "--init-from", str(folder), "--run-dir", "run"]
    error = jobs.refused(jobs.start(tmp_path, arguments, 2))
    assert re.search(message, error), error


def test_weights_that_would_not_reach_all_ranks_are_refused(
    theirs: Callable[..., Path], inputs: list[str], tmp_path: Path
) -> None:
    arguments = [*inputs, *START, "--init-from", str(theirs()), "--run-dir", "run"]
    job = jobs.start(tmp_path, [*arguments, "--sharding", '{"broadcast_params": false}'], 2)
    assert "broadcast_params must not be false with --init-from" in jobs.refused(job)


def test_a_fine_tuned_model_is_refused(
    theirs: Callable[..., Path], inputs: list[str], tmp_path: Path
) -> None:
    """What it has beside BERT is named."""
    arguments = [*inputs, *START, "--init-from", str(theirs(BertForSequenceClassification))]
    error = jobs.refused(jobs.start(tmp_path, [*arguments, "--run-dir", "run"], 2))
    assert "has classifier.bias, classifier.weight, which BertForPreTraining has not" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-size", "tiny"], r"--model-size cannot be given beside --init-from: .* 2x48"),
        (["--vocab-size", "99", "--model-size", "mini"], r"--model-size, --vocab-size cannot"),
        (["--seq-len", "48"], r"has 40 positions, --seq-len \(or a phase\) asks for 48; use at"),
        (["--recipe", "nvidia-base"], r"is BERT 2x48, --recipe nvidia-base is of BERT base"),
    ],
)  # fmt: skip
def test_options_that_contradict_it(
    theirs: Callable[..., Path], arguments: list[str], message: str
) -> None:
    """They are refused, and both sides are named."""
    with pytest.raises(UsageError, match=message):
        parse_config(["--init-from", str(theirs()), *arguments])


def test_a_dry_run_is_of_its_sizes(
    theirs: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the folder its config.json is read."""
    folder = theirs()
    (folder / "model.safetensors").unlink()
    monkeypatch.chdir(tmp_path)
    assert pretrain.main(["--init-from", str(folder), "--dry-run", "4"]) == 0
    told = capsys.readouterr().out
    assert "BERT 2x48, lamb" in told
    config = BertConfig.from_pretrained(folder)
    numel = sum(param.numel() for param in BertForPreTraining(config).parameters())
    assert f"{numel:,} elements" in told


def test_another_start_is_refused_on_resume(
    exported: Path, inputs: list[str], tmp_path: Path
) -> None:
    """A run has one start."""
    jobs.run(tmp_path, [*inputs, *START, "--init-from", str(exported), "--run-dir", "run"], 0)
    with pytest.raises(UsageError, match=r"was made with --init-from .*, not other"):
        parse_config(["--resume", "--run-dir", str(tmp_path / "run"), "--init-from", "other"])


# The page


def test_the_page_s_commands_run(finished: Path, inputs: list[str], tmp_path: Path) -> None:
    """As they stand; the second one is shortened by options after it."""
    text = (jobs.REPOSITORY / "launch" / "bert" / "transformers.md").read_text()
    first, second = re.findall(r"^```sh\n(.*?)\n```", text, re.MULTILINE | re.DOTALL)
    (tmp_path / "launch").symlink_to(jobs.REPOSITORY / "launch")
    shutil.copytree(finished, tmp_path / "runs" / "bert-001")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = {"PATH": path, "PYTHONPATH": str(jobs.REPOSITORY), "OMP_NUM_THREADS": "1"}
    for command in (first, shlex.join([*shlex.split(second), *inputs, *START])):
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert f"weights: those of {tmp_path / 'exported'}" in done.stdout
    assert len(jobs.losses(tmp_path / "runs" / "bert-002")) == 4
