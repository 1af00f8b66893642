"""ResetCollector and WaitResetCollector against a plain loop, field by field, one environment at a time."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import (
    Agent,
    AgentStep,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SamplerBrokenError,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.agents import draw
from penstock.envs import CountingEnv, Purpose
from penstock.envs.seeding import ColumnStreams, stream

from ..against_loop import compare
from ..scale import examples, quick_first

SEED = 4


class Attentive(Agent):
    """Everything it does depends on all that it is given, so a wrong input shows in the batch.

    With `recurrent`, it also counts its steps since the last `reset_one` of the column.
    """

    def __init__(self, recurrent: bool = False) -> None:
        self.recurrent = recurrent

    def seed_columns(self, rngs: Any) -> None:
        self.rngs = list(rngs)
        self.age = np.zeros(len(self.rngs), np.int64)

    def reset(self) -> None:
        self.age[:] = 0

    def reset_one(self, column: int) -> None:
        self.age[column] = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        noise = np.array([rng.integers(0, 100) for rng in self.rngs])
        mixed = (observation.sum(1) * 7 + prev_action * 3 + prev_reward + noise + self.age).astype(np.int64)
        info = {"value": self.value(observation, prev_action, prev_reward), "age": self.age.copy()}
        self.age += 1
        return AgentStep(mixed % self.action_space.n, info)

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        state = self.age if self.recurrent else 0
        return (observation.sum(1) + prev_action / 10 + prev_reward / 100 + state * 1000).astype(np.float32)


class Jumpy(CountingEnv):
    """Rewards depend on the action; ends by termination or truncation, or both, at random lengths."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(1, 9))
        self.kind = int(self.np_random.integers(0, 3))
        return observation, info

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        over = terminated or truncated
        return observation, reward + action, over and self.kind != 1, over and self.kind != 0, info


both_modes = pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])


@both_modes
@pytest.mark.parametrize("recurrent", quick_first([True, False]))
@examples(10, 15)
@given(T=st.integers(1, 20), B=st.integers(1, 4))
def test_every_field_equals_a_plain_loop(collector_cls: Any, recurrent: bool, T: int, B: int) -> None:
    sizes = {"batch_T": T, "batch_B": B, "n_batches": 4, "wait_reset": collector_cls is WaitResetCollector}
    compare(SerialSampler, Jumpy, partial(Attentive, recurrent), **sizes)


def test_the_first_batch_goes_on_after_the_random_steps() -> None:
    n_envs, most, n_ends = 8, 12, 0
    with SerialSampler(Jumpy, batch_T=1, batch_B=n_envs, max_decorrelation_steps=most) as sampler:
        sampler.initialize(Attentive(), seed=SEED)
        samples = sampler.obtain_samples(0)[0].numpy()
    for b in range(n_envs):
        env, rng = Jumpy(), stream(SEED, Purpose.DECORRELATE, b)
        seen, before, begins = env.reset(seed=ColumnStreams(SEED, [b]).env_seeds(Purpose.TRAIN)[0])[0], (0, 0.0), True
        for action in draw(env.action_space, rng, int(rng.integers(0, most + 1))).tolist():
            seen, reward, terminated, truncated, _ = env.step(action)
            before, begins = (action, reward), False
            if terminated or truncated:
                seen, before, begins, n_ends = env.reset()[0], (0, 0.0), True, n_ends + 1
        assert samples.env.observation[0, b].tolist() == seen.tolist()
        assert (samples.agent.prev_action[0, b], samples.env.prev_reward[0, b]) == before
        assert samples.env.prev_done[0, b] == begins
    assert n_ends > 3


