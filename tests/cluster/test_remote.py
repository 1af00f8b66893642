"""Remote calls: a server on a leased port, a handler, clients in this process and in another."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq", reason="remote calls need pyzmq")
pytest.importorskip("msgpack", reason="remote calls need msgpack")

from penstock import NoReplyError, PeerLostError, RequestError
from penstock.control import RpcClient, RpcServer


@pytest.fixture
def server() -> Iterator[RpcServer]:
    with RpcServer() as made:
        made.register("foo", lambda x: 2 * x)
        made.register("fail", lambda: 1 / 0)
        made.register("unplain", lambda: {1, 2})
        thread = threading.Thread(target=made.serve, args=(60,))
        thread.start()
        yield made
    thread.join()


CLIENT = """
import sys
from penstock.control import RpcClient
with RpcClient(sys.argv[1]) as client:
    print(client.call("foo", x=21))
"""


def test_a_client_in_another_process(server: RpcServer, tmp_path: Path) -> None:
    server.write(tmp_path / "server.json")
    command = [sys.executable, "-c", CLIENT, tmp_path / "server.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("42\n", "")


def test_results_and_errors_of_handlers(server: RpcServer) -> None:
    with RpcClient(server.connection) as client:
        assert client.call("foo", x=np.arange(3)).tolist() == [0, 2, 4]
        with pytest.raises(RequestError, match="there is no command 'bar'; the commands are fail, foo, unplain"):
            client.call("bar")
        with pytest.raises(RequestError, match="fail raised ZeroDivisionError: division by zero"):
            client.call("fail")
        with pytest.raises(RequestError, match="foo raised TypeError"):
            client.call("foo", y=1)
        with pytest.raises(RequestError, match="unplain raised BadMessageError: a value of type set cannot"):
            client.call("unplain")
        assert client.call("foo", x=1) == 2


@pytest.mark.slow
def test_a_server_that_was_closed_is_lost() -> None:
    server = RpcServer()
    with RpcClient(server.connection) as client:
        future = client._peer.ask({"command": "foo", "kwargs": {}}, 30)
        server.close()
        with pytest.raises(PeerLostError):
            future.result()
        with pytest.raises((PeerLostError, NoReplyError)):
            client.call("foo", timeout=0.2)
