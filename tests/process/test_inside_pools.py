"""Samplers in processes of other pools: multiprocessing's, torch's and joblib's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..scale import methods, scaled
from ..starter import run
from ..support import PROGRAMS

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]


@methods("forkserver")
@pytest.mark.parametrize("pool", scaled(["spawn", "forkserver", "torch", "loky"], ["spawn"]))
def test_classes_of_the_script_reach_the_workers(tmp_path: Path, pool: str, start_method: str) -> None:
    if pool == "loky":
        pytest.importorskip("joblib")
    if start_method == "fork":
        pytest.skip("a pool's process has threads, so fork is refused")
    # Processes of a pool start supervisors of their own: they must be new interpreters, as for a user.
    done = run(PROGRAMS / "in_a_pool.py", pool, start_method, cwd=tmp_path, seconds=180, forks_supervisor=False)
    assert done.stdout == "[6.0, 6.0]\n", done.stderr
