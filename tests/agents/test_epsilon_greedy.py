"""EpsilonGreedyAgent, and settings that change with itr and from environment to environment."""

from __future__ import annotations

from typing import Any

import cloudpickle
import numpy as np
import pytest
from gymnasium import spaces

from penstock import SerialSampler
from penstock.agents import EpsilonGreedyAgent
from penstock.agents.schedules import ColumnSetting, ExponentialSchedule, LinearSchedule
from penstock.envs import CountingEnv
from penstock.errors import ConfigError

from ..models import Echo, Net, act, acting


def acting_greedy(n: int, columns: range = range(2), start: int = 0, model: Any = Echo, **options: Any) -> Any:
    agent = EpsilonGreedyAgent(model, **options)
    return acting(agent, spaces.Box(-np.inf, np.inf, (n,)), spaces.Discrete(n, start=start), columns)


def test_without_exploration_the_first_of_the_best_is_taken() -> None:
    step = act(acting_greedy(3, range(3), epsilon=0.0, start=5), [[0, 2, 1], [1, 1, 0], [0, 3, 3]])
    assert step.action.tolist() == [6, 5, 6]
    assert step.agent_info.q.tolist() == [2, 1, 3]
    assert step.agent_info.explored.tolist() == [False] * 3


def test_epsilon_is_the_probability_to_draw_any_action() -> None:
    agent, n, rows = acting_greedy(4, range(64), epsilon=0.3), 300, np.tile([0.0, 1, 0, 0], (64, 1))
    steps = [act(agent, rows) for _ in range(n)]
    actions = np.concatenate([step.action for step in steps])
    explored = np.concatenate([step.agent_info.explored for step in steps])
    assert explored.mean() == pytest.approx(0.3, abs=4.5 * np.sqrt(0.21 / explored.size))
    np.testing.assert_allclose(np.bincount(actions[explored], minlength=4) / explored.sum(), 0.25, atol=0.03)
    assert (actions[~explored] == 1).all()


def test_what_is_recorded() -> None:
    agent, q = acting_greedy(3, epsilon=0.5), np.float32([[1, 2, 3], [6, 5, 4]])
    for _ in range(30):
        step = act(agent, q)
        info = step.agent_info
        assert [*info.keys()] == ["q", "epsilon", "explored"]
        assert info.q.tolist() == q[[0, 1], step.action].tolist()
        assert info.epsilon.tolist() == [0.5] * 2
        assert [leaf.dtype for leaf in info] == [np.float32, np.float32, np.bool_]
        assert step.action.dtype == np.int64


def test_the_value_is_the_largest_q() -> None:
    value = acting_greedy(3, epsilon=0.5).value(np.float32([[1, 2, 3]] * 5), None, np.zeros(5, np.float32))
    assert (value.tolist(), value.dtype) == ([3] * 5, np.float32)


# ---- which epsilon -----------------------------------------------------------------------------


def epsilons(agent: Any, n: int = 2) -> list[float]:
    return act(agent, np.zeros((n, 3))).agent_info.epsilon.tolist()


def test_a_spread_goes_over_the_environments_of_all_machines() -> None:
    with SerialSampler(CountingEnv, batch_T=2, batch_B=2) as sampler:
        sampler.initialize(EpsilonGreedyAgent(lambda: Net(2, 3), epsilon=0.4, spread=7), seed=0, rank=1, world_size=2)
        sampler.obtain_samples(0)
        epsilon = sampler.samples_np.agent.agent_info.epsilon
    np.testing.assert_allclose(epsilon[0], [0.4 ** (1 + 7 * i / 3) for i in (2, 3)], rtol=1e-6)


def test_a_schedule_is_followed_by_itr_and_travels() -> None:
    for schedule in (LinearSchedule(1.0, 0.0, n_itrs=4), lambda itr: 1 - itr / 4):
        agent = cloudpickle.loads(cloudpickle.dumps(acting_greedy(3, epsilon=schedule)))
        seen = []
        for itr in (0, 1, 3, 4):
            agent.sample_mode(itr)
            seen.append(epsilons(agent)[0])
        assert seen == [1, 0.75, 0.25, 0]


