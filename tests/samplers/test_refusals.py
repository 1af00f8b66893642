"""What does not go together is in one table, which the documentation repeats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock import ConfigError
from penstock.samplers.refusals import NAMES, TABLE, as_table, refuse

PAIRS = [(row, feature, other) for row in TABLE for feature in row.features for other in row.others]


def test_the_documentation_has_the_table_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "samplers.md").read_text()
    section = page.partition("## What does not go together\n")[2].partition("\n## ")[0]
    table = [line for line in section.splitlines(keepends=True) if line.startswith("|")]
    assert "".join(table) == as_table()
    assert len(TABLE) <= 9


@pytest.mark.parametrize(("row", "feature", "other"), PAIRS)
def test_each_pair_is_refused_with_its_reason(row: Any, feature: str, other: str) -> None:
    asked: dict[str, object] = dict.fromkeys(NAMES, False)
    refuse({**asked, feature: True})
    refuse({**asked, other: True})
    with pytest.raises(ConfigError) as told:
        refuse({**asked, feature: True, other: True})
    assert str(told.value) == f"{feature} and {other} do not go together: {row.reason}. {row.instead}"


def test_a_name_that_is_not_in_the_table_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="a misspelt name"):
        refuse({"a misspelt name": True})
