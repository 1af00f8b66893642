"""One seed, one batch: however the environments are spread over processes, evaluation or not."""

import os
import random
import signal
import sys
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from penstock import (
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
)
from penstock.buffers import Samples
from penstock.columns.builder import EnvBuilder
from penstock.envs import CountingEnv
from penstock.envs.direct_steps import flat_step_of
from penstock.envs.factory import EnvContext
from penstock.envs.seeding import Purpose
from penstock.learning import gae
from penstock.workers.control import ControlBlock

from ..models import CartPoleNet
from ..scale import some
from ..support import EVALUATING, assert_same, collect_with
from .started import check_refused, started

CARTPOLE = partial(gym.make, "CartPole-v1")


@pytest.mark.slow
def test_an_evaluation_cut_short_does_not_change_the_next() -> None:
    def second_evaluation(limit: int | None) -> list[dict[str, Any]]:
        limits: dict[str, Any] = {"eval_n_envs": 2, "eval_max_steps": 2000, "eval_max_trajectories": limit}
        with started(CARTPOLE, cls=ParallelSampler, seed=3, **limits) as sampler:
            sampler.evaluate_agent(0)
            return [vars(info) for info in sampler.evaluate_agent(1)]

    full, cut = second_evaluation(None), second_evaluation(5)
    assert 5 <= len(cut) <= len(full)
    for info in cut:
        full.remove(info)  # each is one of the full evaluation's


def test_another_seed_gives_other_batches_and_no_seed_a_fresh_one() -> None:
    def first_batch(seed: int | None) -> tuple[Any, int | None]:
        with started(CARTPOLE, batch_T=20, seed=seed) as sampler:
            sampler.obtain_samples(0)
            return sampler.samples_np.copy(), sampler.seed

    zero, _ = first_batch(0)
    one, _ = first_batch(1)
    fresh, seed = first_batch(None)
    again, _ = first_batch(seed)
    assert not np.array_equal(zero.env.observation, one.env.observation)
    np.testing.assert_array_equal(fresh.env.observation, again.env.observation)


def test_machines_of_one_run_share_no_stream() -> None:
    observations = []
    for rank in range(2):
        with started(CARTPOLE, batch_T=1, batch_B=4, rank=rank, world_size=2) as sampler:
            sampler.obtain_samples(0)
            observations.append(sampler.samples_np.env.observation[0].copy())
    assert len(np.unique(np.concatenate(observations), axis=0)) == 8


@pytest.mark.slow
def test_samplers_of_unequal_size_give_the_columns_of_one_large_one() -> None:
    options: dict[str, Any] = {"batch_T": 30, "seed": 5}
    with started(CARTPOLE, batch_B=7, eval_n_envs=3, eval_max_steps=200, **options) as sampler:
        whole, _ = sampler.obtain_samples(0)
        evaluated = sorted(info.Return for info in sampler.evaluate_agent(0))
    options |= {"cls": ParallelSampler, "n_workers": 2, "n_envs": 7, "n_eval_envs": 3}
    first, first_eval, returns = 0, 0, list[float]()
    for n, n_evals in ((4, 2), (3, 1)):
        options |= {"batch_B": n, "first_env_rank": first, "first_eval_env_rank": first_eval, "eval_n_envs": n_evals}
        with started(CARTPOLE, eval_max_steps=n_evals * 66, **options) as sampler:
            part, _ = sampler.obtain_samples(0)
            assert_same(part, whole[:, first : first + n])
            returns += [info.Return for info in sampler.evaluate_agent(0)]
        first, first_eval = first + n, first_eval + n_evals
    assert sorted(returns) == evaluated


