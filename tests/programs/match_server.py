"""A match of two players, for the tests of games: each has a port, and a step needs the line of both.

    python match_server.py PORT PORT

Each player gets {"t": steps so far, "other": what the other has sent}.
"""

import json
import socket
import sys


def main() -> None:
    listeners = [socket.create_server(("127.0.0.1", int(port))) for port in sys.argv[1:]]
    players = [listener.accept()[0] for listener in listeners]
    for player in players:
        player.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    files = [player.makefile("rb") for player in players]
    t = 0
    while True:
        lines = [json.loads(file.readline()) for file in files]
        if "exit" in lines:
            sys.exit(5)
        t = 0 if "reset" in lines else t + 1
        for player, other in zip(players, reversed(lines), strict=True):
            player.sendall(json.dumps({"t": t, "other": other}).encode() + b"\n")


if __name__ == "__main__":
    main()
