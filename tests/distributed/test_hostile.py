"""What strangers send to a wire over sockets is refused, counted, and never unpickled."""

from __future__ import annotations

import contextlib
import pickle
import random
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

zmq = pytest.importorskip("zmq", reason="the wire over sockets needs pyzmq")
msgpack = pytest.importorskip("msgpack", reason="the wire over sockets needs msgpack")

from penstock import ConfigError, FunctionAgent, PeerLostError  # noqa: E402
from penstock.distributed import Actors, ActorWorker, ControlPanel, Experiment, Policies, PolicyWorker, Training  # noqa: E402
from penstock.distributed.keys import Connection  # noqa: E402
from penstock.distributed.messages import BadMessageError, decode, encode  # noqa: E402
from penstock.distributed.names import NameClient  # noqa: E402
from penstock.distributed.parameters import ParameterServer, read_parameters  # noqa: E402
from penstock.distributed.wire import GONE, REPLY, REQUEST, Node, to_frames  # noqa: E402
from penstock.testing import DelegatingAgent  # noqa: E402

from ..scale import scaled  # noqa: E402
from .support import SAMPLER, Bomb, note, wait_until  # noqa: E402

pytestmark = pytest.mark.timeout(scaled(1800, 120))
N_FRAMES = scaled(100_000, 3_000)


def bodies(rng: random.Random, bomb: bytes) -> list[bytes]:
    """The frames of one hostile message."""
    deep = b"\x91" * rng.randrange(1, 3000) + b"\xc0"
    array = msgpack.ExtType(
        1, msgpack.packb([rng.randrange(-2, 3), rng.choice(["<f8", "O", "V9", "x", "|S5"]), [2**40]])
    )
    header = rng.choice(
        [
            rng.randbytes(rng.randrange(200)),
            bomb,
            deep,
            b"\xc6\x40\x00\x00\x00",  # one GiB of bytes
            b"\xdd\x40\x00\x00\x00",  # a list of 2**30
            b"\xdf\x40\x00\x00\x00\x80",  # a dict of as many
            b"\xc9\x40\x00\x00\x00\x01",  # an array of that size
            msgpack.packb({"command": array}),
            msgpack.packb(msgpack.ExtType(2, b"x")),
            msgpack.packb({1: 2}),
            b"\x80" * 1000,
        ]
    )
    return [header, *(rng.choice([b"", bomb, rng.randbytes(40)]) for _ in range(rng.randrange(3)))]


@pytest.fixture
def keys() -> Connection:
    return Connection.make("test/hostile")


@pytest.fixture
def wire(keys: Connection) -> Iterator[Node]:
    """A wire with an inbox that echoes."""
    made = keys.wire()
    inbox = made.open("echo")

    def run() -> None:
        while (call := inbox.receive()) is not None:
            call.reply(call.message)

    thread = threading.Thread(target=run)
    thread.start()
    yield made
    made.close()
    thread.join()


def assert_answers(keys: Connection, wire: Node) -> None:
    friend = keys.wire()
    try:
        assert friend.reach(wire.address, "echo").ask("hello", 20).result() == "hello"
    finally:
        friend.close()


