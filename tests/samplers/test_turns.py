"""Games in turns: each seat's rows are its own decisions."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock import (
    AgentStep,
    GameError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    RecurrentCategoricalPgAgent,
    ResetCollector,
    Sampler,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.collectors import Collector, EvalCollector
from penstock.envs.seeding import eval_seed
from penstock.learning import Prioritized, Replay
from tests.against_loop import compare
from tests.learning.streams import in_python
from tests.scale import examples
from tests.support import Diary
from tests.toy_games import Book, TurnGame, Valuing

from .digest_cases import Plain, Stateful
from .started import check_fails, check_refused, started

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import what is here


def recorded(env_fn: Any, agent: Any, n: int, **options: Any) -> list[Any]:
    """Copies of n batches."""
    with started(env_fn, agent, seed=3, bootstrap_value=True, **options) as sampler:
        return [sampler.obtain_samples(itr)[0].copy().numpy() for itr in range(n)]


@pytest.mark.parametrize(("k", "traj_info_cls"), [(2, TrajInfo), (1, TrajInfo), (5, TrajInfo), (2, Diary)])
def test_every_cell_is_what_a_plain_loop_says(k: int, traj_info_cls: type[TrajInfo]) -> None:
    sizes = {"batch_T": 7, "batch_B": 4, "n_batches": 30, "traj_info_cls": traj_info_cls}
    compare(SerialSampler, partial(TurnGame, k), Valuing, **sizes)


def wanted_windows(batches: list[Any], n_step: int, discount: float) -> dict[int, tuple[float, float, Any]]:
    """By position, the return, the discount and the next observation of each window: computed along the decisions of
    each seat, whatever batches they are in."""
    B = batches[0].env.valid.shape[1]
    names = ("valid", "observation", "reward", "terminated", "truncated", "final_obs")
    env = {name: np.concatenate([batch.env[name] for batch in batches]) for name in names}
    found = {}
    for b in range(B):
        rows = np.flatnonzero(env["valid"][:, b]).tolist()
        for i, row in enumerate(rows):
            total, factor, after = 0.0, 1.0, None
            for k, step in enumerate(rows[i : i + n_step]):
                total, factor = total + factor * env["reward"][step, b], factor * discount
                if env["terminated"][step, b]:
                    after, factor = np.zeros(4), 0.0
                elif env["truncated"][step, b]:
                    after = env["final_obs"][step, b]
                elif k == n_step - 1 and step + 1 < len(env["valid"]):  # the next decision, or one that is open
                    after = env["observation"][step + 1, b]
                if after is not None:
                    break
            if after is not None and row + n_step < len(env["valid"]):  # the newest rows are not drawn
                found[row * B + b] = total, factor, after
    return found


@given(
    T=st.integers(1, 7),
    n_step=st.integers(1, 5),
    k=st.integers(1, 3),
    seed=st.integers(0, 2**20),
    is_prioritized=st.booleans(),
    has_players=st.booleans(),
    version=st.sampled_from([nullcontext, in_python]),
)
@examples(20, 300)
def test_windows_of_a_replay_go_on_in_the_next_batch(
    T: int, n_step: int, k: int, seed: int, is_prioritized: bool, has_players: bool, version: Any
) -> None:
    n = 90 // T
    prioritized = Prioritized() if is_prioritized else None
    replay: Any = Replay(10_000, n_step, 0.9, prioritized, max_truncations=2_000, seed=0)
    agents = {"main": RandomAgent(), "other": RandomAgent()} if has_players else RandomAgent()
    policy_of = (lambda agent_id, rng: ("main", "other")[rng.integers(2)]) if has_players else None
    batches = []
    options = {"policy_of": policy_of, "seed": seed, "max_decorrelation_steps": 100}
    with version(), started(partial(TurnGame, k), agents, batch_T=T, **options) as sampler:
        for itr in range(n):
            samples, _ = sampler.obtain_samples(itr)
            samples = samples.main if has_players else samples
            batches.append(samples.copy().numpy())
            replay.append(samples)
            if is_prioritized and itr % 3 == 2 and len(replay.contents.index):
                replay.contents.probability  # noqa: B018 - the tree follows the ring
        wanted = wanted_windows(batches, n_step, 0.9)
        assert replay.contents.index.tolist() == sorted(wanted)
        if is_prioritized:
            assert (replay.contents.probability > 0).all()
        drawn = replay.contents.read(sorted(wanted)).numpy()
    total, factor, after = (np.array(part) for part in zip(*(wanted[i] for i in sorted(wanted)), strict=True))
    np.testing.assert_allclose(drawn.return_, total, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(drawn.discount, factor, rtol=1e-6)
    np.testing.assert_array_equal(drawn.next_observation, after)


def test_no_window_goes_on_where_a_batch_is_missing(tmp_path: Any) -> None:
    """Whether the replay is told or not, and whether it was saved in the meantime."""
    batches = recorded(partial(TurnGame, 2, ends=False), RandomAgent(), 40, batch_B=3, batch_T=3)
    for is_told, is_saved in ((True, False), (False, False), (True, True)):
        replay: Any = Replay(10_000, 3, 0.9, max_truncations=500, seed=0)
        parts = batches[:20], batches[22:]
        for samples in parts[0]:
            replay.append(samples)
        if is_saved:
            replay.save(tmp_path / "replay")
            replay = Replay.load(tmp_path / "replay")
        for i, samples in enumerate(parts[1]):
            replay.append(samples, continues=i > 0 or not is_told)
        B, read = parts[0][0].env.valid.shape[1], replay.contents.read(index := replay.contents.index).numpy()
        for position, after in zip(index.tolist(), read.next_observation, strict=True):
            envs = [samples.env for samples in parts[position // B >= 20 * 3]]
            seen = [field[:, position % B] for env in envs for field in (env.observation, env.final_obs)]
            assert not after.any() or (np.concatenate(seen) == after).all(1).any(), "on the same side of the gap"


def test_the_games_of_the_random_steps_have_no_number() -> None:
    def players(agent_id: str, game: int) -> str:
        return "even" if game % 2 == 0 else "odd"

    agents = {"even": RandomAgent(), "odd": RandomAgent()}
    options: dict[str, Any] = {"batch_B": 8, "max_decorrelation_steps": 60, "seed": 1, "policy_of": players}
    with started(partial(TurnGame, 2), agents, batch_T=6, **options) as sampler:
        infos = [info for itr in range(4) for info in sampler.obtain_samples(itr)[1]]
    agents = [info for info in infos if info.agent_id is not None]
    assert {info.number for info in agents} >= {0, 1, 2}
    # The game that runs when the first batch begins may have begun in the random steps, but it is number 0.
    assert all(info.policy == players(info.agent_id, info.number) for info in agents)


class Moves(TrajInfo):
    """Notes how many moves the agent has made, by its last observation."""

    def terminate(self, final_observation: Any) -> None:
        self.moves = final_observation[2]


@pytest.mark.parametrize("n_random", [0, 60])
def test_a_trajectory_has_all_moves_of_its_agent_also_random_ones(n_random: int) -> None:
    options: dict[str, Any] = {"traj_info_cls": Moves, "max_decorrelation_steps": n_random, "seed": 2}
    with started(partial(TurnGame, 2), batch_T=5, batch_B=8, **options) as sampler:
        infos: list[Any] = [info for itr in range(6) for info in sampler.obtain_samples(itr)[1]]
    agents = [info for info in infos if info.agent_id is not None]
    assert len(agents) > 20
    assert [info.Length for info in agents] == [info.moves for info in agents]


class Gifts(TurnGame):
    """Agents get a reward before they decide."""

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self._rewards = dict.fromkeys(self.agents, 0.5)


@pytest.mark.parametrize("n_random", [0, 1, 3])
def test_rewards_before_the_first_decision_belong_to_their_game_also_before_random_steps(n_random: int) -> None:
    sizes = {"batch_T": 7, "batch_B": 6, "n_batches": 6, "max_decorrelation_steps": n_random}
    compare(SerialSampler, partial(Gifts, 3), Valuing, **sizes)


def test_a_reward_before_the_first_decision_is_counted_as_late() -> None:
    with started(partial(Gifts, 2, ends=False), batch_B=1, batch_T=20) as sampler:
        n_games = sum(info.agent_id is None for itr in range(5) for info in sampler.obtain_samples(itr)[1])
        assert n_games > 3
        assert 2 * n_games < sampler.stats().late_rewards <= 2 * n_games + 2


class NoMove(TurnGame):
    """Allows no action from move 9 on."""

    def last(self, observe: bool = True) -> Any:
        *result, info = super().last(observe)
        return (*result, {"action_mask": np.full(3, self.t < 9, np.int8)} if self.t >= 9 else info)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler])
def test_a_mask_without_a_legal_action_names_the_agent(cls: type[Sampler]) -> None:
    message = r"env_rank [01], agent 'a[01]'.*allows no action"
    env_fn, agent = partial(NoMove, 2, mask=True, ends=False), RandomAgent(mask_key="info.action_mask")
    check_fails(env_fn, message, agent, cls=cls, batch_T=40)


class Broken(TurnGame):
    """From move 5 on, what `last` returns is changed, or the game after its step."""

    def __init__(self, last: Any = None, step: Any = None) -> None:
        super().__init__(2, ends=False)
        self._last, self._step = last, step

    def last(self, observe: bool = True) -> Any:
        result = super().last(observe)
        return self._last(*result) if self._last and self.t >= 5 and not any(result[2:4]) else result

    def step(self, action: Any) -> None:
        super().step(action)
        if self._step and self.t >= 5:
            self._step(self)


def ask_nobody(game: Any) -> None:
    game.agents = []


def ask_a_stranger(game: Any) -> None:
    game.agent_selection = "nobody"


def send_away_who_is_asked(game: Any) -> None:
    game.agents = [agent for agent in game.agents if agent != game.agent_selection]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"last": lambda seen, *rest: (seen[:3], *rest)}, "must have shape \\(4,\\)"),
        ({"last": lambda seen, reward, *rest: (seen, "much", *rest)}, "must be a single number"),
        ({"last": lambda seen, reward, *rest: (seen, 1e300, *rest)}, "must be a number that float32 can hold"),
        ({"last": lambda seen, reward, _, *rest: (seen, reward, None, *rest)}, ""),
        ({"last": lambda seen, reward, *rest: (seen, reward)}, "must return a tuple"),
        (
            {"last": lambda seen, reward, *rest: (None, reward, False, True, {})},
            r"was truncated, but env\.last returned no observation",
        ),
        ({"step": ask_nobody}, r"is not in env\.agents any more"),
        ({"step": send_away_who_is_asked}, r"is env\.agent_selection, but not in env\.agents"),
        ({"step": ask_a_stranger}, "is not one of possible_agents"),
    ],
)
def test_a_broken_rule_names_environment_and_agent(change: Any, message: str) -> None:
    who = r"env_rank 0, agent '(a[01]|nobody)' *"
    check_fails(partial(Broken, **change), who + message, batch_T=30, batch_B=1, n=20)


class Together(RandomAgent):
    joint = True

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        return AgentStep(np.zeros(prev_reward.shape, np.int64))


@pytest.mark.parametrize(
    ("options", "agent", "message"),
    [
        ({}, Together(), "games in turns and a joint agent do not go together: a joint agent acts for all"),
        ({"seed_episodes": True}, RandomAgent(), "seed_episodes=True and games in turns do not go together"),
        ({"bootstrap_value": True}, Book(), "Book must report `value` in agent_info"),
    ],
)
def test_what_is_not_possible_is_refused(options: Any, agent: Any, message: str) -> None:
    assert "\n" not in check_refused(TurnGame, message, agent, **options)


def test_the_stamps_have_a_row_for_each_round_and_agree_with_the_totals() -> None:
    with started(TurnGame, collector_cls=Noting) as sampler:
        samples, _ = sampler.obtain_samples(0)
        (rows,) = sampler.run.memory.control.memory.arrays.timeline
        times = rows[rows[:, 0].argmax()] / 1e9
        times = times[: (times < times[-1]).sum() + 1]  # the end follows the last round
        assert len(times) >= 2 * int(samples.env.extra.round.max()) + 3
        assert (np.diff(times) > 0).all()
        (worker,) = sampler.stats().workers
        np.testing.assert_allclose(worker.acting, (times[1::2] - times[:-1:2]).sum(), rtol=1e-6)
        (worker,) = sampler.stats().workers
        assert worker.acting > 0
        assert worker.stepping > 0
        n = int(samples.env.valid.sum())
        assert n <= worker.steps <= n + 6  # and the decisions that are open
        assert sampler.metrics()["sampler/agent_steps"] == n


class Failing(TurnGame):
    """Its game fails now and then, in any call. `log` has what the sampler has seen, of all games in this process."""

    log: ClassVar[list[Any]] = []
    chance = 0.0

    def _may_fail(self, chance: float) -> None:
        if self.luck.random() < chance * Failing.chance:
            self.log.append(("fails",))
            raise GameError("lost")

    def __init__(self) -> None:
        super().__init__(3)
        self.luck = np.random.default_rng(len(self.log))

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self._may_fail(0.2)
        super().reset(seed, options)
        self.log.append(("begins",))

    def last(self, observe: bool = True) -> Any:
        self._may_fail(0.02)
        found = super().last(observe)
        self.log.append(("last", self.agent_selection, *found[:4]))
        return found

    def step(self, action: Any) -> None:
        if action is not None:
            self.log.append(("decides", self.agent_selection))
            self._may_fail(0.04)
        super().step(action)


def decisions_of(log: list[Any], agent: str) -> tuple[list[Any], list[tuple[int, float]]]:
    """The complete decisions of an agent: what it has seen, its reward, whether an episode begins with it, and how it
    ends (a flag, and the last observation). And the length and the return of each episode that has ended."""
    rows, episodes, seen, is_open, is_start, rewards = list[Any](), list[Any](), None, False, True, list[float]()
    for what, *more in log:
        if what == "fails":
            if is_open and not is_start:
                rows[-1][3:] = "truncated", seen
            is_open, is_start, rewards = False, True, []
        elif more and more[0] == agent and what == "decides":
            is_open = True
        elif more and more[0] == agent:
            _, observation, reward, terminated, truncated = more
            if is_open:
                how = "terminated" if terminated else "truncated" if truncated else ""
                rows.append([seen, reward, is_start, how, observation if how else None])
                rewards.append(reward)
                is_open, is_start = False, bool(how)
                if how:
                    episodes.append((len(rewards), sum(rewards)))
                    rewards = []
            seen = observation
    return rows, episodes


class Noting(ResetCollector):
    """Writes the round and the environment's rank for each decision."""

    extra_fields: ClassVar[Any] = {"round": np.int64(0), "rank": np.int64(0)}

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        for recorder in self.recorders:
            ranks = np.array([int(rank) for rank in recorder.columns.env_ranks])
            self.record_extra(t, recorder.policy, round=np.full(len(ranks), t), rank=ranks)


