"""Random steps before the first batch, so that episodes do not end together."""

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

    Writes `prev_action` `[B, ...]` and `prev_reward` `[B]` for the agent's first step. `episode_start[b]` becomes True
    if that step starts an episode. A trajectory that is unfinished at the end continues in the first batch, with the
    steps made here. A trajectory that finishes here is dropped.
    """
    on_step = tracker.on_step
    for b, rng in enumerate(rngs):
        n = int(rng.integers(0, max_steps + 1))
        rows = draw(envs.envs[b].action_space, rng, n)
        rewards: list[float] = []
        envs.enter(Phase.DECORRELATING, b)
        for action in envs.split_actions(rows):
            if on_step is not None:  # copies, because the environment may reuse its observation and action
                before, given = snapshot(envs.observations[b]), snapshot(action)
            _, reward, terminated, truncated, info = envs.step_one(b, action)
            if on_step is not None:
                on_step(b, before, given, reward, terminated, truncated, info)
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
