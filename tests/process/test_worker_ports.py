"""Ports that environments lease: a lease ends with its worker, and no run leaves a lock."""

import os
import time
from pathlib import Path

import pytest

from penstock import ParallelSampler, PortLeaseError, RandomAgent
from penstock.envs import CountingEnv
from penstock.games import PortLease, lease_port
from penstock.testing import Fault, faulty_env
from penstock.workers.claims import lock_folder

from ..scale import methods, scaled
from ..support import PROGRAMS, sampler_of, until
from .peers import remove_stale
from .support import SLACK, Script, gone_after, note

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


def lock_files() -> list[Path]:
    return list(lock_folder("port").glob("*.lock"))


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
    how = {"on_worker_failure": "restart", "start_method": start_method}
    with keep[0], sampler_of(ParallelSampler, env_fn, env_kwargs={"tidy": tidy}, batch_T=20, **how) as sampler:
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
    assert lock_files() == []


@methods("fork", "forkserver")
def test_a_killed_main_process_leaves_no_lock(
    start_method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PORT_FOLDER", str(tmp_path / "locks"))
    for _ in range(scaled(30, 1)):
        with Script(tmp_path, PROGRAMS / "leasing.py", start_method=start_method) as script:
            ports, workers = [int(word) for word in script.line()], script.pids()
            assert all(is_leased(port) for port in ports)
            began = time.monotonic()
            script.process.kill()
            gone_after(workers, began, 2 * SLACK)
            # A thread of the process may still run after the process seems to have ended.
            for port in ports:
                until(lambda port=port: not is_leased(port), "the end of the lease")
            note("main process killed, to no port leased, s", time.monotonic() - began, 2 * SLACK)
            remove_stale()
            assert lock_files() == []
