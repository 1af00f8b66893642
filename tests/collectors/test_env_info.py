"""What environments say in `info`, recorded: chosen by name or example, flagged where it is missing."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import CountingEnv

from ..scale import quick_first
from ..support import sampler_of


class Telling(CountingEnv):
    """`count` at every step, `lives` at even ones, nested figures, and what cannot be recorded."""

    def step(self, action: Any) -> Any:
        *result, info = super().step(action)
        info["stats"] = {"speed": np.array([self.count, -1.0], np.float32), "fuel": {"left": 10 - self.count}}
        info["name"] = "text"
        info["TimeLimit.truncated"] = False
        if self.count % 2 == 0:
            info["lives"] = self.count
        return *result, info


def sampler_with(cls: type[Sampler] = SerialSampler, **kwargs: Any) -> Any:
    return sampler_of(cls, **{"env_fn": Telling, "batch_T": 7, "batch_B": 3, **kwargs})


class Own(TrajInfo):
    pass


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
@pytest.mark.parametrize("traj_info_cls", quick_first([Own, TrajInfo]))
def test_entries_are_recorded_and_missing_ones_flagged(
    cls: type[Sampler], collector_cls: Any, traj_info_cls: type[TrajInfo]
) -> None:
    wanted = {"lives": 0, "stats.speed": np.zeros(2, np.float32), "stats.fuel.left": 0.0}
    with sampler_with(cls, env_info=wanted, collector_cls=collector_cls, traj_info_cls=traj_info_cls) as sampler:
        example = sampler.initialize(RandomAgent(), seed=0)
        assert example.env.env_info.lives.dtype == np.int64
        for itr in range(3):
            _, infos = sampler.obtain_samples(itr)
            env = sampler.samples_np.env
            count = np.where(env.valid, env.reward, 0).astype(int)
            even = env.valid & (count % 2 == 0)
            np.testing.assert_array_equal(env.env_info["_lives"], even)
            np.testing.assert_array_equal(env.env_info.lives, np.where(even, count, 0))
            np.testing.assert_array_equal(env.env_info.stats.speed[..., 0], count)
            np.testing.assert_array_equal(env.env_info.stats.fuel.left, np.where(env.valid, 10 - count, 0))
            np.testing.assert_array_equal(env.env_info.stats.fuel["_left"], env.valid)
            assert len(infos) == env.done.sum()


def test_a_key_with_dots_of_its_own_is_found_by_example_too() -> None:
    with sampler_with(env_info={"TimeLimit.truncated": True, "stats.fuel.left": 0}) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
    assert samples.env.env_info.TimeLimit["_truncated"].all()
    assert not samples.env.env_info.TimeLimit.truncated.any()
    assert samples.env.env_info.stats.fuel["_left"].all()


def test_true_finds_what_is_numeric_and_lists_the_rest_once() -> None:
    with sampler_with(env_info=True) as sampler:
        with pytest.warns(UserWarning, match=r"not numeric and not recorded: \['name'\]") as caught:
            sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
    assert len(caught) == 1
    info = samples.env.env_info
    names = "count stats.speed stats.fuel.left TimeLimit.truncated"
    flags = "_count stats._speed stats.fuel._left _TimeLimit.truncated"
    assert {name for name, _ in info.leaves()} == {*names.split(), *flags.split()}
    assert (info.count == samples.env.reward).all()
    assert info["_TimeLimit.truncated"].all()


def test_what_is_asked_for_by_name_is_recorded_and_no_more() -> None:
    for wanted, fields in ((["count", "stats.fuel.left"], {"count", "_count", "stats"}), (False, set())):
        with sampler_with(env_info=wanted) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            env = sampler.samples_np.env
            assert (set(env.env_info.keys()) if "env_info" in env else set()) == fields


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["lives"], r"asks for 'lives'; the info of an example step has \['TimeLimit.truncated', 'count', .*0.0"),
        ({"name": "text"}, "cannot record 'name': 'text' is not numeric"),
        (["name"], "cannot record 'name'"),
    ],
)
def test_what_cannot_be_recorded_is_named(wanted: Any, message: str) -> None:
    with sampler_with(env_info=wanted) as sampler, pytest.raises(ConfigError, match=message):
        sampler.initialize(RandomAgent())


def test_a_value_that_changes_its_shape_is_named() -> None:
    with (
        sampler_with(ParallelSampler, env_info={"stats.speed": 0.0}) as sampler,
        pytest.raises(WorkerError, match=r"info\['stats.speed'\] of env_rank [02] must have shape \(\) .* got \(2,\)"),
    ):
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)


class Keeping(CountingEnv):
    """Episodes of three steps. The info is one dict, with one array and one list, which `reset` changes too."""

    def __init__(self) -> None:
        super().__init__()
        self.info = {"at": np.zeros(2), "parts": {"trail": [0]}}

    def _tell(self, count: int) -> Any:
        self.count = count
        self.info["at"][:] = self.info["n"] = self.info["parts"]["trail"][0] = count
        return np.full(2, count, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._tell(0), self.info

    def step(self, action: Any) -> Any:
        return self._tell(self.count + 1), float(self.count), self.count == 3, False, self.info


class KeepingGame:
    """Two agents with a `Keeping` environment each. Both end together."""

    possible_agents = ("a0", "a1")
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.envs = {agent: Keeping() for agent in self.possible_agents}

    def observation_space(self, agent: str) -> Any:
        return self.envs[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self.envs[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        found = {agent: env.reset(seed=seed) for agent, env in self.envs.items()}
        return tuple({agent: result[i] for agent, result in found.items()} for i in range(2))

    def step(self, actions: Any) -> Any:
        found = {agent: self.envs[agent].step(action) for agent, action in actions.items()}
        self.agents = [agent for agent in self.agents if not found[agent][2]]
        return tuple({agent: result[i] for agent, result in found.items()} for i in range(5))

    def close(self) -> None:
        pass


class KeepingBatch(gym.vector.VectorEnv[Any, Any, Any]):
    """The same for rows of a batched environment, which the caller resets."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}  # noqa: RUF012

    def __init__(self, num_envs: int) -> None:
        self.num_envs, example = num_envs, Keeping()
        self.single_observation_space, self.single_action_space = example.observation_space, example.action_space
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.n = np.zeros(num_envs, np.int64)
        self.info = {"n": self.n, "at": np.zeros((num_envs, 2)), "parts": {"trail": np.zeros((num_envs, 1), np.int64)}}

    def _tell(self) -> Any:
        self.info["at"][:] = self.info["parts"]["trail"][:] = self.n[:, None]
        return np.full((self.num_envs, 2), self.n[:, None], np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.n[(options or {}).get("reset_mask", slice(None))] = 0
        return self._tell(), self.info

    def step(self, actions: Any) -> Any:
        self.n += 1
        return self._tell(), self.n.astype(np.float64), self.n == 3, np.zeros_like(self.n, np.bool_), self.info


class OfTheDocs(ResetCollector):
    """As docs/collectors.md writes a collector."""

    def step_envs(self, t: int) -> None:
        self.progress.begin_stepping(t)
        events = self.columns.step([recorder.prev_action for recorder in self.recorders], t + 1)
        self.record_env_info(t)
        if events is not None:
            self.settle(t, events)
        self.write_step(t)


@pytest.mark.parametrize(
    ("cls", "env_fn", "how"),
    quick_first(
        [
            (SerialSampler, Keeping, {}),
            (SerialSampler, Keeping, {"collector_cls": OfTheDocs}),
            (SerialSampler, KeepingBatch, {"collector_cls": OfTheDocs, "batched": True}),
            (SerialSampler, KeepingGame, {}),
            (ParallelSampler, Keeping, {"traj_info_cls": Own}),
            (ParallelSampler, Keeping, {"collector_cls": WaitResetCollector}),
            (ParallelSampler, KeepingBatch, {"batched": True}),
            (ParallelSampler, KeepingGame, {"traj_info_cls": Own}),
            (GpuSampler, Keeping, {}),
            (AlternatingSampler, KeepingGame, {}),
        ],
        4,
    ),
)
def test_what_a_reset_changes_is_recorded_as_the_last_step_returned_it(cls: Any, env_fn: Any, how: Any) -> None:
    wanted = {"n": 0, "at": np.zeros(2), "parts.trail": [0]}
    with sampler_with(cls, env_fn=env_fn, batch_B=4, env_info=wanted, **how) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            sampler.obtain_samples(itr)
            env = sampler.samples_np.env
            if itr == 0 and how.get("collector_cls") is not WaitResetCollector:
                assert env.reward[:, 0].tolist() == [1, 2, 3, 1, 2, 3, 1]
            assert env.done.any()
            for value in (env.env_info.n, env.env_info.at[..., 1], env.env_info.parts.trail[..., 0]):
                np.testing.assert_array_equal(value, env.reward)
            assert (env.env_info["_n"] == env.valid).all()
