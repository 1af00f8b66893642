"""A trajectory may have several episodes: `TrajInfo.traj_done`."""

from typing import Any

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from penstock import (
    Collector,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.envs import CountingEnv

from ..scale import quick_first

GAME = 3 * 4  # three lives of four steps


class Lives(CountingEnv):
    """Each episode is one of the three lives of a game. A reset continues with the next life."""

    def __init__(self) -> None:
        super().__init__(length=4)
        self.lives = 0

    def reset(self, **kwargs: Any) -> Any:
        self.lives = self.lives or 3
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        self.lives -= terminated
        return observation, 1.0, terminated, truncated, {**info, "lives": self.lives}

    step_into = None  # type: ignore[assignment]


class Game(TrajInfo):
    """One trajectory per game."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.Final: list[float] = []

    def traj_done(self, terminated: bool, truncated: bool, env_info: Any) -> bool:
        return truncated or env_info["lives"] == 0

    def terminate(self, final_observation: Any) -> None:
        self.Final.append(final_observation.tolist()[1])


@pytest.mark.parametrize("collector_cls", quick_first([ResetCollector, WaitResetCollector]))
@pytest.mark.parametrize("cls", quick_first([ParallelSampler, SerialSampler, GpuSampler]))
def test_a_trajectory_is_a_game_and_an_episode_is_a_life(cls: Any, collector_cls: type[Collector]) -> None:
    with cls(Lives, batch_T=9, batch_B=3, n_workers=2, traj_info_cls=Game, collector_cls=collector_cls) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        games, n_episodes = [], 0
        for itr in range(8):
            samples, infos = sampler.obtain_samples(itr)
            games += infos
            n_episodes += int(samples.env.done.sum())
    # Decorrelation makes up to 100 steps before, but every game begins with a first life.
    assert len(games) >= 3
    assert {(game.Length, game.Return, game.Final[0]) for game in games} == {(GAME, GAME, 4)}
    assert all(len(game.Final) == 1 for game in games), "`terminate` is called once, at the end"
    assert n_episodes > 2 * len(games)


@pytest.mark.parametrize("cls", quick_first([ParallelSampler, SerialSampler]))
def test_evaluations_count_games(cls: Any) -> None:
    options: dict[str, Any] = {"batch_T": 2, "batch_B": 2, "n_workers": 2, "traj_info_cls": Game, "eval_n_envs": 2}
    with cls(Lives, **options, eval_episodes=5, eval_max_steps=200) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert [info.Length for info in sampler.evaluate_agent(0)] == [GAME] * 5
    with cls(Lives, **options, eval_max_steps=2 * (2 * GAME + 5)) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        assert [info.Length for info in sampler.evaluate_agent(0)] == [GAME] * 4
        assert sampler.metrics()["eval/Length_mean"] == GAME


def test_a_batched_environment() -> None:
    def make(num_envs: int) -> Any:
        return SyncVectorEnv([Lives] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP)

    with ParallelSampler(make, batch_T=30, batch_B=4, n_workers=2, traj_info_cls=Game, batched=True) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, games = sampler.obtain_samples(0)
    assert [game.Length for game in games] == [GAME] * 8
