"""A2C, shortened."""

from functools import partial
from pathlib import Path

import pytest

from .. import starter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


run = partial(starter.run, "examples/a2c.py", cwd=ROOT)


def test_a_short_a2c_learns() -> None:
    # A random policy stays near 22.
    done = run("--goal", 60, "--eval-every", 5000, "--total-steps", 200_000, "--n-workers", 2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goal of 60 reached" in done.stdout


def test_an_a2c_that_misses_its_goal_says_so() -> None:
    done = run("--total-steps", 320, "--eval-every", 320, "--eval-episodes", 8)
    assert done.returncode == 1
    assert "goal of 475 missed" in done.stderr
