"""Runs of several agents that are saved and continued: as a plain loop that was never interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock import (
    Agent,
    AgentStep,
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    ResetCollector,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.envs.toy import ScriptedGame
from penstock.testing import check_env_state

from ..game_loop import GameLoop, by_policy, ends_of, first_seeds
from ..toy_games import Book, TurnGame, split_agents

T, B, SEED = 6, 4, 5
KINDS = [{"k": k} for k in (3, 4, 2, 3)]
two = partial(ParallelSampler, n_workers=2)
three = partial(ParallelSampler, n_workers=3)


class Kept(Book):
    """A recurrent agent with noise, whose state is saved."""

    def column_state(self, column: int) -> dict[str, Any]:
        return {"own": int(self._own[column]), "rng": self._rngs[column].bit_generator.state}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        self._own[column] = state["own"]
        self._rngs[column].bit_generator.state = state["rng"]


class Counting(ResetCollector):
    """Keeps the number of games of each environment, and writes it beside each step."""

    extra_fields: ClassVar[Any] = {"games": np.int64(0)}

    def start_envs(self) -> None:
        self.n = [0] * len(self.columns.env_ranks)
        super().start_envs()

    def begin_episodes(self, events: Any, going: Sequence[int]) -> Any:
        for e in events.over:
            self.n[e] += 1
        return super().begin_episodes(events, going)

    def step_envs(self, t: int) -> None:
        super().step_envs(t)
        first = self.columns.env_ranks[0]
        for recorder in self.recorders:
            games = np.array([self.n[int(rank) - first] for rank in recorder.columns.env_ranks])
            self.record_extra(t, recorder.policy, games=games)

    def column_state(self, e: int) -> dict[str, Any]:
        return {**super().column_state(e), "n": self.n[e]}

    def load_column_state(self, e: int, state: Mapping[str, Any]) -> None:
        super().load_column_state(e, state)
        self.n[e] = state["n"]


class Own(TrajInfo):
    """A trajectory that is followed step by step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.actions = 0

    def step(self, observation: Any, action: Any, *rest: Any) -> None:
        super().step(observation, action, *rest)
        self.actions += int(action)


class Unsaved(ScriptedGame):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a socket")


