"""on_worker_failure="restart": no batch is lost, no other column is touched, and what is lost is told."""

import contextlib
import functools
import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock import (
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    TrajInfo,
    WorkerDiedError,
)
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_collector, faulty_env

from ..scale import methods, scaled
from ..support import assert_same, until
from .support import ERROR_SECONDS, Notebook, generator, killer, note, pid_of

N_WORKERS, B, T = 3, 6, 24
ENDLESS: dict[str, Any] = {"on_worker_failure": "restart", "max_restarts": 1_000_000}

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


class Detailed(TrajInfo):
    """Goes through the pipe."""

    def terminate(self, final_observation: Any) -> None:
        self.final = np.asarray(final_observation).copy()


def restarting_sampler(env_fn: Any, start_method: str = "forkserver", **kwargs: Any) -> ParallelSampler:
    arguments = {"batch_T": T, "batch_B": B, "n_workers": N_WORKERS, "max_decorrelation_steps": 20, **ENDLESS, **kwargs}
    return ParallelSampler(env_fn, start_method=start_method, **arguments)


def columns(rank: int) -> slice:
    return slice(rank * B // N_WORKERS, (rank + 1) * B // N_WORKERS)


def check_trajectories(sampler: Any, infos: list[TrajInfo]) -> None:
    """One info per recorded done, in order."""
    done = sampler.samples_np.env.done
    assert len(infos) == int(done.sum())


# ---- at random moments ---------------------------------------------------------------------


@functools.cache
def undisturbed(n_batches: int) -> list[Any]:
    with restarting_sampler("CartPole-v1", eval_n_envs=2, eval_max_steps=60) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        return [_one_batch(sampler, itr) for itr in range(n_batches)]


def _one_batch(sampler: ParallelSampler, itr: int) -> Any:
    if itr % 4 == 3:
        sampler.evaluate_agent(itr)
    _, infos = sampler.obtain_samples(itr)
    check_trajectories(sampler, infos)
    return sampler.samples_np.copy()


@methods("fork", "forkserver")
@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Detailed], ids=["ring", "pipe"])
def test_kills_at_random_moments_change_no_other_column(
    traj_info_cls: type[TrajInfo], start_method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "penstock")
    rng = generator("restart", start_method, traj_info_cls.__name__)
    n_kills = scaled(50, 1)
    reference = undisturbed(12)
    kills = 0
    while kills < n_kills:
        caplog.clear()
        kwargs: dict[str, Any] = {"eval_n_envs": 2, "eval_max_steps": 60, "traj_info_cls": traj_info_cls}
        with killer() as kill, restarting_sampler("CartPole-v1", start_method, **kwargs) as sampler:
            sampler.initialize(RandomAgent(), seed=5)
            rank = rng.randrange(N_WORKERS)
            kill.kill([pid_of(sampler, rank)], rng.uniform(0, 0.03))
            batches = []
            while len(batches) < len(reference) or sampler.stats().restarts < 1:
                batches.append(_one_batch(sampler, len(batches)))
            kill.when()
            stats = sampler.stats()
        kills += 1
        assert [worker.restarts for worker in stats.workers] == [int(i == rank) for i in range(N_WORKERS)]
        (record,) = [r.getMessage() for r in caplog.records if "is being replaced" in r.getMessage()]
        assert record.startswith(f"worker {rank} (pid ")
        assert f"it is being replaced, {stats.lost_trajectories} trajectories are lost" in record
        others = [b for b in range(B) if b not in range(B)[columns(rank)]]
        for ours, theirs in zip(batches, reference, strict=False):
            assert_same(ours[:, others], theirs[:, others])


# ---- at fixed places -----------------------------------------------------------------------


def collected(sampler: ParallelSampler) -> list[Any]:
    """Five batches."""
    sampler.initialize(RandomAgent(), seed=9)
    batches = []
    for itr in range(5):
        _, infos = sampler.obtain_samples(itr)
        check_trajectories(sampler, infos)
        batches.append(sampler.samples_np.copy())
    return batches


@methods("forkserver")
def test_the_same_failure_gives_the_same_batches(tmp_path: Path, start_method: str) -> None:
    good, runs = faulty_env("CartPole-v1", Fault("delay", at=10**9)), []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        failing = faulty_env("CartPole-v1", Notebook(folder).fault("kill", 30))
        with restarting_sampler([good] * 3 + [failing] + [good] * 2, start_method) as sampler:
            runs.append(collected(sampler))
            assert [worker.restarts for worker in sampler.stats().workers] == [0, 1, 0]
    assert_same(*runs)
    with restarting_sampler("CartPole-v1") as sampler:
        reference = collected(sampler)
    hit, ours, theirs = columns(1), runs[0][-1].env.observation, reference[-1].env.observation
    assert not np.array_equal(ours[:, hit], theirs[:, hit]), "the streams are fresh"
    assert not np.array_equal(ours[:-1, hit], reference[0].env.observation[1:, hit])


