"""At the end of a batch, workers offer the next first row: the server acts on it before it wakes them."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import cloudpickle
import pytest

from penstock import Agent, Collector, ParallelSampler, ResetCollector, Sampler, WaitResetCollector
from penstock.collectors import VectorEnvCollector
from penstock.envs import BatchedCartPole, CountingEnv

from ..scale import pairs, scaled
from ..support import assert_same
from . import test_central_restart as restarts
from .test_central_restart import AGENTS, CARTPOLE, MODES, OWN_SHARE, TOLERANCE, B

cloudpickle.register_pickle_by_value(restarts)

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

T = 3
CALLER = {**MODES, "own share": OWN_SHARE}


def make(mode: str, env_fn: Any = CARTPOLE, **kwargs: Any) -> Sampler:
    cls, options = CALLER.get(mode, (ParallelSampler, {}))
    arguments: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_workers": 3, "max_decorrelation_steps": 0}
    arguments |= {"eval_n_envs": 3, "eval_max_steps": 3 * 60}
    return cls(env_fn, **{**arguments, **options, **kwargs})


def n_requests(sampler: Sampler) -> list[int]:
    """By rank, how many requests each worker has made."""
    return [sampler._memory.control.replied(rank) for rank in range(sampler.n_workers)]


def new_requests(sampler: Sampler, itr: int = 0) -> list[int]:
    """By rank, how many requests the next batch takes."""
    before = n_requests(sampler)
    sampler.obtain_samples(itr)
    return [after - n for after, n in zip(n_requests(sampler), before, strict=True)]


@pytest.mark.parametrize("mode", CALLER)
def test_a_batch_takes_a_request_less(mode: str) -> None:
    """Only halves, which take turns, make no offers."""
    later = [T if mode in ("alternating", "no overlap") else T - 1] * 3
    with make(mode, CountingEnv) as sampler:
        sampler.initialize(AGENTS["random"](), seed=1)
        assert new_requests(sampler) == [T] * 3
        assert [new_requests(sampler) for _ in range(2)] == [later] * 2
        sampler.evaluate_agent(0)
        assert new_requests(sampler) == [T] * 3
        assert new_requests(sampler) == later
        sampler.call("get_wrapper_attr", "count")
        assert new_requests(sampler) == [T] * 3
        assert new_requests(sampler) == later
        served = sampler.server_stats.served
        assert sum(n_columns * times for n_columns, times in served.items()) == 7 * T * B + 3 * 60


class Own(ResetCollector):
    """It might begin with another row."""


@pytest.mark.parametrize(
    ("collector", "n"), [(Own, T), (WaitResetCollector, T), (ResetCollector, T - 1), (VectorEnvCollector, T - 1)]
)
def test_only_collectors_whose_first_row_is_known(collector: type[Collector], n: int) -> None:
    env_fn = BatchedCartPole if collector.batched else CARTPOLE
    with make("lock-step", env_fn, collector_cls=collector, eval_n_envs=0) as sampler:
        sampler.initialize(AGENTS["categorical"](), seed=1)
        assert [new_requests(sampler) for _ in range(2)] == [[T] * 3, [n] * 3]


def sampled(mode: str, agent: Agent, seed: int, n: int) -> list[Any]:
    """Batches, with evaluations, calls, pauses and killed workers between them, in an order that `seed` draws."""
    rng, found, n_kills = random.Random(seed), [], 0
    with make(mode, on_worker_failure="restart", max_restarts=n) as sampler:
        sampler.initialize(agent, seed=9)
        for itr in range(n):
            what = rng.choice(["batch", "batch", "pause", "evaluation", "call", "kill", "parameters", "change"])
            if what == "evaluation":
                sampler.evaluate_agent(itr)
            elif what == "call":
                sampler.call("get_wrapper_attr", "spec")
            elif what == "kill":
                n_kills += 1
                os.kill(sampler.worker_pids[0], signal.SIGKILL)
            elif what == "parameters":
                agent.sync_shared_memory()
            if what == "pause":
                sampler.start_samples(itr)
                sampler.wait_samples()
            else:
                sampler.obtain_samples(itr)
            found.append(sampler.samples_np.copy())
            if what == "change":  # the next batch begins with what the user has made of the last row
                sampler.samples_np.env.bootstrap_obs[...] *= -0.5
        assert sampler.stats().restarts == n_kills
    return found


@pytest.mark.parametrize(("mode", "seed"), pairs(CALLER, range(scaled(20, 5))))
def test_batches_are_the_same_in_any_order_of_calls(mode: str, seed: int) -> None:
    name = list(AGENTS)[seed % 3]
    found = sampled(mode, AGENTS[name](), seed, scaled(40, 12))
    assert_same(found, sampled("parallel", AGENTS[name](), seed, len(found)), **TOLERANCE[name])


def test_an_agent_that_raises_then_is_named() -> None:
    class Raises(AGENTS["random"]):  # type: ignore[misc]
        def sample_mode(self, itr: int) -> None:
            self.itr = itr

        def step(self, *inputs: Any) -> Any:
            if self.itr == 1:
                raise ValueError("no")
            return super().step(*inputs)

    with make("lock-step") as sampler:
        sampler.initialize(Raises(), seed=1)
        sampler.obtain_samples(0)
        sampler.start_samples(1)
        with pytest.raises(Exception, match=r"the inference server raised ValueError while acting .*itr=1.*: no"):
            sampler.wait_samples()
