"""Random steps before the first batch, so that episodes do not end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.action_masks import ActionMask
from penstock.agents.space_draws import draw
from penstock.buffers.named import ArrayTree
from penstock.collectors.columns import EnvColumns
from penstock.collectors.env_batch import no_legal_action
from penstock.collectors.tracking import Tracker, snapshot
from penstock.workers.control import Phase


def decorrelate(
    envs: EnvColumns,
    tracker: Tracker,
    rngs: Sequence[np.random.Generator],
    max_steps: int,
    prev_action: ArrayTree,
    prev_reward: npt.NDArray[Any],
    episode_start: npt.NDArray[np.bool_],
    mask: ActionMask | None = None,
    columns: Sequence[int] | None = None,
) -> None:
    """Step environment b by 0 to `max_steps` random actions, for each b or those of `columns`. Their number and the
    actions come from `rngs[b]`.

    Writes `prev_action` `[B, ...]` and `prev_reward` `[B]` for the agent's first step. `episode_start[b]` becomes True
    if that step starts an episode. A trajectory that is unfinished at the end continues in the first batch, with the
    steps made here. A trajectory that finishes here is dropped. With `mask`, the actions are legal ones.
    """
    on_step, episodes = tracker.on_step, envs.episodes
    for b in range(len(rngs)) if columns is None else columns:
        rng = rngs[b]
        n = int(rng.integers(0, max_steps + 1))
        # With a mask, only random numbers are drawn here. The actions depend on the observations.
        rows: Any = draw(envs.envs[b].action_space, rng, n) if mask is None else rng.random((n, mask.n_components))
        rewards: list[float] = []
        if episodes is not None:
            episodes.plan_steps(b, rows if mask is None else None, n)
        envs.enter(Phase.DECORRELATING, b)
        for action in envs.split_actions(rows) if mask is None else _legal_actions(envs, b, mask, rows):
            if on_step is not None:  # copies, because the environment may reuse its observation and action
                before, given = snapshot(envs.observations[b]), snapshot(action)
            if episodes is not None:
                episodes.begin_step(b)
            _, reward, terminated, truncated, info = envs.step_one(b, action)
            if episodes is not None:
                episodes.end_step(b, reward)
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
            prev_action[b] = rows[n - 1] if mask is None else action
            prev_reward[b] = rewards[-1]


def _legal_actions(envs: EnvColumns, column: int, mask: ActionMask, uniform: npt.NDArray[Any]) -> Iterator[Any]:
    """One legal action after the other, for the column's current observation."""
    for numbers in uniform:
        observation = envs.observations[column]
        if mask.has_none(observation).any():
            raise no_legal_action(envs, column)
        row = mask.draw(mask.legal(observation), numbers[None])
        if envs.episodes is not None:
            envs.episodes.plan_next(column, row)
        yield envs.split_actions(row)[0]