@methods("spawn")
def test_a_replacement_that_fails_at_start_is_replaced(start_method: str) -> None:
    rng = generator("start", start_method)
    for rank in range(scaled(N_WORKERS, 1)):
        with killer() as kill, restarting_sampler(CountingEnv, start_method) as sampler:
            kill.kill_newborn(rank, rng.uniform(0, 0.02), start_method)
            sampler.initialize(RandomAgent(), seed=5)
            kill.when()
            sampler.obtain_samples(0)
            sampler.obtain_samples(1)  # a death after the answer to the first is noticed now
            assert sampler.stats().restarts == 1


@methods("fork", "forkserver")
def test_a_batch_that_the_user_holds_is_not_touched_by_a_replacement(start_method: str) -> None:
    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            time.sleep(0.001)
            return super().step(action)

    kwargs: dict[str, Any] = {"eval_n_envs": 3, "eval_max_steps": 3 * 100}
    with killer() as kill, restarting_sampler(Slow, start_method, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(scaled(10, 2)):
            sampler.obtain_samples(itr)
            before = {name: leaf.tobytes() for name, leaf in sampler.samples_np.leaves()}
            kill.kill([pid_of(sampler, itr % N_WORKERS)], 0.03)
            assert len(sampler.evaluate_agent(itr)) == 3 * 20
            kill.when()
            assert sampler.stats().restarts == itr + 1
            for name, leaf in sampler.samples_np.leaves():
                assert leaf.tobytes() == before[name], name


@pytest.mark.parametrize("traj_info_cls", [TrajInfo, Detailed], ids=["ring", "pipe"])
def test_lost_trajectories_are_counted_exactly(traj_info_cls: type[TrajInfo], tmp_path: Path) -> None:
    """Episodes of 5; env_rank 3 ends its worker in its 30th step, t=5 of the second batch of 24."""
    fns = [CountingEnv] * 3 + [faulty_env(CountingEnv, Notebook(tmp_path).fault("kill", 30))] + [CountingEnv] * 2
    with restarting_sampler(fns, max_decorrelation_steps=0, traj_info_cls=traj_info_cls) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(3):
            _, infos = sampler.obtain_samples(itr)
            check_trajectories(sampler, infos)
        # Two at t=0, and the two that were running. That of env_rank 2 has just ended, and no other has begun.
        assert [worker.lost_trajectories for worker in sampler.stats().workers] == [0, 4, 0]
        assert [worker.trajectories for worker in sampler.stats().workers] == [2 * 14, 2 * (4 + 4 + 5), 2 * 14]


def test_what_has_been_delivered_is_not_counted_as_lost(tmp_path: Path) -> None:
    """Dies at the beginning of a batch, with the batch before still in the buffer."""
    collector = faulty_collector(ResetCollector, Notebook(tmp_path).fault("kill", 2))
    kwargs: dict[str, Any] = {"env_kwargs": {"length": 1}, "max_decorrelation_steps": 0}
    with restarting_sampler(CountingEnv, collector_cls=collector, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(3):
            assert len(sampler.obtain_samples(itr)[1]) == T * B
        assert sampler.stats().lost_trajectories == 2, "those that were running"


class Mortal(CountingEnv):
    """The first that is told to die does."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self._note = note

    def die(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._note.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_call_after_an_evaluation_loses_no_evaluation(tmp_path: Path) -> None:
    with restarting_sampler(functools.partial(Mortal, tmp_path / "dead"), eval_n_envs=3, eval_max_steps=60) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)
        sampler.call("die")
        assert sampler.stats().restarts == 1
        assert sampler.stats().lost_trajectories == 2, "those that were running"


# ---- when it is enough ---------------------------------------------------------------------


def test_the_quota_ends_it_with_the_history() -> None:
    with restarting_sampler(CountingEnv, max_restarts=3) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        pids = []
        for itr in range(4):
            pids.append(sampler.worker_pids[1])
            psutil.Process(pids[-1]).kill()
            began = time.monotonic()
            if itr < 3:
                sampler.obtain_samples(itr)
                until(lambda known=itr: sampler.stats().restarts == known + 1 or sampler.obtain_samples(9) is None)
        with pytest.raises(WorkerDiedError) as caught:
            while True:
                sampler.obtain_samples(10)
        note("quota used up: kill to error, s", time.monotonic() - began, ERROR_SECONDS)
    message = str(caught.value)
    assert message.startswith(f"worker 1 (pid {pids[3]}")
    assert "max_restarts=3 in 60 s are used up, earlier:" in message
    assert re.findall(r"^  [\d.]+ s ago: worker 1 \(pid (\d+)", message, re.MULTILINE) == [str(p) for p in pids[:3]]


def test_the_quota_is_of_a_window_of_time() -> None:
    with restarting_sampler(CountingEnv, max_restarts=1, restart_window=0.2) as sampler:
        sampler.initialize(RandomAgent(), seed=5)
        for itr in range(3):
            psutil.Process(sampler.worker_pids[1]).kill()
            until(lambda known=itr: sampler.obtain_samples(0) and sampler.stats().restarts == known + 1)
            replaced = time.monotonic()
            until(lambda since=replaced: time.monotonic() - since > 0.2)
