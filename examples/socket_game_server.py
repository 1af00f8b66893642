"""The game server of socket_game.py. It uses neither penstock nor Gymnasium.

    python examples/socket_game_server.py PORT

A ball falls down a grid, one row per step. A paddle at the bottom must catch it. The server has one player, over TCP.
Each request and each reply is one line of JSON:

    request: {"reset": seed} or {"move": -1, 0 or 1}
    reply: {"ball": [x, y], "paddle": x, "reward": r, "over": o}
"""

import json
import random
import socket
import sys

WIDTH, HEIGHT = 7, 10


class Game:
    def reset(self, seed: int) -> None:
        draw = random.Random(seed)
        self.x, self.y, self.paddle = draw.randrange(WIDTH), 0, WIDTH // 2

    def move(self, direction: int) -> None:
        self.paddle = min(max(self.paddle + direction, 0), WIDTH - 1)
        self.y += 1

    def state(self) -> dict[str, object]:
        over = self.y == HEIGHT - 1
        caught = over and self.x == self.paddle
        return {"ball": [self.x, self.y], "paddle": self.paddle, "reward": float(caught), "over": over}


def serve(port: int) -> None:
    game = Game()
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as listener:
        player, _ = listener.accept()
        with player, player.makefile("rw", encoding="utf-8") as lines:
            player.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for line in lines:  # until the player disconnects
                request = json.loads(line)
                if "reset" in request:
                    game.reset(request["reset"])
                else:
                    game.move(request["move"])
                print(json.dumps(game.state()), file=lines, flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
