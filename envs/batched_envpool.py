"""EnvPool's environments as a Gymnasium `VectorEnv`, in `SAME_STEP` mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector.utils import batch_space

from penstock.envs.batched import Rows, SameStep, seeds_of_rows
from penstock.envs.seeding import fresh_seed
from penstock.errors import ConfigError


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
            given = np.array([fresh_seed() if each is None else each for each in seeds], np.uint64)
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
