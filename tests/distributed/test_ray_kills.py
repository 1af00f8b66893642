"""Shards whose processes are killed at random moments, in every way: repaired or named soon, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from penstock import NodeLostError, RandomAgent  # noqa: E402
from penstock.distributed import RaySampler  # noqa: E402

from ..process.support import is_running  # noqa: E402
from ..scale import FULL, scaled  # noqa: E402
from .ray_support import our_processes, ray_sampler, wait_for_none  # noqa: E402
from .test_ray_failures import WithChild, actor_pids  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(600), pytest.mark.slow]

N_SHARDS = 2
# Until a loss is named, and until the processes of a killed shard have ended. Daily, other tests use the CPUs too.
SECONDS, LEFT_SECONDS = scaled(2.0, 5.0), scaled(2.0, 5.0)


def by_signal(number: int, sampler: RaySampler, shard: int) -> None:
    os.kill(actor_pids(sampler)[shard], number)


def by_ray(sampler: RaySampler, shard: int) -> None:
    ray.kill(sampler.run.pool.shards[shard].actor)  # type: ignore[union-attr]


KILLS: dict[str, Callable[[RaySampler, int], None]] = {
    "SIGKILL": partial(by_signal, signal.SIGKILL),
    "SIGSEGV": partial(by_signal, signal.SIGSEGV),
    "ray.kill": by_ray,
}


def make_sampler(on_node_failure: Any) -> RaySampler:
    return ray_sampler(WithChild, batch_T=100, on_node_failure=on_node_failure, max_restarts=1000)


class Killer:
    """Kills a shard once, at a random moment from now on. Its processes must have ended 2 seconds later."""

    def __init__(self, kill: Callable[[RaySampler, int], None], sampler: RaySampler, rng: random.Random) -> None:
        self.shard, self._delay = rng.randrange(N_SHARDS), rng.random() * 0.1
        self._kill, self._sampler, self.at = kill, sampler, 0.0
        actor = psutil.Process(actor_pids(sampler)[self.shard])
        self._processes = {process: process.cmdline() for process in [actor, *actor.children(recursive=True)]}
        self._seconds: dict[psutil.Process, float] = {}  # until each has ended
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        time.sleep(self._delay)
        self.at = time.monotonic()
        self._kill(self._sampler, self.shard)
        while len(self._seconds) < len(self._processes) and time.monotonic() < self.at + 10 * LEFT_SECONDS:
            for process in self._processes.keys() - self._seconds.keys():
                if not is_running(process.pid):
                    self._seconds[process] = time.monotonic() - self.at
            time.sleep(0.01)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        seconds = {p: self._seconds.get(p, float("inf")) for p in self._processes}
        late = [(p.pid, command, seconds[p]) for p, command in self._processes.items() if seconds[p] > LEFT_SECONDS]
        assert late == []


@pytest.mark.parametrize("how", KILLS if FULL else ["SIGKILL", "ray.kill"])
def test_shards_killed_at_random_moments_are_repaired(how: str) -> None:
    rng = random.Random(f"repaired {how}")
    with make_sampler("restart") as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for number in range(1, scaled(14, 1) + 1):
            with Killer(KILLS[how], sampler, rng):
                while sum(shard.restarts for shard in sampler.stats().shards) < number:
                    samples, _ = sampler.obtain_samples(number)
                    assert samples.env.valid.all()


@pytest.mark.parametrize("how", KILLS if FULL else ["SIGSEGV", "ray.kill"])
def test_shards_killed_at_random_moments_are_named_and_leave_nothing(how: str) -> None:
    rng = random.Random(f"named {how}")
    for number in range(scaled(14, 1)):
        before = our_processes()
        with make_sampler("raise") as sampler:
            sampler.initialize(RandomAgent(), seed=number)
            with Killer(KILLS[how], sampler, rng) as killer:
                message = rf"^shard {killer.shard} \(node [0-9.]+ .*, env_rank {2 * killer.shard} .*was lost: .*itr="
                with pytest.raises(NodeLostError, match=message):
                    for itr in range(10**6):
                        sampler.obtain_samples(itr)
                took = time.monotonic() - killer.at
            assert took < SECONDS
            with pytest.raises(NodeLostError, match=f"shard {killer.shard}"):
                sampler.obtain_samples(10**6)
            assert wait_for_none(before, 2.0) == {}
