"""A compiled part that was built can be imported. Otherwise the Python functions would be tested alone, in silence."""

from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.agents import distributions
from penstock.buffers import native
from penstock.columns import stepping
from penstock.learning import compiled
from penstock.workers import spinning

PARTS = {
    "agents._drawing": distributions,
    "buffers._native": native,
    "columns._stepping": stepping,
    "learning._native": compiled,
    "workers._native": spinning,
}
NO_OTHER_WAY = {"fence", "end_group_with_parent"}  # ordering.fence_of_locks, and system.follow


def is_built(part: str) -> bool:
    path = Path(penstock.__file__).parent.joinpath(*part.split("."))
    return any(path.with_name(path.name + suffix).exists() for suffix in EXTENSION_SUFFIXES)


@pytest.mark.parametrize("part", PARTS)
def test_what_was_built_is_used_and_has_a_way_in_python(part: str) -> None:
    if not is_built(part):
        pytest.skip("was built without a C compiler")
    extension = import_module(f"penstock.{part}")  # raises where it is damaged, for example linked without a file
    functions = {name for name, value in vars(extension).items() if callable(value) and not name.startswith("_")}
    module: Any = PARTS[part]
    assert functions - NO_OTHER_WAY == module.PYTHON.keys()


def test_either_all_parts_were_built_or_none() -> None:
    assert len(set(map(is_built, PARTS))) == 1, "one part could not be compiled: see pip install -v"
