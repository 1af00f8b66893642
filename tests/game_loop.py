"""A plain loop over games of several agents, to compare what a sampler has recorded: it steps each game by itself, with
the recorded actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.envs.seeding import ColumnStreams, Purpose

Seats = Mapping[str, Sequence[tuple[int, Any]]]
Trajectory = tuple[int, Any, int, float]  # env_rank, agent (None: the game), length, return


def first_seeds(n: int, seed: int, generation: int = 0) -> list[int]:
    """The seeds of the first resets of n training environments."""
    return ColumnStreams(seed, range(n), generation).env_seeds(Purpose.TRAIN)


def by_policy(batch: Any) -> dict[str, Any]:
    """The samples of each policy; those of the only one are called "agent"."""
    return {"agent": batch} if hasattr(batch, "env") else dict(batch.items())


class GameLoop:
    """One game after the other in each environment, each stepped by itself: what `follow` must find in a batch.

    With `waits`, nothing happens in an environment after the end of its game, until the batch has ended.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        seeds: Sequence[int],
        seats: Seats,
        *,
        waits: bool = False,
        seed_of: Callable[[int, int], int | None] = lambda e, episode: None,
    ) -> None:
        """`make(e)` builds environment e. `seats` are those of `Sampler.seats`. `seed_of(e, episode)` is the seed of
        each reset after the first."""
        self.games, self._waits, self._seed_of = [make(e) for e in range(len(seeds))], waits, seed_of
        self._cell = {seat: (name, b) for name, own in seats.items() for b, seat in enumerate(own)}
        self.episodes = [0] * len(seeds)
        self._lengths: dict[Any, int] = {}
        self._returns: dict[Any, float] = {}
        self._seen = [dict[Any, Any]() for _ in seeds]
        for e, seed in enumerate(seeds):
            self._reset(e, seed)

    def _reset(self, e: int, seed: int | None) -> None:
        self._seen[e] = dict(self.games[e].reset(seed=seed)[0])
        self._begin(e, [None, *self.games[e].agents])

    def _begin(self, e: int, agents: Sequence[Any]) -> None:
        for agent in agents:
            self._lengths[e, agent], self._returns[e, agent] = 0, 0.0

    def restart(self, e: int, seed: int) -> None:
        """The running game of environment e is lost; the next one begins with this seed."""
        self._reset(e, seed)

    def _next(self, e: int) -> None:
        self.episodes[e] += 1
        self._reset(e, self._seed_of(e, self.episodes[e]))

    def follow(self, batch: Any) -> list[Trajectory]:
        """Compare a batch, of one policy or of several (numpy), with the next steps of the games. Returns the
        trajectories that end in it, sorted."""
        own = by_policy(batch)
        wanted = {name: self._blank(samples) for name, samples in own.items()}
        found: list[Trajectory] = []
        for e, game in enumerate(self.games):
            for t in range(len(next(iter(own.values())).env.done)):
                if not game.agents:
                    break  # parked
                found += self._step(e, t, own, wanted)
                if not (game.agents or self._waits):
                    self._next(e)
            for agent in game.agents:
                name, b = self._cell[e, agent]
                wanted[name]["bootstrap_obs"][b] = self._seen[e][agent]
            if not game.agents:
                self._next(e)
        for name, samples in own.items():
            for field, array in wanted[name].items():
                np.testing.assert_array_equal(samples.env[field], array, f"{field} of {name}")
        return sorted(found, key=repr)

    @staticmethod
    def _blank(samples: Any) -> dict[str, Any]:
        names = "observation", "reward", "terminated", "truncated", "done", "valid", "prev_done", "final_obs"
        return {name: np.zeros_like(samples.env[name]) for name in (*names, "bootstrap_obs")}

    def _step(self, e: int, t: int, own: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Trajectory]:
        game, found = self.games[e], list[Trajectory]()
        acted, actions = list(game.agents), {}
        for agent in acted:
            name, b = self._cell[e, agent]
            actions[agent] = own[name].agent.action[t, b]
            cells = wanted[name]
            cells["valid"][t, b], cells["observation"][t, b] = True, self._seen[e][agent]
            cells["prev_done"][t, b] = self._lengths[e, agent] == 0
        observations, rewards, terminated, truncated, _ = game.step(actions)
        self._lengths[e, None] += 1
        self._returns[e, None] += sum(rewards.values())
        for agent in acted:
            name, b = self._cell[e, agent]
            cells, flags = wanted[name], (terminated.get(agent, False), truncated.get(agent, False))
            self._lengths[e, agent] += 1
            self._returns[e, agent] += rewards.get(agent, 0.0)
            cells["reward"][t, b] = rewards.get(agent, 0.0)
            cells["terminated"][t, b], cells["truncated"][t, b] = flags
            cells["done"][t, b] = any(flags)
            if any(flags):
                cells["final_obs"][t, b] = observations[agent]
                found.append((e, agent, self._lengths[e, agent], self._returns[e, agent]))
        self._begin(e, [agent for agent in game.agents if agent not in acted])
        self._seen[e] = observations
        if not game.agents:
            found.append((e, None, self._lengths[e, None], self._returns[e, None]))
        return found


def ends_of(infos: Sequence[Any]) -> list[Trajectory]:
    """The trajectories that a sampler has returned, as `GameLoop.follow` returns them."""
    return sorted([(info.env_rank, info.agent_id, info.Length, info.Return) for info in infos], key=repr)
