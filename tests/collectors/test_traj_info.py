"""TrajInfo: the record of one trajectory, stepped by hand, and of one that has several episodes."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

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
from penstock.errors import ConfigError

from ..scale import quick_first

REWARDS = st.lists(st.one_of(st.just(0.0), st.floats(-100, 100)), max_size=20)


def stepped(rewards: list[Any], **kwargs: Any) -> TrajInfo:
    info = TrajInfo(**kwargs)
    for reward in rewards:
        info.step(None, None, reward, False, False, None, {})
    return info


@given(REWARDS, st.sampled_from([1.0, 0.9, 0.0]))
def test_the_figures_are_those_of_the_rewards(rewards: list[float], discount: float) -> None:
    info = stepped(rewards, discount=discount)
    assert info.Length == len(rewards)
    assert info.Return == pytest.approx(sum(rewards))
    assert info.NonzeroRewards == sum(reward != 0 for reward in rewards)
    assert info.DiscountedReturn == pytest.approx(sum(discount**t * reward for t, reward in enumerate(rewards)))


@given(REWARDS)
def test_undiscounted_is_the_default(rewards: list[float]) -> None:
    info = stepped(rewards)
    assert info.DiscountedReturn == info.Return


@pytest.mark.parametrize(
    "number", [float, int, bool, np.float32, np.float64, np.int64, np.array], ids=lambda n: n.__name__
)
def test_figures_are_plain_numbers_whatever_kind_the_reward_is(number: Any) -> None:
    info = stepped([number(1), number(0), number(1)])
    assert json.loads(json.dumps(vars(info)))["NonzeroRewards"] == 2
    assert (type(info.Length), type(info.Return), type(info.DiscountedReturn)) == (int, float, float)


def test_the_end_of_a_trajectory_changes_nothing() -> None:
    info = stepped([1.0, 2.0])
    before = dict(vars(info))
    info.terminate("final observation")
    assert vars(info) == before


class Own(TrajInfo):
    """Adds a figure and a private attribute."""

    def __init__(self, factor: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.Scaled = 0.0
        self._factor = factor

    def step(self, observation: Any, action: Any, reward: float, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.Scaled += self._factor * reward


def test_a_restored_object_has_the_class_and_attributes_and_steps_on() -> None:
    original = Own(factor=3.0, discount=0.5)
    original.step(None, None, 2.0, False, False, None, {})
    twin = Own.restore(pickle.loads(pickle.dumps(vars(original))))
    assert type(twin) is Own
    assert vars(twin) == vars(original)
    for info in (original, twin):
        info.step(None, None, 1.0, True, False, None, {})
    assert (twin.Scaled, twin.DiscountedReturn) == (9.0, 2.5) == (original.Scaled, original.DiscountedReturn)


def test_restoring_shares_nothing_with_the_attributes_given() -> None:
    attributes = {"Length": 1}
    twin = TrajInfo.restore(attributes)
    twin.Length = 2
    assert attributes == {"Length": 1}


def test_repr_shows_the_record_and_hides_what_is_private() -> None:
    assert repr(Own(2.0)) == "Own(Length=0, Return=0.0, NonzeroRewards=0, DiscountedReturn=0.0, Scaled=0.0)"


@pytest.mark.parametrize("discount", ["0.9", None])
def test_a_discount_that_is_no_number_is_refused(discount: Any) -> None:
    with pytest.raises(ConfigError, match="discount must be a number, got"):
        TrajInfo(discount)


# ---- traj_done: a trajectory may have several episodes -------------------------------------------


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
