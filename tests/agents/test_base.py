"""What the agent does besides acting: it publishes parameters, and its copies do not disturb one another."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from gymnasium import spaces

from penstock import agents
from penstock.agents import RandomAgent
from penstock.errors import ConfigError, SamplerStateError, SpaceError

from ..toy_games import Published, Scripted

OBSERVATIONS, ACTIONS = spaces.Box(0, 1, (2,)), spaces.Discrete(3)


@pytest.fixture
def learner() -> Iterator[Published]:
    agent = Published()
    agent.initialize(OBSERVATIONS, ACTIONS)
    yield agent
    for parameters in agent._subscribers or ():  # a test need not keep what it shares
        agent.runtime.unshare_memory(parameters)


def generators(n: int) -> list[np.random.Generator]:
    return [np.random.default_rng(i) for i in range(n)]


def test_an_agent_that_overrides_the_old_name_of_its_copy_is_told_the_new_one() -> None:
    class Old(RandomAgent):
        def worker_copy(self) -> Any:
            return self

    with pytest.raises(ConfigError, match=r"Old\.worker_copy is not called: its name is copy_for_worker"):
        Old().runtime.ensure_initialized(OBSERVATIONS, ACTIONS, 0)


def test_an_agent_without_a_value_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"Scripted has no value\(\): override it, or .*bootstrap_value=False"):
        Scripted([]).value(None, None, np.zeros(2, np.float32))


def test_the_random_agent_has_no_parameters_and_values_of_zero() -> None:
    value = RandomAgent().value(None, None, np.zeros(5, np.float32))
    assert (value.tolist(), value.dtype) == ([0.0] * 5, np.float32)
    assert RandomAgent().read_parameters() == {}


def test_completion_shows_every_public_name() -> None:
    assert set(agents.__all__) <= set(dir(agents))


# ---- initialization ----------------------------------------------------------------------------


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_agent_is_initialized_once_whoever_does_it_first(by_hand: bool) -> None:
    agent: Any = Published()
    agent.initialize = Mock(wraps=agent.initialize)
    if by_hand:
        agent.initialize(OBSERVATIONS, ACTIONS)
    for _ in range(3):
        agent.runtime.ensure_initialized(OBSERVATIONS, ACTIONS, seed=1)
    assert agent.initialize.call_count == 1
    assert (agent.observation_space, agent.action_space) == (OBSERVATIONS, ACTIONS)


@pytest.mark.parametrize("other", [(OBSERVATIONS, spaces.Discrete(4)), (spaces.Box(0, 2, (2,)), ACTIONS)], ids=str)
def test_another_samplers_other_spaces_are_refused_with_both(other: Any) -> None:
    agent = Published()
    agent.runtime.ensure_initialized(OBSERVATIONS, ACTIONS, seed=1)
    with pytest.raises(SpaceError, match=r"the agent was initialized for .* the environment has"):
        agent.runtime.ensure_initialized(*other, seed=1)


# ---- parameters --------------------------------------------------------------------------------


def test_publishing_before_there_is_a_sampler_says_what_was_expected(learner: Published) -> None:
    with pytest.raises(SamplerStateError, match=r"call sampler.initialize"):
        learner.sync_shared_memory()


def test_sharing_publishes_what_there_is_and_publishing_reaches_every_sampler(learner: Published) -> None:
    learner.number = np.array(4)
    subscribers = [learner.runtime.share_memory(shared=shared) for shared in (False, True)]
    for version, value in ((1, 4), (2, 5)):
        for subscriber in subscribers:
            parameters, found = subscriber.read()
            assert (int(parameters["number"]), found) == (value, version)
        learner.number = np.array(5)
        learner.sync_shared_memory()


def test_a_sampler_that_is_gone_is_published_to_no_longer(learner: Published) -> None:
    gone, there = learner.runtime.share_memory(shared=False), learner.runtime.share_memory(shared=False)
    learner.runtime.unshare_memory(gone)
    learner.sync_shared_memory()
    assert (gone.version, there.version) == (1, 2)
    learner.runtime.unshare_memory(there)
    learner.sync_shared_memory()  # allowed: all samplers are closed
    assert there.version == 2


def test_saved_state_is_a_copy_and_can_be_restored(learner: Published) -> None:
    learner.number = np.array(1)
    state = learner.state_dict()
    learner.number = np.array(2)
    learner.load_state_dict(state)
    assert learner.number == 1


# ---- copies ------------------------------------------------------------------------------------


def test_a_worker_sees_new_parameters_when_it_pulls_and_not_before_and_pulls_only_what_is_new(
    learner: Published,
) -> None:
    subscriber, worker = learner.runtime.share_memory(shared=False), learner.runtime.worker_copy()
    worker.runtime.attach(subscriber)
    for value in (6, 7):
        before = int(worker.number)
        learner.number = np.array(value)
        learner.sync_shared_memory()
        assert worker.number == before
        worker.runtime.pull_shared_memory()
        assert worker.number == value
        worker.number[...] = -1  # would be overwritten by a second pull
        worker.runtime.pull_shared_memory()
        assert worker.number == -1


COPIES: list[Any] = [
    copy.copy,
    copy.deepcopy,
    lambda agent: pickle.loads(pickle.dumps(agent)),
    lambda agent: agent.runtime.worker_copy(),
]


@pytest.mark.parametrize("duplicate", COPIES)
def test_a_copy_of_the_learner_belongs_to_no_sampler_and_follows_nothing(learner: Published, duplicate: Any) -> None:
    subscriber = learner.runtime.share_memory(shared=False)
    learner.runtime.attach(subscriber)
    target = duplicate(learner)
    with pytest.raises(SamplerStateError):
        target.sync_shared_memory()
    target.number = target.number + 1
    target.runtime.pull_shared_memory()
    assert target.number == 1
    assert subscriber.version == 1


def test_an_agent_that_was_used_is_freed_without_the_garbage_collector() -> None:
    agent = Published()
    agent.runtime.ensure_initialized(OBSERVATIONS, ACTIONS, seed=1)
    subscriber, worker = agent.runtime.share_memory(shared=False), agent.runtime.worker_copy()
    worker.runtime.attach(subscriber)
    acting = worker.runtime.column_copy(generators(2))
    agent.runtime.unshare_memory(subscriber)
    references = [weakref.ref(each) for each in (agent, worker, acting, subscriber)]
    gc.disable()
    try:
        del agent, worker, acting, subscriber
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()


def test_a_copy_knows_its_environments_once_it_is_told(learner: Published) -> None:
    copies = [learner.runtime.worker_copy().runtime.column_copy(generators(2)) for _ in range(2)]
    copies[0].runtime.set_columns(range(3, 5), 8)
    assert (list(copies[0].env_ranks or ()), copies[0].n_envs) == ([3, 4], 8)
    for other in (copies[1], learner, copies[0].runtime.column_copy(generators(2))):
        assert (other.env_ranks, other.n_envs) == (None, None)