def test_hostile_frames_of_somebody_with_the_key(keys: Connection, wire: Node, tmp_path: Path) -> None:
    rng = random.Random(0)
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
        text.encode() for text in (keys.server_public, keys.client_public, keys.client_secret)
    )
    dealer.connect(wire.address)
    assert_answers(keys, wire)
    before = psutil.Process().memory_info().rss
    for number in range(N_FRAMES):
        kind = rng.choice([REQUEST, REQUEST, REQUEST, GONE, REPLY, 99, -1, "x", None])
        target, inbox = rng.choice(["", "other", wire.id]), rng.choice(["echo", "echo", "nobody", "x" * 2000])
        counts = rng.choice([0, number, 2**62, -5]), rng.choice([0, number, 2**63])
        header = [kind, target, inbox, f"sender {rng.randrange(3)}", number, *counts]
        head = rng.choice([msgpack.packb(header)] * 3 + [bomb, rng.randbytes(30), b"\x91" * 5000, b""])
        frames = to_frames(head, bodies(rng, bomb))
        dealer.send_multipart(frames if rng.random() < 0.9 else [head, *frames])
        while dealer.poll(0):
            dealer.recv_multipart()
    assert_answers(keys, wire)
    wait_until(lambda: wire.counts["refused"] > N_FRAMES // 4)
    context.destroy(linger=0)
    note("growth of memory [MB]", (psutil.Process().memory_info().rss - before) / 2**20, 20)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("client", ["no keys", "own keys", "server's key"])
def test_nobody_gets_in_without_the_key(keys: Connection, wire: Node, client: str) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    if client != "no keys":
        public, secret = zmq.curve_keypair()
        if client == "server's key":
            public, secret = keys.server_public.encode(), keys.server_secret.encode()
        dealer.curve_serverkey = keys.server_public.encode()
        dealer.curve_publickey, dealer.curve_secretkey = public, secret
    dealer.connect(wire.address)
    for number in range(20):
        header = msgpack.packb([REQUEST, "", "echo", "stranger", number, 0, 0])
        dealer.send_multipart(to_frames(header, encode("let me in")))
    assert_answers(keys, wire)
    assert dealer.poll(300) == 0  # no answer
    assert "stranger" not in wire.senders
    if client != "no keys":  # the others do not come as far as the question for the key
        wait_until(lambda: wire.counts["refused"] > 0)
    context.destroy(linger=0)


def test_hostile_frames_of_somebody_without_the_key(keys: Connection, wire: Node, tmp_path: Path) -> None:
    """Each connection sends some bytes that are no ZMQ, or the begin of ZMQ's protocol and then 100 frames."""
    rng = random.Random(0)
    bomb = pickle.dumps(Bomb(tmp_path / "exploded"))
    host, _, port = wire.address.removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(55, b"\0")
    claim = b"\x06" + (2**30).to_bytes(8, "big")  # a command of one GiB
    assert_answers(keys, wire)
    before = psutil.Process().memory_info().rss
    for _ in range(N_FRAMES // 100):
        frames = [body for _ in range(60) for body in bodies(rng, bomb)][:100]
        hostile = b"".join(b"\x02" + len(frame).to_bytes(8, "big") + frame for frame in frames)
        first = rng.choice([greeting, greeting, greeting + claim, b"GET / HTTP/1.1\r\n\r\n", rng.randbytes(500), b""])
        with socket.create_connection((host, int(port)), timeout=10) as stranger, contextlib.suppress(ConnectionError):
            stranger.sendall(first + hostile)  # the other side may close the connection meanwhile
    assert_answers(keys, wire)
    note("growth of memory [MB]", (psutil.Process().memory_info().rss - before) / 2**20, 20)
    assert not (tmp_path / "exploded").exists()


def test_a_peer_without_the_key_is_lost(keys: Connection, wire: Node) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    stranger = replace(keys, client_public=public, client_secret=secret).wire()
    with pytest.raises(PeerLostError, match="no connection"):
        stranger.reach(wire.address, "echo", lost_after=0.5).ask("hello", 20).result()
    stranger.close()


def test_only_this_machine_can_connect_by_default() -> None:
    with ControlPanel("test", wire="zmq"):
        listening = [c.laddr.ip for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN]
        assert set(listening) == {"127.0.0.1"}


EVERY_NETWORK = ["", "*", "0", "0.0", "0x0", "00.0x0.0", "000.000.000.000", "0.0.0.0"]
EVERY_NETWORK += ["::", "[::]", "0:0::0", "::0.0.0.0", "::ffff:0.0.0.0", "::ffff:0:0", "[::FFFF:0.0.0.0]"]


@pytest.mark.parametrize("host", [*EVERY_NETWORK, "203.0.113.7", "no such.host", "x" * 70, "a\0b", 5, None])
def test_every_network_at_once_and_the_address_of_another_machine_are_refused(keys: Connection, host: Any) -> None:
    error = (
        "give the address of one network" if host in EVERY_NETWORK else "cannot listen at host=|host must be an address"
    )
    with pytest.raises(ConfigError, match=error):
        replace(keys, host=host).wire()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "localhost", "lo", "::1", "[::1]"])
