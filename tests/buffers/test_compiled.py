"""A compiled part that was built can be imported. Otherwise the Python functions would be tested alone, in silence."""

from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import penstock

PARTS = ("buffers", "learning", "workers")


def built(folder: Path) -> list[Path]:
    return [path for path in folder.glob("_native.*") if path.name.removeprefix("_native") in EXTENSION_SUFFIXES]


@pytest.mark.parametrize("room", PARTS)
def test_what_was_built_is_used(room: str) -> None:
    folder = Path(penstock.__file__).parent / room
    if not built(folder):
        pytest.skip("was built without a C compiler")
    import_module(f"penstock.{room}._native")  # raises where it is damaged, for example linked without one of its files


def test_either_all_parts_were_built_or_none() -> None:
    root = Path(penstock.__file__).parent
    assert len({bool(built(root / room)) for room in PARTS}) == 1, "one part could not be compiled: see pip install -v"
