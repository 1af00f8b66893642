"""EnvPool as a batched environment: its pool behind Gymnasium's `VectorEnv`, in `SAME_STEP` mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium.vector.utils import batch_space

from penstock.envs.batched import Rows, SameStep, seeds_of_rows
from penstock.envs.seeding import fresh_seed
from penstock.errors import ConfigError

__all__ = ["BatchedEnvPool"]


class BatchedEnvPool(SameStep):
    """`num_envs` environments of EnvPool's `task_id`; needs `penstock[envpool]`.

    EnvPool by itself resets an environment in the step after its episode's end. Here what has ended is
    reset within the step, by a second call for the rows concerned, and its final observation is kept.

    The pool is built by the first `reset`, since EnvPool takes seeds only when it is built, and anew by
    every further one that has a seed: milliseconds for small environments. Each row has the stream of
    its own seed, so it does not matter how the rows are spread over workers. It gets one thread, as a
    worker has one CPU; `num_threads` and all else in `kwargs` is `envpool.make`'s.

    Raises `ConfigError` without EnvPool, for a task that it does not have, for `batch_size` (its
    asynchronous mode) and for several players.
    """

    def __init__(self, task_id: str, num_envs: int = 1, *, num_threads: int = 1, **kwargs: Any) -> None:
        try:
            import envpool  # seconds: only for those who use it
        except ImportError as error:
            raise ConfigError(f"BatchedEnvPool needs EnvPool, pip install 'penstock[envpool]': {error}") from error
        if task_id not in envpool.list_all_envs():
            raise ConfigError(f"EnvPool has no task {task_id!r}; envpool.list_all_envs() has what there is")
        if kwargs.get("batch_size", num_envs) not in (0, num_envs) or kwargs.get("max_num_players", 1) != 1:
            raise ConfigError(
                "BatchedEnvPool steps all environments together, with one player each: leave "
                "batch_size and max_num_players as they are"
            )
        self.num_envs, self._task_id, self._envpool = num_envs, task_id, envpool
        self._kwargs = {**kwargs, "num_threads": num_threads}
        with _quiet_bounds():
            spec = envpool.make_spec(task_id, num_envs=num_envs, **self._kwargs)
            self.single_observation_space = spec.gymnasium_observation_space
            self.single_action_space = spec.gymnasium_action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._pool: Any = None

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset every row. `seed` is a list `[B]`, or a number s for s, s + 1, and so on; without one the
        pool's streams go on."""
        if self._pool is None or seed is not None:
            seeds = seeds_of_rows(seed, self.num_envs)
            given = np.array([fresh_seed() if own is None else own for own in seeds], np.uint64)
            self._build(given.astype(np.uint32).view(np.int32))  # all its 32 bits count, of which one is a sign
        observation, infos = self._pool.reset()
        return observation, _of_environments(infos)

    def _build(self, seeds: Any) -> None:
        self.close_extras()
        pool = self._envpool.make_gymnasium(self._task_id, num_envs=self.num_envs, seed=seeds.tolist(), **self._kwargs)
        with _quiet_bounds():
            _ = pool.observation_space, pool.action_space  # made now, and kept by the pool
        self._pool = pool

    def advance(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        *step, infos = self._pool.step(actions)
        return (*step, _of_environments(infos))

    def reset_rows(self, rows: Rows) -> tuple[Any, dict[str, Any]]:
        observation, infos = self._pool.reset(rows.astype(np.int32))
        return observation, _of_environments(infos)

    def close_extras(self, **kwargs: Any) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()


@contextmanager
def _quiet_bounds() -> Iterator[None]:
    """Without Gymnasium's warning that the bounds of float32 spaces are given in float64, which is EnvPool's doing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*precision lowered")
        yield


def _of_environments(infos: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of the environments, less EnvPool's own numbering of them."""
    return {name: value for name, value in infos.items() if name not in ("env_id", "players")}
