"""Entry of one rank's process: ``python -m launch.bench.rank MODULE:FUNCTION FOLDER``."""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(target: str, folder: str) -> None:
    """Join the group (none for one rank), call the function, leave its result in RANK.json."""
    work = Path(folder)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    module, _, function = target.partition(":")
    run = getattr(importlib.import_module(module), function)
    arguments = json.loads((work / "arguments.json").read_text())
    if world_size == 1:
        result = run(**arguments)
    else:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{work / 'store'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        try:
            result = run(**arguments)
            dist.barrier()
        finally:
            dist.destroy_process_group()
    (work / f"{rank}.json").write_text(json.dumps(result))
    # Done. At the interpreter's end torch 2.13 with gloo now and then aborts a process that has run
    # a backward ("terminate called without an active exception"); plain torch and DDP do too.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
