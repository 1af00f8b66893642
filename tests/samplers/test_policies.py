"""Several policies in one environment: who plays whom, whose columns are whose, and what each of them sees."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    Sampler,
    SerialSampler,
    SpaceError,
    StaleSamplesError,
)
from penstock.buffers import PolicySamples
from penstock.envs.toy import CountingEnv, ScriptedGame
from penstock.learning import Replay

from ..support import assert_same, collect_with
from ..toy_games import Book, Numbered, Published, Roles, Valued, odd_or_even
from .started import check_refused, started

MIXED = [{"k": k} for k in (4, 2, 5, 3, 4)]


def by_env(agent_id: str, env_rank: int) -> str:
    """The first agent is another policy's in every second environment."""
    return "odd" if env_rank % 2 and agent_id == "a0" else "even"


def two(cls: type[Any] = Book) -> dict[str, Any]:
    return {"even": cls(), "odd": cls()}


# ---- the batch ---------------------------------------------------------------------------------


def test_a_batch_has_the_samples_of_each_policy() -> None:
    options: dict[str, Any] = {"debug": True, "policy_of": odd_or_even, "bootstrap_value": True}
    with started(ScriptedGame, two(Valued), batch_T=6, batch_B=3, **options) as sampler:
        assert set(sampler.observation_space) == set(sampler.action_space) == {"even", "odd"}
        assert sampler.seats() == {
            "even": [(rank, agent) for rank in range(3) for agent in ("a0", "a2")],
            "odd": [(rank, "a1") for rank in range(3)],
        }
        for itr in range(3):
            samples, _ = sampler.obtain_samples(itr)
            assert isinstance(samples, PolicySamples)
            assert (samples.batch, samples.is_current, samples.valid_until) == (itr, True, itr + 1)
            assert samples.even.env.reward.shape == (6, 6)
            assert samples.odd.env.reward.shape == (6, 3)
            for own in samples.values():
                assert len(own.flatten().env.reward) == int(own.env.valid.sum())
        copied = samples.copy()
        sampler.obtain_samples(3)
        assert not samples.is_current
        for name in ("even", "odd"):
            with pytest.raises(StaleSamplesError, match="batch 2 was used after its memory was given back"):
                _ = samples[name].env.reward
        assert (copied.batch, copied.is_current) == (None, True)
        assert copied.odd.env.valid.any()


@pytest.mark.slow
def test_the_columns_of_an_environment_can_be_seen_together() -> None:
    options: dict[str, Any] = {"env_kwargs": {"k": 5}, "policy_of": odd_or_even, "n_workers": 2}
    with started(ScriptedGame, two(), ParallelSampler, batch_T=6, batch_B=3, **options) as sampler:
        samples, _ = sampler.obtain_samples(0)
        assert [worker.steps for worker in sampler.stats().workers] == [12, 6]
        even, odd = samples.even.by_env(), samples.odd.by_env()
        assert (even.env.reward.shape, odd.env.reward.shape) == ((6, 3, 3), (6, 3, 2))
        for column, (rank, agent_id) in enumerate(sampler.seats()["even"]):
            seat = ("a0", "a2", "a4").index(agent_id)
            assert (even.env.observation[:, rank, seat] == samples.even.env.observation[:, column]).all()


@pytest.mark.slow
def test_a_worker_may_have_no_seat_of_a_policy() -> None:
    def alone(agent_id: str, env_rank: int) -> str:
        return "odd" if (agent_id, env_rank) == ("a1", 4) else "even"

    wanted = collect_with(SerialSampler, ScriptedGame, two(), policy_of=alone, env_kwargs=MIXED)
    assert wanted[0][0].odd.env.reward.shape == (9, 1)
    for n_workers in (2, 5):
        found = collect_with(
            ParallelSampler, ScriptedGame, two(), policy_of=alone, env_kwargs=MIXED, n_workers=n_workers
        )
        assert_same(wanted, found)


def test_env_rank_is_that_of_all_machines() -> None:
    seen: list[int] = []

    def note(agent_id: str, env_rank: int) -> str:
        seen.append(env_rank)
        return by_env(agent_id, env_rank)

    with started(ScriptedGame, two(), batch_B=3, policy_of=note, rank=1, world_size=2) as sampler:
        assert set(seen) == {3, 4, 5}
        assert sampler.seats()["odd"] == [(3, "a0"), (5, "a0")]
        _, infos = sampler.obtain_samples(0)
        assert {info.env_rank for info in infos} <= {3, 4, 5}


# ---- parameters --------------------------------------------------------------------------------


def learner_and_frozen() -> dict[str, Any]:
    return {"learner": Published(), "frozen": Published()}


PLAYS: dict[str, Any] = {"policy_of": lambda agent_id: "learner" if agent_id == "a0" else "frozen"}


