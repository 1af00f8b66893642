"""Several nodes: the same batches on any number of them, a node that is lost, and a program that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from penstock import ConfigError, NodeLostError, RandomAgent, SerialSampler, TrajInfo
from penstock.distributed import RaySampler, ray_pool
from penstock.envs import SlowEnv

from ..scale import scaled
from ..support import assert_same
from .ray_support import CARTPOLE, our_processes, rollouts, wait_for_none
from .test_ray_sampler import Own

pytestmark = [pytest.mark.ray, pytest.mark.timeout(180), pytest.mark.slow]


def add_node(cluster: Any, kind: str, n_shards: int = 2) -> Any:
    """A node, which only shards that are `on(kind)` use."""
    return cluster.add_node(num_cpus=n_shards, resources={kind: n_shards}, object_store_memory=80 * 2**20)


def on(kind: str) -> dict[str, Any]:
    return {"resources": {kind: 1}, "sampler_cls": SerialSampler}


@pytest.fixture(scope="module")
def three_nodes(ray_cluster: Any) -> Iterator[None]:
    nodes: list[Any] = []
    try:
        for _ in range(3):
            nodes.append(add_node(ray_cluster, "far"))
        yield
    finally:
        for node in nodes:
            ray_cluster.remove_node(node)


def nodes_of(sampler: Any) -> set[str]:
    """The nodes of the shards."""
    return {shard.node for shard in sampler.stats().shards}


@pytest.mark.parametrize(
    ("n_shards", "batch_B", "traj_info_cls"),
    scaled([(n, B, cls) for n in (1, 2, 3, 5) for B in (7, 32) for cls in (TrajInfo, Own)], [(5, 7, Own)]),
)
@pytest.mark.usefixtures("three_nodes")
def test_the_same_seed_gives_the_same_batches_on_three_nodes(
    n_shards: int, batch_B: int, traj_info_cls: type[TrajInfo]
) -> None:
    def check(sampler: RaySampler, itr: int) -> None:
        assert len(nodes_of(sampler)) == min(n_shards, 3)

    options: dict[str, Any] = {"batch_B": batch_B, "traj_info_cls": traj_info_cls, "eval_n_envs": 2, "eval_episodes": 5}
    reference = rollouts(SerialSampler, CARTPOLE, RandomAgent, iterations=5, **options)
    found = rollouts(
        RaySampler, CARTPOLE, RandomAgent, iterations=5, n_shards=n_shards, before=check, **on("far"), **options
    )
    assert_same(reference, found)


def test_a_node_that_joins_changes_nothing(ray_cluster: Any, nodes: list[Any]) -> None:
    nodes.append(add_node(ray_cluster, "joined"))

    def join(sampler: RaySampler, itr: int) -> None:
        if itr == 2:
            nodes.append(add_node(ray_cluster, "joined"))
        assert len(nodes_of(sampler)) == 1, "shards that run stay where they are"

    reference = rollouts(SerialSampler, CARTPOLE, RandomAgent, iterations=5)
    options: dict[str, Any] = {"n_shards": 2, "before": join, **on("joined")}
    assert_same(reference, rollouts(RaySampler, CARTPOLE, RandomAgent, iterations=5, **options))
    assert len(nodes) == 2


def test_shards_fit_unequal_nodes_and_what_fits_nowhere_is_refused(
    ray_cluster: Any, nodes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for n_cpus in (1, 5):
        nodes.append(ray_cluster.add_node(num_cpus=n_cpus, resources={"uneven": 9}, object_store_memory=80 * 2**20))
    options: dict[str, Any] = {"batch_T": 4, "batch_B": 12, "resources": {"uneven": 1}}
    for wanted, n_workers in (({}, [2, 2]), ({"n_shards": 1}, [5])):
        with RaySampler(CARTPOLE, **options, **wanted) as sampler:
            sampler.initialize(RandomAgent(), seed=0)
            sampler.obtain_samples(0)
            assert [len(shard.started.worker_pids) for shard in sampler.run.pool.shards] == n_workers  # type: ignore[union-attr]
    monkeypatch.setattr(ray_pool, "_PLACE_SECONDS", 1.0)
    for wanted in ({"n_workers": 6}, {"n_workers": 3, "n_shards": 2}):
        message = r"shards? were not ready after 2 s .* need \{'CPU': \d.0, 'uneven': 1.0\} each, .*'uneven': 18.0"
        sampler = RaySampler(CARTPOLE, **options, **wanted, start_timeout=1.0)
        with sampler, pytest.raises(ConfigError, match=message):
            sampler.initialize(RandomAgent(), seed=0)
    monkeypatch.undo()
    restart: dict[str, Any] = {"on_node_failure": "restart", "min_shards": 1}
    with RaySampler(CARTPOLE, **options, **restart, n_shards=2, n_workers=3) as sampler:
        sampler.initialize(RandomAgent(), seed=0)  # the other one waits for a node
        samples, _ = sampler.obtain_samples(0)
        assert samples.env.valid[0].sum() == 6


def sample_until(sampler: RaySampler, condition: Callable[[], bool]) -> None:
    """Sample whole batches for 20 seconds at most."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        samples, _ = sampler.obtain_samples(2)
        assert samples.env.valid.all()