@pytest.mark.parametrize(
    ("cls", "env_id", "kwargs"),
    [
        (SerialSampler, "CartPole-v1", {}),
        (SerialSampler, "CartPole-v1", {"max_episode_steps": 7, "disable_env_checker": True}),
        (SerialSampler, "MountainCarContinuous-v0", {"max_episode_steps": 1}),
        (ParallelSampler, "CartPole-v1", {"max_episode_steps": 13}),
        (GpuSampler, "Pendulum-v1", {"max_episode_steps": 11}),
    ],
)
def test_flattened_wrappers_of_gymnasium_change_nothing(cls: Any, env_id: str, kwargs: dict[str, Any]) -> None:
    env_fn = partial(gym.make, env_id, **kwargs)
    env = env_fn()
    assert flat_step_of(env) != env.step
    found = collect_with(cls, env_fn, batch_T=30, **EVALUATING)
    assert_same(found, collect_with(SerialSampler, env_fn, batch_T=30, flatten_wrappers=False, **EVALUATING))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first_env_rank": 2}, "give first_env_rank and n_envs together"),
        ({"first_env_rank": 0, "n_envs": 7, "rank": 1, "world_size": 2}, "in place of rank and world_size"),
        ({"first_env_rank": 0, "n_envs": 7}, "give first_eval_env_rank and n_eval_envs together"),
        ({"first_env_rank": 6, "n_envs": 7}, "n_envs must be an integer of at least 8"),
        ({"first_env_rank": -1, "n_envs": 7}, "first_env_rank must be an integer of at least 0"),
    ],
)
def test_wrong_shares_are_refused(arguments: dict[str, Any], message: str) -> None:
    check_refused(CARTPOLE, message, eval_n_envs=1, **arguments)


@pytest.mark.parametrize("dim", ["T", "B"])
def test_joined_batches_are_one_batch_of_the_same_sampler(dim: Any) -> None:
    """Along T, two batches are one that is twice as long; along B, two halves are one that is twice as wide."""

    def sampled(batch_T: int, n: int) -> list[Any]:
        env_fn, agent = partial(gym.make, "CartPole-v1", max_episode_steps=11), CategoricalPgAgent(CartPoleNet)
        options: dict[str, Any] = {"env_info": {"x": 0.0}, "bootstrap_value": True}
        with started(env_fn, agent, batch_T=batch_T, batch_B=4, seed=5, **options) as sampler:
            return [batch.copy() for batch, _ in (sampler.obtain_samples(itr) for itr in range(n))]

    (whole,) = sampled(48, 1)
    joined = Samples.cat(sampled(16, 3)) if dim == "T" else Samples.cat([whole[:, :3], whole[:, 3:]], dim)
    assert_same(joined.to_dict(), whole.to_dict())
    assert_same(gae(joined, 0.99, 0.95), gae(whole, 0.99, 0.95))
    assert_same(joined.transitions(0.9).to_dict(), whole.transitions(0.9).to_dict())
    assert_same(joined.flatten().to_dict(), whole.flatten().to_dict())
    parts = zip(*(each.minibatches(3, np.random.default_rng(1)) for each in (joined, whole)), strict=True)
    for one, other in parts:
        assert_same(one.to_dict(), other.to_dict())


class Draws(gym.Env[Any, Any]):
    """Observes one number of each global generator."""

    observation_space, action_space = gym.spaces.Box(0, 1, (3,), np.float64), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        return self.observe(), 0.0, False, False, {}

    def observe(self) -> Any:
        return np.array([np.random.rand(), random.random(), torch.rand(()).item()])


class Dice(RandomAgent):
    """Acts with torch's global generator."""

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return AgentStep(torch.randint(10_000, (len(observation),)).numpy())


def draws(cls: type[Sampler], seed: int = 3, **kwargs: Any) -> Any:
    """The observations of the first batch."""
    with started(Draws, cls=cls, seed=seed, batch_T=3, batch_B=4, **kwargs) as sampler:
        return sampler.obtain_samples(0)[0].env.observation.numpy().copy()


def all_differ(*found: Any) -> bool:
    """Whether no number of the arrays comes twice."""
    numbers = np.concatenate([np.ravel(each) for each in found])
    return len(np.unique(numbers)) == len(numbers)


