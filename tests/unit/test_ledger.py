"""The ledger of bits tells what it is for, and nothing else."""

from __future__ import annotations

import pytest

from tests.ledger import Row, ledger, rows

pytestmark = pytest.mark.timeout(120)

ROW = Row(2, "sockets", "ShardedLamb", "stage 1", "fp32", True, "clip")


def test_rows_are_all_combinations() -> None:
    assert len(set(rows())) == len(rows()) == (1 + 3 * 3 + 1) * 9 * 3 * 4 * 2 * 3


def test_a_digest_depends_on_bits_alone() -> None:
    """Overlap changes none; a clip, another rule and another precision do."""
    same = ROW._replace(overlap=False)
    others = [
        ROW._replace(extra="plain"),
        ROW._replace(rule="ShardedAdamW"),
        ROW._replace(precision="8 bits"),
    ]
    found = ledger([ROW, same, *others])
    assert found[str(ROW)] == found[str(same)]
    assert len(set(found.values())) == 4
