"""The programs of docs/subclassing.md: what they record, and how long they are."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, RandomAgent, SerialSampler
from penstock.agents.random import draw
from penstock.envs import CountingEnv, Purpose, stream

from .test_pages import blocks, definitions

PAGE = "subclassing.md"


@pytest.fixture(scope="module")
def page() -> Any:
    return definitions(PAGE)


def test_each_program_has_at_most_40_lines() -> None:
    for block in blocks(PAGE):
        assert len([line for line in block.splitlines() if line.strip()]) <= 40
        ast.parse(block)


@pytest.mark.parametrize("n_workers", [1, 3])
def test_the_episodes_are_the_first_that_began_and_are_whole(page: Any, n_workers: int) -> None:
    with page["EpisodeSampler"](CountingEnv, batch_T=7, batch_B=3, n_workers=n_workers) as sampler:
        sampler.n_episodes = 9
        sampler.initialize(RandomAgent(), seed=2)
        for itr in range(3):
            samples, infos = sampler.obtain_samples(itr)
            env = samples.copy().numpy().env
            starts = [(t, b) for t in range(len(env.done)) for b in range(3) if env.prev_done[t, b]][:9]
            found = page["first_episodes"](samples, 9)
            assert [(rows.start, b) for rows, b in found] == starts
            for rows, b in found:
                assert env.done[rows.stop - 1, b]
                assert not env.done[rows.start : rows.stop - 1, b].any()
            assert len(infos) == env.done.sum()
            last = len(env.done) - 7
            assert not last or page["first_episodes"](samples[:last], 9) is None, "it stops as soon as it can"


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_the_second_agent_acts_in_odd_rows_with_its_own_numbers(page: Any, cls: Any) -> None:
    collector = page["TwoAgentsCollector"]
    with cls(CountingEnv, batch_T=6, batch_B=3, collector_cls=collector, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        actions = [sampler.obtain_samples(itr)[0].agent.action.clone().numpy() for itr in range(2)]
    for b in range(3):
        rngs = [stream(5, Purpose.ACTION, b), stream(5, Purpose.ACTION, b, 1)]
        wanted = [draw(CountingEnv().action_space, rngs[t % 2], 1)[0] for t in range(12)]
        np.testing.assert_array_equal(np.concatenate(actions)[:, b], wanted)


def test_both_samplers_give_the_same_batches_with_any_number_of_workers(page: Any) -> None:
    for name in ("EpisodeSampler", "TwoAgentsSampler"):
        found = []
        for n_workers in (1, 3):
            with page[name](CountingEnv, batch_T=7, batch_B=3, n_workers=n_workers) as sampler:
                sampler.initialize(RandomAgent(), seed=1)
                found.append([sampler.obtain_samples(itr)[0].env.reward.clone() for itr in range(3)])
        assert all(one.equal(other) for one, other in zip(*found, strict=True))
