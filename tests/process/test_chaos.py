"""Chaos: random workers of random samplers killed at random moments."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from ..scale import scaled

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
SECONDS = scaled(600, 4)
TRIES = scaled(1, 12)  # a short run on a slow machine may have no restart
MEAN = scaled(2.0, 0.4)  # seconds between signals; in a short run enough of them that some hit a sampler that restarts

pytestmark = [pytest.mark.timeout(TRIES * SECONDS + 150), pytest.mark.slow]


def test_chaos() -> None:
    command = [sys.executable, str(CHAOS), "--seconds", str(SECONDS), "--mean", str(MEAN)]
    counts: Counter[str] = Counter()
    for _ in range(TRIES):
        run = subprocess.run(command, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr
        counts.update({what: int(n.replace(",", "")) for n, what in re.findall(r"(\d[\d,]*) ([\w ]+)", run.stdout)})
        if counts["batches"] and counts["restarts"] and counts["signals"]:
            return
    raise AssertionError(f"no batch, no restart or no signal: {dict(counts)}")
