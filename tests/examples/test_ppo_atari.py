"""PPO for Atari, shortened to two batches."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest

from .. import starter
from ..scale import scaled

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
MISSING = [name for name in ("ale_py", "cv2") if importlib.util.find_spec(name) is None]


run = partial(starter.run, cwd=ROOT)


@pytest.mark.skipif(bool(MISSING), reason=f"needs the extra `atari`: {', '.join(MISSING)}")
@pytest.mark.parametrize(("game", "envs"), [("Breakout", "batched"), *scaled([("Pong", "single")], [])])
def test_two_batches(game: str, envs: str) -> None:
    sizes = ["--total-frames", 512, "--batch-T", 32, "--batch-B", 2, "--n-workers", 2, "--eval-every", 0]
    done = run("examples/ppo_atari.py", "--game", game, "--envs", envs, *sizes)
    assert done.returncode == 0, done.stderr
    assert "512 frames" in done.stdout


def test_without_ale_py_the_error_names_the_extra(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, runpy; sys.modules['ale_py'] = None; runpy.run_path('examples/ppo_atari.py')")
    done = run(script)
    assert done.returncode == 1
    assert "pip install '.[atari]'" in done.stderr