def test_an_environment_that_waits_is_reset_between_the_batches_and_not_within() -> None:
    class Noted(CountingEnv):
        resets: list[int] = []  # noqa: RUF012

        def reset(self, **kwargs: Any) -> Any:
            self.resets.append(self.count)
            return super().reset(**kwargs)

    with SerialSampler(
        Noted, batch_T=12, batch_B=1, collector_cls=WaitResetCollector, max_decorrelation_steps=0
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(3):
            Noted.resets.clear()
            samples, infos = sampler.obtain_samples(itr)
            assert Noted.resets == ([5] if itr else []), "reset once, before the batch, where the last one ended it"
            assert samples.env.valid[:, 0].tolist() == [True] * 5 + [False] * 7
            assert [info.Length for info in infos] == [5]
        assert sampler.stats().workers[0].steps == 15


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_the_error_of_a_reset_between_the_batches_says_so(cls: Any) -> None:
    class FailsInItsThirdReset(CountingEnv):
        n_resets = 0

        def reset(self, **kwargs: Any) -> Any:
            self.n_resets += 1
            if self.n_resets == 3:
                raise OSError("no level left")
            return super().reset(**kwargs)

    options: Any = {"collector_cls": WaitResetCollector, "max_decorrelation_steps": 0}
    with cls(FailsInItsThirdReset, batch_T=12, batch_B=1, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        expected = r"raised OSError while resetting env_rank 0 between two batches( \(itr=\d\))?: no level left"
        with pytest.raises(SamplerBrokenError, match=expected):
            for itr in range(3):
                sampler.obtain_samples(itr)


def test_a_real_environment_with_a_time_limit() -> None:
    env_fn = partial(gym.make, "CartPole-v1", max_episode_steps=11)
    with SerialSampler(env_fn, batch_T=200, batch_B=3) as sampler:
        sampler.initialize(Attentive(), seed=SEED, bootstrap_value=True)
        sampler.obtain_samples(0)
        env, agent = sampler.samples_np.env, sampler.samples_np.agent
    only_truncated = env.truncated & ~env.terminated
    assert only_truncated.any()
    assert (env.terminated & ~env.truncated).any()
    assert ((agent.final_value != 0) == only_truncated).all()
    assert (np.any(env.final_obs != 0, axis=-1) == env.done).all()


class Short(ResetCollector):
    """A collector of a user's own: leaves a mark in each batch, and uses the hooks."""

    def start_agent(self) -> None:
        super().start_agent()
        self.resets = 0

    def reset_if_needed(self) -> None:
        self.resets += 1

    def collect_batch(self, itr: int) -> None:
        super().collect_batch(itr)
        self.samples.reward[1:] = 100 * itr + self.resets


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_a_custom_collector_runs_with_its_hooks(cls: Any) -> None:
    with cls(CountingEnv, batch_T=3, batch_B=2, collector_cls=Short) as sampler:
        sampler.initialize(Attentive())
        for resets, itr in enumerate((5, 6, 9), start=1):
            samples, _ = sampler.obtain_samples(itr)
            assert (samples.env.reward == 100 * itr + resets).all()


def test_an_environment_may_keep_and_change_what_it_is_given() -> None:
    class Possessive(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-9, 9, (2,))
        action_space = gym.spaces.Box(-1, 1, (2,))

        def __init__(self) -> None:
            self.buffer = np.zeros(2, np.float32)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.buffer, {}

        def step(self, action: Any) -> Any:
            self.buffer[:] = action  # one buffer for all observations
            action[:] = 99.0  # and no respect for the caller's
            return self.buffer, 0.0, False, False, {}

    with SerialSampler(Possessive, batch_T=6, batch_B=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        assert samples.agent.action.abs().max() <= 1
        np.testing.assert_array_equal(samples.env.observation[1:], samples.agent.action[:-1])


def test_a_traj_info_sees_what_the_agent_reported_and_the_environment_returned() -> None:
    class Seen(TrajInfo):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[Any] = []

        def step(self, observation: Any, action: Any, reward: Any, *rest: Any) -> None:
            terminated, _, agent_info, env_info = rest
            self.steps.append((float(observation[1]), action, reward, terminated, float(agent_info.value), env_info))

    with SerialSampler(CountingEnv, batch_T=5, batch_B=1, traj_info_cls=Seen, max_decorrelation_steps=0) as sampler:
        sampler.initialize(Attentive(), seed=0)
        samples, (info,) = sampler.obtain_samples(0)
    assert info.steps == [
        (t, int(samples.agent.action[t]), t + 1, t == 4, float(samples.agent.agent_info.value[t]), {"count": t + 1})
        for t in range(5)
    ]
