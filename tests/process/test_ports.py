"""Port leases of many processes that are killed at random: one owner per port, and all are free at the end."""

import mmap
import os
import re
import signal
import socket
import time
from contextlib import ExitStack, closing

import numpy as np
import pytest

from penstock import PortLeaseError
from penstock.games import lease_port, leases
from penstock.workers.claims import lock_folder

from ..scale import scaled
from ..support import BOUND, until
from .peers import Peer, all_at_once, bind, free_stretch, peers, server_at
from .support import SLACK, note, pause

FREE_SECONDS = 1.0 * SLACK  # after the owner is killed, until its port can be leased

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.xdist_group("ports"), pytest.mark.slow]


# ---- no port twice -------------------------------------------------------------------------


def lock_files() -> list[str]:
    return [path.name for path in lock_folder("port").glob("*.lock")]


def test_as_many_processes_as_ports() -> None:
    n = 10
    ports = free_stretch(n)
    with peers(n) as them:
        for _ in range(scaled(200, 8)):
            began = time.monotonic()
            assert sorted(all_at_once(them, 1, ports, timeout=BOUND)) == list(ports)
            note("10 processes lease the only 10 ports, s", time.monotonic() - began, 10)
            for peer in them:
                peer.release()


def test_many_leases_of_many_processes() -> None:
    n_peers, n = scaled(64, 4), 50
    ports = range(12_000, 12_000 + n_peers * n * 5 // 4)
    with peers(n_peers) as them:
        began = time.monotonic()
        got = all_at_once(them, n, ports, timeout=BOUND)
        note(f"{n_peers} processes lease {n} ports each, s", time.monotonic() - began, BOUND)
        assert len(got) == len(set(got)) == n_peers * n
        assert set(got) <= set(ports)
        for peer in them[::2]:
            peer.release()
        for peer in them[1::2]:
            peer.kill()
        with peers(1) as (late,):
            late.lease(1, ports)
            left = lock_files()
            assert len(left) == 1, "the first lease of another process removes the files of killed ones"


class OwnerTable:
    """Shared memory with one word per port, where each owner enters itself. It uses no lock."""

    def __init__(self, ports: range, n_peers: int) -> None:
        self._base = ports.start
        words = np.frombuffer(mmap.mmap(-1, 8 * (len(ports) + 3 * n_peers)), np.int64)
        self.owner, counts = words[: len(ports)], words[len(ports) :]
        self.clashes, self.leased, self.grabbed = counts.reshape(3, n_peers)  # one writer each

    def enter(self, me: int, port: int, doomed: "np.typing.NDArray[np.int64]") -> None:
        before = int(self.owner[port - self._base])
        # A process that is being killed loses its port before others can see that it has ended.
        if before and not doomed[before - 1] and before - 1 != me:
            self.clashes[me] += 1
        self.owner[port - self._base] = me + 1
        self.leased[me] += 1

    def leave(self, me: int, port: int) -> None:
        if self.owner[port - self._base] != me + 1:
            self.clashes[me] += 1
        self.owner[port - self._base] = 0


def churn(me: int, ports: range, owners: OwnerTable, doomed: "np.typing.NDArray[np.int64]") -> None:
    """Lease, bind, close and release, again and again."""
    rng = np.random.default_rng(me)
    while True:
        with lease_port(ports.start, ports.stop, timeout=BOUND) as mine:
            owners.enter(me, mine.port, doomed)
            for _ in range(rng.integers(3)):
                try:
                    server = bind(mine.port)
                except OSError:
                    owners.grabbed[me] += 1  # by an outsider, or by a process that tests the port
                    break
                time.sleep(rng.uniform(0, 0.002))
                server.close()
            time.sleep(rng.uniform(0, 0.002))
            owners.leave(me, mine.port)


def run_churn(n_peers: int, n_ports: int, seconds: float, *, kills: bool, outsider: bool) -> OwnerTable:
    """Run `n_peers` processes on `n_ports`. With `kills`, kill and replace one of them every few milliseconds."""
    ports = free_stretch(n_ports)
    total = 20_000 if kills else n_peers
    owners = OwnerTable(ports, total)
    doomed = np.frombuffer(mmap.mmap(-1, 8 * total), np.int64)
    rng = np.random.default_rng(0)
    started = 0

    def one() -> Peer:
        nonlocal started
        me, started = started, started + 1
        return Peer(lambda: churn(me, ports, owners, doomed))

    grabbed: list[socket.socket] = []
    with ExitStack() as stack:
        them = [(i, stack.enter_context(closing(one()))) for i in range(n_peers)]
        until(lambda: owners.leased.sum() >= n_peers, "every process's first lease")
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if kills:
                k = int(rng.integers(n_peers))
                number, peer = them[k]
                doomed[number] = 1
                peer.kill()
                them[k] = (started, stack.enter_context(closing(one())))
            if outsider:
                if len(grabbed) > n_ports // 3:
                    grabbed.pop(0).close()
                try:
                    grabbed.append(bind(int(rng.choice(ports))))
                except OSError:
                    pass  # a peer has it
            pause(rng.uniform(0, 0.01))
        doomed[:] = 1
    for each in grabbed:
        each.close()
    assert owners.clashes.sum() == 0
    assert owners.leased.sum() > n_peers
    if kills:
        assert started > n_peers
    with leases(n_ports, ports.start, ports.stop, timeout=BOUND) as everything:
        assert everything.ports == tuple(ports), "all are free at the end"
    assert lock_files() == []
    note(f"leases in the churn of {n_peers} processes on {n_ports} ports", float(owners.leased.sum()), float("inf"))
    note(f"killed in the churn of {n_peers} processes on {n_ports} ports", float(started - n_peers), float("inf"))
    return owners


def test_random_kills() -> None:
    owners = run_churn(*scaled((50, 64), (10, 13)), scaled(60, 0.6), kills=True, outsider=False)
    assert owners.grabbed.sum() == 0, "no process binds a port of another owner"


def test_an_outsider_that_grabs_ports() -> None:
    run_churn(*scaled((50, 96), (8, 24)), scaled(60, 0.3), kills=False, outsider=True)


def test_a_range_without_a_free_port() -> None:
    ports = free_stretch(6)
    with ExitStack() as stack:
        (peer,) = stack.enter_context(peers(1))  # first, so that it inherits no socket
        for port in ports[:3]:
            stack.enter_context(bind(port))
        peer.lease(3, ports)
        began = time.monotonic()
        with pytest.raises(PortLeaseError) as caught:
            lease_port(ports.start, ports.stop, timeout=0.2)
        note("a search of 0.2 s in a range without a free port, s", time.monotonic() - began, 1.0 * SLACK)
        lines = str(caught.value).splitlines()
        assert f"  {ports[0]}-{ports[2]}: not leased, but bound by pid {os.getpid()} (" in lines[1]
        assert re.match(rf"  {ports[3]}-{ports[5]}: leased by pid {peer.pid} \(.*\), since \d{{4}}-", lines[2])
        assert len(lines) == 3


# ---- killed owners ------------------------------------------------------------------------


def seconds_until_free(port: int) -> float:
    """Seconds until `port` can be leased. It is released at once."""
    began = time.monotonic()
    lease_port(port, port + 1, timeout=BOUND).release()
    return time.monotonic() - began


def test_a_killed_owners_port_is_free() -> None:
    ports = free_stretch(1)
    for _ in range(scaled(100, 5)):
        with peers(1) as (peer,):
            peer.lease(1, ports)
            with pytest.raises(PortLeaseError, match=rf"leased by pid {peer.pid} .*, since \d"):
                lease_port(ports.start, ports.stop, timeout=0)
            os.kill(peer.pid, signal.SIGKILL)
            note("owner killed, to its port leased again, s", seconds_until_free(ports[0]), FREE_SECONDS)


def test_a_killed_owners_port_is_not_free_while_its_server_runs() -> None:
    ports = free_stretch(2)
    with peers(1) as (peer,):
        mine = peer.lease(1, ports[:1])[0]
        with server_at(mine) as server:
            peer.kill()
            with pytest.raises(PortLeaseError, match=f"{mine}: not leased, but bound by pid {server.pid} "):
                lease_port(mine, mine + 1, timeout=0.1)
            for _ in range(10):
                with lease_port(ports.start, ports.stop) as other:
                    assert other.port == ports[1]
            server.kill()
            note("server of a killed owner killed, to its port leased again, s", seconds_until_free(mine), FREE_SECONDS)