def test_a_node_listens_at_one_address(keys: Connection, host: str) -> None:
    if ":" in host:
        with contextlib.closing(socket.socket(socket.AF_INET6)) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                pytest.skip("this machine has no IPv6")
    with contextlib.closing(replace(keys, host=host).wire()) as node:
        node.open("echo", lambda call: call.reply(call.message))
        assert node.address.startswith("tcp://[::1]:" if ":" in host else "tcp://127.0.0.1:")
        assert_answers(keys, node)


def test_somebody_with_the_key_who_never_acknowledges_takes_a_bounded_memory(
    keys: Connection, wire: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.distributed.wire._MOST_KEPT", 100)
    monkeypatch.setattr("penstock.distributed.wire._MOST_SENDERS", 5)
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = (
        text.encode() for text in (keys.server_public, keys.client_public, keys.client_secret)
    )
    dealer.connect(wire.address)
    n = 1000
    for number in range(n):
        header = msgpack.packb([REQUEST, "", "echo", f"sender {number % 10}", number, 0, 0])
        dealer.send_multipart(to_frames(header, encode("x" * 1000)))
        assert dealer.poll(10_000)
        dealer.recv_multipart()
    context.destroy(linger=0)
    wait_until(lambda: len(wire.kept) == 100)  # it forgets the oldest after its last reply
    assert len(wire.senders) == 5
    assert wire.kept_bytes <= 100 * 1010
    assert sum(len(sender.replies) for sender in wire.senders.values()) == 100


def test_the_connection_file_is_for_its_owner_alone(keys: Connection, tmp_path: Path) -> None:
    file = tmp_path / "trial.json"
    keys.write(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert Connection.read(file) == keys
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Connection.read(file)
    (tmp_path / "other").write_text("{}")
    (tmp_path / "other").chmod(0o600)
    with pytest.raises(ConfigError, match="is no connection file"):
        Connection.read(tmp_path / "other")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"\xc1"],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1, 2], "O", [1]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1, 2], "<f8", [-1]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1, 2], "<f8", [2**61]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1, 2], "<f8", [True]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[0, 1], "<f8", [1]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[2, 3], "<f8", [1]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1, 2], "<f8"]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([bytes(7), "<f8", [1]])))],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb(["x" * 8, "<f8", [1]]))), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([bytes(8), "O", [1]])))],
        [msgpack.packb([msgpack.ExtType(1, msgpack.packb([[1, 2], "<f8", [1]]))] * 2), bytes(8)],
        [msgpack.packb(msgpack.ExtType(1, msgpack.packb([[1, 3], "<f8", [1]]))), bytes(8)],
        [b"\x91" * 100 + b"\xc0"],
        [b"\x80" * 2],
        [b"\x00" * 300_000],
        [b"\x00"] * 20_000,
    ],
    ids=lambda frames: str(frames)[:60],  # one has megabytes
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadMessageError, match=r"no message|nested"):
        decode(frames)


# ---- code --------------------------------------------------------------------------------------

