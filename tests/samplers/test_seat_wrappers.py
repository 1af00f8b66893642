"""Agents that decide at their own times (`OwnClocks`), and agents that come with new ids (`Seats`)."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given
from hypothesis import strategies as st

from penstock import AsyncSampler, ParallelSampler, RandomAgent, Sampler, SerialSampler, TrajInfo
from penstock.envs import CountingEnv, OwnClocks, Seats
from penstock.errors import ConfigError, SpaceError
from tests.scale import examples, scaled
from tests.support import assert_same
from tests.toy_games import Clocks, TurnGame

from .spoiled_games import Spoiled, all_of, give, leave_out, vanish
from .started import check_fails, started

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


def chosen(seen: Any) -> int:
    return int(1000 * seen[3]) % 3


def plain_decisions(game: Any, seed: int) -> dict[Any, list[Any]]:
    """What each agent decides in a game of a `ParallelEnv`: observation, action, reward, steps, flags and the
    observation after it."""
    found, running = defaultdict(list), dict[Any, list[Any]]()
    observations, _ = game.reset(seed=seed)
    while game.agents:
        actions = {agent: chosen(seen) for agent, seen in observations.items() if agent in game.agents}
        running |= {agent: [observations[agent], action, 0.0, 0] for agent, action in actions.items()}
        observations, rewards, *flags, _ = game.step(actions)
        for agent, own in running.items():
            own[2], own[3] = own[2] + rewards.get(agent, 0.0), own[3] + 1
        for agent in running.keys() & observations.keys():
            ends = [flag.get(agent, False) for flag in flags]
            found[agent].append([*running.pop(agent), *ends, observations[agent]])
    return found


def decisions_in_turns(game: Any, seed: int) -> dict[Any, list[Any]]:
    """The same, of an `AECEnv`."""
    found, running = defaultdict(list), dict[Any, list[Any]]()
    game.reset(seed=seed)
    for agent in game.agent_iter():
        seen, reward, *ends, info = game.last()
        if agent in running:
            found[agent].append([*running.pop(agent), reward, info["steps"], *ends, seen])
        if not any(ends):
            running[agent] = [seen, chosen(seen)]
        game.step(None if any(ends) else chosen(seen))
    return found


@pytest.mark.parametrize(("k", "chance"), [(3, 0.4), (1, 0.3), (4, 1.0)])
def test_each_decision_has_the_rewards_and_steps_until_the_next_one(k: int, chance: float) -> None:
    for seed in range(scaled(300, 30)):
        wanted = plain_decisions(Clocks(k, chance), seed)
        assert_same(decisions_in_turns(OwnClocks(Clocks(k, chance)), seed), wanted)
        assert wanted


@given(k=st.integers(1, 4), T=st.integers(1, 9), B=st.integers(1, 3), seed=st.integers(0, 2**20))
@example(k=2, T=2, B=1, seed=121309)  # a reward at the beginning of the last game
@examples(40, 400)
def test_the_records_of_games_have_every_reward(k: int, T: int, B: int, seed: int) -> None:
    made: list[Any] = []

    def env_fn() -> Any:
        made.append(OwnClocks(Clocks(k)))
        return made[-1]

    with started(env_fn, batch_T=T, batch_B=B, seed=seed) as sampler:
        infos = [info for itr in range(6) for info in sampler.obtain_samples(itr)[1]]
    for rank, game in enumerate(made[-B:]):
        returns = [info.Return for info in infos if info.env_rank == rank and info.agent_id is None]
        assert sum(returns) == game.finished


class Calls(Clocks):
    """One unit decides when a call comes, which is in step 2 of each game. In the games of `silent` no call comes. A
    game has 4 steps, and each but the last is worth 1."""

    def __init__(self, silent: Any) -> None:
        super().__init__(1)
        self.silent, self.game = silent, -1

    def _calls(self) -> dict[str, Any]:
        is_called = self.t == 2 and self.game not in self.silent
        return {"a0": np.full(4, self.game, np.float32)} if is_called else {}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.game, self.t, self.agents = self.game + 1, 0, ["a0"]
        return self._calls(), {}

    def step(self, actions: dict[str, int]) -> Any:
        self.t += 1
        if self.t < 4:
            return self._calls(), {"a0": 1.0}, {}, {}, {}
        self.agents = []
        return {}, {}, {"a0": True}, {}, {}


#: Games before the first call, between two calls, and many in a row.
SILENT = {0, 1, 4, 7, 8, *range(20, 900)}


def check_calls(infos: Any, n_games: int) -> None:
    """Games 0 to n_games of `Calls` have these records, in this order."""
    games = [info for info in infos if info.agent_id is None]
    assert [game.number for game in games] == list(range(n_games))
    for n, game in enumerate(games):
        # Two rewards come before the decision, one after it. Without a decision, all are late.
        figures = game.Length, game.Return, game.NonzeroRewards, game.DiscountedReturn
        assert figures == ((0, 3.0, 1, 3.0) if n in SILENT else (1, 3.0, 1, 3.0))
    seats = [info for info in infos if info.agent_id is not None]
    assert [(seat.number, seat.policy, seat.Return) for seat in seats] == [
        (n, "even" if n % 2 == 0 else "odd", 1.0) for n in range(n_games) if n not in SILENT
    ]


@pytest.mark.parametrize("traj_info_cls", [TrajInfo, type("OwnTrajInfo", (TrajInfo,), {})])
@pytest.mark.parametrize(("cls", "T"), [(SerialSampler, 2), (AsyncSampler, 1), (ParallelSampler, 7)])
def test_a_game_in_which_nobody_was_asked_has_length_0(cls: type[Sampler], T: int, traj_info_cls: Any) -> None:
    agents = {"even": RandomAgent(), "odd": RandomAgent()}
    options: dict[str, Any] = {
        "batch_T": T,
        "batch_B": 1,
        "policy_of": lambda agent_id, game: ("even", "odd")[game % 2],
        "traj_info_cls": traj_info_cls,
        "eval_n_envs": 1,
        "eval_episodes": 25,
        "eval_max_steps": 100,
    }
    with started(lambda: OwnClocks(Calls(SILENT)), agents, cls, **options) as sampler:
        infos: list[Any] = []
        n_asked = itr = 0
        while n_asked < 25:  # each decision ends its game
            batch, own = sampler.obtain_samples(itr)
            infos, itr = infos + own, itr + 1
            for name in agents:
                seen = batch[name].env
                n_asked += int(seen.valid.sum())
                assert (seen.observation[seen.valid][:, 0] % 2 == (name == "odd")).all()
        check_calls(infos, 1 + max(info.number for info in infos))
        # One for each game, and those of the next game, whose agent has been asked.
        n_late = 1 + sum(info.agent_id is None for info in infos)
        assert sampler.stats().late_rewards >= n_late, "an asynchronous sampler has begun the next batches"
        assert isinstance(sampler, AsyncSampler) or sampler.stats().late_rewards == n_late
        check_calls(sampler.evaluate_agent(0), 25)


def test_random_steps_may_play_games_in_which_nobody_is_asked() -> None:
    sizes = {"batch_T": 4, "batch_B": 6, "max_decorrelation_steps": 30, "seed": 1}
    with started(lambda: OwnClocks(Calls({1, 2, 5, 9, 10})), **sizes) as sampler:
        for itr in range(8):
            samples, infos = sampler.obtain_samples(itr)
            assert samples.env.valid.all()
            assert sum(info.Length for info in infos if info.agent_id is None) == 24


def test_games_that_never_ask_anybody_are_refused() -> None:
    message = "1,000 games have ended before any agent could act, the last one of env"
    check_fails(lambda: OwnClocks(Calls(range(5, 10**9))), message, batch_T=2, batch_B=1, n=9)


class Pair(Clocks):
    """Both decide in each step. "a1" ends in step 1, and gets a late reward in each later step. A game has 6 steps."""

    def __init__(self) -> None:
        super().__init__(2)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.t, self.agents = 0, ["a0", "a1"]
        return self._seen(self.agents), {}

    def step(self, actions: dict[str, int]) -> Any:
        self.t += 1
        last, ends = self._seen(self.agents), {"a1": True} if self.t == 1 else {"a0": True} if self.t == 6 else {}
        self.agents = [agent for agent in self.agents if agent not in ends]
        return last, {"a1": 1.0} if self.t > 1 else {}, ends, {}, {}


@pytest.mark.parametrize("T", [1, 2, 3, 8])
def test_a_late_reward_counts_with_the_decision_after_which_it_came(T: int) -> None:
    options: dict[str, Any] = {"batch_T": T, "batch_B": 1, "traj_info_kwargs": {"discount": 0.5}}
    with started(lambda: OwnClocks(Pair()), **options) as sampler:
        infos = [info for itr in range(24 // T) for info in sampler.obtain_samples(itr)[1]]
    games = [info for info in infos if info.agent_id is None]
    assert len(games) >= 3
    for game in games:  # decisions 0 and 1 are made in step 1, and one more in each later step
        figures = game.Length, game.Return, game.NonzeroRewards, game.DiscountedReturn
        assert figures == (7, 5.0, 5, sum(0.5**n for n in range(2, 7)))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (give(0, np.zeros(4, np.float32), "a9"), "agent 'a9' is not one of possible_agents"),
        (give(2, True, "a9"), "agent 'a9' is not one of possible_agents"),
        (vanish, "agent 'a1' is not in env.agents any more, but neither terminated nor truncated"),
        (give(1, "much"), "the reward of agent 'a1' must be a single number, got 'much'"),
        (give(2, None), "env_rank 0, agent 'a1'"),
        (lambda game, results: tuple(results[:2]), "env.step must return five dicts by agent"),
        (
            all_of(leave_out(0), give(3, True)),
            "env_rank 0, agent 'a1' was truncated, but env.last returned no observation",
        ),
    ],
)
def test_a_broken_rule_of_own_clocks_names_the_agent(spoil: Any, message: str) -> None:
    check_fails(lambda: OwnClocks(Spoiled(spoil, start=["a0", "a1"])), message)


def test_a_game_in_which_nobody_is_asked_any_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.envs.seat_wrappers._MOST_STEPS", 50)

    class Silent(Clocks):
        def step(self, actions: Any) -> Any:
            return {}, {}, {}, {}, {}

    game = OwnClocks(Silent(1, 1.0))
    game.reset(seed=0)
    with pytest.raises(SpaceError, match=r"nobody was asked in 50 steps, but \['a0'\] are there"):
        game.step(0)


@pytest.mark.slow
def test_who_has_ended_and_is_not_removed_is_named() -> None:
    class Stays(TurnGame):
        def step(self, action: Any) -> None:
            if action is not None:
                super().step(action)

    check_fails(Stays, r"agent 'a\d' has ended, but env.step\(None\) did not remove it", batch_B=1, n=20)


def test_own_clocks_are_for_parallel_envs() -> None:
    for wrong in (CountingEnv(), TurnGame(), 3):
        with pytest.raises(ConfigError, match="OwnClocks is for a ParallelEnv of PettingZoo, got"):
            OwnClocks(wrong)


# ---- agents with new ids ---------------------------------------------------------------------------


class Crowd:
    """A `ParallelEnv` whose agents are born and die, each with an id of its own: "ant_0", "bee_1", ... Who has died may
    still get a reward, and one that is born may die at once.

    An observation is (id's number, step, age, random number).
    """

    metadata: dict[str, Any] = {"name": "crowd"}  # noqa: RUF012
    render_mode = None

    def __init__(self, most: int = 6, length: int = 40) -> None:
        self.agents: list[str] = []
        self.most, self.length, self.rng, self.born = most, length, np.random.default_rng(0), 0

    def observation_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent: str) -> gym.Space[Any]:
        return spaces.Discrete(3 if agent.startswith("ant") else 2)

    def _bear(self) -> str:
        agent = f"{'ant' if self.rng.random() < 0.6 else 'bee'}_{self.born}"
        self.born += 1
        self.birth[agent] = self.t
        return agent

    def _seen(self, agents: Any) -> dict[str, Any]:
        ages = {agent: self.t - self.birth[agent] for agent in agents}
        return {a: np.array([int(a[4:]), self.t, age, self.rng.random()], np.float32) for a, age in ages.items()}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.t, self.birth, self.dead = 0, dict[str, int](), list[str]()
        self.agents = [self._bear() for _ in range(3)]
        return self._seen(self.agents), {}

    def step(self, actions: dict[str, int]) -> Any:
        assert list(actions) == self.agents
        assert all(action in self.action_space(agent) for agent, action in actions.items())
        self.t += 1
        before, rng = self.agents, self.rng
        over = self.t >= self.length
        ended = {agent: over or rng.random() < 0.1 for agent in before}
        self.agents = [agent for agent in before if not ended[agent]]
        born = [self._bear() for _ in range(rng.integers(0, 3)) if not over and len(self.agents) < self.most - 2]
        rewards = {agent: float(actions.get(agent, 0) + rng.integers(3)) for agent in (*before, *self.dead[-2:], *born)}
        observations = self._seen([*before, *born])
        for agent in born:
            ended[agent] = rng.random() < 0.2
        self.agents += [agent for agent in born if not ended[agent]]
        self.dead = [agent for agent in ended if ended[agent]]
        return observations, rewards, ended, {}, {}

    def close(self) -> None:
        """There is nothing to close."""


def kind_of(agent: str) -> str:
    return agent.partition("_")[0]


SEATS = {"ant": 12, "bee": 12}
SPACES = {kind: (Crowd().observation_space(kind), Crowd().action_space(kind)) for kind in SEATS}


def crowd(env: Any = None) -> Any:
    return Seats(Crowd() if env is None else env, SEATS, kind=kind_of, spaces=SPACES)


def kind_of_seat(seat: str) -> str:
    return seat.partition(":")[0]


def of_each_kind() -> dict[str, Any]:
    return {kind: RandomAgent() for kind in SEATS}


@pytest.mark.slow
def test_the_rows_of_an_agent_are_in_one_seat() -> None:
    sizes = {"batch_T": 25, "batch_B": 1}
    with started(crowd, of_each_kind(), policy_of=kind_of_seat, **sizes) as sampler:
        rows: dict[float, list[Any]] = {}
        where: dict[float, Any] = {}
        for itr in range(scaled(400, 40)):
            batch, _ = sampler.obtain_samples(itr)
            for name, samples in batch.items():
                own = samples.copy().numpy().env
                for t, b in np.argwhere(own.valid):
                    agent, _, age, _ = own.observation[t, b].tolist()
                    rows.setdefault(agent, []).append((age, own.prev_done[t, b], own.done[t, b]))
                    assert where.setdefault(agent, (name, b)) == (name, b), "an agent stays in its seat"
        n_late = sampler.stats().late_rewards
    finished = 0
    for own in rows.values():
        assert [age for age, _, _ in own] == list(range(len(own)))
        assert [start for _, start, _ in own] == [True] + [False] * (len(own) - 1)
        assert not any(done for _, _, done in own[:-1])
        finished += bool(own[-1][2])
    assert finished > 100
    assert n_late > 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seats": {"ant": 1, "bee": 12}},
            r"2 agents of kind 'ant' are there, with agent 'ant_\d+', and it has 1 seats",
        ),
        ({"seats": {"ant": 12}}, r"agent 'bee_\d+' is of kind 'bee', and only these kinds have seats: \['ant'\]"),
        ({"kind": lambda agent: 1 / 0}, r"kind raised ZeroDivisionError.* for agent '(ant|bee)_0'"),
        ({"seats": {}}, "Seats needs a dict with the number of seats of each kind"),
        ({"kind": "ant"}, "and a function of an agent's id"),
        ({"kind": lambda agent: [agent]}, r"is of kind \['(ant|bee)_0'\], and only these kinds have seats"),
        ({"seats": {1: 2}}, "the kinds of Seats must be texts, got 1"),
        ({"seats": {"ant": True, "bee": 1}}, "of kind 'ant' must be an integer of at least 1, got True"),
        ({"seats": {"ant": 0, "bee": 1}}, "of kind 'ant' must be an integer of at least 1, got 0"),
        ({"seats": {**SEATS, "cat": 2}}, r"no agent of kind 'cat' is there after env.reset, .* give spaces=\{'cat'"),
        ({"spaces": [1]}, r"spaces of Seats must be a dict \{kind: .*\}, got \[1\]"),
        (
            {"spaces": {**SPACES, "bee": 1}},
            r"spaces\['bee'\] of Seats must be \(observation_space, action_space\), got 1",
        ),
        ({"spaces": {"ant": SPACES["ant"][:1]}}, r"spaces\['ant'\] of Seats must be \(observation_space, action_space"),
        ({"env": CountingEnv()}, "Seats is for environments of several agents"),
    ],
)
def test_wrong_arguments_of_seats_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"env": Crowd(), "seats": SEATS, "kind": kind_of, **change}
    with pytest.raises((ConfigError, SpaceError), match=message):
        env = Seats(arguments.pop("env"), arguments.pop("seats"), **arguments)
        for seed in range(20):
            env.reset(seed=seed)
            while env.agents:
                env.step(dict.fromkeys(env.agents, 0))


def test_agents_of_a_kind_have_the_same_spaces() -> None:
    env = Seats(Crowd(), {"any": 20}, kind=lambda agent: "any", spaces={"any": SPACES["ant"]})
    with pytest.raises(SpaceError, match=r"agent 'bee_\d+' of kind 'any' has the spaces .*the agents of a kind must"):
        for seed in range(20):
            env.reset(seed=seed)


def test_who_sits_where_and_who_disappears() -> None:
    env = crowd()
    env.reset(seed=1)
    for seat in env.agents:
        assert env.agent_of(seat) in env.env.agents
    assert env.agent_of("ant:11") is None
    gone = env.env.agents[-1]
    env.env.step = lambda actions: (env.env.agents.remove(gone), ({}, {}, {}, {}, {}))[1]
    with pytest.raises(SpaceError, match=f"agent '{gone}' is not in env.agents any more, but neither"):
        env.step(dict.fromkeys(env.agents, 0))


def test_an_id_that_comes_again_must_be_flagged_again() -> None:
    class Returning(Crowd):
        """An ant ends in step 1, comes again in step 2, and is not there after step 3. A bee is there all the time."""

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            self.t, self.birth, self.agents = 0, {"ant_0": 0, "bee_1": 0}, ["ant_0", "bee_1"]
            return self._seen(self.agents), {}

        def step(self, actions: dict[str, int]) -> Any:
            self.t += 1
            self.agents = ["ant_0", "bee_1"] if self.t == 2 else ["bee_1"]
            return self._seen(["ant_0", "bee_1"]), {}, {"ant_0": self.t == 1}, {}, {}

    env = crowd(Returning())
    env.reset(seed=0)
    agents = []
    for _ in range(2):
        env.step(dict.fromkeys(env.agents, 0))
        agents.append(list(env.agents))
    assert agents == [["bee:0"], ["ant:0", "bee:0"]]
    with pytest.raises(SpaceError, match=r"agent 'ant_0' is not in env.agents any more, but neither"):
        env.step(dict.fromkeys(env.agents, 0))


def test_both_wrappers_together() -> None:
    """A crowd in which each agent decides when it is asked."""
    for env_fn in (
        lambda: OwnClocks(crowd()),
        lambda: Seats(OwnClocks(crowd()), SEATS, kind=kind_of_seat, spaces=SPACES),
    ):
        options: dict[str, Any] = {"env_info": {"steps": 0}, "policy_of": kind_of_seat}
        with started(env_fn, of_each_kind(), **options) as sampler:
            for itr in range(5):
                batch, infos = sampler.obtain_samples(itr)
                assert (batch.ant.env.env_info.steps[batch.ant.env.valid] == 1).all()
            assert infos


def test_options_of_reset_reach_the_game() -> None:
    env = OwnClocks(Clocks())
    env.reset(seed=0, options={"board": 3})
    assert env.env.options == {"board": 3}