@pytest.mark.parametrize("cls", [ParallelSampler, SerialSampler, AsyncSampler])
def test_a_frozen_opponent_stays_as_it_is(cls: type[Sampler]) -> None:
    agents = learner_and_frozen()
    agents["frozen"].number = np.array(2)
    with started(ScriptedGame, agents, cls, batch_T=2, **PLAYS) as sampler:
        for itr in range(30):
            samples, _ = sampler.obtain_samples(itr)
            for name, own in samples.items():
                version, valid = own.agent.policy_version, own.env.valid
                number = 2 if name == "frozen" else version[valid] - 1
                assert (own.agent.agent_info.number[valid] == number).all()
                assert (own.agent.action[valid] == number % 3).all()
                newest = 1 if name == "frozen" else itr + 1
                assert version.max() == newest or (cls is AsyncSampler and version.max() < newest)
            assert sampler.policy_version["frozen"] == 1
            agents["learner"].publish()
        assert samples.learner.agent.policy_version.min() > 10


def test_a_policy_that_is_never_published_is_named() -> None:
    agents = learner_and_frozen()
    with started(ScriptedGame, agents, batch_T=2, **PLAYS) as sampler:
        for itr in range(5):
            sampler.obtain_samples(itr)
            agents["learner"].number = np.array(itr + 1)
        with pytest.warns(RuntimeWarning, match=r"call agents\['learner'\]\.sync_shared_memory\(\)"):
            sampler.obtain_samples(5)
        sampler.obtain_samples(6)


# ---- trajectories and figures ------------------------------------------------------------------


@pytest.mark.parametrize("names", [("agent",), ("even", "odd")], ids=len)
def test_figures_are_told_apart_by_policy(names: tuple[str, ...]) -> None:
    options = {"agent": Book()} if len(names) == 1 else {"agent": two(), "policy_of": odd_or_even}
    with started(ScriptedGame, batch_T=40, batch_B=3, eval_n_envs=2, eval_episodes=10, **options) as sampler:
        before = sampler.metrics()
        infos, n_cells = [], 0
        for itr in range(2):
            infos += sampler.obtain_samples(itr)[1]
            samples = sampler.samples_np.values() if len(names) > 1 else [sampler.samples_np]
            n_cells += sum(int(own.env.valid.sum()) for own in samples)
        evaluated = sampler.evaluate_agent(2)
        figures = sampler.metrics()
        assert figures.keys() == before.keys()
        assert all(isinstance(value, float) for value in figures.values())
        assert figures["sampler/env_steps"] == 2 * 40 * 3
        assert figures["sampler/agent_steps"] == n_cells
        versions = [""] if len(names) == 1 else [f"/{name}" for name in names]
        assert [figures[f"sampler/policy_version{name}"] for name in versions] == [1] * len(names)
        for group, own in (("train", infos), ("eval", evaluated)):
            for name in (None, *names):
                returns = [info.Return for info in own if info.policy == name][-100:]
                prefix = f"{group}/{name}/" if name else f"{group}/"
                assert figures[f"{prefix}trajectories"] == len(returns) > 3
                assert figures[f"{prefix}Return_mean"] == pytest.approx(sum(returns) / len(returns))
                assert figures[f"{prefix}Return_max"] == max(returns)


# ---- evaluation --------------------------------------------------------------------------------


def test_evaluation_may_have_other_agents() -> None:
    options: dict[str, Any] = {"eval_env_kwargs": {"k": 1}, "eval_n_envs": 2, "eval_episodes": 6}
    with started(ScriptedGame, two(), policy_of=odd_or_even, **options) as sampler:
        assert {info.policy for info in sampler.evaluate_agent(0)} == {"even", None}
        sampler.obtain_samples(0)
        assert sampler.samples_np.odd.env.valid.any()


def test_an_evaluation_that_is_too_short_says_how_many_games_are_missing() -> None:
    agents = {name: RandomAgent() for name in ("a0", "a1", "a2")}
    options: dict[str, Any] = {"eval_n_envs": 2, "eval_episodes": 20, "eval_max_steps": 60}
    with started(ScriptedGame, agents, batch_B=1, **options) as sampler:
        assert sampler.seats() == {name: [(0, name)] for name in agents}, "ids are the names by default"
        with pytest.warns(RuntimeWarning, match=r"of 20") as told:
            infos = sampler.evaluate_agent(0)
        n_games = sum(info.agent_id is None for info in infos)
        assert 0 < n_games < 20
        assert str(n_games) in str(told[0].message) or str(20 - n_games) in str(told[0].message)


# ---- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agents", "policy_of", "message"),
    [
        ({}, None, "the dict of agents is empty"),
        (
            {"a0": RandomAgent()},
            None,
            r"policy_of returned 'a1' for env_rank 0, agent 'a1', .*\['a0'\]: give policy_of",
        ),
        (two(RandomAgent), lambda agent: "both", r"policy_of returned 'both' for env_rank 0, agent 'a0', but the "),
        (two(RandomAgent), lambda agent: 1 / 0, "policy_of raised ZeroDivisionError: .* for env_rank 0, agent 'a0'"),
        (two(RandomAgent), lambda agent, rng: "odd", "policy_of with game or rng and agents that all act in each"),
        (two(RandomAgent), "odd", "policy_of must be a function of agent_id, got 'odd'"),
        (two(RandomAgent), lambda agent: "odd", "no agent of the training environments has the policy 'even'"),
        (RandomAgent(), odd_or_even, "policy_of needs a dict of agents"),
        *(
            ({name: RandomAgent()}, None, f"a policy cannot be called {name!r}")
            for name in ("a b", "_a", "class", "keys", "batch", 3)
        ),
        (dict.fromkeys(("odd", "even"), RandomAgent()), odd_or_even, "two policies have the same agent"),
        ({"odd": RandomAgent(), "even": 3}, odd_or_even, r"agent must be a penstock Agent \(wrap a model.*, got 3"),
    ],
)
def test_wrong_policies_are_refused(agents: Any, policy_of: Any, message: str) -> None:
    check_refused(ScriptedGame, message, agents, policy_of=policy_of)


