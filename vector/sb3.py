"""ShmVectorEnv for Stable-Baselines3: its `VecEnv` interface around ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from stable_baselines3.common.env_util import is_wrapped
from stable_baselines3.common.vec_env import VecEnv

from penstock.errors import EnvCallError

if TYPE_CHECKING:
    from penstock.vector.env import ShmVectorEnv

__all__ = ["Sb3VecEnv"]


class Sb3VecEnv(VecEnv):
    """What `ShmVectorEnv.to_sb3()` returns. Closing it closes the vector environment."""

    def __init__(self, envs: ShmVectorEnv) -> None:
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self.metadata = envs.metadata

    def reset(self) -> Any:
        """Observations `[n, ...]`; infos are in `reset_infos`. Seeds and options are those of `seed` and `set_options`,
        once."""
        options = self._options[0] or None
        if any(each != self._options[0] for each in self._options):
            raise ValueError("set_options: all environments of a ShmVectorEnv are reset with the same options")
        observations, infos = self.envs.reset_listed(seed=list(self._seeds), options=options)
        self.reset_infos = [{} for _ in range(self.num_envs)]
        for i, info in infos:
            self.reset_infos[i] = info
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Any) -> None:
        """Have all environments step."""
        self.envs.step_async(actions)

    def step_wait(self) -> Any:
        """Observations `[n, ...]`, rewards `[n]` as float32, dones `[n]`, and a list of infos, with
        `terminal_observation` and `TimeLimit.truncated` where an episode ended."""
        observations, rewards, terminated, truncated, told = self.envs.step_wait_listed()
        done = terminated | truncated
        infos: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        for i, info in told:
            if done[i]:
                final, last = info.pop("final_obs"), info.pop("final_info")
                cut = bool(truncated[i] and not terminated[i])
                infos[i] = {**last, "terminal_observation": final, "TimeLimit.truncated": cut}
                self.reset_infos[i] = info
            else:
                infos[i].update(info)
        return observations, rewards.astype(np.float32), done, infos

    def close(self) -> None:
        """End the workers."""
        self.envs.close()

    def get_images(self) -> Sequence[Any]:
        """The frames of all environments."""
        return self.envs.render() or ()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of each environment, or of those of `indices`. Raises `AttributeError` where it is missing."""
        return self._ask(indices, attr_name)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of each environment, or of those of `indices`."""
        if wanted := self._wanted(indices):
            self.envs.broadcast({attr_name: value}, sorted(set(wanted)))

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """What a method returns in each environment, or in those of `indices`."""
        return self._ask(indices, method_name, *method_args, **method_kwargs)

    def _wanted(self, indices: Any) -> list[int]:
        return [int(i) % self.num_envs for i in self._get_indices(indices)]

    def _ask(self, indices: Any, name: str, *args: Any, **kwargs: Any) -> list[Any]:
        wanted = self._wanted(indices)
        if not wanted:
            return []
        each = sorted(set(wanted))
        try:
            found = self.envs.call_some(each, name, *args, **kwargs)
        except EnvCallError as error:
            if isinstance(error.__cause__, AttributeError):
                raise AttributeError(str(error)) from error
            raise
        by_index = dict(zip(each, found, strict=True))
        return [by_index[i] for i in wanted]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        """Whether each environment, or those of `indices`, has a wrapper of that class."""
        each = self.envs.apply(lambda env: is_wrapped(env, wrapper_class))
        return [each[i] for i in self._wanted(indices)]
