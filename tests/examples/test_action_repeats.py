"""The example of decisions that take several steps, shortened; and its wrapper."""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from penstock import RandomAgent, SerialSampler
from penstock.learning import Steps, n_step_return

from .. import starter
from ..scale import scaled

ROOT = Path(__file__).parent.parent.parent
run = partial(starter.run, cwd=ROOT)


@pytest.mark.slow
def test_a_short_run_learns() -> None:
    # At random, most games end after 500 steps without the goal.
    total_steps, goal = scaled((60_000, -250), (36_000, -350))
    done = run("examples/action_repeats.py", "--total-steps", total_steps, "--goal", goal)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps for each decision" in done.stdout


def test_the_returns_of_decisions_are_those_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `discount ** steps`, the return from a decision on is that of all steps of the game from there on."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.delitem(sys.modules, "action_repeats", raising=False)
    example = importlib.import_module("action_repeats")
    rewards: list[float] = []

    class Random(gym.RewardWrapper[Any, Any]):
        """Rewards that differ from step to step."""

        def reward(self, reward: Any) -> float:
            rewards.append(float(np.sin(7 * len(rewards))))
            return rewards[-1]

    def env_fn() -> Any:
        return example.Repeats(Random(gym.make("Acrobot-v1")), (1, 3, 8), 0.95)

    with SerialSampler(
        env_fn, batch_T=60, batch_B=1, env_info={"steps": 0}, traj_info_cls=example.Game, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0, bootstrap_value=True)
        rewards.clear()
        samples, _ = sampler.obtain_samples(0)
    steps = samples.env.env_info.steps[:, 0].numpy()
    assert not samples.env.done.any()
    assert sorted(set(steps.tolist())) == [1, 3, 8]
    assert int(steps.sum()) == len(rewards)
    zero = torch.zeros(60, 1)
    own = Steps.of(samples, value=zero, bootstrap_value=zero[0])
    found = n_step_return(own, 60, 0.95**samples.env.env_info.steps)[:, 0]
    firsts = np.cumsum(steps) - steps
    for t, first in enumerate(firsts.tolist()):
        wanted = sum(0.95**i * reward for i, reward in enumerate(rewards[first:]))
        assert found[t] == pytest.approx(wanted, abs=1e-5)
    monkeypatch.delitem(sys.modules, "action_repeats")
