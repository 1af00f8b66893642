"""Shards that are killed, nodes that come and go: named errors, or the same batches again, and nothing left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import psutil
import pytest

ray = pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from penstock import NodeLostError, PenstockError, RandomAgent, SamplerClosedError, SerialSampler  # noqa: E402
from penstock.distributed import RaySampler  # noqa: E402
from penstock.envs import CountingEnv, EnvContext, SlowEnv  # noqa: E402

from ..process.support import is_running  # noqa: E402
from ..scale import FULL, scaled  # noqa: E402
from ..support import assert_same  # noqa: E402
from .ray_support import CARTPOLE, our_processes, ray_sampler, rollouts, wait_for_none  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180), pytest.mark.slow]

# Like CountingEnv, but a step takes 50 ms.
SLEEPING = partial(SlowEnv, 0.05)


class WithChild(gym.Wrapper[Any, Any, Any, Any]):
    """An environment that starts a process and never ends it."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # of an environment"])

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        super().close()


def actor_pids(sampler: RaySampler) -> list[int]:
    return [shard.started.pid for shard in sampler.run.pool.shards]  # type: ignore[union-attr]


def kill_by_signal(sampler: RaySampler) -> None:
    os.kill(actor_pids(sampler)[1], signal.SIGKILL)


def fails_in_a_shard(context: EnvContext) -> gym.Env[Any, Any]:
    if context.worker_rank >= 0:
        raise OSError("no licence on this machine")
    return gym.make("CartPole-v1")


def test_an_error_at_the_start_of_a_shard_names_its_node() -> None:
    message = r"shard \d \(node [0-9.]+ \w+, env_rank \d\): .*no licence on this machine"
    sampler = ray_sampler(fails_in_a_shard, batch_B=2, sampler_cls=SerialSampler)
    with sampler, pytest.raises(PenstockError, match=message):
        sampler.initialize(RandomAgent(), seed=0)


RESTART: dict[str, Any] = {"on_node_failure": "restart", "sampler_cls": SerialSampler}
ONCE = {"max_restarts": 1, "restart_window": 600}


def with_kill(kill_at: int, n_batches: int = 5) -> tuple[list[Any], Any]:
    """Batches and trajectories of a run in which shard 1 is killed before batch `kill_at`."""
    batches, infos = [], []
    with ray_sampler(batch_B=5, **RESTART) as sampler:
        sampler.initialize(RandomAgent(), seed=5, bootstrap_value=True, traj_info_kwargs={"discount": 0.9})
        for itr in range(n_batches):
            if itr == kill_at:
                kill_by_signal(sampler)
            _, found = sampler.obtain_samples(itr)
            batches.append(sampler.samples_np.copy())
            infos.append([vars(info) for info in found])
        stats = sampler.stats()
        assert [shard.restarts for shard in stats.shards] == [0, 1]
        assert stats.shards[1].lost_trajectories == 2
        assert (stats.restarts, stats.lost_trajectories) == (1, 2)
    return batches, infos


def test_runs_that_lose_the_same_shard_at_the_same_batch_are_equal() -> None:
    first, second = with_kill(3), with_kill(3)
    plain = rollouts(SerialSampler, CARTPOLE, RandomAgent, iterations=5, seed=5, batch_T=20, batch_B=5)
    assert_same(first, second)
    assert_same([batch[:, :3] for batch in first[0]], [batch[:, :3] for batch in plain[0]])
    assert_same(first[0][:3], plain[0][:3])
    assert not (first[0][3].env.observation[:, 3:] == plain[0][3].env.observation[:, 3:]).all(), "a new generation"
    assert first[0][3].env.valid.all()


def test_a_rack_may_be_lost() -> None:
    with ray_sampler(batch_T=8, n_shards=4, min_shards=1, **RESTART, **ONCE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)

        def sample_until_all_are_there() -> None:
            deadline = time.monotonic() + 120
            while not sampler.obtain_samples(0)[0].env.valid.all():
                assert time.monotonic() < deadline
                time.sleep(0.1)

        sample_until_all_are_there()
        pids = actor_pids(sampler)
        for pid in pids[:3]:
            os.kill(pid, signal.SIGKILL)
        sample_until_all_are_there()
        assert [shard.restarts for shard in sampler.stats().shards] == [1, 1, 1, 0]
        os.kill(actor_pids(sampler)[0], signal.SIGKILL)
        with pytest.raises(NodeLostError, match="max_restarts=1 in 600 s are used up"):
            sample_until_all_are_there()


