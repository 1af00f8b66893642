"""A compiled part that was built can be imported. Otherwise the Python functions would be tested alone, in silence."""

from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import penstock

PARTS = ("agents._drawing", "buffers._native", "columns._stepping", "learning._native", "workers._native")


def is_built(part: str) -> bool:
    path = Path(penstock.__file__).parent.joinpath(*part.split("."))
    return any(path.with_name(path.name + suffix).exists() for suffix in EXTENSION_SUFFIXES)


@pytest.mark.parametrize("part", PARTS)
def test_what_was_built_is_used(part: str) -> None:
    if not is_built(part):
        pytest.skip("was built without a C compiler")
    import_module(f"penstock.{part}")  # raises where it is damaged, for example linked without one of its files


def test_either_all_parts_were_built_or_none() -> None:
    assert len(set(map(is_built, PARTS))) == 1, "one part could not be compiled: see pip install -v"
