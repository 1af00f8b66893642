"""RaySampler of environments with several agents: the batches and the trajectories of one machine."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason='ray is not installed: pip install ".[cluster]"')

from penstock import ConfigError, RandomAgent, SerialSampler
from penstock.cluster import RaySampler
from penstock.envs import ScriptedGame
from tests.turns_support import TurnGame, Valuing

from ..scale import scaled
from .ray_support import assert_same, run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.timeout(180),
    pytest.mark.slow,
]

# Shards have different numbers of agents, so the keys of their records must be of one kind.
GAMES: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (3, 4, 2, 3, 1, 5, 3)], "global_state": True}


@pytest.mark.parametrize("n_shards", scaled([1, 3], [3]))
def test_seats_of_shards_are_those_of_one_machine(n_shards: int) -> None:
    options = {**GAMES, "eval_n_envs": 4, "eval_episodes": 6}
    wanted = run(SerialSampler, ScriptedGame, RandomAgent, **options)
    found = run(RaySampler, ScriptedGame, RandomAgent, n_shards=n_shards, sampler_cls=SerialSampler, **options)
    assert_same(found, wanted)
    assert any(info["agent_id"] == "a4" for own in found[1] for info in own if "agent_id" in info)


@pytest.mark.parametrize("n_shards", [1, 3])
def test_games_in_turns_are_those_of_one_machine(n_shards: int) -> None:
    """Rows, open decisions, values after the last row, and the numbers of the games."""
    options: dict[str, Any] = {"env_kwargs": [{"k": k} for k in (3, 2, 1, 4, 2, 3, 2)]}
    options |= {"eval_n_envs": 4, "eval_episodes": 6, "eval_max_steps": 2_000, "batch_T": 9, "iterations": 5}
    wanted = run(SerialSampler, TurnGame, Valuing, **options)
    found = run(RaySampler, TurnGame, Valuing, n_shards=n_shards, **options)
    assert_same(found, wanted)
    assert not wanted[0][0].env.valid.all()


def test_pieces_of_a_stream_have_the_seats_of_their_shard() -> None:
    with RaySampler(ScriptedGame, batch_T=20, batch_B=4, n_shards=2, n_workers=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for piece, _ in zip(sampler.stream(), range(4), strict=False):
            assert piece.samples.by_env().env.reward.shape == (20, 2, 3)
            assert {info.env_rank for info in piece.traj_infos} <= set(piece.env_ranks)
        assert sampler.stats().late_rewards > 0
        assert sampler.metrics()["sampler/agent_steps"] > 0


@pytest.mark.parametrize("wrong", ["dict", "trajectories"])
def test_what_shards_cannot_do_is_refused(wrong: str) -> None:
    agents: Any = RandomAgent() if wrong == "trajectories" else {f"a{i}": RandomAgent() for i in range(3)}
    limits = {"eval_n_envs": 1, "eval_max_trajectories": 2} if wrong == "trajectories" else {}
    refusal = "takes one agent for all of them, and counts the games of an evaluation"
    with (
        RaySampler(ScriptedGame, batch_T=5, batch_B=2, n_shards=2, n_workers=1, **limits) as sampler,
        pytest.raises(ConfigError, match=refusal),
    ):
        sampler.initialize(agents, seed=0)
