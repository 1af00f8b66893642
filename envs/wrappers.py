"""Wrappers: an action mask from `info` becomes a part of the observation. A lost life ends an episode while the game
continues, for a single game and for ALE's batched games."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from penstock.envs.checks import reset_with
from penstock.errors import ConfigError, SpaceError


class EpisodicLife(gym.Wrapper[Any, Any, Any, Any]):
    """Ends an episode when a life is lost. `reset` then continues the same game, so training sees all lives.

    The next episode begins with the observation that the last one ended with. The wrapper adds no steps:
    where a game waits for fire, the agent presses it. After each step, `info["game_over"]` says whether the game has
    ended. `reset` with a seed, or in the middle of an episode, starts a new game.

    `reset` raises `ConfigError` if the infos have no `lives`.
    """

    _lives = 0
    _lost: tuple[Any, dict[str, Any]] | None = None  # what `reset` returns after a lost life

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result, self._lost = self._lost, None
        if result is None or seed is not None:
            result = reset_with(self.env, seed, options)
        self._lives = _lives_of(result[1], self.env)
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        is_over, lives = terminated or truncated, info["lives"]
        info = {**info, "game_over": is_over}
        # Some games, such as Qbert, go on for some frames after the last life.
        is_lost = not is_over and 0 < lives < self._lives
        self._lives, self._lost = lives, (observation, info) if is_lost else None
        return observation, reward, terminated or is_lost, truncated, info


class BatchedEpisodicLife(VectorWrapper):
    """As `EpisodicLife`, for batched games that reset themselves in the step that ends a game (`SAME_STEP`).

    Use it with ALE's `AtariVectorEnv(..., autoreset_mode="SameStep")`. Do not use ALE's own options: `episodic_life`
    starts a new game after each lost life, and `life_loss_info` leaves `final_obs` unset there.

    `info["game_over"]` is bool `[num_envs]`. After a lost life, `final_obs` is the observation that is returned.

    Raises `ConfigError` for another mode. `reset` raises it if the infos have no `lives`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        mode = env.metadata.get("autoreset_mode")
        if mode is None or AutoresetMode(mode) is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                f"BatchedEpisodicLife needs the autoreset_mode SAME_STEP, but {env} has {mode}. Other modes spend "
                'a step on a lost life. With ALE, make it with autoreset_mode="SameStep"'
            )

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observations, infos = reset_with(self.env, seed, options)
        self._lives = _lives_of(infos, self.env)
        return observations, infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        is_over, lives = np.logical_or(terminated, truncated), infos["lives"]
        is_lost = ~is_over & (lives > 0) & (lives < self._lives)
        self._lives, infos = lives, {**infos, "game_over": is_over}
        if is_lost.any():
            # ALE's `final_obs` has only the rows of games that ended. Gymnasium's is an array of objects, with a mask.
            final = infos["final_obs"].copy() if "final_obs" in infos else np.empty_like(observations)
            for b in is_lost.nonzero()[0]:
                final[b] = observations[b]
            infos["final_obs"] = final
            if "_final_obs" in infos:
                infos["_final_obs"] = infos["_final_obs"] | is_lost
        return observations, rewards, terminated | is_lost, truncated, infos


def _lives_of(infos: Mapping[str, Any], env: Any) -> Any:
    if "lives" not in infos:
        raise ConfigError(f"the infos of {env} have no `lives`: use the wrapper only for Atari games")
    return infos["lives"]


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
