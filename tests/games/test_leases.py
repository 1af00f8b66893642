"""Leases within one process: which ports are leased, which are refused, and when a lease ends."""

import gc
import os
import pickle
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fasteners import InterProcessLock
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, PortLeaseError, system
from penstock.games import PortLease, lease_port, leases
from penstock.games import lease as lease_module
from penstock.workers import claims
from penstock.workers.claims import lock_folder

pytestmark = pytest.mark.xdist_group("ports")


@pytest.fixture(scope="module", autouse=True)
def _own_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes that other tests have ended leave files in the other folder, until the next process leases a port."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_PORT_FOLDER", str(tmp_path_factory.mktemp("leases") / "locks"))
        yield


def ports_with_lock_file() -> list[int]:
    return sorted(int(path.stem) for path in lock_folder("port").glob("*.lock"))


@pytest.fixture
def stretch() -> range:
    """Eight free ports in a row."""
    with leases(8, consecutive=True) as found:
        return range(found.ports[0], found.ports[-1] + 1)


def lease(ports: range, **options: object) -> PortLease:
    return lease_port(ports.start, ports.stop, timeout=0, **options)  # type: ignore[arg-type]


def test_a_lease_has_one_owner_even_if_nothing_is_bound(stretch: range) -> None:
    ports = stretch[:1]
    with lease(ports) as mine:
        assert (mine.port, mine.host, mine.protocol, mine.is_active) == (ports[0], "127.0.0.1", "tcp", True)
        with pytest.raises(PortLeaseError, match=rf"{ports[0]}: leased by pid {os.getpid()} .*this process, since \d"):
            lease(ports)
        with socket.create_server((mine.host, mine.port)):
            pass  # the owner can bind it
        assert ports_with_lock_file() == [mine.port]
    assert not mine.is_active
    assert ports_with_lock_file() == []
    mine.release()  # a second call does nothing
    with lease(ports) as next_one:
        mine.release()  # and does not release the next lease
        assert next_one.is_active
        with pytest.raises(PortLeaseError):
            lease(ports)


def test_a_block(stretch: range) -> None:
    with leases(3, stretch.start, stretch.stop) as block:
        assert len(set(block.ports)) == len(block) == 3
        assert list(block.ports) == sorted(block.ports)
        assert set(block.ports) <= set(stretch)
        with pytest.raises(PortLeaseError, match="6 free ports could not be found"):
            leases(6, stretch.start, stretch.stop, timeout=0)
        with leases(5, stretch.start, stretch.stop, timeout=0) as others:  # the failed search has released all
            assert {*block.ports, *others.ports} == set(stretch)
    assert not any(each.is_active for each in block)


def test_a_row(stretch: range) -> None:
    with lease(stretch[3:4]):
        for _ in range(30):  # the search starts at a random port
            with leases(4, stretch.start, stretch.stop, consecutive=True, timeout=0) as row:
                assert row.ports == tuple(stretch[4:8])
        with pytest.raises(PortLeaseError, match="5 free ports in a row"):
            leases(5, stretch.start, stretch.stop, consecutive=True, timeout=0)
    for _ in range(30):
        with leases(8, stretch.start, stretch.stop, consecutive=True, timeout=0) as row:
            assert row.ports == tuple(stretch)


@given(st.sets(st.integers(1, 40), min_size=1))
def test_intervals_name_each_port_once(ports: set[int]) -> None:
    named: list[int] = []
    for part in lease_module.intervals(sorted(ports)).split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(ports)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 5, "stop": 5}, "start and stop must be numbers with 1 <= start < stop"),
        ({"stop": 70_000}, "got .* and 70000"),
        ({"start": 2.5}, "start must be an integer, got 2.5"),
        ({"start": True}, "start must be an integer, got True"),
        ({"protocol": ["tcp"]}, 'protocol must be "tcp" or "udp"'),
        ({"timeout": "x"}, "timeout must be"),
        ({"timeout": None}, "timeout must be"),
        ({"host": ""}, "host must be an address or a name"),
        ({"host": "no.such.host.invalid"}, "neither an address nor a known name"),
        ({"host": "192.0.2.1"}, "no server can listen at host '192.0.2.1' on this machine"),
        ({"protocol": "sctp"}, 'protocol must be "tcp" or "udp"'),
        ({"timeout": -1}, "timeout must be"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"consecutive": "x"}, "consecutive must be True or False, got 'x'"),
        ({"n": 0}, "n must be a number of ports from 1 to"),
        ({"n": 4, "start": 20_000, "stop": 20_003}, "from 1 to 3, as many as the range has, got 4"),
    ],
)
def test_invalid_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        leases(**{"n": 1, **options})  # type: ignore[arg-type]


