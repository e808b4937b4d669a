"""python -m shardfuse doctor: alone, under torchrun, with a rank that is ill, behind a firewall."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from launch.bench.hosts import Hosts, reason_unavailable
from shardfuse.doctor import command
from shardfuse.doctor.checks import BUILDS, CHECKS
from shardfuse.doctor.host import Finding

pytestmark = pytest.mark.timeout(180)

REPOSITORY = Path(__file__).parents[2]
DOCTOR = ["-m", "shardfuse", "doctor", "--json"]
BEFORE = ["ranks", "torch", "torch_npu and CANN", "environment", "process group"]


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def torchrun(*command: str, num_ranks: int = 2) -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code, and what the first rank has found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    result = subprocess.run(
        [*launcher, "--nproc-per-node", str(num_ranks), *command],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("[{")]
    assert lines, result.stderr
    found: list[dict[str, Any]] = json.loads(lines[0])
    return result.returncode, found


def test_alone() -> None:
    result = subprocess.run(
        [sys.executable, *DOCTOR],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    found = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 0, result.stdout
    assert list(found) == [*BEFORE, *CHECKS]
    assert len(found["optimizers"]["values"]) == len(BUILDS)


def test_rows_of_ascend_are_printed_where_torch_npu_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [Finding(name, "ok", "fine") for name in ("ranks", "formats")]
    for version, names in ((None, ["ranks"]), ("2.13.0", ["ranks", "formats"])):
        monkeypatch.setattr(command, "installed_version", lambda name, v=version: v)
        command._show(found, sys.stdout, as_json=False)
        assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == names


def test_two_ranks() -> None:
    code, found = torchrun(*DOCTOR)
    assert code == 0, found
    assert [finding["name"] for finding in found] == [*BEFORE, *CHECKS]
    verdicts = {finding["name"]: finding["verdict"] for finding in found}
    not_here = {name for name, verdict in verdicts.items() if verdict == "not run"}
    assert not_here == {"formats", "NPU settings", "room for communicators"}  # of an NPU
    assert {v for name, v in verdicts.items() if name not in not_here} == {"ok"}, found
    rates = found[-3]["values"] | found[-1]["values"]
    assert len(rates) == 8  # two kinds at two sizes, aligned and not
    assert all(value > 0 for value in rates.values())


def test_a_wrong_interface_is_named() -> None:
    """Before a transport waits for it in vain."""
    interfaces = [name for _, name in socket.if_nameindex()]
    result = subprocess.run(
        [sys.executable, *DOCTOR],
        env=environment(HCCL_SOCKET_IFNAME="=nosuch0"),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    found = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 1
    assert "HCCL_SOCKET_IFNAME==nosuch0" in found["environment"]["text"]
    assert all(name in found["environment"]["remedy"] for name in interfaces)


# {what is ill on rank 1: (program, the check that finds it, its words)}
ILL = {
    "sums": (
        "checks._integers = lambda n, r, d, f=checks._integers: f(n, r, d) + (n > 5000)",
        "sums over ranks",
        "sums over ranks are wrong",
    ),
    "nan": (
        "P.all_reduce = lambda s, t, *a, f=P.all_reduce, **k: f(s, t.nan_to_num_(9, 9), *a, **k)",
        "inf and nan",
        "inf and nan arrive as",
    ),
    "minus zero": (
        "P.all_reduce = lambda s, t, *a, f=P.all_reduce, **k: f(s, t.add_(0.0), *a, **k)",
        "minus zero",
        "the sign of zero is wrong after all-reduce of float32, all-reduce of bfloat16",
    ),
    "raises": (
        "checks.CHECKS['alignment'] = lambda *a: 1 / 0",
        "alignment",
        "rank 1: ZeroDivisionError",
    ),
    "dies": ("checks.CHECKS['optimizers'] = lambda *a: os._exit(3)", "optimizers", "rank "),
}

PROGRAM = """
import os, sys
from shardfuse.comm.gloo import PairwiseCommunicator as P
from shardfuse.doctor import checks
from shardfuse.__main__ import main
if os.environ["RANK"] == "1":
    exec(sys.argv[1])
sys.exit(main(["doctor", "--json", "--limit-s", "8"]))
"""


@pytest.mark.parametrize("what", ILL)
def test_one_rank_is_ill(what: str, tmp_path: Path) -> None:
    """The check says so, on all ranks; what would come after it is not run."""
    fault, check, words = ILL[what]
    port = free_port()
    script = tmp_path / "ill.py"
    script.write_text(PROGRAM)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), fault],
            env=environment(
                RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    found = json.loads(outputs[0])
    assert [process.returncode for process in processes] == [1, 3 if what == "dies" else 1]
    by_name = {finding["name"]: finding for finding in found}
    assert by_name[check]["verdict"] == "failed", found
    assert words in by_name[check]["text"]
    names = list(by_name)
    later = names[names.index(check) + 1 :]
    assert {by_name[name]["verdict"] for name in later} == {"not run"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


MORE = """
import json, os
from shardfuse.doctor import Finding, examine
is_second = os.environ["RANK"] == "1"
more = {
    "fails": lambda comm, device: Finding("", "failed", "bad"),
    "raises on all": lambda comm, device: 1 / 0,
    "is made": lambda comm, device: Finding("", "ok", str(comm.world_size)),
    "raises on one": lambda comm, device: 1 / 0 if is_second else Finding("", "ok", "good"),
    "is not made": lambda comm, device: Finding("", "ok", "good"),
}
told = []
found = examine(limit_s=20, device="cpu", more=more, tell=told.append)
assert told == found
if not is_second:
    print(json.dumps([finding.to_json() for finding in found]))
