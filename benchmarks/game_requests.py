"""Requests to a game over loopback: what the deadline of `GameProcess.connect` costs, in microseconds per request.

The same connection is used in three ways, which take turns: a bare blocking socket (`sendall`, `recv`, without any
deadline), `GameSocket.request`, and a socket with `settimeout`. The game repeats each line.

    python benchmarks/game_requests.py
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

from penstock.games import GameProcess

ECHO = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as listener:
    player, _ = listener.accept()
    player.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := player.recv(65536):
        player.sendall(data)
"""
BARE = "bare blocking socket"
LINE = b'{"move": 1}\n'


def seconds_of(request: Callable[[bytes], bytes], n: int) -> tuple[float, float]:
    """Wall clock and CPU time of this process, in microseconds per request."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(n):
        request(LINE)
    return (time.perf_counter() - wall) / n * 1e6, (time.process_time() - cpu) / n * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5_000, help="in each turn")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with GameProcess([sys.executable, "-I", "-c", ECHO, "{port}"]) as game:
        own = game.connect()
        no_limit, limit = struct.pack("ll", 0, 0), struct.pack("ll", 10, 0)

        def plain(line: bytes) -> bytes:
            own.socket.sendall(line)
            return own.socket.recv(65536)

        ways = {BARE: plain, "GameSocket.request": own.request, "settimeout": plain}
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, request in ways.items():
                own.socket.settimeout(10.0 if name == "settimeout" else None)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    own.socket.setsockopt(socket.SOL_SOCKET, option, no_limit if name == BARE else limit)
                found[name].append(seconds_of(request, options.requests))
    print("microseconds per request, median (least) of wall clock; CPU time of this process")
    base = statistics.median(wall for wall, _ in found[BARE])
    figures = {}
    for name, times in found.items():
        walls, cpu = [wall for wall, _ in times], statistics.median(cpu for _, cpu in times)
        median = statistics.median(walls)
        more = statistics.median(wall - other for wall, (other, _) in zip(walls, found[BARE], strict=True))
        figures[name] = {"median": median, "least": min(walls), "cpu": cpu, "more": more}
        print(f"{name:<22} {median:7.2f} ({min(walls):6.2f})  {cpu:6.2f}  {more:+6.2f}  ({median / base:.2f} times)")
    if options.json:
        options.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