@pytest.mark.parametrize(
    ("T", "cls"), [(1, ResetCollector), (4, Noting), (30, ResetCollector), (4, WaitResetCollector)]
)
def test_a_game_that_fails_is_built_again_and_its_open_decisions_are_lost(T: int, cls: type[Collector]) -> None:
    Failing.chance = 0.0
    options: dict[str, Any] = {
        "batch_T": T,
        "batch_B": 1,
        "on_game_failure": "renew",
        "max_renewals": 9_999,
        "bootstrap_value": True,
    }
    options |= {"collector_cls": cls}
    found: dict[str, list[Any]] = {f"a{i}": [] for i in range(3)}
    with started(Failing, Plain(), max_decorrelation_steps=0, **options) as sampler:
        Failing.log[:], Failing.chance, infos = Failing.log[-2:], 1.0, []
        for itr in range(400 // T):
            samples, own = sampler.obtain_samples(itr)
            infos += own
            assert cls is not Noting or not samples.env.extra.round[~samples.env.valid].any()
            for b, rows in enumerate(found.values()):
                env = samples.copy().numpy().env[:, b]
                n = int(env.valid.sum())
                rows += [(env[t], t == n - 1) for t in range(n)]
        stats = sampler.stats()
    n_lost = sum(entry == ("fails",) for entry in Failing.log)
    assert stats.workers[0].renewals == n_lost > 20
    for agent, rows in found.items():
        wanted, episodes = decisions_of(Failing.log, agent)
        assert len(rows) > 60
        for (row, is_last), (seen, reward, is_start, how, final) in zip(rows, wanted, strict=False):
            np.testing.assert_array_equal(row.observation, seen)
            assert (row.reward, row.prev_done) == (np.float32(reward), is_start)
            if is_last and not row.done:  # the batch was complete when the game failed
                assert how in ("", "truncated")
                continue
            assert (row.terminated, row.truncated, row.done) == (how == "terminated", how == "truncated", how != "")
            np.testing.assert_array_equal(row.final_obs, np.zeros(4) if final is None else final)
        told = [(info.Length, info.Return) for info in infos if info.agent_id == agent]
        assert told == episodes[: len(told)]
        assert len(told) > 5


class FailsAfterAnEnd(TurnGame):
    """Its game may fail when an agent that has ended is removed. `ended` has these agents, for each game that began."""

    ended: ClassVar[list[set[str]]] = []
    chance = 0.0

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        super().reset(seed, options)
        self.ended.append(set())

    def step(self, action: Any) -> None:
        if action is None:
            self.ended[-1].add(self.agent_selection)
            if np.random.default_rng(len(self.ended)).random() < FailsAfterAnEnd.chance:
                raise GameError("lost")
        super().step(action)


@pytest.mark.parametrize("traj_info_cls", [TrajInfo, type("OwnTrajInfo", (TrajInfo,), {})])
def test_who_ends_in_the_round_in_which_its_game_fails_belongs_to_this_game(traj_info_cls: Any) -> None:
    FailsAfterAnEnd.chance = 0.0
    options: dict[str, Any] = {"on_game_failure": "renew", "max_renewals": 9_999, "max_decorrelation_steps": 0}
    with started(FailsAfterAnEnd, batch_T=5, batch_B=1, traj_info_cls=traj_info_cls, **options) as sampler:
        FailsAfterAnEnd.ended[:], FailsAfterAnEnd.chance = FailsAfterAnEnd.ended[-1:], 0.3
        infos = [info for itr in range(60) for info in sampler.obtain_samples(itr)[1]]
        assert sampler.stats().workers[0].renewals > 5
    whose = [(info.number, info.agent_id) for info in infos]
    assert len(set(whose)) == len(whose) > 60
    assert all(agent is None or agent in FailsAfterAnEnd.ended[number] for number, agent in whose)


class TwiceAsLong(EvalCollector):
    """Each game begins as the first one."""

    def seed_of(self, e: int) -> int:
        return eval_seed(self.streams.seed, self.streams.env_ranks[e])


def test_a_collector_of_the_users_own_writes_fields_of_decisions() -> None:
    agents = {"x": RandomAgent(), "y": RandomAgent()}
    own = {"collector_cls": Noting, "eval_collector_cls": TwiceAsLong, "eval_n_envs": 2, "eval_episodes": 6}
    policy_of = {"policy_of": lambda agent: "xyx"[int(agent[1])], "eval_max_steps": 500}
    with started(TurnGame, agents, ParallelSampler, batch_T=6, batch_B=2, n_workers=2, **own, **policy_of) as sampler:
        for itr in range(6):
            batch, _ = sampler.obtain_samples(itr)
            for name, samples in batch.items():
                env = samples.numpy().env
                ranks = np.array([rank for rank, _ in sampler.seats()[name]])
                assert (env.extra.rank == np.where(env.valid, ranks, 0)).all()
                later = env.valid[1:]  # row 0 may be a decision of the batch before
                assert (np.diff(env.extra.round, axis=0)[1:][later[1:]] > 0).all()
            rounds = [batch[name].numpy().env for name in agents]
            for rank in range(2):  # each round is one decision of a game
                own_rounds = [
                    env.extra.round[1:, b][env.valid[1:, b]].tolist()
                    for name, env in zip(agents, rounds, strict=True)
                    for b, (of, _) in enumerate(sampler.seats()[name])
                    if of == rank
                ]
                made = sorted(t for own in own_rounds for t in own)
                assert len(set(made)) == len(made)
        figures = {(info.env_rank, info.number, info.agent_id): info.Length for info in sampler.evaluate_agent(0)}
    games = {key: length for key, length in figures.items() if key[2] is None}
    assert len(games) == 6


class Fresh(ResetCollector):
    """Begins new games before each batch."""

    def collect_batch(self, itr: int) -> None:
        self.reset_now(range(len(self.envs)))
        super().collect_batch(itr)


def test_after_a_reset_between_batches_every_agent_begins_anew() -> None:
    with started(partial(TurnGame, 3), Stateful(), batch_T=3, batch_B=4, collector_cls=Fresh) as sampler:
        for itr in range(20):
            samples = sampler.obtain_samples(itr)[0].copy().numpy()
            first, info = samples[0], samples.agent.agent_info[0]
            has_row = first.env.valid
            assert (first.env.prev_done == has_row).all()
            assert (info.own == has_row).all()
            weights = [
                (k * 0.37) % 1.0 for k in range(1, 5)
            ]  # those of `Stateful`, with no action and no reward before
            wanted = sum(w * first.env.observation[:, k].astype(np.float64) for k, w in enumerate(weights)) + 5.0
            np.testing.assert_array_equal(info.value[has_row], wanted.astype(np.float32)[has_row])
        assert 0 < has_row.sum() < 12


class Counting(nn.Module):
    """Its state is the number of its steps."""

    state_shape = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, observation: Any, prev_action: Any, prev_reward: Any, state: Any) -> Any:
        return self.scale * observation[:, :3], self.scale * state[:, 0], state + 1


