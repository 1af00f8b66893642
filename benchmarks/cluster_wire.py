"""Round trips between two processes: penstock's wire over ZMQ beside a bare REQ/REP pair with msgpack, in one run.

    python benchmarks/cluster_wire.py --seconds 20

The turns are interleaved. Each row has the median and the middle half of the round trips in µs, and the ratio to
the bare pair with CURVE. The CPU time is that of both processes per round trip.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable

import msgpack
import numpy as np
import psutil
import zmq

from penstock.cluster.keys import Connection
from penstock.cluster.wire import Wire

MESSAGE = {"command": "ping", "kwargs": {"x": 1.5, "name": "worker/3"}}


def serve_bare(public: str, secret: str) -> None:
    socket = zmq.Context().socket(zmq.REP)
    if secret:
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public.encode(), secret.encode()
    socket.bind("tcp://127.0.0.1:*")
    print(socket.last_endpoint.decode(), flush=True)
    while True:
        socket.send(msgpack.packb(msgpack.unpackb(socket.recv())))


def serve_wire(*keys: str) -> None:
    wire = Connection("benchmark", "", *keys).wire()
    inbox = wire.open("echo")
    print(wire.address, flush=True)
    while (letter := inbox.receive()) is not None:
        letter.reply(letter.message)


class Bare:
    """A REQ socket and its server process."""

    def __init__(self, keys: Connection | None) -> None:
        texts = ("", "") if keys is None else (keys.server_public, keys.server_secret)
        self.server, address = start("bare", *texts)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.REQ)
        if keys is not None:
            self.socket.curve_serverkey = keys.server_public.encode()
            self.socket.curve_publickey = keys.client_public.encode()
            self.socket.curve_secretkey = keys.client_secret.encode()
        self.socket.connect(address)

    def __call__(self) -> None:
        self.socket.send(msgpack.packb(MESSAGE))
        assert msgpack.unpackb(self.socket.recv()) == MESSAGE

    def close(self) -> None:
        self.context.destroy(linger=0)


class Ours:
    """A wire, and the process of another one."""

    def __init__(self, keys: Connection) -> None:
        texts = keys.server_public, keys.server_secret, keys.client_public, keys.client_secret
        self.server, address = start("wire", *texts)
        self.wire: Wire = keys.wire()
        self.peer = self.wire.reach(address, "echo")

    def __call__(self) -> None:
        assert self.peer.ask(MESSAGE, 30).result() == MESSAGE

    def close(self) -> None:
        self.wire.close()


def start(kind: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, __file__, "--serve", kind, *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def cpu_seconds(*pids: int) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def measure(seconds: float) -> None:
    keys = Connection.make("benchmark")
    makers: dict[str, Callable[[], Bare | Ours]] = {
        "bare REQ/REP, msgpack": lambda: Bare(None),
        "bare REQ/REP, msgpack, CURVE": lambda: Bare(keys),
        "penstock: ask and reply": lambda: Ours(keys),
    }
    calls = {name: make() for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    cpu = dict.fromkeys(calls, 0.0)
    try:
        for call in calls.values():
            for _ in range(100):
                call()
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for name, call in calls.items():
                before = cpu_seconds(os.getpid(), call.server.pid)
                for _ in range(200):
                    began = time.perf_counter()
                    call()
                    times[name].append(time.perf_counter() - began)
                cpu[name] += cpu_seconds(os.getpid(), call.server.pid) - before
    finally:
        for call in calls.values():
            call.close()
            call.server.kill()
            call.server.wait()
    base = float(np.median(times["bare REQ/REP, msgpack, CURVE"]))
    for name, values in times.items():
        low, median, high = np.percentile(values, [25, 50, 75])
        own = cpu[name] / len(values)
        print(
            f"{name:32}{median * 1e6:8.0f} µs [{low * 1e6:.0f}, {high * 1e6:.0f}]  {median / base:5.2f}  "
            f"{own * 1e6:6.0f} µs CPU  n={len(values)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="time for the turns of all (20)")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        {"bare": serve_bare, "wire": serve_wire}[args.serve[0]](*args.serve[1:])
    else:
        measure(args.seconds)


if __name__ == "__main__":
    main()
