"""Workers with environments of several agents die, hang or raise: what the error says, and what a restart loses."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import (
    AgentStep,
    ParallelSampler,
    SamplerBrokenError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.envs.toy import ScriptedGame
from penstock.testing import Fault
from penstock.testing.faults import Trigger

from ..scale import pairs, scaled, with_start_methods
from ..support import Follower, check_rules
from ..toy_games import Book, TurnGame, Valued
from .support import ERROR_SECONDS, generator, killer, note

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]

N_WORKERS, B, T, K = 3, 6, 12, 3


class FaultyGame(ScriptedGame):
    """Has a fault at one call of `where`."""

    def __init__(self, fault: Fault | None = None, where: str = "step", **kwargs: Any) -> None:
        super().__init__(k=K, **kwargs)
        self._trigger, self._where = None if fault is None else Trigger(fault), where

    def step(self, actions: dict[str, Any]) -> Any:
        if self._trigger is not None and self._where == "step":
            self._trigger.call()
        return super().step(actions)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if self._trigger is not None and self._where == "reset":
            self._trigger.call()
        return super().reset(seed, options)


class FaultyPolicy(Valued):
    def __init__(self, fault: Fault, where: str = "step") -> None:
        super().__init__()
        self._trigger, self._where, self._is_acting = Trigger(fault), where, False

    def step(self, observation: Any, prev_action: Any, prev_reward: Any) -> AgentStep:
        if self._where == "step":
            self._trigger.call()
        self._is_acting = True
        try:
            return super().step(observation, prev_action, prev_reward)
        finally:
            self._is_acting = False

    def value(self, observation: Any, prev_action: Any, prev_reward: Any) -> Any:
        if self._where == "value" and not self._is_acting:
            self._trigger.call()
        return super().value(observation, prev_action, prev_reward)


HOWS: dict[str, tuple[type[SamplerBrokenError], str]] = {
    "raise": (WorkerError, "raised .*InjectedFault"),
    "kill": (WorkerDiedError, r"was killed by SIGKILL"),
    "exit": (WorkerDiedError, "exited with code 0"),
    "hang": (WorkerTimeoutError, r"no progress"),
}


def places(*where: str) -> list[str]:
    """Such as "kill in step". At full scale, every kind of failure in every place."""
    return [f"{how} in {place}" for how, place in pairs(HOWS, where)]


def fault(how: str, at: int = 3, marker: Path | None = None) -> Fault:
    return Fault(how, at, marker=None if marker is None else str(marker), spare_pid=os.getpid())


def kinds(agent_id: str) -> str:
    return "one" if agent_id == "a0" else "two"


def game_sampler(env_fns: Any, cls: Any = ParallelSampler, **kwargs: Any) -> Any:
    arguments = {"batch_T": T, "batch_B": B, "n_workers": N_WORKERS, "max_decorrelation_steps": 0, **kwargs}
    return cls(env_fns, **arguments)


@with_start_methods("what", places("step", "value"))
def test_the_policy_that_was_acting_is_named(what: str, start_method: str) -> None:
    how, where = what.split(" in ")
    error, message = HOWS[how]
    limit = {"step_timeout": 1.0} if how == "hang" else {}
    agents = {"one": Valued(), "two": FaultyPolicy(fault(how, 4 if where == "step" else 2), where)}
    with game_sampler(ScriptedGame, start_method=start_method, **limit) as sampler:
        sampler.initialize(agents, policy_of=kinds, seed=0, bootstrap_value=True)
        with pytest.raises(error, match=message) as told:
            for itr in range(3):
                sampler.obtain_samples(itr)
        assert "acting by the policy 'two'" in str(told.value)


# ---- restarts ----------------------------------------------------------------------------------


def parts(samples: Any) -> dict[str, Any]:
    return {"agent": samples} if hasattr(samples, "env") else dict(samples.items())


def batches_with_restarts(
    env_fns: Any, n: int, *, several: bool, **kwargs: Any
) -> tuple[list[dict[str, Any]], Any, int]:
    """Copies of `n` batches by policy, the seats, and how often a worker was replaced."""
    agents: Any = {"one": Book(), "two": Book()} if several else Book()
    with game_sampler(env_fns, on_worker_failure="restart", max_restarts=1000, **kwargs) as sampler:
        sampler.initialize(agents, policy_of=kinds if several else None, seed=4, bootstrap_value=True)
        found = []
        for itr in range(n):
            _, infos = sampler.obtain_samples(itr)
            own = parts(sampler.samples_np)
            found.append({name: part.copy() for name, part in own.items()})
            for part in own.values():
                check_rules(part)
            assert sum(info.agent_id is not None for info in infos) == sum(int(p.env.done.sum()) for p in own.values())
        return found, sampler.seats(), sampler.stats().restarts


@pytest.mark.parametrize(("how", "several"), pairs(["kill", "raise", "hang"], [True, False]))
def test_a_restart_touches_only_the_columns_of_its_worker(how: str, several: bool, tmp_path: Path) -> None:
    wanted, seats, restarts = batches_with_restarts(FaultyGame, 5, several=several)
    assert restarts == 0
    env_fns = [FaultyGame] * B
    env_fns[3] = partial(FaultyGame, fault(how, T * 2 + 5, tmp_path / "marker"))
    limit = {"step_timeout": 1.0} if how == "hang" else {}
    found, _, restarts = batches_with_restarts(env_fns, 5, several=several, **limit)
    assert restarts == 1
    lost = (2, 3)  # the environments of worker 1
    differs = set()
    for itr, (one, other) in enumerate(zip(wanted, found, strict=True)):
        for policy, part in one.items():
            for (name, left), (_, right) in zip(part.leaves(), other[policy].leaves(), strict=True):
                at = int(not name.split(".")[1].startswith("bootstrap"))  # the dimension of the columns
                for b, (rank, _) in enumerate(seats[policy]):
                    if not np.array_equal(np.take(left, b, at), np.take(right, b, at)):
                        assert rank in lost, f"{name} of {rank}, batch {itr}"
                        assert itr >= 2
                        differs.add((itr, policy, rank))
    assert {rank for _, _, rank in differs} == {2, 3}
    assert {policy for _, policy, _ in differs} == set(wanted[0])
    for policy, part in found[2].items():  # new games, from the first row on
        columns = [b for b, (rank, _) in enumerate(seats[policy]) if rank in lost]
        starts, valid = part.env.prev_done[0, columns], part.env.valid[0, columns]
        assert (starts == valid).all()


@pytest.mark.parametrize("several", [False, True])
def test_workers_may_be_killed_at_any_moment(several: bool) -> None:
    agents: Any = {"one": Book(), "two": Book()} if several else Book()
    rng = generator("seats", several)
    n_batches = scaled(400, 30)
    with (
        killer() as kill,
        game_sampler(
            ScriptedGame,
            env_kwargs=[{"k": k} for k in (4, 2, 5, 3, 4, 2)],
            on_worker_failure="restart",
            max_restarts=10**6,
        ) as sampler,
    ):
        sampler.initialize(agents, policy_of=kinds if several else None, seed=4, bootstrap_value=True)
        seats = sampler.seats()
        ended = 0
        for itr in range(n_batches):
            is_hit = itr % 3 == 1
            if is_hit:
                kill.kill([rng.choice(sampler.worker_pids)], rng.random() * 0.004)
            _, infos = sampler.obtain_samples(itr)
            if is_hit:
                kill.when()
            own = parts(sampler.samples_np)
            expected = []
            for name, part in own.items():
                check_rules(part)
                expected += [(int(t), *seats[name][b]) for t, b in np.argwhere(part.env.done)]
            told = [(info.env_rank, info.agent_id) for info in infos if info.agent_id is not None]
            assert told == [(rank, agent_id) for _, rank, agent_id in sorted(expected)]
            ended += len(told)
        assert sampler.stats().restarts >= 5
        assert ended > 100


def test_lengths_are_right_after_restarts(tmp_path: Path) -> None:
    """A trajectory that a restart cuts is not reported, and none contains parts of two."""
    env_fns = [FaultyGame] * B
    env_fns[0] = partial(FaultyGame, fault("kill", T + 5, tmp_path / "marker"))
    with game_sampler(env_fns, on_worker_failure="restart") as sampler:
        sampler.initialize(Book(), seed=4)
        follower = Follower(sampler.seats()["agent"])
        for itr in range(6):
            _, infos = sampler.obtain_samples(itr)
            found = follower.follow(sampler.samples_np)
            assert [(i.env_rank, i.agent_id, i.Length, i.Return) for i in infos if i.agent_id is not None] == found
        assert sampler.stats().restarts == 1


# ---- games in turns ----------------------------------------------------------------------------


class FaultyTurns(TurnGame):
    """Has a fault at one call of `where`."""

    def __init__(self, fault: Fault | None = None, where: str = "step") -> None:
        super().__init__(2)
        self._trigger, self._where = None if fault is None else Trigger(fault), where

    def _call(self, where: str) -> None:
        if self._trigger is not None and self._where == where:
            self._trigger.call()

    def step(self, action: Any) -> None:
        self._call("step")
        super().step(action)

    def last(self, observe: bool = True) -> Any:
        self._call("last")
        return super().last(observe)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self._call("reset")
        super().reset(seed, options)


def seat(agent_id: str, env_rank: int, episode: int, rng: np.random.Generator) -> str:
    return "one" if rng.random() < 0.6 else "two"


@with_start_methods("what", places("step", "last", "reset"))
def test_the_game_in_turns_that_failed_is_named(what: str, start_method: str) -> None:
    how, where = what.split(" in ")
    at = generator("turns", how, where).randint(3, 8)
    env_fns: Any = [FaultyTurns] * B
    env_fns[3] = partial(FaultyTurns, fault(how, at), where)
    error, message = HOWS[how]
    limit = {"step_timeout": 1.0} if how == "hang" else {}
    with game_sampler(env_fns, start_method=start_method, **limit) as sampler:
        sampler.initialize(Valued(), seed=0)
        began = time.monotonic()
        with pytest.raises(error, match=message) as told:
            for itr in range(20):
                began = time.monotonic()
                sampler.obtain_samples(itr)
        took = time.monotonic() - began
        assert f"{'resetting' if where == 'reset' else 'stepping'} env_rank 3, t=" in str(told.value)
        note(f"turns, {how}", took - limit.get("step_timeout", 0), 2 * ERROR_SECONDS)


@pytest.mark.parametrize(("how", "record"), pairs(HOWS, [None, ["one"]]))
def test_the_policy_that_was_acting_in_turns_is_named(how: str, record: Any) -> None:
    """Also if it is not recorded."""
    error, message = HOWS[how]
    limit = {"step_timeout": 1.0} if how == "hang" else {}
    agents = {"one": Valued(), "two": FaultyPolicy(fault(how, generator("turn policy", how).randint(3, 29)))}
    with game_sampler(FaultyTurns, **limit) as sampler:
        sampler.initialize(agents, policy_of=seat, record=record, seed=0)
        with pytest.raises(error, match=message) as told:
            for itr in range(20):
                sampler.obtain_samples(itr)
        assert "acting by the policy 'two'" in str(told.value)


def check_turns(samples: Any) -> None:
    """Valid rows are a prefix of each column, and each episode in it has all its decisions, one after the other."""
    env = samples.env
    valid, own = env.valid, env.observation[..., 2]
    assert (valid[:-1] >= valid[1:]).all()
    np.testing.assert_array_equal(env.prev_done, valid & (own == 0))
    goes_on = valid[1:] & ~env.done[:-1]
    np.testing.assert_array_equal(own[1:][goes_on], own[:-1][goes_on] + 1)
    assert not env.prev_done[1:][goes_on].any()
    assert not env.reward[~valid].any()
    assert not samples.agent.action[~valid].any()


@pytest.mark.parametrize("record", [None, ["one"]])
def test_workers_of_games_in_turns_may_be_killed_at_any_moment(record: Any) -> None:
    rng, n_batches, ended, games = generator("turns", str(record)), scaled(400, 30), 0, 0
    with (
        killer() as kill,
        game_sampler(partial(TurnGame, 2), on_worker_failure="restart", max_restarts=10**6) as sampler,
    ):
        agents = {"one": Book(), "two": Book()}
        sampler.initialize(agents, policy_of=seat, record=record, seed=4)
        for itr in range(n_batches):
            is_hit = itr % 3 == 1
            if is_hit:
                kill.kill([rng.choice(sampler.worker_pids)], rng.random() * 0.004)
            _, infos = sampler.obtain_samples(itr)
            if is_hit:
                kill.when()
            own = parts(sampler.samples_np)
            for name, part in own.items():
                check_turns(part)
                assert sum(info.policy == name for info in infos) == part.env.done.sum()
            if record is None:  # one seat of each environment has all rows: of one policy, or of the two together
                n = sum(part.env.valid.sum(0) for part in own.values())
                assert (n.reshape(B, 2).max(1) >= T).all()
            ended += sum(info.agent_id is not None for info in infos)
            games += sum(info.agent_id is None for info in infos)
        assert sampler.stats().restarts >= 5
        assert ended > games > 50


@pytest.mark.parametrize("kind", ["raise", "exit", "kill", "hang"])
def test_a_failed_worker_of_games_in_turns_is_replaced(kind: str, tmp_path: Path) -> None:
    """Only its columns differ, in the batch of the failure and later."""
    at = generator("replaced", kind).randint(30, 79)
    kwargs: Any = [{"fault": fault(kind, at, tmp_path / "once")} if rank == 3 else {} for rank in range(6)]
    found = []
    restart: Any = {"on_worker_failure": "restart", "step_timeout": 1.0 if kind == "hang" else None}
    for env_kwargs, options in (([{}] * 6, {}), (kwargs, restart)):
        with game_sampler(FaultyTurns, env_kwargs=env_kwargs, **options) as sampler:
            sampler.initialize(Valued(), seed=4, bootstrap_value=True)
            found.append([sampler.obtain_samples(itr)[0].copy().numpy() for itr in range(8)])
            assert sampler.stats().restarts == (1 if options else 0)
    own, others, differs = slice(4, 8), [0, 1, 2, 3, 8, 9, 10, 11], False
    for one, other in zip(*found, strict=True):
        for name, *pair in ((name, x, y) for (name, x), (_, y) in zip(one.leaves(), other.leaves(), strict=True)):
            left, right = (each[None] if name.split(".")[1].startswith("bootstrap") else each for each in pair)
            np.testing.assert_array_equal(left[:, others], right[:, others], err_msg=name)
            differs |= not np.array_equal(left[:, own], right[:, own])
        assert other.env.valid.all(0).reshape(6, 2).any(1).all(), "one seat of each environment has all rows"
    assert differs
