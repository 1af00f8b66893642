"""A signal handler that raises at any moment: `signal.alarm`, pytest-timeout, a second Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..scale import methods, scaled
from ..support import PROGRAMS
from .support import Script

LIMIT = scaled(1500, 100)  # seconds, for all batches together

pytestmark = [pytest.mark.timeout(LIMIT + 100), pytest.mark.slow]


@methods("forkserver")
@pytest.mark.parametrize("what", ["serial", "parallel", "gpu", "server", "vector"])
def test_no_call_is_locked_and_no_column_is_ahead(tmp_path: Path, what: str, start_method: str) -> None:
    # With spawn, two new interpreters may import torch at each alarm.
    n = scaled(3_000 if start_method == "spawn" else 20_000, 400)
    given = {"start_method": start_method, "what": what, "n": n}
    with Script(tmp_path, PROGRAMS / "alarms.py", **given) as script:
        output, errors = script.end(LIMIT)
    assert output, errors
    n_alarms, n_broken = map(int, output.split())
    assert n_alarms >= n // 16
    assert n_broken < n_alarms or what == "serial"
