"""Bad arguments and calls out of order: one clear line each, and nothing left running."""

import threading
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from torch import nn

from penstock import (
    Agent,
    AgentStep,
    CategoricalPgAgent,
    ConfigError,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SamplerClosedError,
    SamplerState,
    SamplerStateError,
    SerialSampler,
    SpaceError,
)
from penstock.envs import CountingEnv

from ..support import sampler_of

both = pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"observation_dtype": "float99"}, "observation_dtype must be a floating-point numpy dtype"),
        ({"observation_dtype": np.int32}, "observation_dtype must be"),
        ({"batch_T": 0}, "batch_T must be an integer of at least 1, got 0"),
        ({"batch_T": 2.5}, "batch_T must be an integer of at least 1, got 2.5"),
        ({"batch_B": -1}, "batch_B must be"),
        ({"batch_B": True}, "batch_B must be"),
        ({"n_workers": 0}, "n_workers must be"),
        ({"max_decorrelation_steps": -1}, "max_decorrelation_steps must be"),
        ({"eval_n_envs": -1}, "eval_n_envs must be"),
        ({"eval_n_envs": 4, "eval_max_steps": 3}, "eval_max_steps must be at least eval_n_envs=4"),
        ({"eval_n_envs": 4, "eval_max_trajectories": 0}, "eval_max_trajectories must be"),
        ({"start_method": "thread"}, "start_method must be one of fork, forkserver, spawn"),
        ({"step_timeout": 0}, "step_timeout must be a positive number"),
        ({"collector_cls": CountingEnv}, "collector_cls must be a subclass of Collector"),
    ],
)
def test_constructor_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        sampler_of(SerialSampler, **arguments)
    assert "\n" not in str(caught.value)


class OldGymEnv:
    def reset(self) -> None: ...
    def step(self, action: int) -> None: ...


def raising_factory() -> gym.Env[Any, Any]:
    raise FileNotFoundError("no such game")


@both
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_fn": OldGymEnv}, "must return a gymnasium.Env, got .*OldGymEnv.*shimmy"),
        ({"env_fn": 7}, "env_fn must be a callable, an environment id or a list"),
        ({"env_fn": "NoSuchEnv-v0"}, "'NoSuchEnv-v0' is not a registered environment id"),
        ({"env_fn": [CountingEnv]}, "a list of 1 callables for 4 environments"),
        ({"env_kwargs": [{}, {}]}, "a list of 2 dicts for 4 environments"),
        ({"env_fn": raising_factory}, "its spaces: FileNotFoundError: no such game"),
        ({"env_kwargs": {"no_such": 1}}, "its spaces: TypeError"),
    ],
)
def test_bad_environments_are_refused_before_any_worker_starts(
    cls: type[Sampler], arguments: dict[str, Any], message: str
) -> None:
    with sampler_of(cls, **arguments) as sampler, pytest.raises(ConfigError, match=message) as caught:
        sampler.initialize(RandomAgent())
    assert "\n" not in str(caught.value)


