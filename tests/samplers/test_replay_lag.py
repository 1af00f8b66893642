"""AsyncSampler with a replay and lag=1: the draws are the same whatever the timing, and those of a serial loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import AsyncSampler, NamedArrays, SerialSampler
from penstock.envs import CountingEnv
from penstock.learning import Prioritized, Ratio, Replay

from ..learning.streams import storage_of
from ..scale import scaled
from .async_support import B, Delayed, T, TabularAgent

N_DRAWS, BATCH, LENGTH = 60, 16, 5
RATIO = Ratio(1.0, T * B, BATCH, min_steps=2 * T * B)

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


def make_env() -> Any:
    return Delayed(CountingEnv(length=LENGTH, truncate=True), 0.004)


def make_replay(max_truncations: int) -> Replay:
    # The ring wraps several times.
    return Replay(B * 6 * T, 2, 0.9, Prioritized(), max_truncations=max_truncations, seed=3)


def learn(replay: Replay, agent: TabularAgent) -> dict[str, Any]:
    """Draw, and train in a way that the draw alone determines. Returns what was drawn."""
    batch = replay.sample(BATCH)
    replay.update(batch.index, batch.return_.abs() + 0.1)
    agent.weights = agent.weights + 0.01 * np.tanh(batch.observation.double().mean(0).numpy())
    agent.sync_shared_memory()
    return {name: leaf.numpy().tobytes() for name, leaf in batch.leaves()} | {"n_steps": replay.n_steps}


def asynchronous(max_truncations: int = 10_000, **options: Any) -> list[dict[str, Any]]:
    replay, agent = make_replay(max_truncations), TabularAgent()
    sampler = AsyncSampler(make_env, batch_T=T, batch_B=B, replay=replay, ratio=RATIO, lag=1, **options)
    with sampler:
        sampler.initialize(agent, seed=7)
        sampler.start()
        drawn = [learn(replay, agent) for _ in range(N_DRAWS)]
        sampler.take_traj_infos()
        assert replay.n_steps > 2 * replay.capacity
        if max_truncations < 10_000:
            assert replay.n_without_final
    return drawn


@pytest.fixture(scope="module")
def serial() -> list[dict[str, Any]]:
    """The next batch is collected as soon as the ratio allows it, and appended when no draw is possible without it."""
    replay, agent, drawn = make_replay(10_000), TabularAgent(), []
    waiting: NamedArrays | None = None

    def show() -> None:
        if replay.n_steps:
            ring = storage_of(replay).ring
            end = ring.written(0)
            ring.pin(end, end + (0 if waiting is None else T))

    with SerialSampler(partial(CountingEnv, length=LENGTH, truncate=True), batch_T=T, batch_B=B) as sampler:
        sampler.initialize(agent, seed=7, bootstrap_value=False)
        for _ in range(N_DRAWS):
            while True:
                if waiting is None and RATIO.may_append(replay):
                    waiting = sampler.obtain_samples(0)[0].copy()
                    show()
                if RATIO.may_sample(replay):
                    break
                assert waiting is not None
                replay.append(waiting)
                waiting = None
                show()
            drawn.append(learn(replay, agent))
    return drawn


SETTINGS = scaled([(1, 2, None), (3, 4, None), (2, 3, "process")], [(3, 4, None), (2, 3, "process")])


@pytest.mark.parametrize(("n_workers", "n_slots", "server"), SETTINGS)
def test_the_draws_are_those_of_a_serial_loop(serial: Any, n_workers: int, n_slots: int, server: Any) -> None:
    drawn = asynchronous(n_workers=n_workers, n_slots=n_slots, server=server)
    for k, (found, expected) in enumerate(zip(drawn, serial, strict=True)):
        assert found == expected, f"draw {k}"


@pytest.mark.filterwarnings("ignore:more than max_truncations")
def test_the_draws_are_the_same_when_final_observations_are_lost() -> None:
    assert asynchronous(24, n_workers=2) == asynchronous(24, n_workers=2)
