"""What the launcher said about this process, read from the environment."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from pretraining.errors import UsageError

EXIT_USAGE = 2
_SECONDS_FOR_RANK_0_TO_SPEAK = 3.0
_SECONDS_FOR_OTHERS_TO_COME = 1.0


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process among its peers; `is_distributed` is False for a plain `python pretrain.py`."""

    rank: int
    local_rank: int
    world_size: int
    is_distributed: bool

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Launch:
        if "RANK" not in environ and "WORLD_SIZE" not in environ:
            _check_not_apart(environ)
            return cls(rank=0, local_rank=0, world_size=1, is_distributed=False)
        try:
            rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            local_rank = int(environ.get("LOCAL_RANK", rank))
        except (KeyError, ValueError) as error:
            raise UsageError(
                "RANK and WORLD_SIZE must both be set to integers, or neither; start with torchrun"
            ) from error
        return cls(rank, local_rank, world_size, is_distributed=True)


def _check_not_apart(environ: Mapping[str, str]) -> None:
    """Raise UsageError in one of several processes that know of no other."""
    # It imports torch, as what comes next does.
    from shardfuse.comm.select import launched_apart

    apart = launched_apart(environ)
    if apart is not None:
        raise UsageError(
            f"{apart}: each would train by itself. Have it start torchrun, once a host "
            "(launch/npu/slurm.sh does so); if they are to be apart, unset that variable"
        )


def refuse(error: UsageError, launch: Launch | None, program: str = "pretrain.py") -> int:
    """Print the error once for all ranks and return the exit code of a wrong request.

    The launcher ends every process as soon as one has failed, so the other ranks hold back until
    rank 0 has spoken, and rank 0 until they have got here; ended early, they report the same code.
    """
    line = f"{program}: error: {error}"
    if launch is None or launch.is_main or error.is_local:
        print(line, file=sys.stderr, flush=True)
        _tell_launcher(line)
        if launch is not None and launch.world_size > 1:
            time.sleep(_SECONDS_FOR_OTHERS_TO_COME)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_USAGE))
        _tell_launcher(line)
        time.sleep(_SECONDS_FOR_RANK_0_TO_SPEAK)
    return EXIT_USAGE


def _tell_launcher(line: str) -> None:
    """Have torchrun's report end with `line`, where it would say how to get a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        detail = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        unfinished = Path(f"{path}.unfinished")
        with contextlib.suppress(OSError):
            unfinished.write_text(json.dumps({"message": detail}))
            unfinished.replace(path)