class WrongCount(RandomAgent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(np.zeros(5, np.int64))


class NoBatch(RandomAgent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(super().step(observation, prev_action, prev_reward).action, {"scalar": 1.0})


class NoValue(Agent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(np.zeros(len(prev_reward), np.int64))


@both
@pytest.mark.parametrize(
    ("agent", "error", "message"),
    [
        (nn.Linear(2, 2), ConfigError, r"must be a penstock Agent .*CategoricalPgAgent\(model\).* got Linear"),
        (WrongCount(), SpaceError, r"one row per column"),
        (NoBatch(), SpaceError, "agent_info.scalar must be a numeric array"),
        (NoValue(), ConfigError, r"NoValue has no value\(\)"),
        (CategoricalPgAgent(nn.Linear(9, 3)), SpaceError, "failed on example observations of shape"),
        (CategoricalPgAgent(lambda o, a: None), ConfigError, "could not be built.*observation_space and action_space"),
    ],
)
def test_bad_agents_are_refused_before_any_worker_starts(
    cls: type[Sampler], agent: Any, error: type[Exception], message: str
) -> None:
    with sampler_of(cls) as sampler, pytest.raises(error, match=message) as caught:
        sampler.initialize(agent, bootstrap_value=True)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()

    def factory() -> gym.Env[Any, Any]:
        return CountingEnv(length=5 if lock else 6)

    with (
        sampler_of(ParallelSampler, env_fn=factory) as sampler,
        pytest.raises(ConfigError, match=r"env_fn .* cannot be pickled") as caught,
    ):
        sampler.initialize(RandomAgent())
    assert "\n" not in str(caught.value)
    with sampler_of(SerialSampler, env_fn=factory) as sampler:
        sampler.initialize(RandomAgent())  # pickles nothing
        sampler.obtain_samples(0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed must be"),
        ({"seed": 0.5}, "seed must be"),
        ({"affinity": 0}, "affinity must list, for each worker"),
        ({"rank": "0"}, "rank must be an integer, got .0."),
        ({"rank": 2, "world_size": 2}, r"rank must be in range\(world_size\)"),
        pytest.param({"affinity": [0, 10_000]}, r"\[10000\] are not among", marks=pytest.mark.linux("masks of CPUs")),
        ({"traj_info_kwargs": {"gamma": 1}}, r"TrajInfo\(\*\*traj_info_kwargs\) raised TypeError"),
    ],
)
def test_initialize_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with sampler_of(ParallelSampler) as sampler, pytest.raises(ConfigError, match=message):
        sampler.initialize(RandomAgent(), **arguments)


def test_a_failed_initialize_can_be_tried_again() -> None:
    with sampler_of(ParallelSampler) as sampler:
        with pytest.raises(ConfigError):
            sampler.initialize(RandomAgent(), seed=-1)
        sampler.initialize(RandomAgent(), seed=1)
        sampler.obtain_samples(0)


CALLS = {
    "initialize": lambda s: s.initialize(RandomAgent()),
    "obtain_samples": lambda s: s.obtain_samples(0),
    "start_samples": lambda s: s.start_samples(0),
    "wait_samples": lambda s: s.wait_samples(),
    "evaluate_agent": lambda s: s.evaluate_agent(0),
}


@both
def test_calls_out_of_order_name_the_expected_call(cls: type[Sampler]) -> None:
    def refused(sampler: Sampler, allowed: set[str], expected: str, error: type[Exception] = SamplerStateError) -> None:
        for name in CALLS.keys() - allowed:
            with pytest.raises(error, match=f"{name} was called.*{expected}"):
                CALLS[name](sampler)

    sampler = sampler_of(cls, eval_n_envs=1, eval_max_steps=10)
    refused(sampler, {"initialize"}, "initialize")
    for look in (sampler.stats, sampler.metrics, lambda: sampler.trace("never.json")):
        with pytest.raises(SamplerStateError, match=r"call sampler.initialize\(agent\) first"):
            look()
    sampler.initialize(RandomAgent())
    refused(sampler, {"obtain_samples", "start_samples", "evaluate_agent"}, "start_samples, obtain_samples, evaluate")
    with pytest.raises(SamplerStateError, match="the sampler is already initialized: make a new sampler, or use this"):
        sampler.initialize(RandomAgent())
    sampler.start_samples(0)
    refused(sampler, {"wait_samples"}, "wait_samples")
    sampler.wait_samples()
    sampler.obtain_samples(1)
    sampler.shutdown()
    refused(sampler, set(), "after shutdown", SamplerClosedError)
    assert sampler.state is SamplerState.CLOSED


@both
def test_evaluation_without_evaluation_environments_says_so(cls: type[Sampler]) -> None:
    with sampler_of(cls) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(ConfigError, match="eval_n_envs"):
            sampler.evaluate_agent(0)
        sampler.obtain_samples(0)


def test_two_calls_at_once_are_refused() -> None:
    class Blocking(CountingEnv):
        entered, leave = threading.Event(), threading.Event()

        def step(self, action: Any) -> Any:
            self.entered.set()
            self.leave.wait(20)
            return super().step(action)

    with sampler_of(SerialSampler, env_fn=Blocking, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent())
        thread = threading.Thread(target=sampler.obtain_samples, args=(0,))
        thread.start()
        assert Blocking.entered.wait(20)
        with pytest.raises(SamplerStateError, match="while obtain_samples is running in another thread"):
            sampler.obtain_samples(1)
        Blocking.leave.set()
        thread.join(20)


def test_an_environment_that_ends_the_process_in_close_is_named() -> None:
    closed = []

    class Leaving(CountingEnv):
        def close(self) -> None:
            closed.append(self)
            if len(closed) == 2:
                raise SystemExit(3)

    sampler = sampler_of(SerialSampler, env_fn=Leaving)
    sampler.initialize(RandomAgent())
    closed.clear()  # the example
    with pytest.warns(RuntimeWarning, match="raised SystemExit while closing env_rank 2: "):
        sampler.shutdown()
    assert len(closed) == 4


@both
def test_repr_shows_state_and_workers(cls: type[Sampler]) -> None:
    sampler = sampler_of(cls, eval_n_envs=1, eval_max_steps=10)
    assert repr(sampler) == f"<{cls.__name__} created: batch_T=8, batch_B=4>"
    sampler.initialize(RandomAgent(), seed=8)
    assert "ready" in repr(sampler)
    assert "seed=8" in repr(sampler)
    assert "worker 0 (pid " in repr(sampler)
    assert "waiting for the next command" in repr(sampler)
    sampler.shutdown()
    assert "closed" in repr(sampler)


@both
@pytest.mark.parametrize("which", ["observation_space", "action_space"])
def test_the_example_environment_is_closed_even_if_a_space_cannot_be_recorded(cls: type[Sampler], which: str) -> None:
    closed = []

    class WithText(CountingEnv):
        def __init__(self) -> None:
            super().__init__()
            setattr(self, which, spaces.Text(5))

        def close(self) -> None:
            closed.append(which)

    with pytest.raises(SpaceError, match="Text space"):
        sampler_of(cls, env_fn=WithText).initialize(RandomAgent())
    assert closed == [which]
