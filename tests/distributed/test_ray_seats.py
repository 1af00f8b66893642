"""RaySampler of environments with several agents: the batches and the trajectories of one machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

import ray

from penstock import ConfigError, GpuSampler, ParallelSampler, RandomAgent, SerialSampler
from penstock.buffers import PolicySamples
from penstock.distributed import RaySampler
from penstock.envs import ScriptedGame
from tests.support import EVALUATING, assert_same, collect_with
from tests.toy_games import Book, Published, TurnGame, Valuing, odd_or_even

from ..scale import scaled

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # shards cannot import what is here

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(180), pytest.mark.slow]


def alone(agent_id: str, env_rank: int) -> str:
    """The first shards have no seat of the policy "odd"."""
    return "odd" if (agent_id, env_rank) == ("a1", 6) else "even"


def drawn(agent_id: str, env_rank: int, rng: np.random.Generator) -> str:
    return "even" if rng.random() < 0.3 + 0.1 * env_rank else "odd"


def two(cls: type[Any] = Book) -> dict[str, Any]:
    return {"even": cls(), "odd": cls()}


# Shards have different numbers of agents, so the keys of their records must be of one kind.
GAMES: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (3, 4, 2, 3, 1, 5, 3)]}
TURNS: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (3, 2, 1, 4, 2, 3, 2)]}
COUNTED = {"eval_episodes": 6, "eval_max_steps": 2_000}
#: An environment, agents, options, and options of the shards. A shard may have no seat of a policy, or of any that is
#: recorded. The largest game in turns is in one shard: the seats of all shards are numbered with it.
ROWS: dict[str, tuple[Any, Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "one policy": (ScriptedGame, RandomAgent, {**GAMES, "global_state": True, **COUNTED}, {}),
    "two policies": (ScriptedGame, two, {**GAMES, "policy_of": odd_or_even}, {"sampler_cls": ParallelSampler}),
    "a lonely seat": (ScriptedGame, two, {**GAMES, "policy_of": alone, "n_slots": 2}, {}),
    "only it is recorded": (ScriptedGame, two, {**GAMES, "policy_of": alone, "record": ["odd"]}, {}),
    "turns": (TurnGame, Valuing, {**TURNS, **COUNTED}, {}),
    "turns, two policies": (
        TurnGame,
        partial(two, Valuing),
        {**TURNS, "policy_of": drawn, "eval_env_kwargs": {"k": 4}},
        {"sampler_cls": ParallelSampler},
    ),
}


@pytest.mark.parametrize("n_shards", scaled([1, 2, 3], [3]))
@pytest.mark.parametrize("row", ROWS)
def test_seats_and_policies_of_shards_are_those_of_one_machine(row: str, n_shards: int) -> None:
    """Rows, open decisions, values after the last row, and the numbers of the games."""
    env_fn, make_agents, own, of_shards = ROWS[row]
    options = {"batch_B": 7, **EVALUATING, **own}
    wanted = collect_with(ParallelSampler, env_fn, make_agents(), n_workers=2, **options)
    options |= {"n_workers": 1, "n_shards": n_shards, "sampler_cls": SerialSampler, **of_shards}
    assert_same(wanted, collect_with(RaySampler, env_fn, make_agents(), **options), but="policy_version")
    batches = [batch for batch, _ in wanted if batch is not None]
    seen = {info.get("agent_id") for _, infos in wanted for info in infos}
    assert ("a4" if env_fn is ScriptedGame else "a3") in seen, "the largest game"
    policies = options.get("record", ["even", "odd"]) if "policy_of" in own else [None]
    for policy in policies:
        valid = [(batch if policy is None else batch[policy]).env.valid for batch in batches]
        assert sum(each.sum() for each in valid) > 10
        assert not all(each.all() for each in valid)


def test_pieces_of_a_stream_have_the_seats_of_their_shard() -> None:
    with RaySampler(ScriptedGame, batch_T=20, batch_B=4, n_shards=2, n_workers=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for piece, _ in zip(sampler.stream(), range(4), strict=False):
            assert piece.samples.by_env().env.reward.shape == (20, 2, 3)
            assert {info.env_rank for info in piece.traj_infos} <= set(piece.env_ranks)
        assert sampler.stats().late_rewards > 0
        assert sampler.metrics()["sampler/agent_steps"] > 0


def test_each_policy_has_its_own_parameters() -> None:
    """They are sent when they are new: those of a frozen opponent never again."""
    agents: dict[str, Any] = two(Published)
    agents["odd"].number = np.array(2)
    with RaySampler(ScriptedGame, batch_T=3, batch_B=2, n_shards=2, n_workers=1) as sampler:
        sampler.initialize(agents, policy_of=odd_or_even, seed=0)
        before = sampler.metrics()
        for itr in range(4):
            samples, _ = sampler.obtain_samples(itr)
            assert isinstance(samples, PolicySamples)
            assert sampler.policy_version == {"even": itr + 1, "odd": 1}
            for name, number in (("even", itr), ("odd", 2)):
                own = samples[name]
                assert (own.agent.policy_version == sampler.policy_version[name]).all()
                assert (own.agent.agent_info.number[own.env.valid] == number).all()
            agents["even"].publish()
        assert sampler.stats().parameter_puts == 3
        figures = sampler.metrics()
        assert figures.keys() == before.keys()
        assert (figures["sampler/policy_version/even"], figures["sampler/policy_version/odd"]) == (4, 1)
        assert figures["sampler/agent_steps"] > 0
        agents["odd"].publish()
        pieces, versions = [], []
        for piece in sampler.stream(max_staleness=None):
            pieces.append(piece)
            number, valid = piece.samples.odd.agent.agent_info.number, piece.samples.odd.env.valid
            assert (number[valid] == piece.policy_version["odd"] + 1).all()
            assert piece.samples.odd.by_env().env.reward.shape == (3, 1, 1)
            assert piece.samples.even.by_env().env.reward.shape == (3, 1, 2)
            assert piece.staleness == len(versions) - (piece.policy_version["even"] - 5)
            versions.append(piece.policy_version)
            if len(pieces) == 12:
                break
            agents["even"].publish()
        assert versions[-1]["odd"] == 2
        assert sampler.policy_version == versions[-1]


def test_a_lost_shard_loses_the_seats_of_all_policies() -> None:
    with RaySampler(ScriptedGame, batch_T=20, batch_B=3, n_shards=2, n_workers=1, on_node_failure="restart") as sampler:
        agents: dict[str, Any] = two(Published)
        sampler.initialize(agents, policy_of=odd_or_even, seed=0)
        sampler.obtain_samples(0)
        for agent in agents.values():
            agent.publish()
        ray.kill(sampler.run.pool.shards[1].actor)  # type: ignore[union-attr]
        samples, _ = sampler.obtain_samples(1)
        for name, n in (("even", 6), ("odd", 3)):
            own = samples[name]
            assert own.env.valid.shape == (20, n)
            assert own.env.valid[:, -n // 3 :].any(), "the columns of the new shard"
            assert (own.agent.agent_info.number[own.env.valid] == 1).all(), "the new shard has the newest of both"
        assert sampler.stats().shards[1].lost_trajectories == 3


def test_policy_of_can_be_changed_while_games_run() -> None:
    options: dict[str, Any] = {"batch_T": 10, "batch_B": 4, "n_shards": 2, "n_workers": 1}
    with RaySampler(partial(TurnGame, 2), **options) as sampler:
        sampler.initialize(two(RandomAgent), policy_of=lambda agent_id, episode: "even", seed=0)
        running = [0] * 4
        for info in sampler.obtain_samples(0)[1]:
            if info.agent_id is None:
                running[info.env_rank] = info.episode + 1
        sampler.set_policy_of(lambda agent_id: "odd")
        infos = [info for itr in range(1, 8) for info in sampler.obtain_samples(itr)[1] if info.agent_id is not None]
        for info in infos:
            assert info.policy == ("even" if info.episode <= running[info.env_rank] else "odd")
        assert {info.policy for info in infos} == {"even", "odd"}
    with RaySampler(partial(TurnGame, 2), on_node_failure="restart", **options) as sampler:
        sampler.initialize(two(RandomAgent), policy_of=lambda agent_id, episode: "even", seed=0)
        with pytest.raises(ConfigError, match='set_policy_of and on_node_failure="restart" do not go together'):
            sampler.set_policy_of(lambda agent_id: "odd")


@pytest.mark.parametrize(
    ("agents", "options", "message"),
    [
        (RandomAgent(), {"eval_n_envs": 1, "eval_max_trajectories": 2}, "counts the games of an evaluation with"),
        (two(RandomAgent), {"sampler_cls": GpuSampler}, "shard 0 .*: several policies and an inference server"),
    ],
)
def test_what_shards_cannot_do_is_refused(agents: Any, options: dict[str, Any], message: str) -> None:
    with (
        RaySampler(ScriptedGame, batch_T=5, batch_B=2, n_shards=2, n_workers=1, **options) as sampler,
        pytest.raises(ConfigError, match=message),
    ):
        sampler.initialize(agents, policy_of=odd_or_even if isinstance(agents, dict) else None, seed=0)
