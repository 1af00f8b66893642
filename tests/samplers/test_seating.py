"""Environments of one agent are seats too, without a number of their own."""

from __future__ import annotations

from collections import Counter

import pytest

from penstock import TrajInfo
from penstock.envs import Purpose
from penstock.samplers.sampler_plan import EnvRange, make_plans
from penstock.samplers.seating import Seating, column_streams, env_streams, keys_of

ENV_RANGE = EnvRange(first_env_rank=7, n_envs=20, first_eval_env_rank=3, n_eval_envs=8)
SEATING = Seating.of_single(5, 2, ENV_RANGE)


def test_each_environment_of_one_agent_has_one_seat_of_the_policy_agent() -> None:
    assert (SEATING.policies, SEATING.is_shared, SEATING.has_games, SEATING.in_turns) == (
        ("agent",),
        True,
        False,
        False,
    )
    assert SEATING.train.policy == [(0,)] * 5
    assert SEATING.n_seats(0) is None


def test_its_cells_are_the_columns_of_the_environments() -> None:
    for plan in make_plans(5, 2, [(), (), ()], ENV_RANGE):
        own = SEATING.with_cells(plan)
        assert (own.cells, own.eval_cells) == ((plan.columns,), (plan.eval_columns,))
        assert (own.n_records, own.n_eval_records) == (len(plan.columns), len(plan.eval_columns))


@pytest.mark.parametrize("evaluation", [False, True])
def test_its_streams_and_keys_are_those_of_the_environments(evaluation: bool) -> None:
    (plan,) = make_plans(5, 2, [()], ENV_RANGE)
    own, expected = column_streams(SEATING, plan, 1, evaluation=evaluation), env_streams(plan, 1, evaluation=evaluation)
    assert own == expected
    assert keys_of(SEATING, own) == list(plan.eval_env_ranks if evaluation else plan.env_ranks)
    draws = [[rng.random() for rng in streams.rngs(Purpose.ACTION)] for streams in (own, expected)]
    assert draws[0] == draws[1]


def test_its_trajectories_are_counted_by_environment() -> None:
    infos, games = [TrajInfo() for _ in range(3)], Counter({8: 4})
    SEATING.name_infos(infos, [(0, 8), (1, 7), (2, 8)], games, evaluation=False)
    assert [(info.env_rank, info.episode, info.agent_id) for info in infos] == [
        (8, 4, None),
        (7, 0, None),
        (8, 5, None),
    ]


def test_a_part_keeps_the_env_ranks() -> None:
    plan = make_plans(5, 2, [(), ()], ENV_RANGE)[1]
    part = SEATING.part(plan)
    assert part.train.first_env_rank == plan.env_ranks.start
    assert len(part.train.agents) == len(plan.columns)
