"""Files under attack: each ends safe or in a clear error, as the committed table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.attacks import ATTACKS, row

pytestmark = pytest.mark.timeout(60)

TABLE = Path(__file__).parents[1] / "faults" / "attacks.md"


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str, tmp_path: Path) -> None:
    result = row(name, ATTACKS[name](tmp_path.resolve()), tmp_path.resolve())
    assert result in TABLE.read_text().splitlines()