def test_bound_ports_are_not_leased(stretch: range) -> None:
    ports = stretch[:2]
    for kind, protocol in ((socket.SOCK_STREAM, "tcp"), (socket.SOCK_DGRAM, "udp")):
        with socket.socket(socket.AF_INET, kind) as outsider:
            outsider.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            outsider.bind(("127.0.0.1", ports[0]))
            if protocol == "tcp":
                outsider.listen()
            for _ in range(5):
                with lease(ports, protocol=protocol) as free:
                    assert free.port == ports[1]
            with pytest.raises(PortLeaseError, match=rf"{ports[0]}: not leased, but bound by pid {os.getpid()} "):
                lease(ports[:1], protocol=protocol)
            with lease(ports[:1], protocol="udp" if protocol == "tcp" else "tcp") as other:
                assert other.port == ports[0]  # a TCP port and a UDP port with one number are two ports
    with lease(ports, protocol="udp") as mine, lease(ports) as other:
        assert mine.port != other.port  # but a lease covers both: games often use both


def test_ipv6_and_names(stretch: range) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6")
    try:
        outsider = socket.create_server(("::1", stretch[0]), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with outsider:
        for host in ("::1", "::"):
            with pytest.raises(PortLeaseError):
                lease(stretch[:1], host=host)
        with lease(stretch[:2], host="::1") as mine:
            assert mine.port == stretch[1]
            with socket.create_server((mine.host, mine.port), family=socket.AF_INET6):
                pass
    with lease(stretch, host="localhost") as mine:
        assert mine.is_active


def test_a_port_in_time_wait_is_not_taken(stretch: range) -> None:
    address = ("127.0.0.1", stretch[0])
    with socket.create_server(address) as server, socket.create_connection(address) as player:
        accepted, _ = server.accept()
        accepted.close()  # the server closes first, so its port is in TIME_WAIT
        assert player.recv(1) == b""
    with pytest.raises(PortLeaseError, match="not leased, but bound by a process that cannot be seen"):
        lease(stretch[:1])
    with lease(stretch[:2]) as other:
        assert other.port == stretch[1]


def test_a_lease_that_was_released_cannot_be_entered(stretch: range) -> None:
    several = leases(2, stretch.start, stretch.stop)
    several.release()
    for released in (several, several[0]):
        with pytest.raises(PortLeaseError, match="not active in this process> was released, or is that of"), released:
            pytest.fail("the block ran without a lease")


def test_a_lease_ends_with_its_object(stretch: range) -> None:
    mine = leases(1, stretch.start, stretch.start + 1)[0]
    gc.collect()
    with pytest.raises(PortLeaseError):
        lease(stretch[:1])
    with pytest.warns(ResourceWarning, match=f"PortLease tcp 127.0.0.1 {mine.port}, active> was not released"):
        del mine
    lease(stretch[:1]).release()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_garbage_collection_may_run_during_another_lease() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(50):
            cycle: list[object] = [lease_port()]
            cycle.append(cycle)
    finally:
        gc.set_threshold(*threshold)
    del cycle
    gc.collect()
    assert ports_with_lock_file() == []


def test_threads_get_different_ports_and_several_may_release_one(stretch: range) -> None:
    with ThreadPoolExecutor(2 * len(stretch)) as threads:
        for _ in range(20):
            found = list(threads.map(lambda _: lease_port(stretch.start, stretch.stop, timeout=20), stretch))
            assert {each.port for each in found} == set(stretch)
            list(threads.map(PortLease.release, found * 2))


def test_a_file_system_without_locks_and_a_folder_that_cannot_be_used(
    stretch: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lock: InterProcessLock) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(InterProcessLock, "trylock", refuse)
    for why in ("No locks available", "/dev/null is not a folder that only"):
        with pytest.raises(PortLeaseError, match=f"{why}.*PENSTOCK_PORT_FOLDER"):
            lease(stretch)
        assert not claims.held
        monkeypatch.setenv("PENSTOCK_PORT_FOLDER", "/dev/null")


def test_a_lease_cannot_be_pickled(stretch: range) -> None:
    with lease(stretch) as mine, pytest.raises(TypeError, match="belongs to the process that took it"):
        pickle.dumps(mine)


@pytest.fixture
def ephemeral(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    between = [0, 0]
    monkeypatch.setattr(system, "ephemeral_ports", lambda: tuple(between))
    return between


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ((32_768, 60_999), range(10_000, 32_768)),
        ((49_152, 65_535), range(10_000, 49_152)),
        ((1_024, 30_000), range(30_001, 65_536)),
        ((1_024, 5_000), range(10_000, 65_536)),
    ],
)
def test_default_ports_are_not_used_for_outgoing_connections(
    ephemeral: list[int], between: tuple[int, int], expected: range
) -> None:
    ephemeral[:] = between
    assert lease_module.default_ports() == expected


def test_a_kernel_that_uses_all_ports(ephemeral: list[int], stretch: range) -> None:
    ephemeral[:] = 1_024, 65_535
    with pytest.raises(ConfigError, match=r"the ports 1024 to 65535 to outgoing connections.*pass start= and stop="):
        lease_port()
    lease(stretch).release()  # the default is not used


def test_the_default_on_this_machine() -> None:
    low, high = system.ephemeral_ports()
    with lease_port() as mine:
        assert not low <= mine.port <= high
