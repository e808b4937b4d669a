"""launch/npu's scripts: dry runs, which the programs' own parsers accept, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from launch.npu import check

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "launch" / "npu"
RECIPES = sorted(path.stem for path in (FOLDER / "recipes").glob("*.args"))
CONFIG = "launch/npu/recipes/bert-large-deepspeed.json"

pytestmark = pytest.mark.timeout(120)


def environment(**variables: str) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "OMP_NUM_THREADS": "1", "HCCP_WAIT_S": "0", "DS_ACCELERATOR": "cpu"}
    return os.environ | own | variables


def script(
    name: str, *options: str, cwd: Path = REPOSITORY, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(FOLDER / name), *options],
        cwd=cwd,
        env=environment(**variables),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def command_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the command that a dry run has printed."""
    assert result.returncode == 0, result.stdout + result.stderr
    line = next(line for line in result.stdout.splitlines() if line.startswith("command: "))
    return shlex.split(line.removeprefix("command: "))


def check_torchrun(command: list[str], world_size: int) -> None:
    """torchrun's parser takes it, and launch/bert's what is left."""
    from pretraining.config import check_options

    parsed = get_args_parser().parse_args(command[1:])
    assert parsed.training_script == str(REPOSITORY / "launch" / "bert" / "pretrain.py")
    assert int(parsed.nnodes.removeprefix("1:")) * int(parsed.nproc_per_node) == world_size
    check_options(parsed.training_script_args, world_size)


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("launch/*/*.sh")), ids=lambda p: p.name)
def test_syntax(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK) or path.name == "common.sh"


@pytest.mark.parametrize("path", ["npu/acceptance.sh", "gpu/acceptance.sh", "npu/nodes.sh"])
def test_a_shell_that_prints_where_it_goes(path: str) -> None:
    """So does cd in a shell whose CDPATH is exported."""
    result = subprocess.run(
        ["bash", f"launch/{path}", *(["--markdown"] if "acceptance" in path else [])],
        cwd=REPOSITORY,
        env=environment(CDPATH="."),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    first = (result.stdout + result.stderr).splitlines()[0]
    known = "| | Ascend NPU, HCCL |", "nodes.sh: error: name a recipe: bert-large"
    assert first.startswith(known), first


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_node(recipe: str) -> None:
    """Every recipe fits, on eight NPUs, with MindSpeed-LLM's variables; nothing is started."""
    result = script("a2.sh", "--dry-run", recipe)
    command = command_of(result)
    assert command[0] == "torchrun"
    assert "--standalone" in command
    check_torchrun(command, 8)
    for line in (
        "HCCL_CONNECT_TIMEOUT=3600",
        "TASK_QUEUE_ENABLE=2",
        "CPU_AFFINITY_CONF=1",
        "MULTI_STREAM_MEMORY_REUSE=2",
        "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True",
    ):
        assert f"  {line}\n" in result.stdout
    assert "GB of 64 a rank of 8" in result.stdout
    assert result.stdout.endswith("not run on hardware\n")


def test_sixteen() -> None:
    check_torchrun(command_of(script("a3.sh", "--dry-run", RECIPES[0])), 16)


def test_a_variable_that_is_set_is_kept() -> None:
    result = script(
        "a2.sh", "--dry-run", RECIPES[0], HCCL_CONNECT_TIMEOUT="600", HCCL_BUFFSIZE="64"
    )
    assert "  HCCL_CONNECT_TIMEOUT=600\n" in result.stdout
    assert "  HCCL_BUFFSIZE=64\n" in result.stdout


def test_several_nodes() -> None:
    result = script(
        "nodes.sh",
        "--dry-run",
        "bert-large",
        NNODES="4",
        NODE_RANK="3",
        MASTER_ADDR="10.0.0.1",
    )
    command = command_of(result)
    check_torchrun(command, 32)
    parsed = get_args_parser().parse_args(command[1:])
    assert (parsed.node_rank, parsed.master_addr) == (3, "10.0.0.1")


def test_slurm(tmp_path: Path) -> None:
    """By sbatch, whose copy of the script lies elsewhere: the first node is the meeting point."""
    (tmp_path / "copy").write_text((FOLDER / "slurm.sh").read_text())
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node07\necho node08\n")
    (tmp_path / "scontrol").chmod(0o755)
    own = environment(
        SLURM_SUBMIT_DIR=str(REPOSITORY),
        SLURM_NNODES="2",
        SLURM_JOB_ID="77",
        SLURM_JOB_NODELIST="node[07-08]",
    )
    own["PATH"] = f"{tmp_path}{os.pathsep}{own['PATH']}"
    result = subprocess.run(
        ["bash", str(tmp_path / "copy"), "--dry-run", "bert-large-short", "--run-dir", "mine"],
        env=own,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    command = command_of(result)
    assert command[0] == "srun"
    start = command.index("torchrun")
    check_torchrun(command[start:], 16)
    parsed = get_args_parser().parse_args(command[start + 1 :])
    assert (parsed.rdzv_endpoint, parsed.rdzv_id) == ("node07:29500", "77")
    folder = ["--run-dir", "runs/slurm-77", "--resume", "auto"]
    assert parsed.training_script_args[:4] == folder
    assert parsed.training_script_args[-2:] == ["--run-dir", "mine"]  # the last one counts


def hostfile(folder: Path, text: str = "worker-0 slots=8\nworker-1 slots=8\n") -> str:
    path = folder / "hostfile"
    path.write_text(text)
    return str(path)


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed"
)


@needs_deepspeed
def test_deepspeed(tmp_path: Path) -> None:
    result = script(
        "deepspeed.sh", "--dry-run", CONFIG, "--model-size", "large", HOSTFILE=hostfile(tmp_path)
    )
    command = command_of(result)
    from deepspeed.launcher.runner import fetch_hostfile, parse_args

    parsed = parse_args(command[1:])
    assert parsed.user_script == str(REPOSITORY / "launch" / "deepspeed" / "train_bert.py")
    assert parsed.no_local_rank  # train_bert.py knows no --local_rank
    assert sum(fetch_hostfile(parsed.hostfile).values()) == 16
    assert "a rank of 16" in result.stdout
    assert "--dtype bf16" in result.stdout


@needs_deepspeed
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-0 slots=7\n", "train_batch_size 65536 is no multiple of 7 ranks"),
        ("worker-0 eight\n", "HOSTFILE="),
        (None, "no such file"),
    ],
)
def test_deepspeed_refuses(text: str | None, words: str, tmp_path: Path) -> None:
    path = str(tmp_path / "none") if text is None else hostfile(tmp_path, text)
    result = script("deepspeed.sh", "--dry-run", CONFIG, HOSTFILE=path)
    assert result.returncode == 2, result.stdout
    assert words in result.stderr


