"""Environments that write into the same memory again: a trajectory info sees what was there before the step."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from penstock import (
    AgentStep,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    VectorEnvCollector,
    WaitResetCollector,
)
from penstock.collectors.tracking import snapshot
from penstock.testing import check_traj_info
from penstock.testing.environments import ReusingEnv

from ..scale import quick_first
from ..support import sampler_of


class Plain(gym.Env[Any, Any]):
    """Observes its count of steps, in a dict; episodes of five."""

    observation_space = spaces.Dict({"count": spaces.Box(0, 9, (1,), np.float32), "n": spaces.Discrete(9)})
    action_space = spaces.Dict({"push": spaces.Box(-1, 1, (2,), np.float32)})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), 1.0, self.count == 5, False, {}

    def observe(self) -> Any:
        return {"count": np.full(1, self.count, np.float32), "n": self.count}


class Diary(TrajInfo):
    """Keeps all that it is given, as it is given."""

    def __init__(self, discount: float = 1.0) -> None:
        super().__init__(discount)
        self.Observations: list[Any] = []
        self.Actions: list[Any] = []
        self.AgentInfos: list[Any] = []
        self.Last: Any = None

    def step(self, observation: Any, action: Any, reward: float, *rest: Any) -> None:
        super().step(observation, action, reward, *rest)
        self.Observations.append(observation)
        self.Actions.append(action)
        self.AgentInfos.append(rest[2])

    def terminate(self, final_observation: Any) -> None:
        self.Last = final_observation


class Counting(RandomAgent):
    """Reports the number of its steps."""

    n_steps = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self.n_steps += 1
        step = super().step(observation, prev_action, prev_reward)
        return AgentStep(step.action, {"n_steps": np.full((len(prev_reward), 2), self.n_steps)})


@pytest.mark.parametrize("cls", quick_first([SerialSampler, ParallelSampler]))
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
def test_what_a_trajectory_info_keeps_is_what_was_there(cls: type[Sampler], collector_cls: Any) -> None:
    sizes = {"batch_T": 4, "batch_B": 2, "eval_n_envs": 2, "eval_max_steps": 20}
    how = {"traj_info_cls": Diary, "collector_cls": collector_cls}
    with sampler_of(cls, lambda: ReusingEnv(Plain()), **sizes, **how) as sampler:
        sampler.initialize(Counting(), seed=0)
        first = sampler.samples_np
        sampler.obtain_samples(0)
        pushed = [first.agent.action.push[:, b].copy() for b in range(2)]
        _, infos = sampler.obtain_samples(1)
        evaluated = sampler.evaluate_agent(0)
        for info in [*infos[:2], *evaluated]:
            assert isinstance(info, Diary)
            assert [int(observation["count"][0]) for observation in info.Observations] == [0, 1, 2, 3, 4]
            assert [observation["n"] for observation in info.Observations] == [0, 1, 2, 3, 4]
            assert (info.Last["count"].tolist(), info.Last["n"]) == ([5.0], 5)
            assert all(np.any(action["push"]) for action in info.Actions)
        for b, info in enumerate(infos[:2]):
            assert isinstance(info, Diary)
            np.testing.assert_array_equal([action["push"] for action in info.Actions[:4]], pushed[b])
            assert [int(each.n_steps[0]) for each in info.AgentInfos] == [1, 2, 3, 4, 5], "of two batches"


def test_so_it_is_in_the_random_steps_before_the_first_batch() -> None:
    with SerialSampler(
        lambda: ReusingEnv(Plain()), batch_T=8, batch_B=8, traj_info_cls=Diary, max_decorrelation_steps=9
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
    assert len(infos) >= 8
    for info in infos:
        assert isinstance(info, Diary)
        assert [observation["n"] for observation in info.Observations] == [0, 1, 2, 3, 4]
        assert all(np.any(action["push"]) for action in info.Actions)


class OneArray(gym.vector.VectorEnv[Any, Any, Any]):
    """Counts up to three, in one array that it always returns; zeroes the actions that it is given."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 9, (1,), np.float32)
        self.single_action_space = spaces.Box(-1, 1, (1,), np.float32)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.at = np.zeros((num_envs, 1), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.at[(options or {}).get("reset_mask", slice(None))] = 0
        return self.at, {}

    def step(self, actions: Any) -> Any:
        self.at += 1
        actions[...] = 0
        over = self.at[:, 0] == 3
        return self.at, np.ones(self.num_envs), over, np.zeros_like(over), {}


def test_so_it_is_in_batched_environments() -> None:
    with SerialSampler(
        OneArray, batch_T=7, batch_B=2, traj_info_cls=Diary, collector_cls=VectorEnvCollector
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, infos = sampler.obtain_samples(0)
    assert len(infos) == 4
    for i, info in enumerate(infos):
        assert isinstance(info, Diary)
        assert [float(observation[0]) for observation in info.Observations] == [0, 1, 2]
        assert float(info.Last[0]) == 3
        rows = slice(3 * (i // 2), 3 * (i // 2) + 3)
        np.testing.assert_array_equal(info.Actions, samples.agent.action[rows, i % 2])


@pytest.mark.slow
def test_the_kit_finds_nothing_wrong_with_a_diary() -> None:
    check_traj_info(Diary, Plain)


def test_what_is_kept_is_a_copy_of_the_same_structure() -> None:
    value = {"a": np.zeros(2), "b": (np.ones(1), 3), "c": [np.zeros(1)], "d": "text"}
    copy = snapshot(value)
    for array in (value["a"], value["b"][0], value["c"][0]):
        array[...] = 7
    assert (copy["a"].tolist(), copy["b"][0].tolist(), copy["b"][1]) == ([0, 0], [1], 3)
    assert (copy["c"][0].tolist(), copy["d"], type(copy["b"])) == ([0], "text", tuple)
