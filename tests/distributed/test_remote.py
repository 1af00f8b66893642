"""Remote calls: a server, a handler, clients in this process and in another."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("zmq", reason="remote calls need pyzmq")
pytest.importorskip("msgpack", reason="remote calls need msgpack")

from penstock import ClusterError, ConfigError, NoReplyError, PeerLostError, RequestError
from penstock.distributed import RpcClient, RpcServer


@pytest.fixture
def server() -> Iterator[RpcServer]:
    with RpcServer() as made:
        made.register_handler("foo", lambda x: 2 * x)
        made.register_handler("fail", lambda: 1 / 0)
        is_done = threading.Event()

        def serve() -> None:
            while not is_done.is_set():
                made.handle_requests(timeout=0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        yield made
        is_done.set()
        thread.join()


CLIENT = """
import sys
from penstock.distributed import RpcClient
with RpcClient(sys.argv[1]) as client:
    print(client.request("foo", x=21))
"""


def test_a_client_in_another_process(server: RpcServer, tmp_path: Path) -> None:
    server.write(tmp_path / "server.json")
    command = [sys.executable, "-c", CLIENT, tmp_path / "server.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_results_and_errors_of_handlers(server: RpcServer) -> None:
    with RpcClient(server.connection) as client:
        assert client.request("foo", x=np.arange(3)).tolist() == [0, 2, 4]
        with pytest.raises(RequestError, match="there is no command 'bar'; the commands are fail, foo"):
            client.request("bar")
        with pytest.raises(RequestError, match="fail raised ZeroDivisionError: division by zero"):
            client.request("fail")
        assert client.request("foo", x=1) == 2


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [ValueError("data_\udcff"), Unprintable()], ids=["surrogate", "unprintable"])
def test_a_server_goes_on_after_an_error_whose_text_cannot_be_sent_or_made(server: RpcServer, error: Exception) -> None:
    def fail() -> None:
        raise error

    server.register_handler("fail", fail)
    with RpcClient(server.connection) as client:
        with pytest.raises(RequestError, match=rf"fail raised .*{type(error).__name__}: "):
            client.request("fail")
        assert client.request("foo", x=1) == 2


@pytest.mark.slow
def test_a_server_that_was_closed_is_lost() -> None:
    server = RpcServer()
    with RpcClient(server.connection) as client:
        future = client.async_request("foo")
        server.close()
        with pytest.raises(PeerLostError):
            future.result()
        with pytest.raises((PeerLostError, NoReplyError)):
            client.request("foo", timeout=0.2)


def test_a_server_is_polled_in_a_loop_of_ones_own() -> None:
    with RpcServer() as server, RpcClient(server.connection) as client:
        assert server.handle_requests() == 0
        server.register_handler("foo", lambda x, y: f"{x}{y}")
        futures = [client.async_request("foo", x=x, y="str") for x in range(3)]
        n, deadline = 0, time.monotonic() + 10
        while n < 3:
            n += server.handle_requests()
            assert time.monotonic() < deadline
        assert [future.result() for future in futures] == ["0str", "1str", "2str"]
        with pytest.raises(ConfigError, match="timeout must be a number of seconds, 0 or more, got -1"):
            server.handle_requests(-1)
    with pytest.raises(ClusterError, match="this server was closed"):
        server.handle_requests()


def test_who_asked_knows_why_the_server_ends() -> None:
    with RpcServer() as server, RpcClient(server.connection) as client:
        server.register_handler("leave", sys.exit)
        future = client.async_request("leave")
        with pytest.raises(SystemExit):
            server.handle_requests(10)
        with pytest.raises(RequestError, match="leave raised SystemExit"):
            future.result(10)


@pytest.mark.parametrize("port", [-1, 65536, "5555", True])
def test_a_wrong_port_is_refused(port: Any) -> None:
    with pytest.raises(ConfigError, match="port must be"):
        RpcServer(port)


def test_a_client_needs_the_keys() -> None:
    with pytest.raises(ConfigError, match=r"a client needs the keys .* RpcClient\(file\)"):
        RpcClient("127.0.0.1", 5555)