@pytest.mark.parametrize("cls", [SerialSampler, GpuSampler])
def test_the_first_row_has_the_state_before_it_also_where_its_decision_is_of_the_batch_before(cls: Any) -> None:
    agent = RecurrentCategoricalPgAgent(Counting, record_state="batch")
    options: dict[str, Any] = {"batch_T": 3, "batch_B": 4, "bootstrap_value": True, "max_decorrelation_steps": 0}
    with started(TurnGame, agent, cls, **options) as sampler:
        for itr in range(12):
            samples, _ = sampler.obtain_samples(itr)
            valid, info = samples.env.valid, samples.agent.agent_info
            assert (info.has_rnn_state[0] == valid[0]).all()
            assert not info.has_rnn_state[1:].any()
            own_moves = samples.env.observation[0, :, 2]  # how often this agent has moved in this game
            assert (samples.initial_state[valid[0], 0] == own_moves[valid[0]]).all()
            if itr == 0:
                assert not own_moves.any()
        assert own_moves.max() > 0


class Scored(TurnGame):
    """Says in info how many moves were made."""

    def last(self, observe: bool = True) -> Any:
        *result, info = super().last(observe)
        return (*result, {**info, "moves": self.t})


def test_env_info_is_that_of_the_end_of_a_decision() -> None:
    compare(SerialSampler, partial(Scored, 2), Valuing, batch_T=7, batch_B=2, n_batches=6, env_info=True)
