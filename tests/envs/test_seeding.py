"""Random streams: no two are equal, and each depends only on seed, purpose and environment."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.envs import ColumnStreams, Purpose, fresh_seed, stream

seeds = st.integers(0, 2**64)
purposes = st.sampled_from(Purpose)
ranks = st.integers(0, 2**33)


def head(rng: np.random.Generator) -> list[float]:
    return rng.random(8).tolist()


def test_no_two_environments_share_a_seed_in_training_or_evaluation_or_under_another_base_seed() -> None:
    env_seeds = {
        (base, purpose, env_rank): env_seed
        for base in range(20)
        for purpose in (Purpose.TRAIN, Purpose.EVAL)
        for env_rank, env_seed in enumerate(ColumnStreams(base, range(64)).env_seeds(purpose))
    }
    assert len(env_seeds) == 20 * 2 * 64
    assert len(set(env_seeds.values())) == len(env_seeds)


@given(seeds, st.integers(0, 100), st.lists(st.integers(1, 4), min_size=1, max_size=4), purposes)
def test_seeds_and_streams_do_not_depend_on_how_environments_are_grouped(
    seed: int, first: int, widths: list[int], purpose: Purpose
) -> None:
    bounds = np.cumsum([first, *widths]).tolist()
    groups = [ColumnStreams(seed, range(a, b)) for a, b in pairwise(bounds)]
    whole = ColumnStreams(seed, range(first, bounds[-1]))
    assert [s for group in groups for s in group.env_seeds(purpose, 3)] == whole.env_seeds(purpose, 3)
    rngs = [rng for group in groups for rng in group.rngs(purpose, 3)]
    assert [head(rng) for rng in rngs] == [head(rng) for rng in whole.rngs(purpose, 3)]


@given(seeds, ranks, purposes)
def test_a_column_has_the_stream_of_its_environment(seed: int, env_rank: int, purpose: Purpose) -> None:
    (rng,) = ColumnStreams(seed, range(env_rank, env_rank + 1)).rngs(purpose, 4)
    assert head(rng) == head(stream(seed, purpose, env_rank, 4))


@given(seeds, ranks, purposes)
def test_an_environment_that_was_built_again_has_other_seeds_and_streams(
    seed: int, env_rank: int, purpose: Purpose
) -> None:
    generations = [ColumnStreams(seed, range(env_rank, env_rank + 1), generation) for generation in range(3)]
    assert len({streams.env_seeds(purpose)[0] for streams in generations}) == 3
    heads = [head(streams.rngs(purpose)[0]) for streams in generations]
    assert all(not set(one) & set(other) for one, other in combinations(heads, 2))


@given(seeds, ranks, purposes)
def test_an_env_seed_has_at_most_32_bits(seed: int, env_rank: int, purpose: Purpose) -> None:
    (env_seed,) = ColumnStreams(seed, range(env_rank, env_rank + 1)).env_seeds(purpose)
    assert type(env_seed) is int
    assert 0 <= env_seed < 2**32


def test_fresh_seeds_are_short_and_differ() -> None:
    found = {fresh_seed() for _ in range(20)}
    assert len(found) > 10
    assert all(type(seed) is int and 0 <= seed < 2**32 for seed in found)


@pytest.mark.parametrize("purpose", Purpose)
def test_a_stream_is_the_same_as_in_earlier_releases(purpose: Purpose) -> None:
    """New numbers for the purposes would change recorded experiments without an error."""
    for key in ((), (3,), (3, 2)):
        sequence = np.random.SeedSequence(7, spawn_key=([*Purpose.__members__].index(purpose.name), *key))
        assert head(stream(7, purpose, *key)) == head(np.random.Generator(np.random.PCG64(sequence)))
