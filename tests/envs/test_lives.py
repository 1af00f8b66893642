"""A lost life ends an episode and the game goes on: the same steps as without the wrapper, cut at each lost life."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from penstock.envs import BatchedEpisodicLife, EpisodicLife
from penstock.errors import ConfigError

from ..scale import scaled, some

ale_py = pytest.importorskip("ale_py")

SMALL = {"img_height": 10, "img_width": 10, "num_threads": 1, "reward_clipping": False, "noop_max": 4}


def games(rom: str = "breakout", mode: str = "SameStep", **kwargs: Any) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(rom, 3, autoreset_mode=mode, **SMALL, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize(("rom", "n_steps"), some([("qbert", scaled(1500, 460)), ("breakout", 250)], 1))
def test_batched_games_are_cut_at_each_lost_life(rom: str, n_steps: int) -> None:
    """Qbert goes on for some frames after the last life: such a life ends no episode of its own."""
    plain, env, rng = games(rom), BatchedEpisodicLife(games(rom)), np.random.default_rng(0)
    seeds = np.arange(3)
    _, infos = plain.reset(seed=seeds)
    env.reset(seed=seeds)
    lives, n_over, n_lost = infos["lives"], 0, 0
    for _ in range(n_steps):
        actions = rng.integers(0, int(env.single_action_space.n), 3)
        before, reward, terminated, truncated, wanted = plain.step(actions)
        observation, given, ended, cut, infos = env.step(actions)
        np.testing.assert_array_equal(observation, before)
        np.testing.assert_array_equal(given, reward)
        np.testing.assert_array_equal(cut, truncated)
        np.testing.assert_array_equal(infos["game_over"], terminated)
        lost = ended & ~terminated
        assert (lost == (~terminated & (wanted["lives"] > 0) & (wanted["lives"] < lives))).all()
        for b in lost.nonzero()[0]:
            np.testing.assert_array_equal(infos["final_obs"][b], before[b])
        for b in terminated.nonzero()[0]:
            np.testing.assert_array_equal(infos["final_obs"][b], wanted["final_obs"][b])
        lives, n_over, n_lost = wanted["lives"], n_over + terminated.sum(), n_lost + lost.sum()
    assert n_over >= 3
    assert n_lost >= 3 * n_over
    plain.close()
    env.close()


class Lives(gym.Env[Any, Any]):
    """A game with a life for each of the lengths. It goes on for some `frames` after the last life."""

    observation_space, action_space = gym.spaces.Box(0, 99, (1,)), gym.spaces.Discrete(2)

    def __init__(self, *lengths: int, frames: int = 0) -> None:
        self._ends, self._frames = np.cumsum(lengths), frames

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._t = 0
        return np.zeros(1, np.float32), {"lives": len(self._ends)}

    def step(self, action: Any) -> Any:
        self._t += 1
        lives = int((self._ends > self._t).sum())
        is_over = self._t == self._ends[-1] + self._frames
        return np.full(1, self._t, np.float32), 1.0, is_over, False, {"lives": lives}


@pytest.mark.parametrize("frames", [0, 2])
def test_one_game_has_an_episode_for_each_life(frames: int) -> None:
    """A last life that the game outlives ends no episode of its own."""
    plain, env = Lives(2, 3, 1, frames=frames), EpisodicLife(Lives(2, 3, 1, frames=frames))
    plain.reset()
    env.reset()
    ends = []
    for t in range(1, 7 + frames):
        before, reward, terminated, truncated, info = plain.step(0)
        observation, given, ended, cut, told = env.step(0)
        assert (observation, given, cut, told) == (before, reward, truncated, {**info, "game_over": terminated})
        if ended:
            ends.append((t, told["game_over"], told["lives"]))
            observation, info = env.reset()
            assert (observation, info["lives"]) == ((before, told["lives"]) if t < 6 else (0, 3))
    assert ends == [(2, False, 2), (5, False, 1), (6 + frames, True, 0)]


@pytest.mark.parametrize("seed", [None, 5])
def test_a_reset_starts_a_new_game_in_the_middle_of_an_episode_or_with_a_seed(seed: int | None) -> None:
    env = EpisodicLife(Lives(1, 9))
    env.reset()
    assert env.step(0)[2]
    if seed is None:
        assert env.reset()[1]["lives"] == 1  # the same game
        env.step(0)
    assert env.reset(seed=seed)[1]["lives"] == 2
    assert env.step(0)[4]["lives"] == 1


def test_games_of_gymnasium_step_together_too() -> None:
    """Its `final_obs` is an array of objects, with a mask. Here a game ends where another loses a life."""
    made: Any = SyncVectorEnv([lambda: Lives(2, 2), lambda: Lives(4, 3)], autoreset_mode="SameStep")
    env = BatchedEpisodicLife(made)
    env.reset()
    ends = []
    for t in range(1, 5):
        _, _, terminated, _, infos = env.step(np.zeros(2, int))
        if terminated.any():
            ends.append((t, terminated.tolist(), infos["game_over"].tolist()))
            assert infos.get("_final_obs", terminated).tolist() == terminated.tolist()
            assert [infos["final_obs"][b].tolist() for b in terminated.nonzero()[0]] == [[t]] * int(terminated.sum())
    assert ends == [(2, [True, False], [False, False]), (4, [True, True], [True, False])]


@pytest.mark.slow
def test_an_unsuitable_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="have no `lives`"):
        EpisodicLife(gym.make("CartPole-v1")).reset()
    with pytest.raises(ConfigError, match=r"SAME_STEP.*NEXT_STEP"):
        BatchedEpisodicLife(games(mode="NextStep"))
    cartpoles: Any = SyncVectorEnv([lambda: gym.make("CartPole-v1")], autoreset_mode="SameStep")
    with pytest.raises(ConfigError, match="have no `lives`"):
        BatchedEpisodicLife(cartpoles).reset()