class Stateful(ScriptedGame):
    """Is saved by methods of its own, and cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("it has a socket")

    def get_state(self) -> Any:
        return {**vars(self), "np_random": self.np_random.bit_generator.state}

    def set_state(self, state: Any) -> None:
        vars(self).update({**state, "np_random": self.np_random})
        self.np_random.bit_generator.state = state["np_random"]


def of_games(cls: Any, env_fn: Any = ScriptedGame, **options: Any) -> Any:
    options = {"batch_T": T, "batch_B": B, "env_kwargs": KINDS, "max_decorrelation_steps": 0, **options}
    return cls(env_fn, **options)


def follow(sampler: Any, loop: GameLoop, itrs: range) -> list[Any]:
    """Compare these batches with the loop. Returns copies of them, with the trajectories."""
    found = []
    for itr in itrs:
        _, infos = sampler.obtain_samples(itr)
        assert ends_of(infos) == loop.follow(sampler.samples_np)
        found.append((sampler.samples_np.copy(), [repr(info) for info in infos]))
    return found


def check_agents(batches: Sequence[Any]) -> None:
    """The agents have counted their own steps as the games have, and have drawn no number twice."""
    for name in by_policy(batches[0]):
        noise = []
        for batch in batches:
            samples = by_policy(batch)[name]
            valid = samples.env.valid
            seen = samples.agent.agent_info
            np.testing.assert_array_equal(seen.own[valid], samples.env.observation[..., 2][valid])
            noise.append(seen.noise[valid])
        drawn = np.concatenate(noise)
        assert len(np.unique(drawn)) > 0.99 * len(drawn)


@pytest.mark.parametrize("collector_cls", [ResetCollector, WaitResetCollector, Counting])
@pytest.mark.parametrize("n_policies", [1, 2])
@pytest.mark.parametrize(
    ("first", "second"), [(SerialSampler, two), pytest.param(three, SerialSampler, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("env_fn", [ScriptedGame, pytest.param(Stateful, marks=pytest.mark.slow)])
def test_a_run_continues_as_if_it_had_never_ended(
    first: Any, second: Any, n_policies: int, collector_cls: Any, env_fn: Any
) -> None:
    options = {"collector_cls": collector_cls}
    with of_games(first, env_fn, **options) as sampler:
        sampler.initialize(**split_agents(n_policies, Kept), seed=SEED)
        waits = collector_cls is WaitResetCollector
        loop = GameLoop(lambda e: ScriptedGame(**KINDS[e]), first_seeds(B, SEED), sampler.seats(), waits=waits)
        before = follow(sampler, loop, range(3))
        state = sampler.state_dict(env_state="require")
        kind = {column["kind"] for column in state["columns"].values()}
        assert kind == {"pickle" if env_fn is ScriptedGame else "get_state"}
    with of_games(second, env_fn, **options) as sampler:
        sampler.initialize(**split_agents(n_policies, Kept), seed=SEED)
        assert list(sampler.load_state_dict(state).exact) == list(range(B))
        again = sampler.state_dict(env_state="require")
        after = follow(sampler, loop, range(3, 6))
        assert again["columns"].keys() == state["columns"].keys()
        batches = [batch for batch, _ in before + after]
        check_agents(batches)
        if collector_cls is Counting:
            for name, seats in sampler.seats().items():
                for b, (e, _) in enumerate(seats):
                    assert by_policy(batches[-1])[name].env.extra.games[-1, b] == loop.episodes[e]
    with of_games(SerialSampler, env_fn, **options) as sampler:  # the actions too are those of one long run
        sampler.initialize(**split_agents(n_policies, Kept), seed=SEED)
        for itr, (batch, infos) in enumerate(before + after):
            _, others = sampler.obtain_samples(itr)
            assert [repr(info) for info in others] == infos
            for (name, left), (_, right) in zip(batch.leaves(), sampler.samples_np.leaves(), strict=True):
                np.testing.assert_array_equal(left, right, name)


@pytest.mark.parametrize("n_policies", [1, 2])
def test_what_cannot_be_saved_is_reseeded_game_by_game(n_policies: int) -> None:
    env_fns = [ScriptedGame, Unsaved, ScriptedGame, Unsaved]
    with of_games(two, env_fns) as sampler:
        sampler.initialize(**split_agents(n_policies, Kept), seed=SEED)
        loop = GameLoop(lambda e: ScriptedGame(**KINDS[e]), first_seeds(B, SEED), sampler.seats())
        before = follow(sampler, loop, range(3))
        state = sampler.state_dict()
        with pytest.raises(ConfigError, match=r"env_rank 1.*it has a socket"):
            sampler.state_dict(env_state="require")
    with of_games(SerialSampler, env_fns) as sampler:
        sampler.initialize(**split_agents(n_policies, Kept), seed=SEED)
        report = sampler.load_state_dict(state)
        assert report.exact == (0, 2)
        assert "socket" in report.reseeded[1]
        for e in (1, 3):
            loop.restart(e, first_seeds(B, SEED, state["generation"] + 1)[e])
        after = follow(sampler, loop, range(3, 6))
        check_agents([batch for batch, _ in before + after])


@pytest.mark.parametrize("cls", [partial(GpuSampler, n_workers=2), partial(AlternatingSampler, n_workers=2)])
def test_a_central_sampler_continues(cls: Any) -> None:
    env_fns, found = [ScriptedGame, ScriptedGame, Unsaved, ScriptedGame], []
    with of_games(cls, env_fns) as sampler:
        sampler.initialize(Kept(), seed=SEED)
        loop = GameLoop(lambda e: ScriptedGame(**KINDS[e]), first_seeds(B, SEED), sampler.seats())
        found += follow(sampler, loop, range(3))
        state = sampler.state_dict()
    with of_games(partial(GpuSampler, n_workers=3), env_fns) as sampler:
        sampler.initialize(Kept(), seed=SEED)
        assert sampler.load_state_dict(state).exact == (0, 1, 3)
        loop.restart(2, first_seeds(B, SEED, state["generation"] + 1)[2])
        check_agents([batch for batch, _ in found + follow(sampler, loop, range(3, 6))])


def test_trajectories_of_a_subclass_continue() -> None:
    with of_games(SerialSampler, traj_info_cls=Own) as sampler:
        sampler.initialize(Kept(), seed=SEED)
        columns = {seat: list[int]() for seat in sampler.seats()["agent"]}
        infos = [_actions_of(sampler, itr, columns) for itr in range(2)]
        state = sampler.state_dict(env_state="require")
    with of_games(two, traj_info_cls=Own) as sampler:
        sampler.initialize(Kept(), seed=SEED)
        sampler.load_state_dict(state)
        infos += [_actions_of(sampler, itr, columns) for itr in range(2, 6)]
    assert sum(infos) > 10


def _actions_of(sampler: Any, itr: int, running: dict[Any, list[int]]) -> int:
    """Compare the sums of actions in a batch's trajectories with those of its cells. Returns how many there are."""
    _, infos = sampler.obtain_samples(itr)
    env, action, wanted = sampler.samples_np.env, sampler.samples_np.agent.action, []
    for t in range(T):
        for b, seat in enumerate(running):
            if env.valid[t, b]:
                running[seat] = [*([] if env.prev_done[t, b] else running[seat]), int(action[t, b])]
            if env.done[t, b]:
                wanted.append((*seat, sum(running[seat])))
    found = [(info.env_rank, info.agent_id, info.actions) for info in infos if info.agent_id is not None]
    assert sorted(found) == sorted(wanted)
    return len(found)


