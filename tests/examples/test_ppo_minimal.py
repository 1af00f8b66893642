"""The shortest example, and the one that goes on from a checkpoint."""

from functools import partial
from pathlib import Path

import pytest
import torch

from .. import starter

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent


run = partial(starter.run, cwd=ROOT)


def test_the_minimal_example_is_short_and_learns() -> None:
    assert len((ROOT / "examples/ppo_minimal.py").read_text(encoding="utf-8").splitlines()) <= 60
    done = run("examples/ppo_minimal.py")
    assert done.returncode == 0, done.stderr
    returns = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(returns) == 40
    assert max(returns[-10:]) > 5 * returns[0]


def test_a_resumed_run_ends_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for out, n_batches in (("stopped", 2), ("stopped", 4), ("straight", 4)):
        done = run("examples/ppo_resume.py", "--out", tmp_path / out, "--n-batches", n_batches)
        assert done.returncode == 0, done.stderr
    stopped, straight = (torch.load(tmp_path / out / "checkpoint.pt") for out in ("stopped", "straight"))
    assert stopped["n_batches"] == straight["n_batches"] == 4
    for name, tensor in straight["agent"].items():
        assert torch.equal(stopped["agent"][name], tensor), name
    logs = list((tmp_path / "stopped").glob("events.out.tfevents.*"))
    assert len(logs) == 2, "one for each start"


def test_ppo_learns_continuous_actions(tmp_path: Path) -> None:
    # A random policy stays near -1,200.
    options = {"env-id": "Pendulum-v1", "goal": -700, "discount": 0.9, "gae-lambda": 0.95, "n-workers": 2}
    done = run("examples/ppo.py", "--out", tmp_path, *(x for name, v in options.items() for x in (f"--{name}", v)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goal of -700 reached" in done.stdout
