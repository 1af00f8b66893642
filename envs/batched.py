"""Batched environments that reset within the step: a base class, CartPole, and those of EnvPool."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock.buffers.tree import tree_leaves
from penstock.envs.seeding import fresh_seed
from penstock.errors import ConfigError

Rows = npt.NDArray[np.integer[Any]]

_STARTS = 32  # initial states that are drawn at once for a row: most resets then need no call of its generator


class SameStep(VectorEnv[Any, Any, Any]):
    """Base of batched environments that can reset single rows: Gymnasium's `SAME_STEP` mode.

    Subclasses set `num_envs` and the four spaces, and define `reset`, `advance` and `reset_rows`. `step` resets
    a row in the step that ends its episode. In such a step, the infos also contain `final_obs` and `final_info`:
    the observation and the infos of `advance`, from before the reset. Both have all B rows; the masks
    `_final_obs` and `_final_info` say which rows ended.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  Gymnasium's own declaration

    @abstractmethod
    def advance(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every row, without resets: observation, reward `[B]`, terminated `[B]`, truncated `[B]`, infos.

        Return new arrays for the observation: the caller keeps them.
        """

    @abstractmethod
    def reset_rows(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        """Start new episodes in `rows`, ascending indices `[k]`. Returns their first observations `[k, ...]`
        and their infos, arrays `[k, ...]` by name."""

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observation, reward, terminated, truncated, infos = self.advance(actions)
        rows, first, infos = self._start_episodes(observation, np.logical_or(terminated, truncated), infos)
        if rows.size:
            observation = _with_rows(observation, rows, first)
        return observation, reward, terminated, truncated, infos

    def step_into(self, out: Any, actions: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """As `step`, but write the observation into `out`: an array `[B, ...]`, or a dict or tuple of such."""
        observation, reward, terminated, truncated, infos = self.advance(actions)
        _write(out, observation)
        rows, first, infos = self._start_episodes(observation, np.logical_or(terminated, truncated), infos)
        if rows.size:
            for _, part, values in tree_leaves(out, "the first observation", first):
                part[rows] = values
        return reward, terminated, truncated, infos

    def _start_episodes(
        self, final_obs: object, done: npt.NDArray[np.bool_], infos: dict[str, Any]
    ) -> tuple[Rows, Any, dict[str, Any]]:
        """Reset the rows that are `done`. Returns their indices, their first observations, and the step's infos."""
        rows = done.nonzero()[0]
        if not rows.size:
            return rows, None, infos
        first, first_infos = self.reset_rows(rows)
        final = {"final_obs": final_obs, "_final_obs": done, "final_info": infos, "_final_info": done}
        return rows, first, {**_with_rows(infos, rows, first_infos), **final}


def _write(out: object, batch: object) -> None:
    """Write `batch` into the arrays `out`, which are nested in the same way. Raises `ValueError` for another shape."""
    for _, part, value in tree_leaves(out, "observation", batch):
        if np.shape(value) != part.shape:  # numpy would repeat a smaller array
            raise ValueError(f"the observation must have shape {part.shape}, got {np.shape(value)}")
        np.copyto(part, value, casting="same_kind")


def _with_rows(batch: Any, rows: Rows, values: Any) -> Any:
    """A copy of `batch` with `values` in `rows`. Entries that `values` does not have stay as they are."""
    if isinstance(batch, dict):
        return {key: _with_rows(part, rows, values[key]) if key in values else part for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_with_rows(part, rows, value) for part, value in zip(batch, values, strict=True))
    changed = np.array(batch)
    changed[rows] = values
    return changed


def seeds_of_rows(seed: Any, num_envs: int) -> list[int | None]:
    """One seed per row, from the `seed` of `reset`.

    `seed` is a list `[B]`; or a number s, which stands for s, s + 1, …; or None for no seeds.
    Raises `ValueError` for a list with the wrong length.
    """
    if seed is None:
        return [None] * num_envs
    seeds = [int(seed) + i for i in range(num_envs)] if isinstance(seed, int | np.integer) else list(seed)
    if len(seeds) != num_envs:
        raise ValueError(f"seed must be one number, or a list of {num_envs}, got a list of {len(seeds)}")
    return seeds


class BatchedCartPole(SameStep, CartPoleVectorEnv):
    """Gymnasium's vectorized CartPole, in `SAME_STEP` mode and with a random stream for each row.

    After a reset with a list of seeds, row b has the same initial states as a `CartPole-v1` with `seeds[b]`. Its
    later states are the same except for rounding in numpy's sine and cosine. So the episodes of a row do not depend on
    the number of workers. Episodes are truncated after `max_episode_steps`.
    """

    metadata = {**CartPoleVectorEnv.metadata, **SameStep.metadata}  # noqa: RUF012
    state: Any

    def __init__(
        self, num_envs: int = 1, max_episode_steps: int = 500, sutton_barto_reward: bool = False, **kwargs: Any
    ) -> None:
        CartPoleVectorEnv.__init__(self, num_envs, max_episode_steps, sutton_barto_reward=sutton_barto_reward, **kwargs)
        self._rngs: list[np.random.Generator] = []
        self._starts = np.empty((num_envs, _STARTS, 4))  # numbers in [0, 1) from each row's stream
        self._next = np.full(num_envs, _STARTS)  # how many starts of each row are used

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset every row. `seed` is a list `[B]`, or a number s, which stands for s, s + 1, …. Without a seed the
        streams continue. `options` may contain `low` and `high`, the bounds of the initial states."""
        CartPoleVectorEnv.reset(self, options=options)
        for row, row_seed in enumerate(seeds_of_rows(seed, self.num_envs)):
            if row_seed is not None or len(self._rngs) <= row:
                self._rngs[row : row + 1] = [seeding.np_random(row_seed)[0]]
                self._next[row] = _STARTS
        return self.reset_rows(np.arange(self.num_envs))

    def advance(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.prev_done[:] = False  # otherwise CartPoleVectorEnv resets these rows itself, one step too late
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


class BatchedEnvPool(SameStep):
    """`num_envs` environments of EnvPool's `task_id`; needs the extra `envpool`.

    EnvPool itself resets an environment one step after its episode's end. This class resets it within the step, by
    a second call for the rows that ended, and keeps the final observation.

    EnvPool takes seeds only when a pool is built. So the first `reset` builds the pool, and every later `reset` with
    a seed builds it again, which takes milliseconds for small environments. Each row has the stream of its seed, so
    its episodes do not depend on the number of workers. The pool has one thread, since a worker has one CPU;
    `num_threads` and `kwargs` are arguments of `envpool.make`.

    Raises `ConfigError` if EnvPool is not installed, if it does not have the task, or if `kwargs` ask for its
    asynchronous mode (`batch_size`) or for several players.
    """

    def __init__(self, task_id: str, num_envs: int = 1, *, num_threads: int = 1, **kwargs: object) -> None:
        self._pool: Any = None  # first: Gymnasium before 1.3 closes an environment whose constructor has raised
        try:
            import envpool  # takes seconds, so only here
        except ImportError as error:
            raise ConfigError(f"BatchedEnvPool needs EnvPool, pip install '.[envpool]': {error}") from error
        if task_id not in envpool.list_all_envs():
            raise ConfigError(f"EnvPool has no task {task_id!r}: choose one of envpool.list_all_envs()")
        if kwargs.get("batch_size", num_envs) not in (0, num_envs) or kwargs.get("max_num_players", 1) != 1:
            raise ConfigError(
                "BatchedEnvPool steps all environments together, with one player each: leave batch_size and "
                "max_num_players out"
            )
        self.num_envs, self._task_id, self._envpool = num_envs, task_id, envpool
        self._kwargs = {**kwargs, "num_threads": num_threads}
        with _quiet_bounds():
            spec = envpool.make_spec(task_id, num_envs=num_envs, **self._kwargs)
            self.single_observation_space = spec.gymnasium_observation_space
            self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset every row. `seed` is a list `[B]`, or a number s, which stands for s, s + 1, …. Without a seed the
        pool's streams continue."""
        if self._pool is None or seed is not None:
            seeds = seeds_of_rows(seed, self.num_envs)
            given = np.array([fresh_seed() if seed is None else seed for seed in seeds], np.uint64)
            self._build(given.astype(np.uint32).view(np.int32))  # EnvPool takes signed numbers of 32 bits
        observation, infos = self._pool.reset()
        return observation, _without_ids(infos)

    def _build(self, seeds: npt.NDArray[np.int32]) -> None:
        self.close_extras()
        pool = self._envpool.make_gymnasium(self._task_id, num_envs=self.num_envs, seed=seeds.tolist(), **self._kwargs)
        with _quiet_bounds():
            # Read them now, while the warning is ignored: the pool keeps them.
            _ = pool.observation_space, pool.action_space
        self._pool = pool

    def advance(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *step, infos = self._pool.step(actions)
        return (*step, _without_ids(infos))

    def reset_rows(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        observation, infos = self._pool.reset(rows.astype(np.int32))
        return observation, _without_ids(infos)

    def close_extras(self, **kwargs: object) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


@contextmanager
def _quiet_bounds() -> Iterator[None]:
    """Ignore Gymnasium's warning about the bounds of float32 spaces, which EnvPool gives in float64."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        yield


def _without_ids(infos: Mapping[str, Any]) -> dict[str, Any]:
    """The infos without EnvPool's ids of environments and players."""
    return {name: value for name, value in infos.items() if name not in ("env_id", "players")}
