"""Round trips between two processes: penstock's wire over ZMQ beside a bare REQ/REP pair with msgpack, in one run.

    python benchmarks/cluster_wire.py --repeats 24 --json cluster_wire.json
    python benchmarks/cluster_wire.py --megabytes 29 --seconds 1     # a piece of samples

The contestants take turns, in random order. Each sends the same small message, and waits for it to come back. The CPU
time is that of both processes. "penstock, arrays" sends the message of an actor with 16 environments, and gets actions.

With `--megabytes`, each sends an array of that size, and gets nothing back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
from clocks import cpu_clocks, used
from rich.console import Console
from rich.table import Table
from turns import CAPTION, cell, machine, ratios

from penstock.distributed.keys import Connection

MESSAGE = {"command": "ping", "kwargs": {"x": 1.5, "name": "worker/3"}}
STEP = {
    "kind": "step",
    "env_ranks": np.arange(16),
    "starts": np.zeros(16, np.bool_),
    "observation": np.zeros((16, 4), np.float32),
    "prev_action": np.zeros(16, np.int64),
    "prev_reward": np.zeros(16, np.float32),
}
YARDSTICK = "bare, CURVE"


def serve_bare(public: str, secret: str) -> None:
    socket = zmq.Context().socket(zmq.REP)
    if secret:
        socket.curve_server, socket.curve_publickey, socket.curve_secretkey = True, public.encode(), secret.encode()
    socket.bind("tcp://127.0.0.1:*")
    print(socket.last_endpoint.decode(), flush=True)
    while True:
        message = msgpack.unpackb(socket.recv())
        socket.send(msgpack.packb(message if "command" in message else None))


def serve_wire(*keys: str) -> None:
    wire = Connection("benchmark", "", *keys).wire()
    inbox = wire.open("echo")
    print(wire.address, flush=True)
    while (call := inbox.receive(60)) is not None:
        message = call.message
        call.reply(message if "command" in message else {"action": message.get("prev_action")})


class Bare:
    """A REQ socket, and the process of a REP socket."""

    def __init__(self, keys: Connection | None, message: Any = MESSAGE) -> None:
        self._message = message
        texts = ("", "") if keys is None else (keys.server_public, keys.server_secret)
        self.server, address = start("bare", *texts)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REQ)
        if keys is not None:
            self._socket.curve_serverkey = keys.server_public.encode()
            self._socket.curve_publickey = keys.client_public.encode()
            self._socket.curve_secretkey = keys.client_secret.encode()
        self._socket.connect(address)

    def __call__(self) -> None:
        self._socket.send(msgpack.packb(self._message))
        assert msgpack.unpackb(self._socket.recv()) in (MESSAGE, None)

    def close(self) -> None:
        self._context.destroy(linger=0)
        self.server.kill()
        self.server.communicate()


class Ours:
    """A wire, and the process of another one."""

    def __init__(self, keys: Connection, message: Any) -> None:
        texts = keys.server_public, keys.server_secret, keys.client_public, keys.client_secret
        self.server, address = start("wire", *texts)
        self._wire, self._message = keys.wire(), message
        self._peer = self._wire.reach(address, "echo")

    def __call__(self) -> None:
        reply = self._peer.ask(self._message, 30).result()
        assert reply in (MESSAGE, None) or "action" in reply

    def close(self) -> None:
        self._wire.close()
        self.server.kill()
        self.server.communicate()


def start(kind: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    # As hexadecimal digits: a key may begin with a minus sign.
    command = [sys.executable, __file__, "--serve", kind, *(text.encode().hex() for text in arguments)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def measure(repeats: int, seconds: float, megabytes: float) -> dict[str, dict[str, list[float]]]:
    """Microseconds of a round trip, `repeats` times for each contestant, in random order."""
    keys = Connection.make("benchmark")
    makers: dict[str, Callable[[], Bare | Ours]] = {
        "bare": lambda: Bare(None),
        YARDSTICK: lambda: Bare(keys),
        "penstock": lambda: Ours(keys, MESSAGE),
        "penstock, arrays": lambda: Ours(keys, STEP),
    }
    if megabytes:
        piece = np.zeros(int(megabytes * 2**20), np.uint8)
        makers = {
            YARDSTICK: lambda: Bare(keys, {"samples": piece.tobytes()}),
            "penstock": lambda: Ours(keys, {"samples": piece}),
        }
    results: dict[str, dict[str, list[float]]] = {name: {"wall_us": [], "cpu_us": []} for name in makers}
    with ExitStack() as stack:
        calls = {}
        for name, make in makers.items():
            calls[name] = call = make()
            stack.callback(call.close)
            for _ in range(10 if megabytes else 100):
                call()
        for repeat in range(repeats):
            for name in np.random.default_rng(repeat).permutation(list(calls)):
                call, n = calls[name], 0
                pids = [os.getpid(), call.server.pid]
                before, began = cpu_clocks(pids), time.perf_counter()
                while time.perf_counter() - began < seconds:
                    call()
                    n += 1
                results[name]["wall_us"].append((time.perf_counter() - began) / n * 1e6)
                results[name]["cpu_us"].append(used(before, cpu_clocks(pids)) / n * 1e6)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=24, help="turns of each contestant")
    parser.add_argument("--seconds", type=float, default=0.2, help="of each turn")
    parser.add_argument("--megabytes", type=float, default=0.0, help="of an array that each sends")
    parser.add_argument("--json", help="write the machine and all turns to this file")
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        texts = [bytes.fromhex(digits).decode() for digits in args.serve[1:]]
        {"bare": serve_bare, "wire": serve_wire}[args.serve[0]](*texts)
    results = measure(args.repeats, args.seconds, args.megabytes)
    table = Table(title="Round trips, with msgpack", caption=CAPTION)
    for heading in ("", "µs", "CPU µs", f"time of {YARDSTICK}"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, figures in results.items():
        of = ratios(figures["wall_us"], results[YARDSTICK]["wall_us"])
        table.add_row(name, cell(figures["wall_us"], "{:.0f}"), cell(figures["cpu_us"], "{:.0f}"), cell(of, "{:.2f}"))
    Console(width=120).print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({**machine(), "results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
