"""ResetCollector and WaitResetCollector against a plain loop, field by field, one environment at a time."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ParallelSampler, RandomAgent, ResetCollector, SamplerBrokenError, SerialSampler, WaitResetCollector
from penstock.agents import draw
from penstock.envs import CountingEnv, Purpose
from penstock.envs.seeding import ColumnStreams, stream

from ..against_loop import compare
from ..samplers.digest_cases import Plain, Stateful
from ..scale import examples
from ..support import crashing_env

SEED = 4


class Jumpy(CountingEnv):
    """Rewards depend on the action; ends by termination or truncation, or both, at random lengths. All show their
    observations on one board."""

    board = np.zeros(2, np.float32)

    def observe(self) -> Any:
        self.board[:] = self.episode, self.count
        return self.board

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
@pytest.mark.parametrize("recurrent", [True, False])
@examples(10, 15)
@given(T=st.integers(1, 20), B=st.integers(1, 4), record_final_obs=st.booleans())
def test_every_field_equals_a_plain_loop(
    collector_cls: Any, recurrent: bool, T: int, B: int, record_final_obs: bool
) -> None:
    sizes = {"batch_T": T, "batch_B": B, "n_batches": 4, "wait_reset": collector_cls is WaitResetCollector}
    agent, only_ours = Stateful if recurrent else Plain, {"record_final_obs": record_final_obs}
    compare(SerialSampler, Jumpy, agent, sampler=only_ours, **sizes)


def test_the_first_batch_goes_on_after_the_random_steps() -> None:
    n_envs, most, n_ends = 8, 12, 0
    with SerialSampler(Jumpy, batch_T=1, batch_B=n_envs, max_decorrelation_steps=most) as sampler:
        sampler.initialize(Stateful(), seed=SEED)
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
    options: Any = {"collector_cls": WaitResetCollector, "max_decorrelation_steps": 0}
    with cls(partial(crashing_env, "reset", at=3), batch_T=12, batch_B=1, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        expected = r"raised .*InjectedFault while resetting env_rank 0 between two batches( \(itr=\d\))?: "
        with pytest.raises(SamplerBrokenError, match=expected):
            for itr in range(3):
                sampler.obtain_samples(itr)


# ---- self.envs: a collector reads its environments as a sequence ---------------------------------


class Lengthening(ResetCollector):
    def start_envs(self) -> None:
        for b, env in enumerate(self.envs):
            env.length = 2 + b
        assert self.envs[1].length == 3
        super().start_envs()


def test_the_environments_are_iterated_and_indexed() -> None:
    options: dict[str, Any] = {"batch_T": 12, "batch_B": 3, "max_decorrelation_steps": 0}
    with SerialSampler(CountingEnv, collector_cls=Lengthening, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, infos = sampler.obtain_samples(0)
        assert {info.Length for info in infos} == {2, 3, 4}
