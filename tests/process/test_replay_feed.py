"""AsyncSampler that feeds a replay, when its workers or the main process are killed."""

from __future__ import annotations

import gc
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import AsyncSampler, RandomAgent, SamplerState, WorkerDiedError
from penstock.buffers import descriptors
from penstock.envs import CountingEnv
from penstock.learning import Ratio, Replay

from ..learning.streams import storage_of
from ..scale import methods, pairs, scaled
from ..support import BOUND
from .support import ERROR_SECONDS, SLACK, Script, generator, gone_after, killer, note, pause, pid_of

N_WORKERS, B, T, LENGTH, N_STEP = 3, 6, 8, 5, 2

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


def feeding_sampler(replay: Replay, env_fn: Any, **kwargs: Any) -> AsyncSampler:
    arguments = {"batch_T": T, "batch_B": B, "n_workers": N_WORKERS, "max_decorrelation_steps": 0, **kwargs}
    return AsyncSampler(env_fn, replay=replay, ratio=Ratio(1.0), **arguments)


def replay_of() -> Replay:
    return Replay(B * 12 * T, N_STEP, 1.0, max_truncations=B * 12 * T, seed=0)


def check(batch: Any, truncate: bool) -> None:
    """Every number of a `CountingEnv`'s transition follows from its observation."""
    count = batch.observation[:, 1].int()
    steps = torch.minimum(torch.full_like(count, N_STEP), LENGTH - count)
    ends = count + steps == LENGTH
    assert torch.equal(batch.return_, (count + 1 + (steps - 1) * (count + 2)).float())
    assert torch.equal(batch.discount, (~ends | truncate).float())
    after = batch.observation + torch.stack([torch.zeros_like(steps), steps], -1)
    after[ends & (not truncate)] = 0
    assert torch.equal(batch.next_observation, after)


@pytest.mark.parametrize(("server", "truncate"), pairs([None, "process"], [False, True]))
def test_a_worker_killed_at_a_random_moment(server: Any, truncate: bool) -> None:
    rng = generator("feed", server, truncate)
    with killer() as kill:
        for i in range(scaled(50, 2)):
            replay = replay_of()
            with feeding_sampler(replay, partial(CountingEnv, truncate=truncate), server=server) as sampler:
                sampler.initialize(RandomAgent(), seed=1)
                sampler.start()
                replay.sample(32)
                kill.kill([pid_of(sampler, rng.randrange(N_WORKERS))], rng.uniform(0, 0.05))
                when = 0.0
                if i % 2:  # the learner is in its own code
                    when = kill.when()
                began = time.monotonic()
                with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL"):
                    while True:
                        began = time.monotonic()
                        check(replay.sample(32), truncate)
                seen = time.monotonic()
                note("replay, kill or next sample to error, s", seen - max(when or kill.when(), began), ERROR_SECONDS)
                assert sampler.state is SamplerState.BROKEN
            for _ in range(20):  # training can go on with what there is
                check(replay.sample(64), truncate)


@pytest.mark.parametrize(("server", "truncate"), pairs([None, "process"], [False, True]))
def test_a_replacement_goes_on_in_the_same_columns(server: Any, truncate: bool) -> None:
    rng, wanted = generator("feed restart", server, truncate), scaled(75, 3)
    endless: dict[str, Any] = {"on_worker_failure": "restart", "max_restarts": 1_000_000, "server": server}
    replay = replay_of()
    with killer() as kill, feeding_sampler(replay, partial(CountingEnv, truncate=truncate), **endless) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        sampler.start()
        for n_kills in range(1, wanted + 1):
            kill.kill([pid_of(sampler, rng.randrange(N_WORKERS))], rng.uniform(0, 0.02))
            deadline = time.monotonic() + BOUND
            while sampler.stats().restarts < n_kills:
                assert time.monotonic() < deadline
                check(replay.sample(32), truncate)
            kill.when()
        sampler.pause()
        check_columns(replay)
        ahead = sampler.run.schedule
        assert ahead.released == ahead.opened or ahead.open[-1].number + 1 == ahead.opened
        ring = storage_of(replay).ring
        assert [ring.written(rank) for rank in range(N_WORKERS)] == [ahead.opened * T] * N_WORKERS


def check_columns(replay: Replay) -> None:
    """All rows of the ring continue the row before, or begin an episode with a new environment."""
    rows = replay.contents.rows()
    observation, reward = rows.observation, rows.reward
    assert rows.valid.all()
    assert not rows.is_partial.any()
    assert (reward == observation[..., 1] + 1).all()
    continues = observation[1:, :, 1] > 0
    assert (observation[1:] - observation[:-1])[continues].tolist() == [[0, 1]] * int(continues.sum())
    begins = observation[1:][~continues]
    before = observation[:-1][~continues]
    is_next = (begins[:, 0] == before[:, 0] + 1) & (before[:, 1] == LENGTH - 1)
    is_new = begins[:, 0] <= 0  # the environment of a replacement
    assert (is_next | is_new).all()


RUNNING = """
from penstock.learning import Ratio, Replay
replay = Replay(4 * 400, seed=0)
sampler = AsyncSampler(CountingEnv, batch_T=20, batch_B=4, n_workers=2, replay=replay, ratio=Ratio(1.0))
sampler.initialize(RandomAgent())
sampler.start()
say(*sampler.worker_pids)
for itr in range(10**9):
    replay.sample(32)
    if itr % 50 == 20:
        replay.save("saved")
"""


def test_a_killed_main_process_leaves_nothing_but_a_checkpoint(tmp_path: Path) -> None:
    rng = generator("feed main")
    for _ in range(scaled(50, 1)):
        with Script(tmp_path, RUNNING) as script:
            script.pids()
            pause(rng.uniform(0.2, 0.6))
            everyone = script.descendants()
            began = time.monotonic()
            script.process.kill()
            _, stderr = script.end()
            note(
                "replay, main process killed to nothing left, s", gone_after(everyone, began, 2.0 * SLACK), 2.0 * SLACK
            )
        assert stderr == ""
        if (tmp_path / "saved" / "replay.json").exists():
            loaded = Replay.load(tmp_path / "saved")
            assert (loaded.sample(100).return_ > 0).all()


@methods("forkserver")
def test_no_array_of_a_replay_crosses_to_a_worker_by_value(start_method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dumps, sizes = descriptors.dumps, [0, 0]

    def counting(value: Any) -> tuple[bytes, list[int]]:
        data, fds = dumps(value)
        sizes[-1] += len(data)
        return data, fds

    monkeypatch.setattr(descriptors, "dumps", counting)
    for capacity in (1_000, 1_000, 1_000_000):  # what the first start sends once does not count
        sizes.append(0)
        with feeding_sampler(Replay(capacity, seed=0), CountingEnv, start_method=start_method) as sampler:
            sampler.initialize(RandomAgent(), seed=1)
    small, large = sizes[-2:]
    assert small > 0
    assert abs(large - small) < 1_000


def test_the_memory_is_freed_with_the_last_reference() -> None:
    """At once, and not when Python looks for cycles: it may be gigabytes."""
    import torch.autograd.graph  # noqa: F401 - its first import keeps the frames of its caller until then

    replay = replay_of()
    sampler = feeding_sampler(replay, CountingEnv)
    sampler.initialize(RandomAgent(), seed=0)
    sampler.start()
    replay.sample(8)
    ring = weakref.ref(storage_of(replay).ring)
    sampler.shutdown()
    gc.collect()
    gc.disable()
    try:
        del sampler
        assert len(replay.sample(8).index) == 8
        del replay
        assert ring() is None
    finally:
        gc.enable()