def test_pieces_go_on_after_a_loss_and_it_counts() -> None:
    with ray_sampler(**RESTART, **ONCE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        itrs: dict[int, list[int]] = {0: [], 1: []}
        is_killed = False
        for piece in sampler.pieces():
            itrs[piece.shard].append(piece.itr)
            if not is_killed and len(itrs[1]) == 3:
                kill_by_signal(sampler)
                is_killed, at = True, len(itrs[1])
            if is_killed and len(itrs[1]) >= at + 5:
                break
        assert itrs[1] == list(range(len(itrs[1]))), "no piece is left out"
        assert sampler.stats().shards[1].restarts == 1
        for _ in sampler.pieces(max_in_flight=2):
            kill_by_signal(sampler)
            break
        with pytest.raises(NodeLostError, match="max_restarts=1 in 600 s are used up"):
            sampler.obtain_samples(9)


def test_nodes_may_come_and_go(ray_cluster: Any, nodes: list[Any]) -> None:
    def add_node() -> None:
        nodes.append(ray_cluster.add_node(num_cpus=1, resources={"spot": 1}, object_store_memory=80 * 2**20))

    add_node()
    options: dict[str, Any] = {"n_shards": 3, "resources": {"spot": 1}, "min_shards": 1, **RESTART}
    with ray_sampler(batch_T=10, batch_B=6, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        itr, shares = 0, []

        def sample_until(n_valid: int, seconds: float = 60.0) -> Any:
            nonlocal itr
            deadline = time.monotonic() + seconds
            while True:
                samples, _ = sampler.obtain_samples(itr)
                itr += 1
                shares.append(int(samples.env.valid[0].sum()))
                if shares[-1] == n_valid:
                    return samples
                assert time.monotonic() < deadline, shares
                time.sleep(0.1)

        sample_until(2)
        add_node()
        sample_until(4)
        add_node()
        sample_until(6)
        began = time.monotonic()
        ray_cluster.remove_node(nodes.pop(), allow_graceful=False)
        sample_until(4)
        assert time.monotonic() - began < 15.0
        assert sum(shard.node is None for shard in sampler.stats().shards) == 1
        assert len({shard.node for shard in sampler.stats().shards}) == 3


def suspend(sampler: RaySampler) -> int:
    """Suspend the process of shard 1."""
    os.kill(pid := actor_pids(sampler)[1], signal.SIGSTOP)
    return pid


def test_a_suspended_shard_is_named() -> None:
    before = our_processes()
    with ray_sampler(WithChild, batch_B=3, unavailable_timeout=2.0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        suspend(sampler)
        message = r"shard 1 \(node .*, env_rank 2\) was lost: .*not be reached for unavailable_timeout=2 s \(itr=0\)"
        with pytest.raises(NodeLostError, match=message):
            sampler.obtain_samples(0)
    assert wait_for_none(before, 30.0) == {}, "Ray kills a suspended process after 5 seconds"


def test_a_suspended_shard_is_built_again_and_a_short_pause_is_only_a_delay() -> None:
    before = our_processes()
    plain = rollouts(SerialSampler, CARTPOLE, RandomAgent, iterations=1, batch_T=20, batch_B=3)
    with ray_sampler(batch_B=3, **RESTART, unavailable_timeout=8.0) as sampler:
        sampler.initialize(RandomAgent(), seed=11, bootstrap_value=True)
        waker = threading.Timer(2.0, os.kill, (suspend(sampler), signal.SIGCONT))
        waker.start()
        sampler.obtain_samples(0)
        waker.join()
        assert_same(sampler.samples_np[:, :3], plain[0][0][:, :3])
        assert sampler.stats().restarts == 0
        suspend(sampler)
        samples, _ = sampler.obtain_samples(1)
        assert samples.env.valid.all()
        assert [shard.restarts for shard in sampler.stats().shards] == [0, 1]
    assert wait_for_none(before, 30.0) == {}


def test_ctrl_c_ends_a_wait_which_may_be_made_again() -> None:
    options: dict[str, Any] = {"batch_T": 20, "batch_B": 3, "max_decorrelation_steps": 0}
    plain = rollouts(SerialSampler, CountingEnv, RandomAgent, iterations=1, **options)
    with ray_sampler(SLEEPING, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=11, bootstrap_value=True)
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            sampler.obtain_samples(0)
        timer.join()
        sampler.wait_samples()
        assert_same(sampler.samples_np[:, :3], plain[0][0][:, :3])


@pytest.mark.parametrize("state", ["ready", "sampling", "yielding", "suspended"])
def test_shutdown_ends_everything_in_each_state(state: str) -> None:
    before = our_processes()
    # A suspended shard takes all of this time.
    sampler = ray_sampler(WithChild, batch_T=20_000, batch_B=3, close_timeout=1.0)
    sampler.initialize(RandomAgent(), seed=0)
    if state == "sampling":
        sampler.start_samples(0)
    if state == "yielding":
        pieces = sampler.pieces()
        threading.Timer(1.0, sampler.shutdown).start()
        with pytest.raises(SamplerClosedError):
            list(pieces)
    if state == "suspended":
        suspend(sampler)
        sampler.start_samples(0)
    began = time.monotonic()
    sampler.shutdown()
    assert time.monotonic() - began < 6.0
    assert wait_for_none(before, 30.0 if state == "suspended" else scaled(2.0, 5.0)) == {}


# ---- killed at random moments, in every way ------------------------------------------------

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


@pytest.mark.timeout(600)
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


@pytest.mark.timeout(600)
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
