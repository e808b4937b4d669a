"""Commands and files of other BERT jobs, as translate.py is given them."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import translate
from pretraining.config import check_options

BERT = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "vocab_size": 30522,
}
SCHEDULE = {
    "num_epochs": 150,
    "warmup_proportion": 0.06,
    "learning_rate": 11e-3,
    "decay_rate": 0.9,
    "decay_step": 250,
    "total_training_steps": 7500,
}
EXPERIMENT = {
    "name": "bing_bert_large_lamb_seq",
    "bert_token_file": "bert-large-uncased",
    "bert_model_file": "bert-large-uncased",
    "bert_model_config": {**BERT, "vocab_size_or_config_json_file": 119547},
    "data": {},
    "mixed_seq_training": {"128": SCHEDULE, "512": {**SCHEDULE, "learning_rate": 2e-3}},
    "validation": {},
}


def engine(batch: int, **params: Any) -> dict[str, Any]:
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "Lamb", "params": {"lr": 11e-3, "weight_decay": 0.01, **params}},
        "gradient_clipping": 1.0,
        "fp16": {"enabled": True, "loss_scale": 0},
    }


FILES = {
    "bert_configs/large.json": BERT,
    "bert_config.json": BERT,
    "bert_large_lamb.json": EXPERIMENT,
    "deepspeed_bsz64k_lamb_config_seq128.json": engine(
        65536, bias_correction=False, max_coeff=0.3, min_coeff=0.01
    ),
    "deepspeed_bsz32k_lamb_config_seq512.json": engine(
        32768, bias_correction=False, max_coeff=0.3, min_coeff=0.01
    ),
    "plain.json": engine(4096),
}

BASE = {
    "nvidia": "--config_file bert_configs/large.json --output_dir out --do_train",
    "google": "--bert_config_file=bert_config.json --output_dir=out --do_train",
    "deepspeed": "--cf bert_large_lamb.json --deepspeed_config plain.json --output_dir out",
}
OURS = {
    "nvidia": "--gpus 8 --corpus a.txt",
    "google": "--corpus a.txt",
    "deepspeed": "--corpus a.txt",
}
IGNORED = {"nvidia": "", "google": "", "deepspeed": "pre_layernorm,lr_schedule"}


def place(folder: Path) -> None:
    """Write their files."""
    (folder / "bert_configs").mkdir()
    for name, content in FILES.items():
        (folder / name).write_text(json.dumps(content))


def run(capsys: Any, line: str) -> tuple[int, str, str]:
    code = translate.main(shlex.split(line))
    told = capsys.readouterr()
    return code, told.out, told.err


def options_in(line: str) -> dict[str, list[str]]:
    """Return what a printed line gives each option, once our parser has accepted it."""
    script, *words = shlex.split(line)
    assert script.endswith("launch/bert/pretrain.py")
    check_options(words, 8)
    starts = [n for n, word in enumerate(words) if word.startswith("--")] + [len(words)]
    return {words[a]: words[a + 1 : b] for a, b in itertools.pairwise(starts)}


def ours_of(name: str) -> str:
    """Return the source and our options before --."""
    return f"{name} {OURS[name]} --ignore={IGNORED[name]}"


_NVIDIA = (
    "python3 -m torch.distributed.launch --nproc_per_node=8 bert/run_pretraining.py"
    " --output_dir=/results/checkpoints --config_file=bert_configs/large.json"
    " --vocab_file=vocab/vocab --num_steps_per_checkpoint=200 --seed=42 --fp16"
    " --allreduce_post_accumulation --allreduce_post_accumulation_fp16 --do_train"
    " --json-summary /results/dllogger.json --disable_progress_bar --num_workers=4"
)
NVIDIA_PHASES = [
    f"{_NVIDIA} --input_dir=/data/1 --train_batch_size=8192 --max_seq_length=128"
    " --max_predictions_per_seq=20 --max_steps=7038 --warmup_proportion=0.2843"
    " --learning_rate=6e-3 --gradient_accumulation_steps=32",
    f"{_NVIDIA} --input_dir=/data/2 --train_batch_size=4096 --max_seq_length=512"
    " --max_predictions_per_seq=80 --max_steps=1563 --warmup_proportion=0.128"
    " --learning_rate=4e-3 --gradient_accumulation_steps=128"
    " --phase2 --resume_from_checkpoint --phase1_end_step=7038",
]
"""The commands of NVIDIA's scripts/run_pretraining.sh with dgxa100-80g_8gpu_fp16's values."""
