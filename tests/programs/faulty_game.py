"""A game server with faults, for the tests of games. It uses no penstock.

    python faulty_game.py PORT [FAULT [N]]

It repeats each line that its player sends, counts them, and answers {"n": number, "got": line}. The fault strikes at
line N (default 5), or at the start. A line {"fault": name} lets that fault strike at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

TYPE_CHECKING = False  # tests start many games, and typing and subprocess take a third of the time of a start
if TYPE_CHECKING:
    from typing import Any

FOR_EVER = 3600


def strike(fault: str, player: Any, reply: bytes) -> None:
    print("the fault is", fault, flush=True)
    if fault in FAULTS:
        FAULTS[fault](player, reply)


def vanish(player: Any, _: bytes) -> None:
    player.shutdown(socket.SHUT_RDWR)
    time.sleep(FOR_EVER)


def drip(player: Any, _: bytes) -> None:
    while True:
        player.sendall(b"x")
        time.sleep(0.05)


def spout(player: Any, _: bytes) -> None:
    while True:
        player.sendall(b"x" * 65536)


def flood(*_: Any) -> None:
    sys.stdout.write(("y" * 99 + "\n") * 30_000)
    sys.stdout.flush()


def start_children(**how: Any) -> None:
    import subprocess

    for new_session in (False, True):
        subprocess.Popen(["sleep", str(FOR_EVER)], start_new_session=new_session, **how)


def orphan(*_: Any) -> None:
    """Its children keep the port and the connection."""
    start_children(close_fds=False)
    os._exit(9)


LEAKED: list[bytes] = []
FAULTS: dict[str, Any] = {
    "exit": lambda *_: sys.exit(7),
    "crash": lambda *_: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda *_: time.sleep(FOR_EVER),
    "late": lambda *_: time.sleep(0.4),
    "vanish": vanish,
    "spout": spout,
    "twice": lambda player, reply: player.sendall(reply * 2),  # at once, so that it is always noticed
    "drip": drip,
    "flood": flood,
    "child": lambda *_: start_children(),
    "ignore_term": lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "orphan": orphan,
    "leak": lambda *_: LEAKED.append(b"x" * 100_000_000),
}


def main() -> None:
    given = [*sys.argv[1:], "", ""]
    port, fault, at = int(given[0]), given[1], int(given[2] or 5)
    print("starting", fault, flush=True)
    if fault == "die_at_start":
        print("cannot open display", file=sys.stderr, flush=True)
        sys.exit(3)
    if fault == "never_ready":
        time.sleep(FOR_EVER)
    if fault == "late_start":
        time.sleep(0.3)
    if fault in ("ignore_term", "child"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    listener = socket.create_server(("127.0.0.1", port), reuse_port=False)
    os.set_inheritable(listener.fileno(), True)
    print("listening", flush=True)
    while True:
        player, _ = listener.accept()
        os.set_inheritable(player.fileno(), True)
        player.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for n, line in enumerate(player.makefile("rb"), 1):
            asked = json.loads(line)
            reply = json.dumps({"n": n, "got": asked}).encode() + b"\n"
            if n == at:
                strike(fault, player, reply)
            if isinstance(asked, dict) and "fault" in asked:
                strike(asked["fault"], player, reply)
            player.sendall(reply)


if __name__ == "__main__":
    main()