UNPICKLES = re.compile(
    r"\b(pickle|pickling|cloudpickle|dill|joblib|marshal|shelve)\.(loads?|open|Unpickler)\b|\b(torch|np)\.load\("
    r"|(?<![\w.])(eval|exec)\((?!\))"
)
#: How often a file has what could run code, and where its bytes are from. None are from a socket of penstock's.
OWN, FILE, RAY = (
    "a process of this program, through memory or a pipe",
    "a file that the user names",
    "Ray, with its token",
)
MAY_RUN_CODE = {
    "agents/agent.py": (1, FILE),  # weights only
    "agents/function.py": (2, OWN),
    "buffers/descriptors.py": (1, OWN),
    "buffers/object_pipe.py": (1, OWN),
    "buffers/reports.py": (2, OWN),
    "columns/log_writer.py": (1, OWN),
    "distributed/launch_ray.py": (1, RAY),
    "distributed/launched.py": (1, OWN),
    "distributed/shard.py": (2, RAY),
    "distributed/trainer_worker.py": (3, FILE),  # weights only, unless trust_checkpoint
    "envs/recorded_episode.py": (1, FILE),
    "envs/state.py": (2, FILE),
    "evaluation/background.py": (2, OWN),
    "evaluation/proof.py": (1, FILE),  # it refuses code
    "games/host.py": (1, OWN),  # in the environment's process: what the learner has put into its stdin
    "learning/checkpoint.py": (1, FILE),  # it refuses code
    "samplers/log_reader.py": (1, OWN),
    "samplers/resuming.py": (3, FILE),
    "samplers/sampler_program.py": (1, OWN),
    "testing/agent_rules.py": (1, OWN),
    "vector/making.py": (1, OWN),
    "vector/objects.py": (1, OWN),
    "vector/step_program.py": (1, OWN),
    "vector/vector_infos.py": (1, OWN),
    "workers/program.py": (1, OWN),
    "workers/supervisor.py": (1, OWN),
}


def test_what_can_run_code_is_known_and_none_of_it_gets_bytes_from_a_socket() -> None:
    """`test_experiment.py` has runs whose workers cannot unpickle."""
    import penstock

    found, root = Counter[str](), Path(penstock.__file__).parent
    for file in root.rglob("*.py"):
        found[str(file.relative_to(root))] = len(UNPICKLES.findall(file.read_text()))
    assert {file: n for file, n in found.items() if n} == {file: n for file, (n, _) in MAY_RUN_CODE.items()}
    # These read what comes from a socket.
    for name in ("wire", "messages", "names", "streams", "parameters", "pieces", "remote", "role", "panel"):
        assert f"distributed/{name}.py" in found
        assert f"distributed/{name}.py" not in MAY_RUN_CODE


def act(observation: Any) -> Any:
    return np.zeros(len(observation), np.int64)


@pytest.mark.parametrize("make_agent", [lambda: FunctionAgent(act), lambda: DelegatingAgent(FunctionAgent(act))])
@pytest.mark.parametrize("inference", [None, "policy"])
def test_a_function_that_somebody_with_the_key_publishes_is_not_run(
    tmp_path: Path, make_agent: Any, inference: str | None
) -> None:
    """The function of a `FunctionAgent` does not cross a wire."""
    plan = Experiment("test", make_agent, Actors(1, SAMPLER, bootstrap_value=False), Training(int), seed=1).plan()
    assert read_parameters(plan.agent()) == {}
    bomb = np.frombuffer(pickle.dumps(Bomb(tmp_path / "exploded")), np.uint8)
    make: Any = ActorWorker if inference is None else PolicyWorker
    of = Actors(1, SAMPLER, bootstrap_value=False) if inference is None else Policies(1)
    with ControlPanel("test") as panel:
        wire = panel.connection.wire()
        server = ParameterServer(wire, NameClient(wire, panel.connection.address), "policy")
        server.publish(1, {})
        panel.launch(lambda: make(of, plan), name="worker")
        panel.connect()
        panel.request("worker/0", "configure")
        panel.request("worker/0", "start")
        server.publish(2, {"function": bomb})
        wait_until(lambda: panel.stats()["worker/0"]["status"] == "ERROR")
        assert "parameters of the trainer do not fit" in panel.stats()["worker/0"]["text"]
        wire.close()
    assert not (tmp_path / "exploded").exists()