"""


def test_more_checks(tmp_path: Path) -> None:
    """Checks of others follow the doctor's, as long as all ranks go the same way."""
    script = tmp_path / "more.py"
    script.write_text(MORE)
    _, found = torchrun(str(script))
    by_name = {finding["name"]: finding for finding in found}
    assert list(by_name)[:-5] == [*BEFORE, *CHECKS]
    verdicts = {name: by_name[name]["verdict"] for name in list(by_name)[-5:]}
    assert verdicts == {
        "fails": "failed",
        "raises on all": "failed",
        "is made": "ok",
        "raises on one": "failed",
        "is not made": "not run",
    }
    assert by_name["is made"]["text"] == "2"
    assert by_name["raises on one"]["text"].startswith("rank 1: ZeroDivisionError")


STAND_IN = """
import json, os
import torch
from launch.acceptance.ranks import QUICK, own_checks
from shardfuse.doctor import examine
from tests.support import contract
contract.register()
more = own_checks(QUICK, torch.device("cpu"), None)
found = examine("hccl", 30, device="cpu", more=more)
if os.environ["RANK"] == "0":
    print(json.dumps([finding.to_json() for finding in found]))
"""


@pytest.mark.parametrize("zero_copy", ["0", "1"])
def test_on_what_stands_in_for_hccl(
    zero_copy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the doctor's and of acceptance's is refused, but what is 4 bytes off on purpose.

    With zero-copy, too, which changes the inputs of reduce-scatters.
    """
    monkeypatch.setenv("TORCH_HCCL_ZERO_COPY", zero_copy)
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    _, found = torchrun(str(script))
    by_name = {finding["name"]: finding for finding in found}
    assert not [finding for finding in found if finding["verdict"] == "failed"]
    warned = {name for name, finding in by_name.items() if finding["verdict"] == "warning"}
    timed = {"step against DDP", "memory against the plan"}  # of a CPU
    expected = {"bandwidth, 4 bytes off"} | ({"environment"} if zero_copy == "1" else set())
    assert warned - timed == expected
    assert "not possible: refused: HCCL all_gather" in by_name["all-gather in place"]["text"]
    assert "byte misalignment" in by_name["bandwidth, 4 bytes off"]["text"]
    assert by_name["process group"]["text"] == "hccl connects 2 ranks"


WAITS = """
import os, sys, time
from pathlib import Path
from shardfuse.doctor.world import World
from shardfuse.__main__ import main
folder, connect = Path(sys.argv[1]), World.connect
def late(*args):
    (folder / f"met {os.environ['RANK']}").touch()
    while not (folder / "down").exists():
        time.sleep(0.05)
    return connect(*args)
World.connect = late
sys.exit(main(["doctor", "--json", "--limit-s", "6"]))
"""


@pytest.mark.parametrize("when", ["from the start", "after they have met"])
def test_behind_a_firewall(when: str, tmp_path: Path) -> None:
    """A link that drops everything: an end in seconds, which says who cannot be reached."""
    reason = reason_unavailable()
    if reason is not None:
        pytest.skip(reason)
    script = tmp_path / "doctor.py"
    script.write_text(WAITS)
    with Hosts(2, None) as hosts:
        switch = hosts.namespaces()[-1]
        cut = ["ip", "-n", switch, "link", "set", "port1", "down"]
        if when == "from the start":
            (tmp_path / "down").touch()
            subprocess.run(cut, check=True)
        ranks = [
            subprocess.Popen(
                [*hosts.command(rank), sys.executable, str(script), str(tmp_path)],
                env=environment(
                    RANK=str(rank),
                    WORLD_SIZE="2",
                    MASTER_ADDR=hosts.address(0),
                    MASTER_PORT="29555",
                    **hosts.environment(rank),
                ),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]
        deadline = time.monotonic() + 60
        while when != "from the start" and len(list(tmp_path.glob("met *"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        if when != "from the start":
            subprocess.run(cut, check=True)
            (tmp_path / "down").touch()
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], outputs
    found = {finding["name"]: finding for finding in json.loads(outputs[0])}
    name = "ranks" if when == "from the start" else "process group"
    assert found[name]["verdict"] == "failed"
    assert found[name]["remedy"]
    assert "rank" in found[name]["text"]
