"""What the tests of the benchmarks share: their modules, and their figures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
SECONDS = 300  # for a machine that is busy with other work


@contextmanager
def benchmark_modules() -> Iterator[None]:
    """Meanwhile, modules of the benchmarks can be imported."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT / "benchmarks")
        yield
    for module in set(sys.modules) - before:
        if str(getattr(sys.modules[module], "__file__", "")).startswith(str(ROOT / "benchmarks")):
            del sys.modules[module]


def assert_measured(figures: Any, n: int = 2) -> None:
    """Each list in `figures` has `n` measurements, and no figure is 0."""
    if isinstance(figures, dict):
        assert figures
        for part in figures.values():
            assert_measured(part, n)
    else:
        assert len(figures) == n
        assert np.min(figures) > 0