@pytest.mark.parametrize("on_node_failure", scaled(["raise", "restart"], ["restart"]))
def test_a_node_that_is_killed_is_named_or_replaced(ray_cluster: Any, nodes: list[Any], on_node_failure: Any) -> None:
    before = our_processes()
    nodes += [add_node(ray_cluster, "killed", 1), add_node(ray_cluster, "killed", 1)]
    options: dict[str, Any] = {"batch_T": 100, "batch_B": 3, "n_shards": 2, "n_workers": 1, **on("killed")}
    with RaySampler(partial(SlowEnv, 0.005), **options, on_node_failure=on_node_failure) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        where = [shard.node for shard in sampler.stats().shards]
        nodes.append(add_node(ray_cluster, "killed", 1))  # for the shard that is lost
        sampler.obtain_samples(0)
        lost = next(node for node in nodes if node.node_id.startswith(str(where[1]).split()[1]))
        nodes.remove(lost)
        os.kill(lost.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        began = time.monotonic()
        if on_node_failure == "raise":
            with pytest.raises(NodeLostError, match=r"shard 1 \(node .*, env_rank 2\) was lost: .*itr="):
                sample_until(sampler, lambda: False)
        else:
            sample_until(sampler, lambda: sampler.stats().shards[1].restarts == 1)
            now = [shard.node for shard in sampler.stats().shards]
            assert now[0] == where[0]
            assert now[1] not in where
        took = time.monotonic() - began
        ray_cluster.remove_node(lost)
        assert took < 10.0
    assert wait_for_none(before, 2.0) == {}


_DRIVER = """
import subprocess, sys, gymnasium
from penstock import ParallelSampler, RandomAgent
from penstock.distributed import RaySampler

class WithChild(gymnasium.Wrapper):
    def __init__(self):
        super().__init__(gymnasium.make("CartPole-v1"))
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # of an environment"])
    def close(self):
        self.child.kill()
        self.child.wait()

if __name__ == "__main__":
    sampler = RaySampler(WithChild, batch_T=100, batch_B=6, n_shards=3, n_workers=1, resources={"far": 1})
    sampler.initialize(RandomAgent(), seed=0)
    print(len({shard.node for shard in sampler.stats().shards}), flush=True)
    while True:
        sampler.obtain_samples(0)
"""


@pytest.mark.usefixtures("three_nodes")
def test_nothing_is_left_of_a_program_that_is_killed(ray_cluster: Any, tmp_path: Path) -> None:
    before, names = our_processes(), set(os.listdir("/dev/shm"))
    (tmp_path / "program.py").write_text(_DRIVER)
    environ = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py")], env=environ, stdout=subprocess.PIPE, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "3\n"
            running = {pid: text for pid, text in our_processes().items() if pid not in before}
            assert sum("of an environment" in text for text in running.values()) >= 6
        finally:
            driver.kill()
    assert wait_for_none(before, scaled(5.0, 10.0)) == {}
    assert set(os.listdir("/dev/shm")) - names == set()
