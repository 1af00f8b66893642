"""Random steps before the first batch, which put the environments out of phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.drawing import draw
from penstock.collectors.columns import EnvColumns
from penstock.collectors.tracking import Tracker, snapshot
from penstock.workers.progress import Phase


def decorrelate(
    envs: EnvColumns,
    tracker: Tracker,
    rngs: Sequence[np.random.Generator],
    max_steps: int,
    prev_action: Any,
    prev_reward: npt.NDArray[Any],
    episode_start: npt.NDArray[np.bool_],
) -> None:
    """Step environment b by 0 to `max_steps` random actions. Their number and the actions come from `rngs[b]`.

    Writes `prev_action` `[B, ...]` and `prev_reward` `[B]` for the agent's first step, and into `episode_start` `[B]`
    whether an episode starts with it. The steps of an unfinished trajectory count. A trajectory that finishes here was
    not sampled and is dropped.
    """
    for b, rng in enumerate(rngs):
        n = int(rng.integers(0, max_steps + 1))
        rows = draw(envs.envs[b].action_space, rng, n)
        rewards: list[float] = []
        envs.enter(Phase.DECORRELATING, b)
        for action in envs.split_actions(rows):
            before = None if tracker.on_step is None else (snapshot(envs.observations[b]), snapshot(action))
            _, reward, terminated, truncated, info = envs.step_one(b, action)
            if tracker.on_step is not None and before is not None:
                tracker.on_step(b, *before, reward, terminated, truncated, info)
            rewards.append(reward)
            if terminated or truncated:
                tracker.drop(b)
                rewards.clear()
                envs.reset_one(b)
                envs.check_observation(b)
                envs.enter(Phase.DECORRELATING, b)
        tracker.preload(b, rewards)
        episode_start[b] = not rewards
        if rewards:
            prev_action[b] = rows[n - 1]
            prev_reward[b] = rewards[-1]