SERVER = "several policies and an inference server .* do not go together: each of these serves one"


@pytest.mark.parametrize(
    ("cls", "kwargs", "message"),
    [
        (GpuSampler, {}, SERVER),
        (AlternatingSampler, {"n_workers": 2}, SERVER),
        (AsyncSampler, {"server": "process"}, SERVER),
        (AsyncSampler, {"lag": 1}, r"several policies and AsyncSampler\(lag=1\) do not go together"),
        (AsyncSampler, {"replay": Replay(100)}, "several policies and a replay into which workers write do not go"),
        (
            SerialSampler,
            {"env_kwargs": {"k": 1}, "eval_env_kwargs": {"k": 2}, "eval_n_envs": 1},
            "no agent of the training environments has the policy 'odd'",
        ),
    ],
)
def test_several_policies_are_refused_by(cls: type[Any], kwargs: dict[str, Any], message: str) -> None:
    check_refused(ScriptedGame, message, two(), cls=cls, policy_of=odd_or_even, **kwargs)


def test_one_policy_for_unlike_spaces_names_both_agents_and_their_spaces() -> None:
    message = "env_rank 0, agent 'a0' and env_rank 0, agent 'a1' have the same policy"
    told = check_refused(Roles, message, error=SpaceError)
    assert all(part in told for part in ("(5,)", "(4,)", "policy_of"))


def test_what_is_for_several_agents_is_refused_for_one() -> None:
    for agents, options, name in (
        ({"one": RandomAgent()}, {}, "a dict of agents"),
        (RandomAgent(), {"policy_of": odd_or_even}, "policy_of"),
        (RandomAgent(), {"global_state": True}, "global_state=True"),
    ):
        check_refused(CountingEnv, f"^{name} is for environments of several agents", agents, **options)
    with started(CountingEnv) as sampler:
        with pytest.raises(ConfigError, match="seats is for environments of several agents"):
            sampler.seats()
        samples, _ = sampler.obtain_samples(0)
        with pytest.raises(ConfigError, match="by_env needs the same number of agents"):
            samples.by_env()


def test_integers_need_a_policy_of() -> None:
    message = r"policy_of returned '7' for env_rank 0, agent 7, but .*: give policy_of"
    check_refused(Numbered, message, {"odd": RandomAgent()})
    with started(Numbered, two(RandomAgent), policy_of=lambda i: "odd" if i % 2 else "even") as sampler:
        assert sampler.seats() == {"odd": [(0, 7), (0, 1), (1, 7), (1, 1)], "even": [(0, 4), (1, 4)]}
        samples, _ = sampler.obtain_samples(0)
        who = samples.odd.env.observation.who.numpy()
        assert (who == np.where(samples.odd.env.valid, [7, 1, 7, 1], 0)).all()


def test_an_asynchronous_sampler_notes_the_version_of_each_policy() -> None:
    agents = {"even": Published(), "odd": Published()}
    with AsyncSampler(ScriptedGame, batch_T=5, batch_B=4, n_workers=2) as sampler:
        sampler.initialize(agents, policy_of=odd_or_even, seed=0)
        sampler.start()
        for itr in range(20):
            samples, _ = sampler.obtain_samples(itr)
            assert (samples.odd.agent.policy_version == 1).all()
            version, number = samples.even.agent.policy_version, samples.even.agent.agent_info.number
            assert (number == torch.where(samples.even.env.valid, version - 1, 0)).all()
            assert sampler.policy_version["odd"] == 1
            agents["even"].publish()
        assert version.min() > 10


def test_late_rewards_are_counted_for_all_policies(caplog: pytest.LogCaptureFixture) -> None:
    script = [{"a0": "die"}, {"a0": "late"}, {"a0": "late", "a1": "late"}]
    env_fn = partial(ScriptedGame, 2, script)
    with SerialSampler(env_fn, batch_T=6, batch_B=1, max_decorrelation_steps=0) as sampler:
        sampler.initialize(two(), policy_of=odd_or_even, seed=0)
        with caplog.at_level(logging.WARNING, logger="penstock"):
            _, infos = sampler.obtain_samples(0)
        assert sampler.stats().late_rewards == 4  # a1 is there: its event does nothing
        games = [info for info in infos if info.agent_id is None]
        agents = [info for info in infos if info.agent_id is not None]
        assert sum(info.Return for info in games) == sum(info.Return for info in agents) + 4 * 0.5
