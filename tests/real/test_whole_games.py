"""Games of Breakout as `examples/ppo_atari.py` plays them: their scores are those of a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest

from penstock import ParallelSampler, RandomAgent

from ..examples.programs import imported
from ..scale import scaled, some
from ..support import env_seeds

ale_py = pytest.importorskip("ale_py")
pytest.importorskip("cv2")
pytestmark = pytest.mark.slow

B, GAMES, SCORES = scaled((8, 50, 4), (2, 2, 2))  # environments, games, and the fewest different scores, for each form
METHOD = {"start_method": scaled("forkserver", "fork")}  # daily a fork, which need not import ALE
LIVES = 5
Score = tuple[float, int]  # of a game, and its steps


@pytest.fixture(scope="module")
def example() -> Iterator[Any]:
    with imported("ppo_atari") as module:
        cloudpickle.register_pickle_by_value(module)
        yield module
        cloudpickle.unregister_pickle_by_value(module)


def single_scores(game: str, seeds: list[int], actions: Any) -> list[list[Score]]:
    """Of each column, from Gymnasium's environment alone, whose episodes are whole games."""
    gym.register_envs(ale_py)
    found: list[list[Score]] = []
    for b, seed in enumerate(seeds):
        env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
        env = gym.wrappers.AtariPreprocessing(env)
        env.reset(seed=seed)
        scores, score, length = [], 0.0, 0
        for action in actions[:, b]:
            _, reward, terminated, truncated, _ = env.step(action)
            score, length = score + float(reward), length + 1
            if terminated or truncated:
                scores.append((score, length))
                score, length = 0.0, 0
                env.reset()
        found.append(scores)
        env.close()
    return found


def batched_scores(game: str, seeds: list[int], actions: Any) -> list[list[Score]]:
    """Of each column, from ALE's environment alone."""
    from ale_py.vector_env import AtariVectorEnv

    rom = {"Breakout": "breakout", "SpaceInvaders": "space_invaders"}[game]
    env = AtariVectorEnv(rom, len(seeds), reward_clipping=False, autoreset_mode="SameStep", num_threads=2)
    env.reset(seed=np.array(seeds) % 2**31)
    found: list[list[Score]] = [[] for _ in seeds]
    score, length = np.zeros(len(seeds)), np.zeros(len(seeds), int)
    for row in actions:
        _, reward, terminated, truncated, _ = env.step(row)
        score, length = score + reward, length + 1
        for b in np.logical_or(terminated, truncated).nonzero()[0]:
            found[b].append((float(score[b]), int(length[b])))
            score[b] = length[b] = 0
    env.close()
    return found


PLAIN = {"batched": batched_scores, "single": single_scores}


@pytest.mark.parametrize("form", PLAIN)
def test_scores_are_those_of_a_plain_loop(form: str, example: Any) -> None:
    make = example.MAKERS[form]
    sizes: dict[str, Any] = {"batch_T": 64, "batch_B": B, "n_workers": 2, "max_decorrelation_steps": 0}
    sizes |= {"batched": form == "batched", "traj_info_cls": example.GameInfo, "record_final_obs": False, **METHOD}
    found: list[Score] = []
    actions, n_ends = [], 0
    with ParallelSampler(partial(make, "Breakout"), **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        while len(found) < GAMES:
            assert len(actions) < 60
            _, infos = sampler.obtain_samples(len(actions))
            found += [(info.Return, info.Length) for info in infos]
            actions.append(sampler.samples_np.agent.action.copy())
            n_ends += int(sampler.samples_np.env.terminated.sum())
    by_column = PLAIN[form]("Breakout", env_seeds(B, small=False), np.concatenate(actions))
    assert sorted(found) == sorted(score for scores in by_column for score in scores)
    assert len({score for score, _ in found}) >= SCORES
    assert LIVES * len(found) <= n_ends <= LIVES * len(found) + (LIVES - 1) * B  # and lives of games that go on


@pytest.mark.parametrize("form", some(PLAIN, 1))
def test_an_evaluation_plays_whole_games(form: str, example: Any) -> None:
    """In Space Invaders, where most rewards are above 1."""

    class Recorded(example.GameInfo):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.actions: list[int] = []

        def step(self, observation: Any, action: Any, *rest: Any) -> None:
            super().step(observation, action, *rest)
            self.actions.append(int(action))

    make = example.MAKERS[form]
    n = scaled(2, 1)
    sizes: dict[str, Any] = {"batch_T": 2, "batch_B": n, "n_workers": n, "eval_n_envs": n, "eval_episodes": n}
    sizes |= {"batched": form == "batched", "traj_info_cls": Recorded, "max_decorrelation_steps": 0, **METHOD}
    with ParallelSampler(partial(make, "SpaceInvaders"), **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        infos = sampler.evaluate_agent(0)
    assert len(infos) == n
    assert all(info.Return > 2 * info.NonzeroRewards for info in infos)

    def is_game_of(seed: int, info: Any) -> bool:
        """It is the first game of the environment with this seed."""
        actions = np.array(info.actions, np.int64)[:, None]
        return PLAIN[form]("SpaceInvaders", [seed], actions) == [[(info.Return, info.Length)]]

    assert all(is_game_of(info.seed, info) for info in infos)
