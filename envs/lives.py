"""A lost life ends an episode, and the game continues: wrappers for a single game and for ALE's batched games."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from penstock.envs.checks import reset_with
from penstock.errors import ConfigError


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
        found, self._lost = self._lost, None
        if found is None or seed is not None:
            found = reset_with(self.env, seed, options)
        self._lives = _lives_of(found[1], self.env)
        return found

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
