"""Decorrelation: random steps before the first batch, so that environments are out of phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.drawing import draw
from penstock.collectors.columns import EnvColumns
from penstock.collectors.tracking import Tracker, kept
from penstock.workers.progress import Phase

__all__ = ["decorrelate"]


def decorrelate(
    envs: EnvColumns,
    tracker: Tracker,
    rngs: Sequence[np.random.Generator],
    max_steps: int,
    prev_action: Any,
    prev_reward: npt.NDArray[Any],
    begins: npt.NDArray[np.bool_],
) -> None:
    """Step environment b by between 0 and `max_steps` random actions; number and actions from `rngs[b]`.

    Writes `prev_action` and `prev_reward` `[B]` as the agent is to find them, and in `begins` `[B]` whether an
    episode begins. A trajectory that is running at the end counts these steps; one that finishes here was
    never sampled and is dropped.
    """
    for b, rng in enumerate(rngs):
        n = int(rng.integers(0, max_steps + 1))
        rows = draw(envs.envs[b].action_space, rng, n)
        rewards: list[float] = []
        envs.enter(Phase.DECORRELATING, b)
        for action in envs.split_actions(rows):
            told = None if tracker.on_step is None else (kept(envs.observations[b]), kept(action))
            _, reward, terminated, truncated, info = envs.step_one(b, action)
            if tracker.on_step is not None and told is not None:
                tracker.on_step(b, *told, reward, terminated, truncated, info)
            rewards.append(reward)
            if terminated or truncated:
                tracker.drop(b)
                rewards.clear()
                envs.reset_one(b)
                envs.check_observation(b)
                envs.enter(Phase.DECORRELATING, b)
        tracker.preload(b, rewards)
        begins[b] = not rewards
        if rewards:
            prev_action[b] = rows[n - 1]
            prev_reward[b] = rewards[-1]
