"""Look at the command of a job without an NPU: options, files, ranks, memory.

    python -m launch.npu.check -- torchrun --standalone --nproc-per-node 8 launch/bert/pretrain.py

The command is parsed by the programs' own parsers. Exit code 2, and one line, where it cannot run.
With `--here` before the `--`, this node is to run it at once, and has to have NPUs for it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "launch" / "bert"))

from pretraining.errors import UsageError, not_installed  # noqa: E402

try:
    from pretraining.config import check_options, parse_config
except ModuleNotFoundError as error:
    print(f"launch.npu.check: error: {not_installed(error)}", file=sys.stderr)
    sys.exit(2)

NPU_GB = 64
SCRIPT = "launch/bert/pretrain.py"
VARIABLES = (
    *("HCCL_CONNECT_TIMEOUT", "TASK_QUEUE_ENABLE", "CPU_AFFINITY_CONF"),
    *("MULTI_STREAM_MEMORY_REUSE", "PYTORCH_NPU_ALLOC_CONF", "TORCH_HCCL_ZERO_COPY"),
    "SHARDFUSE_IN_PLACE_ALL_GATHER",
    *("HCCL_BUFFSIZE", "HCCL_SOCKET_IFNAME", "ASCEND_RT_VISIBLE_DEVICES"),
)
"""Of the environment, that are shown where they are set."""


@dataclass(frozen=True)
class Job:
    """What a command starts.

    Attributes:
        world_size: ranks in all.
        size, optimizer: of launch/bert's options, as ``shardfuse plan`` names them.
        dtype: of the parameters.
        sharding: more of ShardConfig, as JSON.
        stage: of DeepSpeed's ZeRO; from 1 on DeepSpeed shards, and not shardfuse.
    """

    world_size: int
    size: str
    optimizer: str
    dtype: str
    sharding: str = "{}"
    stage: int = 0


def main(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> int:
    """Print the command, its environment and the memory it takes; return 0, or 2."""
    is_here = list(argv[:1]) == ["--here"]
    command = list(argv[is_here:])
    command = command[command[:1] == ["--"] :]
    # Exactly what runs, before anything is said against it.
    print(f"command: {shlex.join(command)}")
    for name in VARIABLES:
        if name in environment:
            print(f"  {name}={environment[name]}")
    try:
        job = look(command, environment)
        if is_here:
            _check_npus(command)
        print(memory(job, _npu_gb(environment)), flush=True)
    except UsageError as error:
        print(f"launch.npu.check: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def look(command: Sequence[str], environment: Mapping[str, str]) -> Job:
    """Return what a command starts.

    Raises:
        UsageError: it cannot run.
    """
    programs = {"torchrun": _torchrun, "deepspeed": _deepspeed}
    start = next((i for i, word in enumerate(command) if word in programs), None)
    if start is None:
        raise UsageError(f"neither torchrun nor deepspeed is in {shlex.join(command)!r}")
    return programs[command[start]](command[start + 1 :], environment)


def _torchrun(arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    from torch.distributed.run import get_args_parser

    parsed = _parsed(get_args_parser(), arguments, "torchrun")
    num_nodes, per_node = (
        _number("NNODES", parsed.nnodes.removeprefix("1:")),
        _number("NPROC", parsed.nproc_per_node),
    )
    if not 0 <= parsed.node_rank < num_nodes:
        raise UsageError(f"NODE_RANK={parsed.node_rank} is not in 0 to {num_nodes - 1}")
    _check_devices(per_node, environment)
    _check_script(parsed.training_script)
    options = parsed.training_script_args
    check_options(options, num_nodes * per_node)
    config = parse_config(options)
    config.check_batches(num_nodes * per_node)  # those of a recipe, too
    # Autocast leaves parameters in fp32.
    return Job(num_nodes * per_node, config.model_size, config.optimizer, "fp32", config.sharding)


def _deepspeed(arguments: Sequence[str], environment: Mapping[str, str]) -> Job:
    try:
        from deepspeed.launcher import runner
    except ImportError:
        raise UsageError("deepspeed is not installed: pip install -e '.[bert,deepspeed]'") from None
    from launch.deepspeed import train_bert

    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            parsed = runner.parse_args(list(arguments))
    except SystemExit:
        raise UsageError(f"deepspeed refuses its options: {_last_line(said)}") from None
    if not Path(parsed.hostfile).is_file():
        raise UsageError(f"HOSTFILE={parsed.hostfile}: no such file; a line is: worker-0 slots=8")
    try:
        slots = runner.fetch_hostfile(parsed.hostfile)
    except ValueError as error:
        raise UsageError(f"HOSTFILE={parsed.hostfile}: {error}") from None
    world_size = sum(slots.values())
    _check_script(parsed.user_script)
    own = argparse.ArgumentParser(allow_abbrev=False)
    own.add_argument("--deepspeed-config", type=Path, required=True)
    given, options = own.parse_known_args(parsed.user_args)
    settings = train_bert.read_settings(given.deepspeed_config)
    try:
        kind, dtype, stage = _chosen(settings)
    except (AttributeError, KeyError) as error:
        text = f"--deepspeed-config {given.deepspeed_config} is none of DeepSpeed's: {error}"
        raise UsageError(text) from None
    _check_batch(settings, world_size)
    options += ["--global-batch-size", str(settings["train_batch_size"])]
    check_options(options, world_size)
    config = parse_config(options)
    return Job(world_size, config.model_size, kind, dtype, stage=stage)


def _chosen(settings: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return the optimizer, the dtype of parameters, and the stage; KeyError, AttributeError."""
    is_bf16 = settings.get("bf16", {}).get("enabled", False)
    kind = settings["optimizer"]["type"].removeprefix("Sharded").removeprefix("NpuFused").lower()
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    return kind, "bf16" if is_bf16 else "fp32", stage


