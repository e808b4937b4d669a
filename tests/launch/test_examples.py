"""Every example of launch/examples is run by the commands of its page, on two ranks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch.bench import hosts
from launch.bench.hosts import Hosts

pytestmark = [
    pytest.mark.timeout(280),
    pytest.mark.cpu_only("its processes are told nothing of it"),
]

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "launch" / "examples"
TIMEOUT_S = 130.0  # DeepSpeed compiles an extension in its first minute
MAX_LINES = 60
NEEDS = {
    "deepspeed_json.py": ["deepspeed"],
    "hf_trainer.py": ["transformers", "accelerate"],
    "accelerate_loop.py": ["accelerate"],
    "lightning_fit.py": ["lightning"],
}
"""The packages that an example imports besides ours and torch."""

OWN_LINES = re.compile(
    r"(step|epoch) \d+  loss [0-9.]+(  gradient norm [0-9.]+|  torch\.\w+)?"
    r"|world size \d, goes on after step \d+|rank \d of 2, node \d, .*"
    r"|The checkpoint was saved by 2 ranks, this run has 1: random generators start afresh\."
)
PROBLEMS = re.compile(r"warn|error|fail|deprecated|will raise|had other values", re.IGNORECASE)
"""Words that no line of a framework has."""
FOREIGN = [
    "`isinstance(treespec, LeafSpec)` is deprecated",  # Lightning calls torch so
    "The hostname of the client socket cannot be retrieved",  # torch, where hosts have no names
    "`torch.distributed.all_gather_into_tensor` is deprecated",  # DeepSpeed calls torch so
    "return func(*args, **kwargs)",  # the warning's second line
]
FRAMEWORKS = [name for name in NEEDS if name != "accelerate_loop.py"]
"""Examples whose framework prints lines of its own."""

REASON = hosts.reason_unavailable()


def commands_of_the_page() -> dict[str, list[str]]:
    """Return {file: its commands} of the table."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (EXAMPLES / "README.md").read_text().splitlines()
        if line.startswith("| [")
    ]
    return {
        re.findall(r"\((.*)\)", name)[0]: re.findall(r"`(torchrun .*?)`", command)
        for name, _, command, _ in rows
    }


PAGE = commands_of_the_page()


class Run:
    """A command of the page, in a shell of its own that can be ended with all that it started."""

    def __init__(self, command: str, cwd: Path, prefix: list[str], **variables: str) -> None:
        bin_folder = str(Path(sys.executable).parent)  # where this Python's torchrun is
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [*prefix, "bash", "-c", command],
            cwd=cwd,
            env=os.environ
            | {"PATH": os.pathsep.join([bin_folder, os.environ["PATH"]])}
            | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
            | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def output(self, *, has_framework: bool = False) -> str:
        """Return what the command printed, once it has ended well, and as expected."""
        try:
            out, err = self._process.communicate(timeout=TIMEOUT_S)
        finally:
            self.end()
        assert self._process.returncode == 0, out + err
        lines = [line for line in (out + err).splitlines() if line.strip()]
        lines = [line for line in lines if not any(known in line for known in FOREIGN)]
        if has_framework:
            assert not [line for line in lines if PROBLEMS.search(line)], out + err
        else:
            assert not [line for line in lines if not OWN_LINES.fullmatch(line)], out + err
        return out

    def end(self) -> None:
        """Kill what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def run(name: str, index: int, cwd: Path) -> str:
    """Run a command of an example's row to its end; return what it printed."""
    missing = [needed for needed in NEEDS.get(name, []) if importlib.util.find_spec(needed) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")
    if not (cwd / "launch").exists():
        (cwd / "launch").symlink_to(ROOT / "launch")
    return Run(PAGE[name][index], cwd, []).output(has_framework=name in FRAMEWORKS)


def losses_in(output: str) -> list[float]:
    """Return the losses that were printed, which only one rank does."""
    lines = re.findall(r"^((?:step|epoch) \d+)  loss ([0-9.]+)", output, flags=re.MULTILINE)
    assert len({step for step, _ in lines}) == len(lines) > 1, output
    return [float(loss) for _, loss in lines]


def assert_it_fell(output: str) -> None:
    losses = losses_in(output)
    assert losses[-1] < 0.8 * losses[0], output


ONE_COMMAND = [name for name in PAGE if name not in ("checkpoint_resume.py", "two_hosts.py")]


@pytest.mark.parametrize(
    ("name", "index"), [(name, index) for name in ONE_COMMAND for index in range(len(PAGE[name]))]
)
def test_it_trains(name: str, index: int, tmp_path: Path) -> None:
    """On two ranks, whose loss falls."""
    assert "--nproc-per-node 2 " in PAGE[name][index]
    assert_it_fell(run(name, index, tmp_path))


def test_one_rank_goes_on_from_what_two_have_saved(tmp_path: Path) -> None:
    """The second command has another world size, and begins where the first one has ended."""
    first, second = (run("checkpoint_resume.py", index, tmp_path) for index in (0, 1))
    assert "world size 2, goes on after step 0" in first
    assert "world size 1, goes on after step 30" in second
    assert re.findall(r"^step (\d+)", first + second, flags=re.MULTILINE)[5:7] == ["30", "31"]
    assert_it_fell(first)
    assert losses_in(second)[0] < 0.5 * losses_in(first)[0], first + second
    assert losses_in(second)[-1] < losses_in(first)[-1], first + second


def train_on_two_hosts(cwd: Path, prefixes: list[list[str]], **variables: str) -> list[str]:
    """Run both lines of the page at once; return what each printed."""
    (cwd / "launch").symlink_to(ROOT / "launch")
    runs: list[Run] = []
    try:
        for command, prefix in zip(PAGE["two_hosts.py"], prefixes, strict=True):
            runs.append(Run(command, cwd, prefix, **variables))
        return [one.output() for one in runs]
    finally:
        for one in runs:
            one.end()


def check_two_hosts(outputs: list[str]) -> None:
    assert_it_fell(outputs[0])
    for number, output in enumerate(outputs):
        assert f"rank {number} of 2, node {number}, " in output
    assert "loss" not in outputs[1]


@pytest.mark.skipif(REASON is not None, reason=f"no hosts here: {REASON}")
def test_two_hosts(tmp_path: Path) -> None:
    """Network and process namespaces, with a link between them; no host sees the other's memory.

    Their names lead to 127.0.0.1, or nowhere: init_process_group() finds the interface.
    """
    with Hosts(2, None) as made:
        outputs = train_on_two_hosts(
            tmp_path,
            [made.command(0), made.command(1)],
            HOST0=made.address(0),
            PORT="29500",
        )
    check_two_hosts(outputs)


@pytest.mark.skipif(REASON is None, reason="it is run on two hosts")
def test_two_launchers_on_this_host(tmp_path: Path) -> None:
    """Where no hosts can be made, the two lines meet on this one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    check_two_hosts(train_on_two_hosts(tmp_path, [[], []], HOST0="127.0.0.1", PORT=port))


def test_the_page_has_every_example() -> None:
    """No file is left out, and each row has a command."""
    assert sorted(PAGE) == sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert all(PAGE.values())


@pytest.mark.parametrize("name", PAGE)
def test_a_file_says_its_commands_and_is_short(name: str) -> None:
    """Its docstring has the commands of the page, and it can be read on one screen."""
    text = (EXAMPLES / name).read_text()
    docstring = " ".join(text.split('"""')[1].replace("\\\n", " ").split())
    for command in PAGE[name]:
        assert f" launch/examples/{name}" in command
        assert command in docstring
    assert len(text.splitlines()) < MAX_LINES
