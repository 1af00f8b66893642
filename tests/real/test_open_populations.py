"""PettingZoo's environments whose agents come with new ids all the time, in seats."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import RandomAgent, SerialSampler
from penstock.envs import Seats
from penstock.errors import WorkerError
from tests.scale import scaled

parallel = pytest.importorskip(
    "pettingzoo.test.example_envs.generated_agents_parallel_v0", exc_type=ImportError
).parallel_env
in_turns = pytest.importorskip("pettingzoo.test.example_envs.generated_agents_env_v0", exc_type=ImportError).raw_env

SPACES = gym.spaces.Box(0, 1, (50,), np.float32), gym.spaces.Discrete(3)
KINDS = "type0", "type1", "type2"


# Classes of the objects in a space: the environment keeps the spaces of each type of agent that it makes.
OF_SPACES = "Box", "Discrete", "Generator", "PCG64", "SeedSequence", "RLock"


def objects() -> Counter[str]:
    """How many objects there are of each class."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects())


def kind_of(agent: str) -> str:
    """The environment makes new types too: type 3 is as type 0, and so on."""
    return f"type{int(agent[4 : agent.rfind('_')]) % 3}"


def padded(base: Any) -> Any:
    """The environment draws the sizes of its spaces in each reset. So pad the observations, and use three actions,
    which all types have."""

    class Padded(base):  # type: ignore[misc]
        def observation_space(self, agent: str) -> Any:
            return SPACES[0]

        def action_space(self, agent: str) -> Any:
            return SPACES[1]

        def observe(self, agent: str) -> Any:
            found = super().observation_space(agent).sample()
            return np.pad(found, (0, 50 - len(found)))

    return Padded


def seats(base: Any, n: int = 40) -> Any:
    return Seats(padded(base)(), dict.fromkeys(KINDS, n), kind=kind_of, spaces=dict.fromkeys(KINDS, SPACES))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("base", [parallel, in_turns])
def test_agents_of_an_open_population_sit_in_the_seats_of_their_kind(base: Any) -> None:
    made: list[Any] = []

    def env_fn() -> Any:
        made.append(seats(base))
        return made[-1]

    with SerialSampler(env_fn, batch_T=50, batch_B=1, max_decorrelation_steps=0) as sampler:
        sampler.initialize(
            {kind: RandomAgent() for kind in KINDS}, policy_of=lambda seat: seat.partition(":")[0], seed=0
        )
        env, n_steps, memory, n_decisions, n_ends = made[-1], 0, list[Counter[str]](), 0, 0
        wanted, itr, ids = scaled(100_000, 1_000), 0, set[str]()
        while n_steps < wanted:
            batch, _ = sampler.obtain_samples(itr)
            itr += 1
            for kind in KINDS:
                own = batch[kind].env
                assert own.reward.shape == (50, 40)
                n_decisions += int(own.valid.sum())
                n_ends += int(own.done.sum())
            n_steps = int(sampler.metrics()["sampler/env_steps"])
            assert all(kind_of(env.agent_of(seat)) == seat.partition(":")[0] for seat in env.agents)
            ids |= set(env.env.agents)
            if n_steps >= wanted // 2 and not memory:
                memory.append(objects())
        memory.append(objects())
    assert n_decisions > wanted / 2
    assert n_ends > wanted / 100
    assert len(ids) > 20
    # The environment keeps the two spaces of each type of agent that it makes, with their random generators. `metrics`
    # keeps up to 2,000 trajectories.
    grown = memory[1] - memory[0]
    assert grown.pop("TrajInfo", 0) <= 2000
    grown = {name: n for name, n in grown.items() if name not in OF_SPACES}
    assert sum(grown.values()) < 200, grown


@pytest.mark.parametrize("base", [parallel, in_turns])
def test_too_few_seats_are_named_with_both_numbers(base: Any) -> None:
    with SerialSampler(lambda: seats(base, 2), batch_T=50, batch_B=1) as sampler:
        message = r"3 agents of kind 'type\d' are there, with agent 'type\d+_\d+', and it has 2 seats: give it more"

        def sample() -> None:
            agents = {kind: RandomAgent() for kind in KINDS}
            sampler.initialize(agents, policy_of=lambda seat: seat.partition(":")[0], seed=0)
            for itr in range(100):
                sampler.obtain_samples(itr)

        with pytest.raises(WorkerError, match=message):
            sample()
