"""Batched environments that reset what is done within the step: a base for one's own, and CartPole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv

__all__ = ["BatchedCartPole", "SameStep", "seeds_of_rows"]

Rows = npt.NDArray[np.integer[Any]]

_STARTS = 32  # drawn at once for a row, so that a reset costs no call of a generator


class SameStep(VectorEnv[Any, Any, Any]):
    """Base of batched environments that can reset chosen sub-environments: Gymnasium's `SAME_STEP` mode.

    Subclasses set `num_envs` and the four spaces, and define `reset`, `advance` and `reset_rows`. `step`
    then resets at once what has ended. Its infos hold, where an episode ended, `final_obs` and
    `final_info`, what `advance` gave before the reset, with the masks `_final_obs` and `_final_info`.
    Both are batches: `final_obs` is `[B, ...]`, in the structure of the observations, and means
    something in the masked rows.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  Gymnasium's own declaration

    @abstractmethod
    def advance(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One step of every row: observation, reward `[B]`, terminated `[B]`, truncated `[B]`, infos.

        Resets nothing. The observation's arrays are not to be written into later: they are handed out.
        """

    @abstractmethod
    def reset_rows(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in `rows`, ascending indices `[k]`: their first observations `[k, ...]`, and
        their infos, arrays `[k, ...]` by name."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.advance(actions)
        done = np.logical_or(terminated, truncated)
        rows = np.flatnonzero(done)
        if rows.size:
            first, first_infos = self.reset_rows(rows)
            final = {"final_obs": observation, "_final_obs": done, "final_info": infos, "_final_info": done}
            observation = _with_rows(observation, rows, first)
            infos = {**_with_rows(infos, rows, first_infos), **final}
        return observation, reward, terminated, truncated, infos


def _with_rows(batch: Any, rows: Rows, values: Any) -> Any:
    """A copy of `batch`, in which `rows` hold `values`; names that these do not have keep what they had."""
    if isinstance(batch, Mapping):
        return {key: _with_rows(part, rows, values[key]) if key in values else part for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_with_rows(part, rows, value) for part, value in zip(batch, values, strict=True))
    changed = np.array(batch)
    changed[rows] = values
    return changed


def seeds_of_rows(seed: Any, num_envs: int) -> list[int | None]:
    """One seed per row from what `reset` may be given: a list, or s for s, s + 1, and so on, or None for all.

    Raises `ValueError` for a list of another length.
    """
    if seed is None:
        return [None] * num_envs
    seeds = [int(seed) + i for i in range(num_envs)] if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != num_envs:
        raise ValueError(f"seed must be one number, or a list of {num_envs}, got a list of {len(seeds)}")
    return seeds


class BatchedCartPole(SameStep, CartPoleVectorEnv):
    """Gymnasium's vectorised CartPole, in `SAME_STEP` mode and with a random stream for each row.

    Row b, reset with a list of seeds, starts its episodes where a `CartPole-v1` that is reset with
    `seeds[b]` does, and goes the same way but for the last bits of numpy's sine and cosine. So it does
    not matter how the rows are spread over workers. `max_episode_steps` truncates.
    """

    metadata = {**CartPoleVectorEnv.metadata, **SameStep.metadata}  # noqa: RUF012
    state: Any

    def __init__(
        self, num_envs: int = 1, max_episode_steps: int = 500, sutton_barto_reward: bool = False, **kwargs: Any
    ) -> None:
        CartPoleVectorEnv.__init__(self, num_envs, max_episode_steps, sutton_barto_reward=sutton_barto_reward, **kwargs)
        self._rngs: list[np.random.Generator] = []
        self._starts = np.empty((num_envs, _STARTS, 4))  # in [0, 1): uniform numbers of each row's stream ...
        self._next = np.full(num_envs, _STARTS)  # ... and how many of the row's starts are used up

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset every row. `seed` is a list `[B]`, or a number s for s, s + 1, and so on; without one the
        streams go on. `options` may hold the bounds `low` and `high` of the starts."""
        CartPoleVectorEnv.reset(self, options=options)
        for row, own in enumerate(seeds_of_rows(seed, self.num_envs)):
            if own is not None or len(self._rngs) <= row:
                self._rngs[row : row + 1] = [seeding.np_random(own)[0]]
                self._next[row] = _STARTS
        return self.reset_rows(np.arange(self.num_envs))

    def advance(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.prev_done[:] = False  # or what has ended would be reset here, a step too late
        return CartPoleVectorEnv.step(self, actions)

    def reset_rows(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        for row in rows[self._next[rows] == _STARTS]:
            self._starts[row] = self._rngs[row].random((_STARTS, 4))
            self._next[row] = 0
        start = self._starts[rows, self._next[rows]].T
        self._next[rows] += 1
        self.state[:, rows] = self.low + (self.high - self.low) * start
        self.steps[rows] = 0
        return self.state[:, rows].T.astype(np.float32), {}
