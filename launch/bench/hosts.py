"""Hosts on one machine: namespaces on a bridge, whose sending is limited as by a slow link.

    with Hosts(2, "1gbit") as hosts:
        run_ranks("module:function", arguments, world_size=2, hosts=hosts)

Needs root, ``ip`` and ``tc`` (iproute2) and ``unshare`` (util-linux).
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

INTERFACE = "eth0"
_SUBNET = "10.77.0"
_BURST = "256kb"
_LATENCY = "100ms"
_CONGESTION_CONTROL = "reno"
"""Of TCP on the hosts, which would be that of the machine: every kernel allows this one there.

BBR, for one, stops sending for 0.2 s every 10 s (PROBE_RTT).
"""

_TIMEOUT_S = 30.0
_TOOLS = ("ip", "tc", "unshare")
_count = itertools.count()

# Reads until its input ends, which it does also when this process is killed. What was being started
# at that moment is not on its host yet, or is about to fork: it is looked for once more.
_REMOVE = """
trap "" HUP INT TERM
times=once
read -r line || times="once again"
for time in $times; do
  if [ "$time" = again ]; then sleep 1; fi
  for namespace do
    for pid in $(ip netns pids "$namespace" 2>/dev/null); do kill -9 "$pid" 2>/dev/null; done
  done
done
for namespace do ip netns del "$namespace" 2>/dev/null; done
exit 0
"""


class HostsError(RuntimeError):
    """A namespace or a link could not be made; the message says which command said what."""


class Hosts:
    """``num`` hosts, each with an address on one bridge, between ``with`` and its end.

    A host is a network namespace. What runs on it has a process namespace of its own as well:
    without it, ranks find each other's memory and leave the link unused. Files are shared.

    All of it is removed at the end by a process of its own, which ends what still runs there. It
    does so as well if this process is killed.

    Args:
        num: how many.
        rate: what each may send, as tc has it ("200mbit", "1gbit"); None is no limit.

    Raises:
        HostsError: see there. Nothing is left behind.
    """

    def __init__(self, num: int, rate: str | None) -> None:
        self.num, self.rate = num, rate
        tag = f"shardfuse-{os.getpid()}-{next(_count)}"
        self._names = [f"{tag}-{host}" for host in range(num)]
        self._switch = f"{tag}-switch"
        self._remover: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        # A session of its own: the terminal's interrupt is not for it.
        self._remover = subprocess.Popen(
            ["sh", "-c", _REMOVE, "sh", *self._names, self._switch],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def command(self, host: int) -> list[str]:
        """Return what a command on a host begins with."""
        enter = ["ip", "netns", "exec", self._names[host]]
        return [*enter, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables of a rank on a host: it is alone there and speaks over the link."""
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"{_SUBNET}.{host + 1}"

    def namespaces(self) -> list[str]:
        """Return the names of all network namespaces, the bridge's last."""
        return [*self._names, self._switch]

    def remove(self) -> None:
        """End what runs on the hosts and remove them; a second call does nothing."""
        if self._remover is not None:
            self._remover.communicate(b"\n", timeout=_TIMEOUT_S)
            self._remover = None

    def _make(self) -> None:
        switch = self._switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            port = f"port{host}"
            pair = ["type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "-n", name, "link", "add", INTERFACE, *pair)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            setting = f"echo {_CONGESTION_CONTROL} > /proc/sys/net/ipv4/tcp_congestion_control"
            _run("ip", "netns", "exec", name, "sh", "-c", setting)
            if self.rate is not None:
                limit = ["rate", self.rate, "burst", _BURST, "latency", _LATENCY]
                _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)


def reason_unavailable() -> str | None:
    """Return why hosts cannot be made here, in words; None if they can. It tries."""
    if os.name != "posix" or not hasattr(os, "geteuid"):
        return "no namespaces on this system"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "not root"
    try:
        with Hosts(1, "1gbit") as hosts:
            _run(*hosts.command(0), "true")
    except HostsError as error:
        return f"namespaces are not allowed: {error}"
    return None


def sent_nbytes() -> int:
    """Return the bytes that this host has sent over its link so far; called on the host."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostsError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit {done.returncode}"
        raise HostsError(f"{' '.join(command)}: {said}")
