"""Chaos: random workers of random samplers killed at random moments."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..scale import scaled

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SECONDS = scaled(600, 3)
MEAN = scaled(2.0, 0.3)  # seconds between signals; in a short run enough of them that some hit a sampler that restarts

pytestmark = [pytest.mark.timeout(SECONDS + 150), pytest.mark.slow]


def test_chaos() -> None:
    command = [sys.executable, str(CHAOS), "--seconds", str(SECONDS), "--mean", str(MEAN), "--restarts", "1"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = {what: int(n.replace(",", "")) for n, what in re.findall(r"(\d[\d,]*) ([\w ]+)", run.stdout)}
    assert counts["batches"], run.stdout
    assert counts["restarts"], run.stdout
    assert counts["signals"], run.stdout
