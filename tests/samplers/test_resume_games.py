"""Runs of several agents that are saved and continued: as a run that was never interrupted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest

from penstock import (
    AgentStep,
    AlternatingSampler,
    ConfigError,
    GpuSampler,
    NamedArrays,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    SerialSampler,
    TrajInfo,
    WaitResetCollector,
)
from penstock.envs.toy import ScriptedGame
from penstock.testing import check_env_state

from ..scale import FULL, covering
from ..support import Diary, assert_same, collect
from ..toy_games import Book, Ghosts, TurnGame, split_agents

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


N = 3


def continued(
    first: Any, second: Any, env_fn: Any = ScriptedGame, at_start: Any = None, only: Any = range(B), **options: Any
) -> tuple[dict[str, Any], Any]:
    """Check that N batches, and N more of another sampler, are those of a run that has never ended. Where environments
    begin again, these are the cells of `only` the others. Returns the state, and what `load_state_dict` has said."""
    at_start = at_start or (lambda: {"agent": Kept()})
    with of_games(SerialSampler, env_fn, **options) as sampler:
        sampler.initialize(**at_start(), seed=SEED)
        wanted, seats = collect(sampler, 2 * N), sampler.seats()
    with of_games(first, env_fn, **options) as sampler:
        sampler.initialize(**at_start(), seed=SEED)
        found, state = collect(sampler, N), sampler.state_dict()
    with of_games(second, env_fn, **options) as sampler:
        sampler.initialize(**at_start(), seed=SEED)
        report = sampler.load_state_dict(state)
        assert sampler.state_dict()["columns"].keys() == state["columns"].keys()
        found += collect(sampler, range(N, 2 * N))
    if len(only) == B:
        assert_same(found, wanted)
    for name, own in seats.items():
        parts = [[batch if "env" in batch else batch[name] for batch, _ in run] for run in (found, wanted)]
        stays = [b for b, (e, _) in enumerate(own) if e in only]
        begins = [b for b, (e, _) in enumerate(own) if e not in only]
        assert_same(*([batch[:, stays] for batch in run] for run in parts))
        again = parts[0][N].env
        assert (again.prev_done[0] == again.valid[0])[begins].all()
        assert not begins or not np.array_equal(again.observation[:, begins], parts[1][N].env.observation[:, begins])
    return state, report


RUNS = list(
    product(
        [ScriptedGame, Stateful],
        [(SerialSampler, two), (three, SerialSampler)],
        [1, 2],
        [ResetCollector, WaitResetCollector, Counting],
    )
)


@pytest.mark.parametrize(("env_fn", "samplers", "n_policies", "collector_cls"), RUNS if FULL else covering(RUNS))
def test_a_run_continues_as_if_it_had_never_ended(
    env_fn: Any, samplers: Any, n_policies: int, collector_cls: Any
) -> None:
    options = {"collector_cls": collector_cls, "traj_info_cls": Diary if n_policies == 2 else TrajInfo}
    state, report = continued(*samplers, env_fn, partial(split_agents, n_policies, Kept), **options)
    assert {column["kind"] for column in state["columns"].values()} == {
        "pickle" if env_fn is ScriptedGame else "get_state"
    }
    assert list(report.exact) == list(range(B))


@pytest.mark.slow
@pytest.mark.parametrize("n_policies", [1, 2])
def test_what_cannot_be_saved_is_reseeded_game_by_game(n_policies: int) -> None:
    env_fns, at_start = [ScriptedGame, Unsaved, ScriptedGame, Unsaved], partial(split_agents, n_policies, Kept)
    _, report = continued(two, SerialSampler, env_fns, at_start, only=(0, 2))
    assert report.exact == (0, 2)
    assert "socket" in report.reseeded[1]
    with of_games(two, env_fns) as sampler:
        sampler.initialize(**at_start(), seed=SEED)
        with pytest.raises(ConfigError, match=r"env_rank 1.*it has a socket"):
            sampler.state_dict(env_state="require")


@pytest.mark.slow
@pytest.mark.parametrize("cls", [partial(GpuSampler, n_workers=2), partial(AlternatingSampler, n_workers=2)])
def test_a_central_sampler_continues(cls: Any) -> None:
    env_fns = [ScriptedGame, ScriptedGame, Unsaved, ScriptedGame]
    assert continued(cls, partial(GpuSampler, n_workers=3), env_fns, only=(0, 1, 3))[1].exact == (0, 1, 3)


class Pair(Kept):
    """A joint agent: all do what the first one would do."""

    joint = True
    column_state, load_column_state = Kept.column_state, Kept.load_column_state  # a class says this for itself

    def step(self, *inputs: Any) -> AgentStep:
        action, info = super().step(*(each[:, 0] for each in inputs))
        n = inputs[0].shape[1]
        return AgentStep(np.repeat(action[:, None], n, 1), NamedArrays(own=np.repeat(info["own"][:, None], n, 1)))

    def value(self, *inputs: Any) -> Any:
        return np.zeros(inputs[0].shape[:2], np.float32)


def test_a_joint_agent_continues() -> None:
    options = {"env_kwargs": {"k": 2, "script": [{}] * 10}}
    _, report = continued(SerialSampler, two, at_start=lambda: {"agent": Pair()}, **options)
    assert report.exact == tuple(range(B))


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


@pytest.mark.parametrize("env_fn", [Unsaved, Stateful])
def test_agents_of_a_game_that_begins_again_are_told_from_those_before(env_fn: Any) -> None:
    """a0 ends in the first step. The game that cannot be saved begins again, and has a number of its own then."""
    make, found = partial(env_fn, 2, [{"a0": "die"}, *[{}] * 9]), list[Any]()
    state: Any = None
    for itr in range(2):
        with SerialSampler(make, batch_T=6, batch_B=1, max_decorrelation_steps=0) as sampler:
            sampler.initialize(Kept(), seed=SEED)
            if state:
                sampler.load_state_dict(state)
            found += [(info.number, info.agent_id) for info in sampler.obtain_samples(itr)[1]]
            state = sampler.state_dict()
    goes_on = [(0, "a0"), (0, "a1"), (0, None), (1, "a0")]
    assert found == ([(0, "a0"), (1, "a0")] if env_fn is Unsaved else goes_on)


class Forgetful(ScriptedGame):
    """Its copy has another random generator."""

    def __getstate__(self) -> Any:
        return {**vars(self), "np_random": np.random.default_rng(3)}


@pytest.mark.parametrize("n_policies", [1, 2])
def test_a_game_that_lists_who_has_ended_continues(n_policies: int) -> None:
    make = partial(Ghosts, script=[{"a1": "die"}, {}, {"a0": "cut"}, {}, {}])
    assert continued(two, SerialSampler, make, partial(split_agents, n_policies, Kept))[1].exact == tuple(range(B))


def test_the_proof_works_for_games() -> None:
    assert check_env_state(ScriptedGame) == "pickle"
    assert check_env_state(Stateful) == "get_state"
    assert check_env_state(partial(ScriptedGame, mask=True)) == "pickle"
    for env_fn, message in (
        (Unsaved, "it has a socket"),
        (Forgetful, "does not continue alike after it was saved and loaded: observation of step"),
        (TurnGame, "a game in turns has decisions"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_env_state(env_fn)


@pytest.mark.slow
def test_what_observations_get_beside_their_own_continues() -> None:
    continued(SerialSampler, two, at_start=lambda: {"agent": RandomAgent()}, env_kwargs=None, global_state=True)
    masked = partial(RandomAgent, mask_key="info.action_mask")
    continued(SerialSampler, two, at_start=lambda: {"agent": masked()}, env_kwargs={"mask": True})
