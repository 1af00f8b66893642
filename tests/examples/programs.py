"""Where the examples are, and a context in which one of them is a module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"


@contextmanager
def imported(name: str) -> Iterator[Any]:
    """This example. Another one may have a module of this name."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(EXAMPLES)
        patched.delitem(sys.modules, name, raising=False)
        yield importlib.import_module(name)
        del sys.modules[name]
