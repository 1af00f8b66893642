"""The examples around the vector environment run, and do what they say."""

import re
from pathlib import Path

import pytest

from .. import starter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


def printed_by(*command: object) -> str:
    done = starter.run(*command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ppo_learns_the_same_on_ours_and_on_gymnasiums() -> None:
    ours, theirs = (
        printed_by("examples/vector_ppo.py", "--vector", kind, "--total-steps", 3072) for kind in ("shm", "sync")
    )
    outcome = re.compile(r"return +([\d.]+)|magnitudes: ([\d.]+)")
    assert outcome.findall(ours) == outcome.findall(theirs)
    assert len(outcome.findall(ours)) == 2


def test_stable_baselines3_trains_on_it() -> None:
    pytest.importorskip("stable_baselines3")
    assert re.search(
        r"return \d+\.\d \+- \d+\.\d after 512 steps",
        printed_by("examples/vector_sb3.py", "--steps", 512, "--num-envs", 4),
    )
