"""Many games at once, and several clients in one match: a seat for each client."""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from penstock import AsyncSampler, ParallelSampler, RandomAgent, SerialSampler
from penstock.games import GameProcess

from ..scale import pairs, scaled
from ..support import PROGRAMS, assert_same, collect, sampler_of, until
from .games_support import SAMPLERS, SHORT, Played, game, play, processes

pytestmark = [pytest.mark.xdist_group("ports"), pytest.mark.slow]

MATCH = [sys.executable, "-I", "-S", str(PROGRAMS / "match_server.py"), "{port0}", "{port1}"]


class Match(ParallelEnv[str, Any, Any]):
    """Two players in one game, each through its own port. A request waits for the other player, so all are sent
    before the first reply is read."""

    def __init__(self, mark: str, dies_at: int = -1, *, context: Any) -> None:
        """The first match of env_rank 1 dies in step `dies_at`."""
        self.marker = Path(mark, "died")
        self.dies_at = dies_at if context.env_rank == 1 and not self.marker.exists() else -1
        self.possible_agents = ["left", "right"]
        self.game = GameProcess(MATCH, ports=2, consecutive=True, environ={"MARK": mark}, **SHORT)
        self.seats: list[Any] = []

    def observation_space(self, agent: str) -> Any:
        return Box(-1, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Any:
        return Discrete(5)

    def exchange(self, lines: list[Any]) -> dict[str, Any]:
        for seat, line in zip(self.seats, lines, strict=True):
            seat.send(json.dumps(line).encode() + b"\n")
        states = [json.loads(seat.receive_line()) for seat in self.seats]
        self.t = states[0]["t"]
        numbers = ((state["t"], state["other"] if self.t else -1) for state in states)
        return {agent: np.array(pair, np.float32) for agent, pair in zip(self.agents, numbers, strict=True)}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents = self.possible_agents[:]
        if not self.seats:
            self.seats = [self.game.connect(port) for port in range(2)]
        return self.exchange(["reset"] * 2), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        lines = [int(actions[agent]) for agent in self.agents]
        if dies := self.t + 1 == self.dies_at:
            self.marker.touch()
        observations = self.exchange(["exit"] * 2 if dies else lines)
        is_over = dict.fromkeys(self.agents, self.t == 6)
        rewards = {agent: float(observations[agent][1]) for agent in self.agents}
        infos: dict[str, Any] = {agent: {} for agent in self.agents}
        if self.t == 6:
            self.agents = []
        return observations, rewards, is_over, dict.fromkeys(is_over, False), infos

    def close(self) -> None:
        self.game.close()


def matches(cls: Any, env_fn: Any, **options: Any) -> tuple[Any, Any]:
    """3 batches of 8 rows, each with its trajectories, and the statistics. A match has 6 steps."""
    with sampler_of(cls, env_fn, on_game_failure="renew", **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        if cls is AsyncSampler:
            sampler.start()
        return collect(sampler, 3), sampler.stats()


@functools.cache
def undisturbed_matches() -> list[Any]:
    """Batches without faults, by environment and seat. Every sampler gives these."""
    found = [batch.by_env(2) for batch, _ in matches(SerialSampler, partial(Match, ""))[0]]
    for batch in found:  # each client sees what the other one does
        np.testing.assert_array_equal(batch.env.reward, batch.agent.action[:, :, ::-1])
    return found


@pytest.mark.parametrize(("cls", "at"), pairs(SAMPLERS, [3, 1]))
def test_all_seats_of_a_match_are_cut_in_one_row(cls: Any, at: int, tmp_path: Path) -> None:
    """The match of env_rank 1 dies in row at - 1 of the first batch."""
    found, stats = matches(cls, partial(Match, str(tmp_path), at))
    assert (stats.renewals, stats.cut_episodes, stats.restarts) == (1, 1, 0)
    ours, others = [batch.by_env(2) for batch, _ in found], [0, 2, 3]
    assert_same([batch[:, others] for batch in ours], [batch[:, others] for batch in undisturbed_matches()])
    first = ours[0].env
    assert np.argwhere(~first.valid).tolist() == [[at - 1, 1, 0], [at - 1, 1, 1]]
    assert first.done[at - 1, 1].all()
    assert (first.reward[at - 1, 1] == 0).all()
    assert all(batch.env.valid.all() for batch in ours[1:])
    if at == 3:
        assert first.truncated[1, 1].all()
        np.testing.assert_array_equal(first.final_obs[1, 1], first.observation[2, 1])
    assert not first.terminated[:at, 1].any()
    np.testing.assert_array_equal(first.observation[at, 1], [[0, -1]] * 2)  # a new match begins
    lengths = [info["Length"] for _, infos in found for info in infos]
    assert set(lengths) == {6}, "no trajectory of the match that was cut"
    until(lambda: not list(processes(str(tmp_path))), "the end of all games", 5.0)


def test_a_host_and_its_clients() -> None:
    """A client has no port of its own, and the host's port in its command."""
    client = "import socket, sys; s = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
    client += "print('joined', flush=True); s.recv(1)"
    with game() as host:
        host.wait_ready()
        command = [sys.executable, "-I", "-c", client, str(host.ports[0])]
        with GameProcess(command, ports=0, ready=re.compile("joined"), **SHORT) as own:
            own.wait_ready()
            assert own.ports == ()
            assert own.tail() == ["joined"]


def test_many_games_at_once(tmp_path: Path) -> None:
    n, n_workers = scaled((64, 8), (12, 3))
    with sampler_of(ParallelSampler, partial(Played, str(tmp_path)), batch_B=n, n_workers=n_workers) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        assert samples.env.valid.all()
        assert len(set(processes(str(tmp_path)))) >= n
    until(lambda: not list(processes(str(tmp_path))), "the end of all games", 5.0)


def test_games_of_one_process_start_side_by_side() -> None:
    """Each takes 0.3 s until it listens."""
    began = time.monotonic()
    games = [game("late_start") for _ in range(8)]
    launched = time.monotonic() - began
    for own in games:
        play(own.connect(), 1)
    took = time.monotonic() - began
    for own in games:
        own.close()
    assert launched < 8 * 0.3
    assert took < 8 * 0.3 + 2.0


def test_threads_may_have_games() -> None:
    def one(_: int) -> list[int]:
        with game() as own:
            return play(own.connect(), 3)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(one, range(6))) == [[1, 2, 3]] * 6