LAYOUTS: list[Any] = [
    (ParallelSampler, {"n_workers": 3}),
    (ParallelSampler, {"n_workers": 2, "start_method": "fork"}),
    (GpuSampler, {"n_workers": 2}),
    (AlternatingSampler, {"n_workers": 2, "server": "process"}),
    (AsyncSampler, {"n_workers": 2, "n_slots": 2, "lag": 1}),
    (ParallelSampler, {"n_workers": 2, "start_method": "spawn"}),  # not daily: each worker takes 2 s to import torch
]


@pytest.mark.parametrize(("cls", "layout"), some(LAYOUTS, 5))
def test_workers_draw_different_numbers_from_global_generators_and_the_same_in_each_run(cls: Any, layout: Any) -> None:
    np.random.seed(1), random.seed(1), torch.manual_seed(1)
    before = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    found = draws(cls, **layout)
    assert all_differ(found, draws(cls, **layout, seed=4))
    np.testing.assert_array_equal(found, draws(cls, **layout))
    after = np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()
    assert before == after, "the generators of this process are the user's"


def test_the_serial_sampler_does_not_seed_the_generators_of_its_caller() -> None:
    np.random.seed(5), random.seed(5), torch.manual_seed(5)
    found = draws(SerialSampler)[:, -1]
    np.random.seed(5), random.seed(5), torch.manual_seed(5)
    wanted = [[np.random.rand(), random.random(), torch.rand(()).item()] for _ in range(16)]
    np.testing.assert_array_equal(found, np.array(wanted)[3::4][:3])


def test_a_replaced_worker_an_evaluation_and_a_run_that_continues_draw_other_numbers() -> None:
    options: dict[str, Any] = {"cls": ParallelSampler, "batch_T": 3, "n_workers": 2, "seed": 3}
    found: list[Any] = []

    def sample(sampler: Any) -> None:
        found.append(sampler.obtain_samples(0)[0].env.observation.numpy().copy())

    with started(Draws, eval_n_envs=2, eval_max_steps=2, on_worker_failure="restart", **options) as sampler:
        sample(sampler)
        os.kill(sampler.worker_pids[1], signal.SIGKILL)
        sample(sampler)
        assert sampler.stats().restarts == 1
        assert all_differ(sampler.call("observe", evaluation=True), sampler.call("observe"), *found)
        state = sampler.state_dict(env_state="never")
    with started(Draws, **options) as sampler:
        sampler.load_state_dict(state)
        sample(sampler)
    assert all_differ(*found)


@pytest.mark.parametrize(("cls", "layout"), [(ParallelSampler, {}), (GpuSampler, {"server": "process"})])
def test_agents_in_workers_and_servers_draw_with_torch_as_the_seed_says(cls: Any, layout: Any) -> None:
    def actions(seed: int) -> Any:
        with started(CountingEnv, Dice(), cls, seed=seed, batch_B=4, n_workers=4, **layout) as sampler:
            return sampler.obtain_samples(0)[0].agent.action.numpy().copy()

    found = actions(3)
    assert len(np.unique(found)) > 0.9 * found.size
    np.testing.assert_array_equal(found, actions(3))
    assert (found != actions(4)).mean() > 0.9


def test_a_worker_in_which_an_environment_imports_torch_seeds_it_and_draws_no_number_twice(monkeypatch: Any) -> None:
    torch.manual_seed(0)
    monkeypatch.delitem(sys.modules, "torch")
    progress, example, numbers = ControlBlock(1, 1, shared=False).progress(0), CountingEnv(), []
    builder = EnvBuilder(progress, example.observation_space, example.action_space, seeds=(3, 0, 0))

    def build(context: EnvContext) -> CountingEnv:
        numbers.append(np.random.rand())
        monkeypatch.setitem(sys.modules, "torch", torch)
        return CountingEnv()

    for env_rank in range(3):
        builder.build(build, EnvContext(env_rank, 0, 0, Purpose.TRAIN))  # type: ignore[arg-type]
    assert all_differ(np.array(numbers))
    assert torch.initial_seed() != 0