class Pair(Agent):
    """A joint agent with a state: how often it has acted in this game."""

    joint, recurrent = True, True

    def seed_columns(self, rngs: Any) -> None:
        self._own = np.zeros(len(rngs), np.int64)

    def reset(self) -> None:
        self._own[...] = 0

    def reset_one(self, column: int) -> None:
        self._own[column] = 0

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        self._own += 1
        own = np.repeat(self._own[:, None], observation.shape[1], 1)
        return AgentStep(own % 3, NamedArrays(own=own))

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        return np.zeros(observation.shape[:2], np.float32)

    def column_state(self, column: int) -> dict[str, Any]:
        return {"own": int(self._own[column])}

    def load_column_state(self, column: int, state: Mapping[str, Any]) -> None:
        self._own[column] = state["own"]


def test_a_joint_agent_continues() -> None:
    script: Any = [{}] * 10
    options: dict[str, Any] = {"env_kwargs": {"k": 2, "script": script}}
    with of_games(SerialSampler, **options) as sampler:
        sampler.initialize(Pair(), seed=SEED)
        for itr in range(2):
            sampler.obtain_samples(itr)
        state = sampler.state_dict(env_state="require")
    with of_games(two, **options) as sampler:
        sampler.initialize(Pair(), seed=SEED)
        sampler.load_state_dict(state)
        for itr in range(2, 5):
            sampler.obtain_samples(itr)
            samples = sampler.samples_np
            steps = (np.arange(T) + itr * T) % 10
            assert (samples.env.observation[..., 1] == steps[:, None]).all()
            assert (samples.agent.agent_info.own == steps[:, None] + 1).all()


def test_other_policies_are_refused() -> None:
    with of_games(SerialSampler) as sampler:
        sampler.initialize(**split_agents(2, Kept), seed=SEED)
        state = sampler.state_dict()
    with of_games(SerialSampler) as sampler:
        sampler.initialize(
            {"first": Kept(), "other": Kept()}, policy_of=lambda a: "first" if a > "a0" else "other", seed=SEED
        )
        with pytest.raises(ConfigError, match=r"the state has policies=.*: let policy_of return the same policies"):
            sampler.load_state_dict(state)


@pytest.mark.parametrize("n_policies", [1, 2])
def test_games_in_turns_begin_again(n_policies: int) -> None:
    with SerialSampler(TurnGame, batch_T=T, batch_B=2) as sampler:
        sampler.initialize(Kept(), seed=SEED)
        sampler.obtain_samples(0)
        state = sampler.state_dict()
    with SerialSampler(TurnGame, batch_T=T, batch_B=2) as sampler:
        sampler.initialize(Kept(), seed=SEED)
        report = sampler.load_state_dict(state)
        assert "a game in turns has decisions that are open" in report.reseeded[0]
        sampler.obtain_samples(1)


class Masked(ScriptedGame):
    """Refuses the action that its mask forbids."""

    def __init__(self) -> None:
        super().__init__(mask=True)

    def _infos(self) -> dict[str, Any]:
        return {agent: {"action_mask": np.array([1, 0, 1], np.int8)} for agent in self._own}

    def step(self, actions: Any) -> Any:
        assert 1 not in actions.values()
        return super().step(actions)


class Forgetful(ScriptedGame):
    """Its copy has another random generator."""

    def __getstate__(self) -> Any:
        return {**vars(self), "np_random": np.random.default_rng(3)}


def test_the_proof_works_for_games() -> None:
    assert check_env_state(ScriptedGame) == "pickle"
    assert check_env_state(Stateful) == "get_state"
    assert check_env_state(Masked) == "pickle"
    for env_fn, message in (
        (Unsaved, "it has a socket"),
        (Forgetful, "does not continue alike after it was saved and loaded: observation of step"),
        (TurnGame, "a game in turns has decisions"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_env_state(env_fn)


@pytest.mark.parametrize("options", [{"global_state": True}, {"mask": True}])
def test_what_observations_get_beside_their_own_continues(options: dict[str, Any]) -> None:
    masked = options.pop("mask", False)

    def agent() -> Any:
        from penstock import RandomAgent

        return RandomAgent(mask_key="info.action_mask") if masked else RandomAgent()

    env_fn: Any = Masked if masked else ScriptedGame
    found: list[Any] = []
    options = {"env_kwargs": None, **options}
    for n_first in (4, 2):
        with of_games(SerialSampler, env_fn, **options) as sampler:
            sampler.initialize(agent(), seed=SEED)
            found.append([sampler.obtain_samples(itr)[0].copy() for itr in range(n_first)])
            state = sampler.state_dict(env_state="require")
    with of_games(two, env_fn, **options) as sampler:
        sampler.initialize(agent(), seed=SEED)
        sampler.load_state_dict(state)
        for itr in (2, 3):
            samples, _ = sampler.obtain_samples(itr)
            for (name, left), (_, right) in zip(samples.numpy().leaves(), found[0][itr].numpy().leaves(), strict=True):
                np.testing.assert_array_equal(left, right, name)
