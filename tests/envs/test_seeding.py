"""Random streams: no two are equal, and each depends only on seed, purpose and environment."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import RandomAgent, SerialSampler
from penstock.envs import ColumnStreams, CountingEnv, Purpose, fresh_seed, independent_seeds, stream
from penstock.errors import ConfigError

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


class Seeded(CountingEnv):
    """Knows the seed of its first reset."""

    seen: list[int]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            Seeded.seen.append(seed)
        return super().reset(seed=seed, options=options)


@given(st.integers(0, 2**80), st.integers(0, 200), st.integers(0, 200))
def test_independent_seeds_differ_and_their_first_ones_stay(seed: int, n: int, fewer: int) -> None:
    found = independent_seeds(seed, n)
    assert len(set(found)) == len(found) == n
    assert all(0 <= one < 2**32 for one in found)
    assert independent_seeds(seed, min(n, fewer)) == found[:fewer]


def test_runs_with_neighbouring_seeds_share_no_independent_seed_and_no_random_number() -> None:
    found = [one for seed in range(200) for one in independent_seeds(seed, 64)]
    assert len(set(found)) == len(found)
    heads = [tuple(np.random.default_rng(one).integers(2**63, size=4).tolist()) for one in found]
    assert len({number for head in heads for number in head}) == 4 * len(found)
    firsts = np.array([np.random.default_rng(one).standard_normal() for one in found]).reshape(200, 64)
    correlations = np.corrcoef(firsts)[np.triu_indices(200, 1)]
    assert abs(correlations.mean()) < 0.01
    assert correlations.std() == pytest.approx(1 / np.sqrt(63), rel=0.05), "as of independent numbers"


def test_a_seed_that_came_before_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small(np.random.SeedSequence):
        def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
            return super().generate_state(n_words, dtype) % 16

    monkeypatch.setattr(np.random, "SeedSequence", Small)
    assert sorted(independent_seeds(0, 16)) == list(range(16))
    assert independent_seeds(0, 7) == independent_seeds(0, 16)[:7]


def test_independent_seeds_are_the_same_in_another_process_and_those_of_a_sampler() -> None:
    program = "from penstock.envs import independent_seeds; print(*independent_seeds(7, 5))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    found = independent_seeds(7, 5)
    assert printed.split() == [str(one) for one in found]
    assert found == [393969088, 1834709978, 856967280, 31412511, 1171815639]
    Seeded.seen = []
    with SerialSampler(Seeded, batch_T=2, batch_B=5, max_decorrelation_steps=0) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        sampler.obtain_samples(0)
    assert Seeded.seen[-5:] == found


@pytest.mark.parametrize(("seed", "n"), [(-1, 2), (0.5, 2), (0, -1), ([1, 2], 2)])
def test_a_wrong_seed_or_number_is_named(seed: Any, n: Any) -> None:
    with pytest.raises(ConfigError, match="must be an integer of at least 0"):
        independent_seeds(seed, n)