def _check_batch(settings: Mapping[str, Any], world_size: int) -> None:
    """DeepSpeed wants train batch = micro batch x accumulation x ranks."""
    names = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
    batch, micro, num_steps = (_number(name, str(settings.get(name, 1))) for name in names)
    if batch % (micro * num_steps * world_size):
        raise UsageError(
            f"train_batch_size {batch} is no multiple of {world_size} ranks x {num_steps} "
            f"accumulation steps x {micro} samples"
        )


def _parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str], program: str
) -> argparse.Namespace:
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            return parser.parse_args(list(arguments))
    except SystemExit:
        raise UsageError(f"{program} refuses its options: {_last_line(said)}") from None


def _last_line(said: io.StringIO) -> str:
    lines = said.getvalue().strip().splitlines()
    return lines[-1] if lines else "it says nothing"


def _number(name: str, text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{name} must be a whole number from 1 on, got {text!r}")
    return int(text)


def _npu_gb(environment: Mapping[str, str]) -> float:
    text = environment.get("NPU_GB") or str(NPU_GB)
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise UsageError(f"NPU_GB must be a number above 0, got {text!r}")


def _check_npus(command: Sequence[str]) -> None:
    """launch/bert falls back to the CPU, where a recipe for NPUs would take all memory and time."""
    start = next((i for i, word in enumerate(command) if word.endswith(SCRIPT)), None)
    if start is None:
        return
    is_cpu = parse_config(command[start + 1 :]).device == "cpu"
    if not is_cpu and not _num_npus():
        raise UsageError(
            "this node has no NPU (/dev/davinci*). --dry-run as the first option looks at the "
            "command; --device cpu among the last runs it on the CPU"
        )


def _num_npus() -> int:
    return len(list(Path("/dev").glob("davinci[0-9]*")))


def _check_devices(per_node: int, environment: Mapping[str, str]) -> None:
    """Ranks of a node have an NPU each."""
    shown = environment.get("ASCEND_RT_VISIBLE_DEVICES")
    devices = _num_npus() or None
    number = len([name for name in shown.split(",") if name]) if shown is not None else devices
    if number is not None and per_node > number:
        where = f"ASCEND_RT_VISIBLE_DEVICES={shown} shows" if shown is not None else "this node has"
        raise UsageError(f"NPROC={per_node} ranks a node, but {where} {number} NPUs")


def _check_script(path: str) -> None:
    if not (ROOT / path).is_file():
        raise UsageError(f"{path}: no such file in {ROOT}")


def memory(job: Job, npu_gb: float) -> str:
    """Return what ``python -m shardfuse plan`` says of a rank's memory.

    Raises:
        UsageError: it does not fit.
    """
    if job.stage:
        return f"memory: not planned, as DeepSpeed shards at stage {job.stage}"
    from shardfuse.__main__ import main as shardfuse

    options = ["plan", "--model", f"bert-{job.size}", "--world-size", str(job.world_size)]
    options += ["--optimizer", job.optimizer, "--dtype", job.dtype, "--sharding", job.sharding]
    errors = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(errors):
        try:
            code = shardfuse([*options, "--device", "npu", "--json"])
        except SystemExit:
            code = 2
    if code != 0:
        raise UsageError(f"python -m shardfuse {shlex.join(options)}: {_last_line(errors)}")
    planned = json.loads(said.getvalue())
    held, peak = planned["total_nbytes"] / 1e9, planned["peak_nbytes"] / 1e9
    if peak >= npu_gb:
        raise UsageError(
            f"a rank holds {held:.1f} GB before activations, and {peak:.1f} GB in a step or while "
            f"it builds the optimizer; an NPU has {npu_gb:.0f} (NPU_GB): "
            "use more ranks, or --sharding '{\"stage\": 2}'"
        )
    return (
        f"memory: {held:.1f} GB of {npu_gb:.0f} a rank of {job.world_size}, "
        f"{npu_gb - held:.1f} left for activations (python -m shardfuse {shlex.join(options)})\n"
        "fits, by the plan; not run on hardware"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
