"""The example in JAX learns. It is skipped without JAX."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from .. import starter

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "jax_ppo.py"


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the extra `jax`")
def test_a_short_run_learns(tmp_path: Path) -> None:
    # In a new interpreter: a process in which JAX runs must not be forked.
    command = [sys.executable, EXAMPLE, "--goal", "60", "--time-limit", "60"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_jax_the_error_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys, runpy; sys.modules['jax'] = None; runpy.run_path({str(EXAMPLE)!r})")
    done = starter.run(script, cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install '.[jax]'" in done.stderr
