"""On real environments, one seed gives one batch for any number of processes and for every kind of agent."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import penstock
from penstock import Agent, ParallelSampler, RandomAgent, Sampler, SerialSampler

from ..samplers.test_agents_determinism import CASES
from ..scale import scaled
from ..support import Batch, assert_same, run
from .environments import ENVIRONMENTS, agent_maker, env_fns

pytestmark = pytest.mark.slow

LIMITS = (9, 12, 15, 18, 21)


def test_every_stock_agent_is_among_those_that_are_compared() -> None:
    """Five batches of each: samplers/test_agents_determinism.py, and test_determinism.py for RandomAgent."""
    public = (getattr(penstock, name) for name in penstock.__all__)
    agents = {cls for cls in public if inspect.isclass(cls) and issubclass(cls, Agent) and not inspect.isabstract(cls)}
    assert agents == {RandomAgent, *(type(make_agent()) for _, make_agent in CASES.values())}


def batches(cls: type[Sampler], name: str, recurrent: bool, **kwargs: Any) -> list[Batch]:
    fns = env_fns(name, LIMITS)
    env = fns[0]()
    make_agent = agent_maker(env.observation_space, env.action_space, recurrent)
    env.close()
    return run(cls, fns, make_agent(), scaled(5, 3), batch_T=10, batch_B=len(fns), **kwargs)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("name", "recurrent"), [("Taxi", False), ("Acrobot", True), ("MuJoCo", True)])
def test_any_number_of_workers_gives_the_same(name: str, recurrent: bool) -> None:
    pytest.importorskip(ENVIRONMENTS[name].needs)
    reference = batches(SerialSampler, name, recurrent)
    assert any(batch.env.done.any() for batch, _ in reference)
    for n_workers in scaled((1, 2, 3), (3,)):
        assert_same(batches(ParallelSampler, name, recurrent, n_workers=n_workers), reference)