def test_evaluations_have_their_own() -> None:
    agent = acting_greedy(3, epsilon=1.0, eval_epsilon=0.125)
    seen = []
    for mode in (agent.eval_mode, agent.sample_mode, agent.eval_mode):
        mode(0)
        seen.append(epsilons(agent)[0])
    assert seen == [0.125, 1, 0.125]


@pytest.mark.parametrize("name", ["epsilon", "eval_epsilon"])
def test_probabilities_beyond_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} must be between 0 and 1, got 1.5"):
        EpsilonGreedyAgent(Echo, **{name: 1.5})  # type: ignore[arg-type]


def test_a_linear_schedule_goes_from_start_to_end_and_stays() -> None:
    schedule = LinearSchedule(1.0, 0.2, n_itrs=4)
    assert [schedule(itr) for itr in (0, 1, 2, 4, 5, 999)] == pytest.approx([1, 0.8, 0.6, 0.2, 0.2, 0.2])
    assert schedule(10**9) == 0.2
    for n_itrs in (0, -5, "3"):
        with pytest.raises(ConfigError, match=f"n_itrs of a LinearSchedule must be at least 1, got {n_itrs!r}"):
            LinearSchedule(1.0, 0.5, n_itrs=n_itrs)  # type: ignore[arg-type]


def test_an_exponential_schedule_decays_to_its_end() -> None:
    schedule = ExponentialSchedule(1.0, 0.5, end=0.2)
    assert [schedule(itr) for itr in range(4)] == [1, 0.5, 0.25, 0.2]


@pytest.mark.parametrize(
    ("value", "columns", "n_envs", "expected"),
    [
        (0.5, None, None, [0.5, 0.5]),
        (0.5, range(4, 7), 9, [0.5] * 3),
        ([0.1, 0.2, 0.3, 0.4, 0.5], range(3, 5), 5, [0.4, 0.5]),
        ([0.1, 0.2, 0.3, 0.4, 0.5], [0, 2, 4], 5, [0.1, 0.3, 0.5]),
        ([0.1, 0.2], None, None, [0.1, 0.1]),  # not told yet: all alike
        (lambda itr: 1 / (1 + itr), None, None, [0.25, 0.25]),
        (lambda itr: [itr, 2 * itr], [1], 2, [6]),
    ],
)
def test_a_setting_is_that_of_the_columns_environments(value: Any, columns: Any, n_envs: Any, expected: Any) -> None:
    assert ColumnSetting("x", value).at(3, len(expected), columns, n_envs).tolist() == expected


def test_the_spread_is_that_of_ape_x() -> None:
    setting, n = ColumnSetting("epsilon", 0.4, highest=1.0, spread=7), 8
    expected = [0.4 ** (1 + 7 * i / (n - 1)) for i in range(n)]
    np.testing.assert_allclose(setting.at(0, n, range(n), n), expected)
    np.testing.assert_allclose(setting.at(0, 3, range(5, 8), n), expected[5:])
    assert setting.at(0, 1, range(1), 1).tolist() == [0.4]
    assert setting.at(0, 2, None, None).tolist() == [0.4, 0.4]


def test_a_list_cannot_be_spread() -> None:
    with pytest.raises(ConfigError, match=r"with spread, epsilon must be one number, got \[0.1, 0.2\]"):
        ColumnSetting("epsilon", [0.1, 0.2], spread=7)


def test_a_sequence_of_a_wrong_length_names_both() -> None:
    with pytest.raises(ConfigError, match="sigma has 2 values for 3 environments"):
        ColumnSetting("sigma", [0.1, 0.2]).at(0, 3, range(3), 3)


@pytest.mark.parametrize("wrong", [-0.1, 1.5, np.nan, [0.1, 2.0]], ids=str)
def test_values_out_of_range_are_refused_where_they_are_given(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"epsilon must be between 0 and 1, got"):
        ColumnSetting("epsilon", wrong, highest=1.0)


@pytest.mark.parametrize("wrong", ["much", [], [[0.1]], {}], ids=str)
def test_what_is_no_setting_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="sigma must be a number, or one per environment, or a function of itr"):
        ColumnSetting("sigma", wrong)


def test_what_a_schedule_gives_is_checked_with_its_itr() -> None:
    with pytest.raises(ConfigError, match=r"sigma must be 0 or more, got -1 at itr 7"):
        ColumnSetting("sigma", lambda itr: -1).at(7, 1, None, None)
