"""`to_tianshou`: what tianshou's `Collector` asks of a vector environment, and this `Collector` itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.envs import CountingEnv, NestedEnv
from penstock.envs.seeding import episode_seed
from penstock.errors import ConfigError
from penstock.vector import ShmVectorEnv

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("starter")
N = 3


def make_envs(env_fn: Any, **options: Any) -> Any:
    return ShmVectorEnv([env_fn] * N, n_workers=2, autoreset_mode="DISABLED", **options).to_tianshou()


@pytest.mark.parametrize("env_fn", [partial(gym.make, "CartPole-v1"), partial(CountingEnv, 3)])
def test_some_environments_step_and_reset_as_in_a_loop(env_fn: Any) -> None:
    envs, loop, rng = make_envs(env_fn), [env_fn() for _ in range(N)], np.random.default_rng(0)
    assert (len(envs), envs.env_num, envs.is_async) == (N, N, False)
    assert envs.action_space == [env.action_space for env in loop]
    observations, infos = envs.reset(seed=5)
    for i, env in enumerate(loop):
        wanted, info = env.reset(seed=5)
        np.testing.assert_array_equal(observations[i], wanted)
        assert infos[i] == info
    assert envs.seed(9) == [env.reset(seed=9 + i) and 9 + i for i, env in enumerate(loop)]
    for _ in range(40):
        ids = rng.permutation(N)[: rng.integers(1, N + 1)]
        actions = rng.integers(0, 2, len(ids))
        observations, rewards, terminated, truncated, infos = envs.step(actions, ids)
        for k, i in enumerate(ids.tolist()):
            wanted, *results, info = loop[i].step(actions[k])
            np.testing.assert_array_equal(observations[k], wanted)
            assert [rewards[k], terminated[k], truncated[k]] == results
            assert infos[k] == {**info, "env_id": i}
        if len(ended := ids[terminated | truncated]):
            observations, infos = envs.reset(ended)
            for k, i in enumerate(ended.tolist()):
                wanted, info = loop[i].reset()
                np.testing.assert_array_equal(observations[k], wanted)
                assert infos[k] == info
    envs.close()


def test_a_dict_observation_is_a_row_of_dicts() -> None:
    envs, env = make_envs(NestedEnv), NestedEnv()
    observations, _ = envs.reset([2, 0], seed=1)
    assert [type(each) for each in observations] == [dict, dict]
    wanted, _ = env.reset(seed=1)
    assert env.observation_space.contains(observations[0])
    np.testing.assert_equal(observations[0], wanted)
    envs.close()


class Telling(CountingEnv):
    """Notes the options of its resets."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.asked = [*getattr(self, "asked", []), options]
        return super().reset(seed=seed, options=options)

    def render(self) -> Any:
        return self.asked


def test_environments_get_the_options_that_tianshou_hands_them() -> None:
    """tianshou hands None where no options are given, and the others as they are."""
    envs = make_envs(Telling)
    envs.reset(seed=5)
    envs.reset([2, 0], options={"level": 1})
    envs.reset(1)
    assert envs.get_env_attr("asked") == [[None, {"level": 1}], [None, None], [None, {"level": 1}]]
    assert envs.render() == envs.get_env_attr("asked")
    assert envs.get_env_attr("asked", [1, 0]) == [[None, None], [None, {"level": 1}]]
    assert envs.get_env_attr("asked", 1) == [[None, None]]
    envs.set_env_attr("asked", ["new"], [2])
    assert envs.get_env_attr("asked", [2, 1]) == [["new"], [None, None]]
    assert envs.get_env_attr("asked", -1) == [["new"]]  # as in a list
    for wrong in (lambda: envs.get_env_attr("asked", 3), lambda: envs.set_env_attr("asked", 1, [0, 3])):
        with pytest.raises(IndexError):
            wrong()
    assert not envs.is_closed
    envs.close()
    assert envs.is_closed


def test_a_plan_gives_the_seeds_and_the_options() -> None:
    envs = make_envs(Telling, episode_plan=lambda env_rank, episode, rng: {"level": (env_rank, episode)})
    assert envs.seed(4) == [4, 5, 6]
    envs.reset([1])
    assert envs.get_env_attr("asked", [0, 1]) == [[{"level": (0, 0)}], [{"level": (1, 0)}, {"level": (1, 1)}]]
    envs.seed([4, 9, 9])
    assert envs.get_env_attr("np_random_seed", 1) == [episode_seed(4, 1, 0)]
    envs.close()


@pytest.mark.parametrize("wrong", [{"autoreset_mode": "NEXT_STEP"}, {"copy": False}])
def test_other_arguments_are_refused(wrong: dict[str, Any]) -> None:
    options: dict[str, Any] = {"autoreset_mode": "DISABLED", **wrong}
    with (
        ShmVectorEnv([CountingEnv] * 2, n_workers=1, **options) as envs,
        pytest.raises(ConfigError, match='construct ShmVectorEnv with autoreset_mode="DISABLED" and copy=True'),
    ):
        envs.to_tianshou()


@pytest.mark.timeout(300)  # the import of tianshou takes long
def test_a_collector_of_tianshou_fills_its_buffer_as_from_its_own_vector_environment() -> None:
    data = pytest.importorskip("tianshou.data", reason="tianshou is not installed")
    from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
    from tianshou.env import DummyVectorEnv
    from tianshou.utils.net.common import Net

    def collect(envs: Any) -> Any:
        torch.manual_seed(0)
        envs.seed(7)
        model = Net(state_shape=(4,), action_shape=2, hidden_sizes=[16])
        policy = DiscreteQLearningPolicy(model=model, action_space=gym.spaces.Discrete(2))
        collector = data.Collector(policy, envs, data.VectorReplayBuffer(600, N))
        collector.reset()
        stats = collector.collect(n_step=300)
        collector.close()
        return collector.buffer, stats.returns, stats.lens

    buffer, *stats = collect(make_envs(partial(gym.make, "CartPole-v1")))
    wanted, *wanted_stats = collect(DummyVectorEnv([partial(gym.make, "CartPole-v1")] * N))
    for name in ("obs", "act", "rew", "terminated", "truncated", "obs_next", "done"):
        np.testing.assert_array_equal(getattr(buffer, name), getattr(wanted, name), name)
    np.testing.assert_array_equal(stats, wanted_stats)
