"""Ports that environments lease: a lease ends with its worker, and no run leaves a lock file."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from penstock import ParallelSampler, PortLeaseError, RandomAgent
from penstock.envs import CountingEnv
from penstock.ports import PortLease, lease_port
from penstock.ports.lock_files import FOLDER_VARIABLE, ports_with_lock_file
from penstock.testing import Fault, faulty_env

from ..scale import methods, scaled
from .support import SLACK, Script, gone_after, note, until

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.xdist_group("ports"), pytest.mark.slow]


class Leasing(CountingEnv):
    """Leases a port. `close` releases it only if `tidy`."""

    def __init__(self, tidy: bool = True) -> None:
        super().__init__()
        self.tidy, self.lease = tidy, lease_port()

    @property
    def port(self) -> int:
        return self.lease.port

    def close(self) -> None:
        if self.tidy:
            self.lease.release()


def is_leased(port: int) -> bool:
    try:
        lease_port(port, port + 1, timeout=0).release()
    except PortLeaseError:
        return True
    return False


@pytest.mark.filterwarnings("ignore:.*PortLease.* was not released:ResourceWarning")
@methods("fork", "forkserver")
@pytest.mark.parametrize("tidy", [True, False])
def test_a_workers_leases_end_with_it(start_method: str, tidy: bool, tmp_path: Path) -> None:
    fault = Fault("kill", at=30, marker=str(tmp_path / "struck"), spare_pid=os.getpid())
    keep: list[PortLease] = [lease_port()]  # a lease of the main process, which a fork does not inherit
    env_fn = [Leasing, faulty_env(Leasing, fault), Leasing, Leasing]
    with (
        keep[0],
        ParallelSampler(
            env_fn,
            env_kwargs={"tidy": tidy},
            batch_T=20,
            batch_B=4,
            n_workers=2,
            max_decorrelation_steps=0,
            on_worker_failure="restart",
            start_method=start_method,
        ) as sampler,
    ):
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        before = sampler.get_attr("port")
        sampler.obtain_samples(1)
        assert sampler.stats().restarts == 1
        after = sampler.get_attr("port")
        assert after[2:] == before[2:], "the other worker keeps its ports"
        assert len({*after, keep[0].port}) == 5
        assert all(is_leased(port) for port in after)
        assert not any(is_leased(port) for port in set(before) - set(after))
    assert not any(is_leased(port) for port in {*before, *after})
    assert ports_with_lock_file() == []


def test_a_killed_workers_lock_files_are_removed_with_the_sampler(tmp_path: Path) -> None:
    with ParallelSampler(Leasing, batch_T=20, batch_B=2, n_workers=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        ports = sampler.get_attr("port")
        for pid in sampler.worker_pids:  # type: ignore[attr-defined]
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="SIGKILL"):
            sampler.obtain_samples(0)
    assert ports_with_lock_file() == []
    assert not any(is_leased(port) for port in ports)


def nothing_left(ports: list[int]) -> bool:
    return not ports_with_lock_file() and not any(map(is_leased, ports))


MAIN = """
from penstock.ports import lease_port
class Leasing(CountingEnv):
    def __init__(self):
        super().__init__()
        self.lease = lease_port()
    @property
    def port(self):
        return self.lease.port
sampler = ParallelSampler(Leasing, batch_T=20, batch_B=4, n_workers=2, start_method=METHOD)
sampler.initialize(RandomAgent())
say(*sampler.get_attr("port"))
say(*sampler.worker_pids)
for itr in range(1000000):
    sampler.obtain_samples(itr)
"""


@methods("fork", "forkserver", "spawn")
def test_a_killed_main_process_leaves_no_lock_file(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "locks"))
    for _ in range(scaled(30, 1)):
        with Script(tmp_path, MAIN, METHOD=start_method) as script:
            ports, workers = [int(word) for word in script.line()], script.pids()
            assert ports_with_lock_file() == sorted(ports)
            began = time.monotonic()
            script.process.kill()
            gone_after(workers, began, 2 * SLACK)
            # A thread of the process may still run after the process seems to have ended.
            until(partial(nothing_left, ports), "the end of leases and lock files")
            note("main process killed, to no lock file left, s", time.monotonic() - began, 2 * SLACK)
