"""Pretrain BERT on real text, with optimizer states partitioned over the ranks.

    torchrun --standalone --nproc-per-node 2 launch/bert/pretrain.py

`python launch/bert/pretrain.py` runs on one process. README.md beside this file lists the options.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pretraining.errors import UsageError, not_installed
from pretraining.launch import Launch, refuse


def main(argv: Sequence[str]) -> int:
    """Run the job; return the exit code: 0, or 2 where the request cannot be met."""
    launch: Launch | None = None
    try:
        launch = Launch.from_environment()
        # Not above: processes that encode text import this file, and are to be without torch.
        from pretraining.config import check_options, dry_run_of

        check_options(argv, launch.world_size)
        if dry_run_of(argv) is not None:
            from pretraining.dry_run import show

            return show(argv, launch)
        # Only now: torch and transformers take seconds to import, a wrong option should not.
        from pretraining.session import run

        run(argv, launch)
    except UsageError as error:
        return refuse(error, launch)
    except ModuleNotFoundError as error:
        return refuse(not_installed(error), launch)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
