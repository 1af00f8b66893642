"""The examples of off-policy learners, shortened."""

import re
from functools import partial
from pathlib import Path

import pytest

from .. import starter
from ..scale import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


run = partial(starter.run, cwd=ROOT)


def test_a_short_dqn_learns() -> None:
    # A policy that does not learn stays near 10: it always pushes to the same side.
    done = run("examples/dqn.py", "--goal", 60, "--eval-every", 1000, "--total-steps", 20_000)
    assert done.returncode == 0, done.stderr
    assert "goal of 60 reached" in done.stdout


def test_a_dqn_that_misses_its_goal_says_so() -> None:
    done = run("examples/dqn.py", "--total-steps", 1600, "--eval-every", 500, "--asynchronous", 1)
    assert done.returncode == 1
    assert "goal of 475 missed" in done.stderr


def test_a_short_sac_runs_with_and_without_the_wrong_learner() -> None:
    for wrong, asynchronous in scaled(((0, 1), (1, 0)), ((1, 0),)):
        options = ["--total-steps", 1300, "--eval-every", 200, "--eval-episodes", 8, "--max-episode-steps", 50]
        done = run("examples/sac.py", *options, "--truncation-terminates", wrong, "--asynchronous", asynchronous)
        assert done.returncode == 1
        assert "goal of -200 missed" in done.stderr
        assert re.search(r"^1,2\d\d steps", done.stdout, re.MULTILINE)


def test_a_short_r2d1_runs() -> None:
    for asynchronous in scaled((0, 1), (1,)):
        options = ["--total-steps", 4000, "--min-steps", 1000, "--eval-every", 1500, "--eval-episodes", 32]
        done = run("examples/r2d1.py", *options, "--asynchronous", asynchronous, "--stored-state", asynchronous)
        assert done.returncode == 1, done.stderr
        assert "goal of 0.95 missed" in done.stderr
        assert done.stdout.count(" steps, ") == 2
