"""A game fails in a batch: only its environment is built again, its episode is cut, and all other columns stay."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import (
    AgentStep,
    AlternatingSampler,
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    GameError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
    WorkerError,
)
from penstock.envs import ColumnStreams, CountingEnv, Purpose
from penstock.envs.seeding import eval_seed
from penstock.envs.toy import ScriptedGame
from penstock.learning import Replay

from ..models import Net
from ..scale import FULL, USUAL_METHODS, pairs, scaled
from ..support import assert_same, collect, sampler_of, until, without_infos
from ..toy_games import Valued
from .games_support import SAMPLERS, Played, processes, undisturbed_games

pytestmark = [pytest.mark.xdist_group("ports"), pytest.mark.timeout(scaled(3600, 120))]

RENEW: dict[str, Any] = {"on_game_failure": "renew"}
#: For environments of other libraries.
BROKEN: dict[str, Any] = {**RENEW, "renew_on": (ConnectionError,)}


@pytest.fixture(autouse=True)
def no_game_left(tmp_path: Path) -> Any:
    yield
    until(lambda: not list(processes(str(tmp_path))), "the end of all games", 5.0)


def batches_and_stats(cls: Any, env_fn: Any, n: int = 3, **options: Any) -> tuple[Any, Any]:
    """`n` batches, and the statistics."""
    with sampler_of(cls, env_fn, **{**RENEW, **options}) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        if cls is AsyncSampler:
            sampler.start()
        return collect(sampler, n), sampler.stats()


#: By column, the step in which the fault strikes: inside an episode, in its first step, in the first step after an end,
#: in the first and in the last row of a batch. The sixth column has none. Batches have 8 rows and episodes 7 steps.
CUTS = (3, 1, 8, 9, 16)


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    faults = {column: (at, "exit") for column, at in enumerate(CUTS)}
    env_fn = partial(Played, str(tmp_path_factory.mktemp("cut")), faults)
    return batches_and_stats(SerialSampler, env_fn, batch_B=len(CUTS) + 1)


def test_the_log_keeps_nothing_that_an_exception_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A handler may keep records. With the exception it would keep the sampler's memory."""
    batches_and_stats(SerialSampler, partial(Played, str(tmp_path), {0: (3, "exit")}), n=1)
    (record,) = [each for each in caplog.records if "is built again" in each.message]
    assert isinstance(record.args, tuple)
    assert not any(isinstance(each, BaseException) for each in record.args)


