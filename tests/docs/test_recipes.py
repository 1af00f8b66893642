"""Lines of recipes that need a library or a GPU which is not there, with something in its place."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import ParallelSampler, RandomAgent, SerialSampler
from penstock.vector import ShmVectorEnv

from .test_pages import DOCS, blocks, executed

pytestmark = pytest.mark.slow


class Recorder:
    """In the place of a logger: takes the calls that wandb, trackio, mlflow and SummaryWriter have."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def log(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step == 512
        self.seen |= metrics

    log_metrics = log

    def add_scalar(self, tag: str, value: float, step: int | None = None) -> None:
        self.log({tag: value}, step)


@pytest.mark.parametrize("name", ["TensorBoard", "W&B", "Trackio", "MLflow"])
def test_a_logger_takes_all_metrics_in_the_line_of_the_recipe(name: str) -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    (line,) = re.findall(rf"^\| {name} \| `(.+)` \|$", text, re.MULTILINE)
    with SerialSampler("CartPole-v1", batch_T=64, batch_B=8) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        metrics, logger = sampler.metrics(), Recorder()
    step = int(metrics["sampler/env_steps"])
    exec(line, {"metrics": metrics, "step": step} | dict.fromkeys(("writer", "wandb", "trackio", "mlflow"), logger))
    assert logger.seen.keys() == metrics.keys()


RENDERER = """
import os
import sys
from penstock.envs import CountingEnv
device = os.environ["MUJOCO_EGL_DEVICE_ID"]  # read once, at the import
class Renders(CountingEnv):
    device = int(device)
"""


@pytest.mark.parametrize("cls", [ParallelSampler, ShmVectorEnv])
def test_each_worker_renders_on_the_gpu_of_its_number(
    cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "renderer_of_a_test.py").write_text(RENDERER, encoding="utf-8")
    (block,) = blocks("displays.md")
    made = 'gym.make("HalfCheetah-v5", render_mode="rgb_array")'
    assert made in block
    block = block.replace("import gymnasium as gym", f"import sys; sys.path.insert(0, {str(tmp_path)!r})")
    block = block.replace(made, "__import__('renderer_of_a_test').Renders()")
    for name in ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID"):  # the example environment sets them in this process
        monkeypatch.setenv(name, "")
    monkeypatch.setattr("sys.path", [*sys.path])
    make_env = executed(block, "docs/displays.md")["make_env"]
    if cls is ShmVectorEnv:
        with ShmVectorEnv([make_env] * 8, n_workers=4) as envs:
            found = envs.get_attr("device")
    else:
        with ParallelSampler(make_env, batch_T=2, batch_B=8, n_workers=4) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            found = sampler.get_attr("device")
    assert list(found) == [0, 0, 1, 1, 0, 0, 1, 1]
    sys.modules.pop("renderer_of_a_test", None)
