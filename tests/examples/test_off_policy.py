"""The examples of off-policy learners, shortened."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, *map(str, command)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=110)


def test_a_short_dqn_learns() -> None:
    # A policy that does not learn stays near 10: it always pushes to the same side.
    done = run("examples/dqn.py", "--goal", 60, "--eval-every", 1000, "--total-steps", 20_000)
    assert done.returncode == 0, done.stderr
    assert "goal of 60 reached" in done.stdout


def test_a_dqn_that_misses_its_goal_says_so() -> None:
    done = run("examples/dqn.py", "--total-steps", 600, "--eval-every", 500)
    assert done.returncode == 1
    assert "goal of 475 missed" in done.stderr
