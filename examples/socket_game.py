"""Sample environments that play a game through a socket, with one game server per environment.

    python examples/socket_game.py

Every environment leases a port, starts a server on it (socket_game_server.py), and plays over TCP. Between two batches
the example kills one server. The worker of that environment then fails and is restarted, its environments start new
servers on new ports, and no batch is lost. The exit status is 1 if anything goes wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from penstock import ParallelSampler, RandomAgent
from penstock.ports import lease_port

SERVER = Path(__file__).resolve().with_name("socket_game_server.py")
START_TIMEOUT = 20.0  # seconds until a server listens
REPLY_TIMEOUT = 10.0  # seconds until it replies
END_TIMEOUT = 2.0  # seconds until it ends after the player has disconnected


class SocketGame(gym.Env[Any, Any]):
    """A ball falls, and a paddle must catch it.

    Observation: (ball's x, ball's y, paddle's x). Actions: left, stay, right. Reward: 1 for a catch.
    """

    def __init__(self) -> None:
        self.observation_space = Box(0, 10, (3,), np.float32)
        self.action_space = Discrete(3)
        # Lease the port before the server starts, and keep the lease until the server has ended. So no other
        # environment can get the port, even while the server starts and nothing is bound to the port.
        self._lease = lease_port()
        self._server = subprocess.Popen([sys.executable, "-I", str(SERVER), str(self.port)])
        try:
            self._socket = self._connect()
        except BaseException:
            self._server.kill()
            self._server.wait()
            self._lease.release()
            raise
        self._lines = self._socket.makefile("rw", encoding="utf-8")

    @property
    def port(self) -> int:
        return self._lease.port

    @property
    def server_pid(self) -> int:
        return self._server.pid

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            try:
                connection = socket.create_connection(("127.0.0.1", self.port), timeout=REPLY_TIMEOUT)
            except ConnectionRefusedError:  # the server does not listen yet
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the game server on port {self.port} did not start") from None
                time.sleep(0.005)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection

    def _request(self, **request: int) -> dict[str, Any]:
        print(json.dumps(request), file=self._lines, flush=True)
        reply = self._lines.readline()
        if not reply:
            raise ConnectionError(f"the game server on port {self.port} has closed the connection")
        state: dict[str, Any] = json.loads(reply)
        return state

    @staticmethod
    def _observation(state: dict[str, Any]) -> Any:
        return np.array([*state["ball"], state["paddle"]], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._observation(self._request(reset=int(self.np_random.integers(2**31)))), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        state = self._request(move=int(action) - 1)
        return self._observation(state), state["reward"], state["over"], False, {}

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may have ended already
            self._socket.shutdown(socket.SHUT_RDWR)  # the server ends when its player disconnects
        self._lines.detach()
        self._socket.close()
        try:
            self._server.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._lease.release()  # last, when the server no longer uses the port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--n-workers", type=int, default=4)
    parser.add_argument("--batch-T", type=int, default=32)
    options = parser.parse_args()
    with ParallelSampler(
        SocketGame,
        batch_T=options.batch_T,
        batch_B=options.n_envs,
        n_workers=options.n_workers,
        max_decorrelation_steps=9,
        on_worker_failure="restart",
    ) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        _, before = sampler.obtain_samples(0)
        ports, victim = sampler.get_attr("port"), sampler.get_attr("server_pid")[0]
        print(f"ports {ports}; killing the server of environment 0, pid {victim}")
        os.kill(victim, signal.SIGKILL)
        began = time.perf_counter()
        _, after = sampler.obtain_samples(1)
        seconds, restarts = time.perf_counter() - began, sampler.stats().restarts
        new_ports = sampler.get_attr("port")
        print(f"ports {new_ports}; {restarts} worker was restarted; this batch took {seconds:.2f} s")
    caught = [info.Return for info in (*before, *after)]
    print(f"{len(caught)} balls fell, {sum(caught):.0f} were caught")
    moved = [b for b, (old, new) in enumerate(zip(ports, new_ports, strict=True)) if old != new]
    is_correct = restarts == 1 and len(set(new_ports)) == options.n_envs and 0 in moved
    return 0 if is_correct else 1


if __name__ == "__main__":
    sys.exit(main())
