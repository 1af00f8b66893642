"""Many games at once, and several clients in one match: a seat for each client."""

from __future__ import annotations

import functools
import json
import re
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from penstock import (
    AsyncSampler,
    ConfigError,
    GameError,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    WorkerError,
)
from penstock.games import GameProcess

from ..scale import pairs, scaled
from ..support import PROGRAMS, assert_same, collect, sampler_of, until
from ..toy_games import TurnGame
from .games_support import SAMPLERS, SHORT, Played, game, play, processes

pytestmark = [pytest.mark.xdist_group("ports"), pytest.mark.slow]

MATCH = [sys.executable, "-I", "-S", str(PROGRAMS / "match_server.py"), "{port0}", "{port1}"]


class Match(ParallelEnv[str, Any, Any]):
    """Two players in one game, each through its own port. A request waits for the other player, so all are sent
    before the first reply is read."""

    def __init__(self, mark: str, dies_at: int = -1, *, once: bool = False, context: Any = None) -> None:
        """`once`: only the first match of env_rank 1 dies."""
        self.marker = Path(mark, "died")
        if once and (context.env_rank != 1 or self.marker.exists()):
            dies_at = -1
        self.possible_agents = ["left", "right"]
        self.game = GameProcess(MATCH, ports=2, consecutive=True, environ={"MARK": mark}, **SHORT)
        self.dies_at = dies_at
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


def test_a_match_has_a_seat_for_each_client(tmp_path: Path) -> None:
    with ParallelSampler(partial(Match, str(tmp_path)), batch_T=12, batch_B=4, n_workers=2) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(2):
            samples, _ = sampler.obtain_samples(itr)
            own = samples.by_env(2)
            actions, rewards = own.agent.action, own.env.reward
            np.testing.assert_array_equal(rewards[:, :, 0], actions[:, :, 1])
            np.testing.assert_array_equal(rewards[:, :, 1], actions[:, :, 0])
    until(lambda: not list(processes(str(tmp_path))), "the end of all games", 5.0)


def test_a_match_that_ends_is_a_failure_of_its_worker(tmp_path: Path) -> None:
    env_fn = partial(Match, str(tmp_path), 4)
    with ParallelSampler(env_fn, batch_T=12, batch_B=2, n_workers=2, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(WorkerError, match="ended with exit code 5") as caught:
            sampler.obtain_samples(0)
        assert isinstance(caught.value.__cause__, GameError)
    until(lambda: not list(processes(str(tmp_path))), "the end of all games", 5.0)


def test_games_in_turns_are_not_renewed() -> None:
    sampler = ParallelSampler(TurnGame, batch_T=2, batch_B=2, on_game_failure="renew")
    with pytest.raises(
        ConfigError, match=r'games in turns and on_game_failure="renew" do not go together: .*; on_worker_failure'
    ):
        sampler.initialize(RandomAgent(), seed=0)


def matches(cls: Any, env_fn: Any, n: int = 3, **options: Any) -> tuple[Any, Any]:
    """`n` batches of 8 rows, by environment and seat; the lengths of the trajectories, and the statistics. A match has
    6 steps."""
    options = {"batch_T": 8, "batch_B": 4, "max_decorrelation_steps": 0, "on_game_failure": "renew", **options}
    with cls(env_fn, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        if cls is AsyncSampler:
            sampler.start()
        found = [collect(sampler, 1, range(3) if options.get("eval_n_envs") else ()) for _ in range(n)]
        return [each[0] for each in found], sampler.stats()


@functools.cache
def undisturbed_matches() -> list[Any]:
    """Batches without faults. Every sampler gives these."""
    return [batch.by_env(2) for batch, _ in matches(SerialSampler, partial(Match, ""))[0]]


@pytest.mark.parametrize(("cls", "at"), pairs(SAMPLERS, [3, 1]))
def test_all_seats_of_a_match_are_cut_in_one_row(cls: Any, at: int, tmp_path: Path) -> None:
    """The match of env_rank 1 dies in row at - 1 of the first batch."""
    sizes = {} if cls is SerialSampler else {"n_workers": 2}
    found, stats = matches(cls, partial(Match, str(tmp_path), at, once=True), **sizes)
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


def test_a_match_of_an_evaluation_is_played_again(tmp_path: Path) -> None:
    class Once(Match):
        def __init__(self, mark: str, context: Any = None) -> None:
            super().__init__(mark, 3 if context is not None and context.purpose == 1 else -1)

        def step(self, actions: Any) -> Any:
            if self.marker.exists():
                self.dies_at = -1
            return super().step(actions)

    sizes = {"batch_T": 8, "batch_B": 2, "eval_n_envs": 2, "eval_episodes": 4, "max_decorrelation_steps": 0}
    with SerialSampler(partial(Once, str(tmp_path)), on_game_failure="renew", **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        infos = sampler.evaluate_agent(0)
        assert [info.Length for info in infos if info.agent_id is None] == [6] * 4
        assert sampler.stats().cut_episodes == 1


def test_too_many_renewals_of_a_match(tmp_path: Path) -> None:
    sizes = {"batch_T": 12, "batch_B": 1, "max_decorrelation_steps": 0, "max_renewals": 2}
    with SerialSampler(partial(Match, str(tmp_path), 4), on_game_failure="renew", **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        with pytest.raises(
            WorkerError, match=r"game of env_rank 0 has failed: .* It was built again 2 times"
        ) as caught:
            sampler.obtain_samples(0)
        assert str(caught.value.__cause__).count("ended with exit code 5") == 4


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
    found = []

    def one() -> None:
        with game() as own:
            found.append(play(own.connect(), 3))

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[1, 2, 3]] * 6
