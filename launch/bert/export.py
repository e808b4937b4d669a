"""Export a run of pretrain.py as a transformers checkpoint.

    python launch/bert/export.py runs/bert-001 exported

AutoModelForPreTraining.from_pretrained("exported") and AutoTokenizer then have model and tokenizer.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pretraining.errors import UsageError, not_installed
from pretraining.launch import refuse
from pretraining.parser import Help, Parser


def main(argv: Sequence[str]) -> int:
    """Export; return the exit code: 0, or 2 where the request cannot be met."""
    parser = Parser(
        prog="export.py",
        description="Export the newest intact checkpoint of a run as a transformers checkpoint.",
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("out_dir", type=Path, help="folder to write, new or empty")
    try:
        arguments = parser.parse_args(argv)
        # Only now: torch and transformers take seconds to import, a wrong option should not.
        from pretraining.exporting import export

        print(export(arguments.run_dir, arguments.out_dir), flush=True)
    except UsageError as error:
        return refuse(error, None, program="export.py")
    except ModuleNotFoundError as error:
        return refuse(not_installed(error), None, program="export.py")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
