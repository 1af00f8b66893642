"""A ShmVectorEnv with the interface of tianshou's vector environments, which its `Collector` expects."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import iterate

from penstock.envs.calls import EnvCall
from penstock.errors import ConfigError
from penstock.vector.env import ShmVectorEnv
from penstock.vector.vector_arguments import as_seeds
from penstock.vector.vector_infos import Infos

Ids = Any  #: an index, several, or None for all


class TianshouVectorEnv:
    """Runs a `ShmVectorEnv` as tianshou's `SubprocVectorEnv`: a collector resets each environment whose episode has
    ended. Make it with `envs.to_tianshou()`. `close` closes both.

    Row i belongs to the ith environment of `id`: observations `[k, ...]` (with a Dict space, `k` dicts), rewards,
    terminations and truncations `[k]`, and `k` infos.
    """

    is_async = False  #: tianshou's `AsyncCollector` refuses it

    def __init__(self, envs: ShmVectorEnv) -> None:
        if envs.autoreset_mode is not AutoresetMode.DISABLED or envs.seats is not None or not envs.copy:
            raise ConfigError(
                "to_tianshou: tianshou resets environments itself and keeps observations: construct ShmVectorEnv with "
                'autoreset_mode="DISABLED" and copy=True, on environments of one agent'
            )
        self.envs, self.env_num = envs, envs.num_envs
        #: As those of `ShmVectorEnv`.
        self.trace, self.mark = envs.trace, envs.mark
        self.observation_space = [envs.single_observation_space] * envs.num_envs
        self.action_space = [envs.single_action_space] * envs.num_envs

    def __len__(self) -> int:
        return self.env_num

    def seed(self, seed: int | list[int] | None = None) -> list[int | None]:
        """Reset all environments with these seeds, or with `seed`, `seed + 1` and so on; with an episode plan, all with
        the first of them. Returns the seeds."""
        seeds = as_seeds(seed, self.env_num)
        self.envs.reset(seed=seeds[0] if self.envs.has_plan else seeds)
        return seeds

    def reset(self, env_id: Ids = None, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        """Begin an episode in these environments, as with tianshou all with the same seed. Returns observations and
        infos."""
        ids = self._ids(env_id)
        seeds: Any = seed if seed is None or self.envs.has_plan else [seed] * self.env_num
        observation, infos = self.envs._reset_listed(seeds, options, np.unique(ids))
        return self._rows(observation, ids), self._infos(infos, ids)

    def step(self, action: Any, id: Ids = None) -> tuple[Any, Any, Any, Any, Any]:
        """Step these environments, each with one of the actions. Each info has its index as `env_id`."""
        ids = self._ids(id)
        order = np.argsort(ids)
        self.envs.send(np.asarray(action)[order], ids[order])
        observation, *results, infos = self.envs.recv_listed(len(ids))
        back, env_infos = np.argsort(order), self._infos(infos, ids)
        for i, info in zip(ids.tolist(), env_infos, strict=True):
            info["env_id"] = i
        return self._rows(observation, back), *(result[back] for result in results), env_infos

    def get_env_attr(self, key: str, id: Ids = None) -> list[Any]:
        """This attribute of these environments."""
        return self._call(id, "get_attr", key)

    def set_env_attr(self, key: str, value: Any, id: Ids = None) -> None:
        """Set this attribute of these environments."""
        self._call(id, "set_attr", key, values=[value] * self.env_num)

    def render(self, **kwargs: Any) -> list[Any]:
        """What `render` of each environment returns."""
        return self._call(None, "call", "render", kwargs=kwargs)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return bool(self.envs.closed)

    def close(self) -> None:
        """End the workers."""
        self.envs.close()

    def _call(self, which: Ids, verb: str, name: str, **parts: Any) -> list[Any]:
        ids = self._ids(which).tolist()
        call = EnvCall(verb, name, only=frozenset(ids), **parts)
        results = dict(zip(sorted(set(ids)), self.envs._call(call), strict=True))
        return [results[i] for i in ids]

    def _ids(self, which: Ids) -> Any:
        every = np.arange(self.env_num)
        return every if which is None else every[np.atleast_1d(which)]

    def _rows(self, observation: Any, rows: Any) -> Any:
        if isinstance(self.envs.single_observation_space, spaces.Dict):
            observations = list(iterate(self.envs.observation_space, observation))
            return np.array([observations[i] for i in rows.tolist()], object)
        return observation[rows]

    def _infos(self, infos: Infos, rows: Any) -> Any:
        of_row = dict(infos)
        return np.array([of_row.get(i, {}) for i in rows.tolist()], object)
