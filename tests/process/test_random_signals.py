"""Ctrl-C, and the exceptions of other signal handlers, at random moments of random calls."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from ..scale import FULL, START_METHODS, methods, pairs, scaled
from ..support import PROGRAMS
from .support import Script

LIMIT = scaled(600, 100)  # seconds, for all signals together
CLASSES = ["serial", "parallel", "gpu", "alternating", "async", "vector"]

pytestmark = [pytest.mark.timeout(LIMIT + 100), pytest.mark.slow]


def trials(folder: Path, what: str, start_method: str, sig: str, n: int) -> tuple[int, int, str]:
    """Returns how often a new sampler was needed, how many descriptors are left, and what was said on stderr."""
    given = {"start_method": start_method, "what": what, "sig": sig, "n": n}
    with Script(folder, PROGRAMS / "random_signals.py", **given) as script:
        output, errors = script.end(LIMIT)
    assert output, errors
    n_signals, n_broken, n_processes, n_descriptors = map(int, output.split())
    assert n_signals == n
    assert n_processes == 0
    return n_broken, n_descriptors, errors


@pytest.mark.parametrize(
    ("what", "start_method"), [*product(CLASSES, START_METHODS)] if FULL else pairs(CLASSES, ("fork", "forkserver"))
)
def test_ctrl_c_gives_no_wrong_number_and_leaves_nothing(tmp_path: Path, what: str, start_method: str) -> None:
    """Each class goes on with the right numbers; a step in the main process ends, and then the sampler says so."""
    n_broken, n_descriptors, errors = trials(tmp_path, what, start_method, "SIGINT", scaled(34, 5))
    assert n_broken == 0 or what == "serial"
    assert n_descriptors == 0
    assert errors == ""


@methods("forkserver")
@pytest.mark.parametrize("what", ["serial", "parallel", "gpu", "server", "vector"])
def test_an_exception_of_another_handler_may_break_a_sampler_and_the_next_call_says_so(
    tmp_path: Path, what: str, start_method: str
) -> None:
    trials(tmp_path, what, start_method, "SIGALRM", scaled(100, 5))
