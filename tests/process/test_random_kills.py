"""SIGKILL at moments that nobody knows: one worker, all of them, and workers with children that live on."""

import os
import re
import statistics
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncSampler, RandomAgent, SamplerBrokenError, TrajInfo, WorkerDiedError
from penstock.envs import CountingEnv

from ..scale import START_METHODS, pairs, scaled, with_start_methods
from ..support import until
from .failing import SAMPLERS
from .support import (
    ERROR_SECONDS,
    SLACK,
    Talkative,
    WithChildren,
    check_counting,
    generator,
    gone_after,
    is_running,
    killer,
    note,
    pid_of,
)

#: With no other test beside it, three processes like the workers take 0.02 s to die.
MEDIAN_SECONDS = scaled(0.22, 1.0)
LONGEST_DELAY = 0.05

pytestmark = [pytest.mark.timeout(scaled(1800, 40)), pytest.mark.slow]


def mortal_sampler(start_method: str, env_fn: Any = CountingEnv, name: str = "parallel", **kwargs: Any) -> Any:
    cls, options = SAMPLERS[name]
    arguments = {"batch_T": 16, "batch_B": 6, "n_workers": 3, "eval_n_envs": 3, "eval_max_steps": 3 * 30}
    return cls(env_fn, start_method=start_method, **{**arguments, **options, **kwargs})


class WithCargo(CountingEnv):
    def __init__(self, cargo: bytes = b"") -> None:
        super().__init__()


def work_until_it_breaks(sampler: Any, agent: Any = None, polls: bool = False) -> tuple[SamplerBrokenError, float]:
    """Training, parking and evaluation in turn; returns the error and when it came."""
    with pytest.raises(SamplerBrokenError) as caught:
        if agent is not None:
            sampler.initialize(agent)
        for itr in range(10_000_000):
            result = sampler.poll_samples() if polls else sampler.obtain_samples(itr)
            if result is not None:
                samples, infos = result
                check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
                assert len(infos) == int(samples.env.done.sum())
            if itr % 3 == 0 and sampler.config.eval_n_envs and not polls:
                sampler.evaluate_agent(itr)
    return caught.value, time.monotonic()


def named(error: SamplerBrokenError) -> list[tuple[int, int]]:
    return [(int(rank), int(pid)) for rank, pid in re.findall(r"^worker (\d+) \(pid (\d+)", str(error), re.MULTILINE)]


@pytest.mark.parametrize(
    ("name", "traj_info_cls", "start_method"),
    [
        (name, *how)
        for name, how in pairs(
            [name for name in SAMPLERS if name != "serial"],
            scaled([*product((Talkative, TrajInfo), START_METHODS)], [(Talkative, "fork"), (TrajInfo, "forkserver")]),
        )
    ],
)
def test_a_random_worker_at_a_random_moment(name: str, traj_info_cls: type[TrajInfo], start_method: str) -> None:
    rng, latencies = generator("one", name, start_method, traj_info_cls.__name__), []
    with killer() as kill:
        for i in range(scaled(20, 3 if name.startswith("ahead") else 1)):
            with mortal_sampler(start_method, name=name, traj_info_cls=traj_info_cls) as sampler:
                sampler.initialize(RandomAgent(), seed=1)
                is_async = isinstance(sampler, AsyncSampler)
                if is_async:
                    sampler.start()
                rank = rng.randrange(3)
                pid = pid_of(sampler, rank)
                kill.kill([pid], rng.uniform(0, LONGEST_DELAY))
                if is_async and i % 3 == 0:  # the learner is in its own code, and its next call reports the death
                    kill.when()
                    until(lambda pid=pid: not is_running(pid))
                    since = time.monotonic()
                    with pytest.raises(SamplerBrokenError) as caught:
                        sampler.obtain_samples(0)
                    error, seen = caught.value, time.monotonic()
                else:
                    error, seen = work_until_it_breaks(sampler, polls=is_async and i % 3 == 1)
                    since = kill.when()
            assert isinstance(error, WorkerDiedError)
            assert named(error) == [(rank, pid)]
            assert "was killed by SIGKILL (out of memory?) while " in str(error)
            latencies.append(seen - since)
            note(f"random kills, {name}: kill to error, s", latencies[-1], ERROR_SECONDS)
    note(f"random kills, {name}: median to error, s", statistics.median(latencies), MEDIAN_SECONDS)


@pytest.mark.timeout(scaled(300, 15))
@with_start_methods("cargo", [0, 5_000_000], START_METHODS)
def test_a_worker_that_is_being_started(cargo: int, start_method: str) -> None:
    """From its first millisecond on, when it has not even read what it is to do."""
    rng = generator("start-up", start_method, cargo)
    longest = {"fork": 0.02, "forkserver": 0.02, "spawn": 0.3}[start_method]
    with killer() as kill:
        for i in range(scaled(30, 2)):
            with mortal_sampler(start_method, partial(WithCargo, cargo=bytes(cargo))) as sampler:
                kill.kill_newborn(rng.randrange(3), rng.uniform(0, longest) if i else 0.0, start_method)
                error, seen = work_until_it_breaks(sampler, RandomAgent())
                killed, pids = kill.deed()
            assert isinstance(error, WorkerDiedError)
            assert [pid for _, pid in named(error)] == pids
            note(f"killed while starting, {start_method}: kill to error, s", seen - killed, ERROR_SECONDS)


@pytest.mark.parametrize("n_workers", [scaled(8, 4)])
def test_all_workers_at_once(n_workers: int, start_method: str) -> None:
    rng = generator("all", start_method)
    with killer() as kill:
        for _ in range(scaled({"fork": 20, "forkserver": 20, "spawn": 10}, {"fork": 1, "forkserver": 2})[start_method]):
            with mortal_sampler(start_method, n_workers=n_workers, batch_B=n_workers) as sampler:
                sampler.initialize(RandomAgent())
                pids = sampler.worker_pids
                kill.kill(rng.sample(pids, n_workers), rng.uniform(0, LONGEST_DELAY))
                error, seen = work_until_it_breaks(sampler)
                note("all workers killed: kill to error, s", seen - kill.when(), ERROR_SECONDS)
            assert isinstance(error, WorkerDiedError)
            # Those that take longer to die than the main process waits for them are listed all the same.
            assert sorted(named(error)) == list(enumerate(pids)), error


@with_start_methods("how", ["sleep", "fork"])
def test_a_child_that_lives_on_delays_nothing_and_is_ended(how: str, tmp_path: Path, start_method: str) -> None:
    rng = generator("child", start_method, how)
    with killer() as kill:
        for i in range(scaled(9, 1)):
            folder = tmp_path / str(i)
            folder.mkdir()
            kwargs = {"folder": str(folder), "how": how, "spare_pid": os.getpid()}
            with mortal_sampler(start_method, WithChildren, env_kwargs=kwargs, eval_n_envs=0) as sampler:
                sampler.initialize(RandomAgent())
                pid = rng.choice(sampler.worker_pids)
                children = WithChildren.children(folder, pid)
                assert len(children) == 2
                kill.kill([pid], rng.uniform(0, LONGEST_DELAY))
                error, seen = work_until_it_breaks(sampler)
                killed = kill.when()
                assert [p for _, p in named(error)] == [pid]
                note("killed worker with a child: kill to error, s", seen - killed, ERROR_SECONDS)
                seconds = gone_after(children, killed, 2.5 * SLACK)
                note("killed worker with a child: kill to the child's end, s", seconds, 2.5 * SLACK)
                gone_after(WithChildren.children(folder), killed, 2.5 * SLACK)
