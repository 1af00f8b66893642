"""PPO for Atari, shortened to two batches."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest

from .. import starter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
MISSING = [name for name in ("ale_py", "cv2") if importlib.util.find_spec(name) is None]


run = partial(starter.run, cwd=ROOT)


@pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `atari`: {', '.join(MISSING)}")
def test_two_batches_of_pong() -> None:
    options = ["--total-steps", 128, "--batch-T", 32, "--batch-B", 2, "--n-workers", 2, "--eval-every", 0]
    done = run("examples/ppo_atari.py", *options)
    assert done.returncode == 0, done.stderr
    assert "128 steps" in done.stdout


def test_without_ale_py_the_error_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, runpy; sys.modules['ale_py'] = None; runpy.run_path('examples/ppo_atari.py')")
    done = run(script)
    assert done.returncode == 1
    assert "pip install '.[atari]'" in done.stderr