DEEPSPEED = """#!/bin/sh
cp -p "$DS_ENV_FILE" "$KEPT"
echo "$DS_ENV_FILE" >"$KEPT.name"
"""


@pytest.mark.parametrize("ends", ["alone", "by a signal"])
def test_what_deepspeed_passes_on(ends: str, tmp_path: Path) -> None:
    """The user's own file of variables is read and left as it is; none need be set.

    Secrets may be among them: the copy is only this user's, and is gone when the job is.
    """
    own, kept, temporary = tmp_path / "my variables", tmp_path / "kept", tmp_path / "temporary"
    own.write_text("HTTP_PROXY=a b\n\nTASK_QUEUE_ENABLE=1")
    own.chmod(0o600)
    temporary.mkdir()
    (tmp_path / "deepspeed").write_text(DEEPSPEED + "kill -TERM $PPID\n" * (ends != "alone"))
    (tmp_path / "python3").write_text("#!/bin/sh\n")  # the look at the command
    for name in ("deepspeed", "python3"):
        (tmp_path / name).chmod(0o755)
    for name in (str(own), own.name):
        variables = {"HOME": str(tmp_path), "DS_ENV_FILE": name, "TORCH_HCCL_ZERO_COPY": "1"}
        variables |= {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        variables |= {"KEPT": str(kept), "TMPDIR": str(temporary)}
        result = script("deepspeed.sh", "no.json", HOSTFILE=hostfile(tmp_path), **variables)
        assert (result.returncode == 0) == (ends == "alone"), result.stderr
        assert own.read_text() == "HTTP_PROXY=a b\n\nTASK_QUEUE_ENABLE=1"
        lines = kept.read_text().splitlines()
        assert {"TASK_QUEUE_ENABLE=2", "TORCH_HCCL_ZERO_COPY=1"} <= set(lines)
        assert lines[-2:] == ["HTTP_PROXY=a b", "TASK_QUEUE_ENABLE=1"]
        assert kept.stat().st_mode & 0o077 == 0
        assert not Path((tmp_path / "kept.name").read_text().strip()).exists()
        assert not list(temporary.iterdir())


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_every_option_of_a_recipe_counts(end: str, tmp_path: Path) -> None:
    """Also the last one of a file without a last line's end, and every line of CORPUS."""
    folder = tmp_path / "launch" / "npu"
    (folder / "recipes").mkdir(parents=True)
    (folder / "common.sh").write_text((FOLDER / "common.sh").read_text())
    text = f"# one{end or chr(10)}--dtype bf16{end or chr(10)}--save-every 200{end}"
    (folder / "recipes" / "own.args").write_bytes(text.encode())
    shell = f'. {folder / "common.sh"}; take own --last; printf "%s|" "${{options[@]}}"'
    result = subprocess.run(
        ["bash", "-c", shell],
        env=environment(CORPUS="a.txt  b\nc.txt\n\td.txt\n"),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    expected = "--dtype|bf16|--save-every|200|--corpus|a.txt|b|c.txt|d.txt|--last|"
    assert result.stdout == expected


@needs_deepspeed
def test_configurations_of_deepspeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is planned where shardfuse shards; an optimizer of others is refused in words."""
    monkeypatch.chdir(REPOSITORY)
    settings = json.loads((REPOSITORY / CONFIG).read_text())
    command = ["deepspeed", "--hostfile", hostfile(tmp_path), "--no_local_rank"]
    command += ["launch/deepspeed/train_bert.py", "--deepspeed-config", str(tmp_path / "ds.json")]

    def look(**changes: Any) -> int:
        (tmp_path / "ds.json").write_text(json.dumps({**settings, **changes}))
        return check.main(["--", *command], {})

    assert look(zero_optimization={"stage": 2}) == 0
    assert "not planned, as DeepSpeed shards at stage 2" in capsys.readouterr().out
    assert look(optimizer={"type": "OneBitAdam", "params": {"lr": 1}}) == 2
    assert "invalid choice: 'onebitadam'" in capsys.readouterr().err
    for key, value, words in (
        ("train_batch_size", "auto", "train_batch_size must be a whole number"),
        ("train_micro_batch_size_per_gpu", "auto", "per_gpu must be a whole number"),
        ("optimizer", {"params": {"lr": 1}}, "is none of DeepSpeed's: 'type'"),
        ("bf16", True, "is none of DeepSpeed's: 'bool' object"),
    ):
        assert look(**{key: value}) == 2
        assert words in capsys.readouterr().err


REFUSED = {
    "no master": ("nodes.sh", {"NNODES": "2", "NODE_RANK": "0"}, [], "needs MASTER_ADDR"),
    "no rank": ("nodes.sh", {"NNODES": "2", "MASTER_ADDR": "a"}, [], "needs NODE_RANK"),
    "rank": (
        "nodes.sh",
        {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "2"},
        [],
        "NODE_RANK=2 is not in 0 to 1",
    ),
    "nodes": ("nodes.sh", {"NNODES": "x", "MASTER_ADDR": "a", "NODE_RANK": "0"}, [], "NNODES must"),
    "devices": (
        "a2.sh",
        {"NPROC": "3", "ASCEND_RT_VISIBLE_DEVICES": "0,1"},
        [],
        "NPROC=3 ranks a node, but ASCEND_RT_VISIBLE_DEVICES=0,1 shows 2 NPUs",
    ),
    "ranks": ("a2.sh", {"NPROC": "7"}, [], "cannot be split over 7 ranks"),
    "text": ("a2.sh", {"CORPUS": "/no/such"}, [], "/no/such is not a file"),
    "option": ("a2.sh", {}, ["--no-such", "1"], "unrecognized arguments: --no-such"),
    "memory": ("a2.sh", {"NPU_GB": "2"}, [], "a rank holds 3.2 GB before activations"),
    "unit": ("a2.sh", {"NPU_GB": "64GB"}, [], "NPU_GB must be a number above 0, got"),
    "no number": ("a2.sh", {"NPU_GB": "nan"}, [], "NPU_GB must be a number above 0, got 'nan'"),
    "sharding": ("a2.sh", {}, ["--sharding", '{"stage": 5}'], "--sharding"),
    "slurm": ("slurm.sh", {"RUN_DIR": ""}, ["--lr", "-1"], "--lr"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    """Exit code 2 and one line that names what is wrong."""
    name, variables, options, words = REFUSED[what]
    result = script(name, "--dry-run", "bert-large", *options, **variables)
    assert result.returncode == 2, result.stdout
    errors = [line for line in result.stderr.splitlines() if "error: " in line]
    assert len(errors) == 1, result.stderr
    assert words in errors[0]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("a2.sh", [], "name a recipe: bert-large"),
        ("a2.sh", ["--dry-run", "nothing"], "no recipe is called nothing; there are"),
        ("slurm.sh", ["bert-large-short"], "this is no Slurm job"),
        ("deepspeed.sh", [], "name a configuration"),
        ("deepspeed.sh", [CONFIG], "HOSTFILE must name a file"),
    ],
)
def test_wrong_use(name: str, options: list[str], words: str) -> None:
    result = script(name, *options)
    assert result.returncode == 2
    assert words in result.stderr


def tiny(text_file: Path, folder: Path, *more: str) -> list[str]:
    """Return options that make a recipe a matter of seconds."""
    return [
        *("bert-large-short", "--model-size", "tiny", "--vocab-size", "120", "--seq-len", "24"),
        *("--global-batch-size", "12", "--micro-batch-size", "0", "--dtype", "fp32"),
        *("--eval-samples", "12", "--corpus", str(text_file), "--data-dir", str(folder / "data")),
        *("--run-dir", str(folder / "run"), "--device", "cpu", *more),
    ]


def test_it_runs(text_file: Path, tmp_path: Path) -> None:
    """On two CPU ranks, since no NPU is here, which has to be said; its exit code is the job's."""
    unsaid = script("nodes.sh", *tiny(text_file, tmp_path, "--device", "auto"), NPROC="2")
    assert unsaid.returncode == 2
    assert "this node has no NPU" in unsaid.stderr
    assert "--device cpu" in unsaid.stderr
    assert not (tmp_path / "run").exists()
    result = script("nodes.sh", *tiny(text_file, tmp_path, "--steps", "2"), NPROC="2")
    assert result.returncode == 0, result.stderr
    assert "after 2 steps" in result.stdout
    again = script("nodes.sh", *tiny(text_file, tmp_path, "--steps", "2"), NPROC="2")
    assert again.returncode == 2  # the folder is used: the look at the command says so
    assert "--run-dir" in again.stderr


def test_a_signal_ends_what_deepspeed_has_started(tmp_path: Path) -> None:
    """Its runner has no handler on one host: the launcher below it held the NPUs for ever."""
    (tmp_path / "deepspeed").write_text(
        f"#!{sys.executable}\nimport subprocess\n"
        f"launcher = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{launcher.pid}}\\n')\n"
        "launcher.wait()\n"
    )
    (tmp_path / "deepspeed").chmod(0o755)
    own = environment()
    own["PATH"] = f"{tmp_path}{os.pathsep}{own['PATH']}"
    text = f". {FOLDER / 'common.sh'}; run deepspeed; finish"
    process = subprocess.Popen(["bash", "-c", text], env=own)
    pid, deadline = tmp_path / "pid", time.monotonic() + 30
    while not pid.is_file() or not pid.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) != 0
    status = Path("/proc", pid.read_text().strip(), "status")
    while status.is_file() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_paths_are_from_where_the_user_is(tmp_path: Path) -> None:
    """Texts, configurations and hosts; and other code there may be called launch."""
    (tmp_path / "launch.py").write_text("raise RuntimeError")
    (tmp_path / "mine.txt").write_text("One line of text.\n")
    (tmp_path / "below").mkdir()
    command_of(script("a2.sh", "--dry-run", RECIPES[0], cwd=tmp_path, CORPUS="mine.txt"))
    if importlib.util.find_spec("deepspeed") is not None:
        (tmp_path / "mine.json").write_text((REPOSITORY / CONFIG).read_text())
        hosts = Path(hostfile(tmp_path)).name
        command_of(script("deepspeed.sh", "--dry-run", "mine.json", cwd=tmp_path, HOSTFILE=hosts))
    for kind in ("npu", "gpu"):
        name, report = f"../{kind}/acceptance.sh", "mine.txt/report.json"
        result = script(name, cwd=tmp_path / "below", DEVICE="cpu", REPORT=f"../{report}")
        assert result.returncode == 2
        assert f"--report ../{report}: File exists (../mine.txt)" in result.stderr


def test_a_signal_reaches_the_ranks(text_file: Path, tmp_path: Path) -> None:
    """SIGTERM to the script alone: the ranks save and stop, and the script waits for them."""
    options = tiny(text_file, tmp_path, "--steps", "100000")
    process = subprocess.Popen(
        ["bash", str(FOLDER / "nodes.sh"), *options],
        env=environment(NPROC="2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, deadline = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 60
    while not metrics.is_file() or '"step": 5' not in metrics.read_text():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert "stopped and saved after step" in output
    assert "closing signal" not in output  # by torchrun, after which it waits for 30 seconds only
    assert process.returncode == 143
