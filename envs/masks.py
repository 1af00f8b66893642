"""MaskInObservation: an action mask from `info`, as a part of the observation."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from penstock.envs.checks import reset_with
from penstock.errors import SpaceError

NAME = "action_mask"  # of the mask in the observation


class MaskInObservation(gym.Wrapper[Any, Any, Any, Any]):
    """Adds `info[key]`, the mask of legal actions, to the observation, as `action_mask`.

    A Dict observation gets one more entry. Any other becomes a Dict of `observation` and `action_mask`. Agents use the
    mask with `mask_key="observation.action_mask"`. With `mask_key="info.action_mask"`, samplers apply this wrapper.
    `key` may lead to a nested entry: "legal.mask".

    The last observation of an episode gets zeros if `info` has no mask there. Raises `SpaceError` if `info` has none in
    another step.
    """

    def __init__(self, env: gym.Env[Any, Any], key: str = "action_mask") -> None:
        super().__init__(env)
        self._path = key.split(".")
        actions = env.action_space
        if not isinstance(actions, spaces.Discrete | spaces.MultiDiscrete):
            raise SpaceError(f"an action mask needs a Discrete or MultiDiscrete action space, got {actions}")
        n = actions.nvec.sum() if isinstance(actions, spaces.MultiDiscrete) else actions.n
        self._n = int(n)
        self._is_dict = isinstance(env.observation_space, spaces.Dict)
        parts = dict(env.observation_space.items()) if isinstance(env.observation_space, spaces.Dict) else {}
        if NAME in parts:
            raise SpaceError(f"the observation has an entry {NAME!r} already: use mask_key='observation.{NAME}'")
        parts = parts or {"observation": env.observation_space}
        self.observation_space = spaces.Dict({**parts, NAME: spaces.MultiBinary(self._n)})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = reset_with(self.env, seed, options)
        return self.joined(observation, info, is_first=True), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        is_last = bool(terminated or truncated)
        return self.joined(observation, info, is_last=is_last), reward, terminated, truncated, info

    def joined(self, observation: Any, info: Any, *, is_first: bool = False, is_last: bool = False) -> dict[str, Any]:
        """`observation` with the mask in `info`. In the first one of an episode the mask's numbers are checked, and the
        last one needs no mask. Raises `SpaceError`."""
        mask = info
        for name in self._path:
            mask = mask.get(name) if isinstance(mask, dict) else None
        if mask is None and not is_last:
            raise SpaceError(f"info has no action mask {'.'.join(self._path)!r}; it has {list(info)}")
        mask = np.zeros(self._n, np.int8) if mask is None else np.asarray(mask)
        if is_first and ((mask != 0) & (mask != 1)).any():
            raise SpaceError(f"the action mask in info must be 1 where an action is legal and 0 elsewhere, got {mask}")
        if mask.shape != (self._n,):
            raise SpaceError(
                f"the action mask in info must have one entry for each of the {self._n} actions, got {list(mask.shape)}"
            )
        parts = observation if self._is_dict else {"observation": observation}
        return {**parts, NAME: (mask != 0).astype(np.int8)}