@pytest.mark.slow
def test_a_column_without_a_cut_stays_as_it_is(cut: tuple[Any, Any]) -> None:
    found, stats = cut
    assert (stats.renewals, stats.cut_episodes) == (5, 5)
    assert_same(without_infos(found, 5), [batch[:, 5] for batch in undisturbed_games(ResetCollector)[:3]])
    lengths = [info["Length"] for _, infos in found for info in infos]
    assert set(lengths) == {7}, "no trajectory of a cut episode"
    assert len(lengths) == sum(int(batch.env.terminated.sum()) for batch, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize("at", CUTS, ids=["inside", "first", "after an end", "t=0", "t=T-1"])
def test_a_cut_invents_no_transition(at: int, cut: tuple[Any, Any]) -> None:
    """The fault strikes in step `at`, so in row at - 1."""
    column = without_infos(cut[0], CUTS.index(at))
    before = [batch[:, CUTS.index(at)] for batch in undisturbed_games(ResetCollector)[:3]]

    def joined(batches: Any, name: str) -> Any:
        return np.concatenate([batch.env[name] for batch in batches])

    valid, done, reward = (joined(column, name) for name in ("valid", "done", "reward"))
    row = at - 1
    assert np.flatnonzero(~valid).tolist() == [row]
    assert done[row]
    assert reward[row] == 0
    ends = [row] if at in (1, 8) else [row] if at == 9 else [row - 1, row]
    was_done = np.flatnonzero(joined(before, "done")[:row])
    assert np.flatnonzero(done[: row + 1]).tolist() == sorted({*was_done.tolist(), *ends})
    observation, number = joined(column, "observation"), joined(before, "observation")[0, 1]
    np.testing.assert_array_equal(observation[:row], joined(before, "observation")[:row])
    assert observation[row + 1, 0] == 0, "a new episode begins"
    assert number not in observation[row + 1 :, 1]
    starts = np.flatnonzero(joined(column, "prev_done"))
    assert row + 1 in starts
    assert row not in starts or at in (1, 8)
    if at == 3:
        assert column[0].env.truncated[row - 1]
        assert not column[0].env.terminated.any()
        np.testing.assert_array_equal(column[0].env.final_obs[row - 1], observation[row])


@pytest.mark.slow
def test_final_values_and_seeds(tmp_path: Path) -> None:
    """The value of the last observation is recorded, and a second run gives the same, whatever the sampler; also
    without `final_obs`."""

    def found(cls: Any, folder: str, n_workers: int, **options: Any) -> Any:
        (tmp_path / folder).mkdir()
        env_fn = partial(Played, str(tmp_path / folder), {1: (4, "exit"), 3: (13, "exit")})
        with sampler_of(cls, env_fn, n_workers=n_workers, **RENEW, **options) as sampler:
            sampler.initialize(CategoricalPgAgent(lambda: Net(2, 5, 0)), seed=7, bootstrap_value=True)
            return collect(sampler, 2)

    results = [found(SerialSampler, "a", 1), found(ParallelSampler, "b", 2)]
    results += [found(ParallelSampler, "c", 4)] if FULL else []
    first = results[0][0][0]
    assert first.env.truncated[2, 1]
    assert first.agent.final_value[2, 1] == pytest.approx(first.agent.agent_info.value[3, 1], rel=1e-4)
    for other in results[1:]:
        assert_same(without_infos(other), without_infos(results[0]), rtol=1e-5, atol=1e-6)
    for (few, _), (batch, _) in zip(found(SerialSampler, "d", 1, record_final_obs=False), results[0], strict=True):
        assert_same(few.agent.final_value, batch.agent.final_value, rtol=1e-5, atol=1e-6)


class OwnTrajInfo(TrajInfo):
    """Of a class of its own, so penstock calls it for each step."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "start_method", "collector_cls"),
    [(*first, last) for first, last in pairs(pairs(SAMPLERS, USUAL_METHODS), [ResetCollector, WaitResetCollector])],
)
def test_other_columns_stay_with_every_sampler(cls: Any, start_method: str, collector_cls: Any, tmp_path: Path) -> None:
    options = {"start_method": start_method, "collector_cls": collector_cls, "traj_info_cls": OwnTrajInfo}
    wanted = undisturbed_games(collector_cls)[:4]
    env_fn = partial(Played, str(tmp_path), {1: (5, "exit"), 2: (11, "hang")})
    found, stats = batches_and_stats(cls, env_fn, n=4, **options)
    assert (stats.renewals, stats.cut_episodes, stats.restarts) == (2, 2, 0)
    assert_same(without_infos(found, [0, 3]), [batch[:, [0, 3]] for batch in wanted])
    ours, theirs = ([batch.env.reward[:, [1, 2]] for batch in each] for each in (without_infos(found), wanted))
    assert not np.array_equal(ours, theirs)
    assert {info["Length"] for _, infos in found for info in infos} == {7}


class Match(ScriptedGame):
    """Two players, 6 steps. The first match of env_rank 1 fails in step `at`."""

    def __init__(self, folder: Path, at: int, context: Any) -> None:
        super().__init__(2, script=[{}] * 6)
        self.marker, self.at = folder / "failed", at if context.env_rank == 1 else 0

    def step(self, actions: Any) -> Any:
        if self.t + 1 == self.at and not self.marker.exists():
            self.marker.touch()
            raise GameError("the server is gone")
        return super().step(actions)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "at"), pairs(SAMPLERS, [3, 1]))
def test_all_seats_of_a_match_are_cut_in_one_row(cls: Any, at: int, tmp_path: Path) -> None:
    """The match of env_rank 1 dies in row at - 1 of the first batch."""
    plain, _ = batches_and_stats(SerialSampler, partial(Match, tmp_path, 0))
    found, stats = batches_and_stats(cls, partial(Match, tmp_path, at))
    assert (stats.renewals, stats.cut_episodes, stats.restarts) == (1, 1, 0)
    others = [0, 1, 4, 5, 6, 7]
    assert_same(without_infos(found, others), without_infos(plain, others))
    first, *later = (batch.by_env(2).env for batch, _ in found)
    assert np.argwhere(~first.valid).tolist() == [[at - 1, 1, 0], [at - 1, 1, 1]]
    assert first.done[at - 1, 1].all()
    assert (first.reward[at - 1, 1] == 0).all()
    assert all(env.valid.all() for env in later)
    if at == 3:
        assert first.truncated[1, 1].all()
        np.testing.assert_array_equal(first.final_obs[1, 1], first.observation[2, 1])
    assert not first.terminated[:at, 1].any()
    np.testing.assert_array_equal(first.observation[at, 1, :, 1], [0, 0])  # a new match begins
    assert {info["Length"] for _, infos in found for info in infos} == {6}, "no trajectory of the match that was cut"


@pytest.mark.slow
def test_too_many_renewals_are_an_error_that_lists_them(tmp_path: Path) -> None:
    class Bad(Played):
        def step(self, action: Any) -> Any:
            self.ask({"fault": "exit"})

    with sampler_of(ParallelSampler, partial(Bad, str(tmp_path)), **RENEW, max_renewals=2) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        says = r"game of env_rank \d has failed: .* It was built again 2 times in 60 s \(max_renewals=2\)"
        with pytest.raises(WorkerError, match=says) as caught:
            sampler.obtain_samples(0)
        assert isinstance(caught.value.__cause__, GameError)
        # On a busy machine, a game may not have ended when its connection has.
        ends = re.findall(r"ended with exit code 7|closed the connection", str(caught.value.__cause__))
        assert len(ends) == 4
        assert "| the fault is exit" in str(caught.value.__cause__)


def test_each_renewal_has_a_seed_of_its_own() -> None:
    seeds = list[int | None]()

    class Failing(CountingEnv):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            seeds.append(seed)
            return super().reset(seed=seed, options=options)

        def step(self, action: Any) -> Any:
            if self.count == 1:
                raise GameError("it has ended")
            return super().step(action)

    with sampler_of(SerialSampler, Failing, batch_B=1, max_renewals=9, **RENEW) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        sampler.obtain_samples(0)
        assert sampler.stats().renewals == 4
    assert len({*seeds} - {None}) == 5


def test_an_episode_that_ends_in_the_step_of_a_cut_keeps_its_last_action() -> None:
    """With a collector that waits, both columns are parked then."""

    class Failing(CountingEnv):
        def __init__(self, context: Any) -> None:
            super().__init__()
            self.rank, self.t = int(context.env_rank), 0

        def step(self, action: Any) -> Any:
            self.t += 1
            if self.rank == 1 and self.t == 4:
                raise ConnectionError("the engine is gone")
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, self.rank == 0 and self.t == 4, truncated, info

    with sampler_of(
        SerialSampler, Failing, collector_cls=WaitResetCollector, batch_B=2, batch_T=6, **BROKEN
    ) as sampler:
        sampler.initialize(Twos(), seed=3)
        sampler.obtain_samples(0)
        samples = sampler.samples_np
        assert samples.env.valid.T.tolist() == [[True] * 4 + [False] * 2, [True] * 3 + [False] * 3]
        assert samples.agent.action.T.tolist() == [[2] * 4 + [0] * 2, [2] * 3 + [0] * 3]
        assert "1 environments built again, 1 episodes cut" in repr(sampler.stats())


class Twos(RandomAgent):
    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return AgentStep(np.full(len(prev_reward), 2))


class Engine(gym.Env[Any, Any]):
    """An observation is (number of the environment that was built, step), a reward 10 times the number plus the step.
    An episode has 4 steps. Environment `first`, after the examples, fails in its step `at`."""

    first = 1

    observation_space, action_space = gym.spaces.Box(0, 99, (2,), np.float32), gym.spaces.Discrete(3)
    metadata: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, built: list[int | None], at: int) -> None:
        self.built, self.at, self.number, self.made = built, at, len(built), 0
        built.append(None)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.built[self.number] = self.built[self.number] or seed
        self.t = 0
        return np.array([self.number, 0], np.float32), {}

    def step(self, action: Any) -> Any:
        self.made, self.t = self.made + 1, self.t + 1
        if self.number == self.first and self.made == self.at:
            raise ConnectionError("the engine is gone")
        return np.array([self.number, self.t], np.float32), 10.0 * self.number + self.t, self.t == 4, False, {}


class Engines:
    """The same as a game of two agents."""

    first = 2
    possible_agents = ("a", "b")
    metadata: dict[str, Any] = {"name": "engines"}  # noqa: RUF012

    def __init__(self, built: list[int | None], at: int) -> None:
        self.engine = Engine(built, at)
        self.engine.first = self.first

    def observation_space(self, agent: str) -> Any:
        return Engine.observation_space

    def action_space(self, agent: str) -> Any:
        return Engine.action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, self.engine.reset(seed=seed)[0]), {}

    def step(self, actions: Any) -> Any:
        acted = self.agents
        observation, reward, ends, *_ = self.engine.step(None)
        self.agents = [] if ends else acted
        return dict.fromkeys(acted, observation), dict.fromkeys(acted, reward), dict.fromkeys(acted, ends), {}, {}

    def close(self) -> None:
        """There is nothing to close."""


@pytest.mark.parametrize(
    ("env_cls", "collector_cls"),
    [
        (Engine, ResetCollector),
        (Engines, ResetCollector),
        pytest.param(Engine, WaitResetCollector, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("at", [1, 3, 5, 7, 99])
def test_a_game_that_fails_in_the_random_steps_is_renewed(env_cls: Any, collector_cls: Any, at: int) -> None:
    built: list[int | None] = []
    options = {"collector_cls": collector_cls, "max_decorrelation_steps": 9, "batch_B": 1, "batch_T": 1, **BROKEN}
    streams = ColumnStreams(3, [0])
    with sampler_of(SerialSampler, partial(env_cls, built, at), **options) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        env = sampler.obtain_samples(0)[0].copy().numpy().env
        stats = sampler.stats()
        infos = [info for itr in range(1, 5) for info in sampler.obtain_samples(itr)[1]]
    # The plain loop.
    n = int(streams.rngs(Purpose.DECORRELATE)[0].integers(0, 10))
    assert n == 7, "the seed is chosen so"
    first = number = env_cls.first
    t, made, reward = 0, 0, 0.0
    for _ in range(n):
        made += 1
        if number == first and made == at:
            number, t, reward = first + 1, 0, 0.0
            continue
        t += 1
        reward = 10.0 * number + t
        if t == 4:
            t, reward = 0, 0.0
    np.testing.assert_array_equal(env.observation[0], [[number, t]] * len(env.observation[0]))
    np.testing.assert_array_equal(env.prev_done[0], t == 0)
    np.testing.assert_array_equal(env.prev_reward[0], reward)
    assert (stats.renewals, stats.cut_episodes) == ((1, 1) if at <= n else (0, 0))
    assert built[first] == streams.env_seeds(Purpose.TRAIN)[0]
    assert at > n or built[first + 1] == streams.renewal_seed(0, Purpose.TRAIN, 1)
    k = 1 if env_cls is Engine else 2
    assert (infos[0].Length, infos[0].Return) == (4, 4 * 10.0 * number + 10)
    assert infos[-1].Return == k * (4 * 10.0 * number + 10)


@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
def test_a_replay_has_the_observation_before_a_cut_in_row_0(collector_cls: Any) -> None:
    """An episode of 4 steps, and three steps of the next one: the fourth one fails, in row 0 of the last batch."""
    options = {"collector_cls": collector_cls, "batch_B": 1, "batch_T": 1, **BROKEN}
    replay: Any = Replay(100, n_step=1, discount=0.9, seed=0)
    with sampler_of(SerialSampler, partial(Engine, [], 8), **options) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        for itr in range(10):
            replay.append(sampler.obtain_samples(itr)[0])
    read = replay.contents.read(replay.contents.index)
    assert read.observation.tolist() == [[1, t] for t in (0, 1, 2, 3, 0, 1, 2)] + [[2, 0]]
    assert read.next_observation.tolist() == [[1, 1], [1, 2], [1, 3], [0, 0], [1, 1], [1, 2], [1, 3], [2, 1]]


class Fragile(ScriptedGame):
    """Three agents. Step `at` of the environment fails, and of each one that is built in its place."""

    def __init__(self, at: int, script: Any = None) -> None:
        super().__init__(3, script)
        self.at, self.n_steps = at, 0

    def step(self, actions: Any) -> Any:
        self.n_steps += 1
        if self.n_steps == self.at:
            raise GameError("the game is gone")
        return super().step(actions)


@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector])
def test_who_has_just_come_back_when_its_game_fails_has_no_row_that_ends(collector_cls: Any) -> None:
    """a1 dies in step 1 and comes back in step 2. Step 3 fails: what step 2 has ended are the rows of the others."""
    make, waits = partial(Fragile, 3, [{"a1": "die"}, {"a1": "join"}, {}, {}]), collector_cls is WaitResetCollector
    with sampler_of(SerialSampler, make, batch_T=6, batch_B=1, collector_cls=collector_cls, **RENEW) as sampler:
        sampler.initialize(Valued(), seed=3, bootstrap_value=True)
        sampler.obtain_samples(0)
        env, final_value = sampler.samples_np.env, sampler.samples_np.agent.final_value
    none, others, everyone = [0, 0, 0], [1, 0, 1], [1, 1, 1]
    second = [none] * 3 if waits else None
    for name, rows in {
        "valid": [everyone, others, none],
        "terminated": [[0, 1, 0], none, none],
        "truncated": [none, others, none],
        "done": [[0, 1, 0], others, none if waits else everyone],
    }.items():
        assert env[name].astype(int).tolist() == rows + (second or rows), name
    np.testing.assert_array_equal(final_value != 0, env.truncated)
    np.testing.assert_array_equal(env.final_obs[1, :, :2], [[1, 2], [0, 0], [3, 2]])


class Lives(TrajInfo):
    """Who dies goes on when it comes back, or in the next game."""

    def traj_done(self, terminated: bool, truncated: bool, env_info: Any) -> bool:
        return not terminated


def ends_of(game: Any, running: dict[str, Any], *, has_lives: bool) -> Iterator[tuple[Any, int, float]]:
    """Play one game, in which all take action 2: agent, Length and Return of who ends, in this order; of the game
    itself the agent is None. If it fails, all in `running` ends."""
    length, total = 0, 0.0
    while game.agents:
        try:
            _, rewards, terminated, truncated, _ = game.step(dict.fromkeys(game.agents, 2))
        except GameError:
            running.clear()
            return
        length, total = length + 1, total + sum(rewards.values())
        for agent in terminated:
            n, reward = running.get(agent, (0, 0.0))
            running[agent] = n + 1, reward + rewards[agent]
            if truncated[agent] or (terminated[agent] and not has_lives):
                yield agent, *running.pop(agent)
    yield None, length, total


def ends_in_batches(make: Any, rank: int, *, has_lives: bool) -> Iterator[tuple[Any, ...]]:
    """The plain loop over one environment without end: episode, agent, Length and Return."""
    streams, running, episode = ColumnStreams(3, range(9)), dict[str, Any](), 0
    for renewal in count():
        seed = streams.renewal_seed(rank, Purpose.TRAIN, renewal) if renewal else streams.env_seeds(Purpose.TRAIN)[rank]
        game, is_over = make(), True
        game.reset(seed)
        while is_over:
            is_over = False
            for agent, *figures in ends_of(game, running, has_lives=has_lives):
                yield episode, agent, *figures
                is_over = agent is None
            episode += 1
            game.reset()


def ends_in_evaluation(make: Any, n_envs: int, n_episodes: int) -> list[tuple[Any, ...]]:
    """What an evaluation in which nothing fails returns."""
    found = []
    for k in range(n_episodes):
        game = make()
        game.reset(eval_seed(3, k))
        ends = [*ends_of(game, {}, has_lives=False)]
        found += [(k % n_envs, k // n_envs, *own) for own in ends]
    return found


LONG: Any = [{}] * 10 + [{"a0": "die"}] + [{}] * 89  # an evaluation sends the trajectories of 128 rows at a time


@pytest.mark.parametrize(
    ("cls", "collector_cls", "traj_info_cls", "n_policies", "game"),
    [
        (SerialSampler, ResetCollector, TrajInfo, 1, {"at": 30}),
        (SerialSampler, ResetCollector, OwnTrajInfo, 2, {"at": 130, "script": LONG}),
        (SerialSampler, WaitResetCollector, Lives, 2, {"at": 30}),
        (ParallelSampler, ResetCollector, Lives, 1, {"at": 30}),
        (ParallelSampler, WaitResetCollector, TrajInfo, 2, {"at": 130, "script": LONG}),
        (GpuSampler, ResetCollector, OwnTrajInfo, 1, {"at": 30}),
        (AlternatingSampler, WaitResetCollector, TrajInfo, 1, {"at": 30}),
        (AsyncSampler, ResetCollector, TrajInfo, 2, {"at": 30}),
    ],
)
def test_agents_of_a_game_that_was_cut_are_told_from_those_of_the_next(
    cls: Any, collector_cls: Any, traj_info_cls: Any, n_policies: int, game: Any
) -> None:
    """In batches they have another `number`. In an evaluation the game is played again, so they are not returned."""
    options = {**RENEW, "max_renewals": 999, "collector_cls": collector_cls, "traj_info_cls": traj_info_cls}
    options |= {"eval_n_envs": 2, "eval_episodes": 7, "eval_max_steps": 9999}
    make, names = partial(Fragile, **game), [f"p{i}" for i in range(n_policies)]
    infos, evaluations = list[Any](), list[Any]()
    with sampler_of(cls, make, batch_T=40, batch_B=3, **options) as sampler:
        several = {"agent": {name: Twos() for name in names}, "policy_of": lambda agent: names[int(agent[1:]) % 2]}
        sampler.initialize(**(several if n_policies > 1 else {"agent": Twos()}), seed=3)
        if cls is AsyncSampler:
            sampler.start()
        for itr in range(8):
            infos += sampler.obtain_samples(itr)[1]
            evaluations += [sampler.evaluate_agent(itr)] if itr in (1, 3) else []
        stats = sampler.stats()
    assert stats.cut_episodes >= 5
    has_lives = traj_info_cls is Lives
    for rank in range(3):
        own = [(i.number, i.agent_id, i.Length, i.Return) for i in infos if i.env_rank == rank]
        assert own == [*islice(ends_in_batches(make, rank, has_lives=has_lives), len(own))]
    wanted = ends_in_evaluation(partial(make, at=0), 2, 7)
    for found in evaluations if not has_lives else ():
        assert [(i.env_rank, i.number, i.agent_id, i.Length, i.Return) for i in found] == sorted(
            wanted, key=lambda end: (end[1], end[0])
        )
        assert [i.seed for i in found] == [eval_seed(3, i.number * 2 + i.env_rank) for i in found]
    if cls is not AsyncSampler:  # which has counted those of batches that nobody has obtained
        assert sum(worker.trajectories for worker in stats.workers) == len(infos) + sum(map(len, evaluations))


@pytest.mark.parametrize("env_cls", [Engine, Engines])
def test_an_evaluation_plays_a_cut_episode_again(env_cls: Any) -> None:
    failing: list[Any] = []

    def make(context: Any) -> Any:
        is_first = context.purpose is Purpose.EVAL and not failing
        failing.extend([context] * is_first)
        return env_cls([None] * env_cls.first, 3 if is_first else 0)

    with sampler_of(SerialSampler, make, eval_n_envs=2, eval_episodes=4, **BROKEN) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        infos = sampler.evaluate_agent(0)
        assert [info.Length for info in infos if info.agent_id is None] == [4] * 4
        assert sampler.stats().cut_episodes == 1


@pytest.mark.parametrize("env_cls", [CountingEnv, ScriptedGame])
def test_starts_that_fail_slowly_are_counted_too(env_cls: Any, tmp_path: Path) -> None:
    """When a start fails, the one before has left the window. A start that succeeds begins a new count."""
    calls = tmp_path / "calls"

    class Slow(env_cls):  # type: ignore[misc, valid-type]
        def step(self, action: Any) -> Any:
            with calls.open("a") as file:
                file.write("s")
            raise ConnectionError("the engine is gone")

        def reset(self, **kwargs: Any) -> Any:
            if calls.exists():
                with calls.open("a") as file:
                    file.write("r")
                if calls.read_text() not in ("sr", "srsrrrr"):
                    raise ConnectionError("the engine does not start")
            return super().reset(**kwargs)

    with sampler_of(SerialSampler, Slow, max_renewals=3, restart_window=1e-9, batch_B=1, **BROKEN) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        with pytest.raises(WorkerError) as caught:
            sampler.obtain_samples(0)
    says = r"the game of env_rank 0 has failed: .*not start\. It has failed to start 4 times in a row \(max_renewals=3"
    assert re.search(says, str(caught.value.__cause__))
    assert str(caught.value.__cause__).count("the engine does not start") == 5
    assert calls.read_text() == "sr" + "srrrr" * 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"on_game_failure": "restart"}, "on_game_failure must be one of raise, renew"),
        ({**RENEW, "batched": True}, "batched environments and on_game_failure=.* do not go together"),
        ({**RENEW, "renew_on": (Exception,)}, "renew_on must not contain Exception, since it includes SpaceError and"),
        ({**RENEW, "renew_on": (ValueError,)}, "must not contain ValueError, since it includes SpaceError: name the"),
        ({**RENEW, "renew_on": ("x",)}, "renew_on must be a tuple of exception classes"),
        ({"renew_on": (OSError,)}, 'renew_on needs on_game_failure="renew"'),
        ({**RENEW, "max_renewals": -1}, "max_renewals must be an integer"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        sampler_of(SerialSampler, **options)


@pytest.mark.slow
def test_a_replay_leaves_out_cut_steps(cut: tuple[Any, Any]) -> None:
    batches, B = without_infos(cut[0]), len(CUTS) + 1
    replay: Any = Replay(8 * B * 4, n_step=1, discount=0.9, max_truncations=100)
    for batch in batches:
        replay.append(batch)
    valid = [batch.env.valid for batch in batches]
    index, all_valid = np.sort(replay.contents.index), np.concatenate(valid)
    assert np.argwhere(~all_valid).tolist() == sorted([at - 1, column] for column, at in enumerate(CUTS))
    assert index.tolist() == np.flatnonzero(all_valid[:-1]).tolist()
    drawn = replay.contents.read(index).numpy()
    goes_on = drawn.discount > 0
    before, after = drawn.observation[goes_on], drawn.next_observation[goes_on]
    np.testing.assert_array_equal(after, np.add(before, [1, 0]))  # the next step of the same episode


# ---- faults at random ----------------------------------------------------------------------

HARMLESS = ("late", "flood", "child", "leak", "ignore_term")
FAULTS = ("exit", "crash", "hang", "vanish", "twice", "drip", "spout", "orphan", *HARMLESS)
POLICIES: dict[str, dict[str, Any]] = {
    "renew": {"on_game_failure": "renew", "max_renewals": 99},
    "restart": {"on_worker_failure": "restart", "max_restarts": 99},
    "raise": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("trial", range(scaled(250, 3)))
def test_nothing_hangs_and_nothing_is_left(trial: int, tmp_path: Path) -> None:
    """The run goes on, or ends with an error that shows the output of the game. `make faults` has many more trials."""
    draw = random.Random(trial)
    cls, start_method = SAMPLERS[trial % len(SAMPLERS)], draw.choice(USUAL_METHODS)
    policy = "renew" if trial % 2 else draw.choice(list(POLICIES))
    faults = {rank: (draw.randrange(1, 30), draw.choice(FAULTS)) for rank in range(4)}
    options: dict[str, Any] = {"start_method": start_method, "step_timeout": 60.0, **POLICIES[policy]}
    options["collector_cls"] = WaitResetCollector if draw.random() < 0.3 else ResetCollector
    failing = [fault for _, fault in faults.values() if fault not in HARMLESS]
    env_fn = partial(Played, str(tmp_path), faults, reply_timeout=5.0, stop_timeout=0.1, spares=draw.randrange(2))
    raised: list[WorkerError] = []
    with sampler_of(cls, env_fn, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        try:
            if cls is AsyncSampler:
                sampler.start()
            found = collect(sampler, 5)
        except WorkerError as error:
            raised.append(error)
        stats = sampler.stats()
    for error in raised:
        assert failing
        assert policy == "raise" or cls.__name__ == "SerialSampler", error
        assert isinstance(error.__cause__, GameError)
        assert "\n  | the fault is " in str(error.__cause__)
    if policy == "renew":
        assert not raised
        assert stats.cut_episodes <= len(failing)
        assert stats.restarts == 0
        others = [rank for rank, (_, fault) in faults.items() if fault in HARMLESS]
        wanted = undisturbed_games(options["collector_cls"])
        assert_same(without_infos(found, others), [batch[:, others] for batch in wanted])
