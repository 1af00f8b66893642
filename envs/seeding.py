"""Random streams: one for each purpose and environment. A stream depends on the `env_rank`, never on the worker.

Every stream is a `numpy.random.SeedSequence` with the user's seed as entropy and `(purpose, env_rank, ...)` as
spawn key. So the streams of the seeds 0 and 1 are independent too.
"""

from __future__ import annotations

import copy
import enum
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.arguments import integer, must_be
from penstock.buffers.reports import in_one_line
from penstock.errors import ConfigError, brief

#: `plan(env_rank, episode, rng)` returns the options of the reset that begins this episode, or None for none.
EpisodePlan = Callable[[int, int, np.random.Generator], Mapping[str, Any] | None]


class Purpose(enum.IntEnum):
    """What a random stream is for. An environment's purpose is `TRAIN` or `EVAL`."""

    TRAIN = 0
    EVAL = 1
    DECORRELATE = 2
    ACTION = 3
    EVAL_ACTION = 4
    MODEL = 5
    EPISODE = 6
    SEATING = 7
    EVAL_EPISODE = 8
    GLOBAL = 9
    PLAN = 10


def fresh_seed() -> int:
    """A seed from the operating system, for callers who give none. It has only 32 bits, so users can copy it easily."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def stream(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """The generator for `purpose` and `key`; the key usually starts with an env_rank."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, *key))))


def seed_generators(seed: int, *key: int) -> None:
    """Seed the global generators of this process, a worker: those of `random` and `np.random`, and of torch, if it is
    imported."""
    words = np.random.SeedSequence(seed, spawn_key=(Purpose.GLOBAL, *key)).generate_state(4)
    random.seed(words.tobytes())
    np.random.seed(words)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(int(words[0]))


def episode_seed(seed: int, env_rank: int, episode: int, generation: int = 0) -> int:
    """The seed of the reset that begins this episode, if every reset is seeded (`seed_episodes=True`).

    Episode 0 has the seed that it has without that option.
    """
    streams = ColumnStreams(seed, range(env_rank, env_rank + 1), generation)
    return streams.env_seeds(*((Purpose.EPISODE, episode) if episode else (Purpose.TRAIN,)))[0]


def require_plan(name: str, plan: Any) -> EpisodePlan | None:
    """`plan`. Raises `ConfigError` unless it is a function or None."""
    fits = plan is None or callable(plan)
    return must_be(name, plan, fits, "a function of env_rank, episode and rng, or None")  # type: ignore[no-any-return]


def episode_options(
    plan: EpisodePlan | None, seed: int, env_rank: int, episode: int, generation: int = 0
) -> dict[str, Any] | None:
    """What `plan` says of this episode. Raises `ConfigError` if it raises, or returns something else than a dict or
    None."""
    if plan is None:
        return None
    (rng,) = ColumnStreams(seed, range(env_rank, env_rank + 1), generation).rngs(Purpose.PLAN, episode)
    where = f"env_rank {env_rank}, episode {episode}"
    try:
        options = plan(env_rank, episode, rng)
    except Exception as error:
        raise ConfigError(f"episode_plan raised {in_one_line(error)} for {where}") from error
    if not isinstance(options, Mapping | None):
        raise ConfigError(
            f"episode_plan must return a dict, the options of env.reset, or None; for {where} it returned "
            f"{brief(options)}"
        )
    return None if options is None else copy.deepcopy(dict(options))  # the environment may change them


def independent_seeds(seed: int, n: int) -> list[int]:
    """Seeds for the n environments of one run. Runs with neighbouring seeds get others.

    `reset(seed=s)` of Gymnasium's vector environments and of `ShmVectorEnv` gives environment i the seed s + i. So of
    eight environments, the runs with the seeds 0 and 1 share seven. Write `reset(seed=independent_seeds(s, 8))`.

    Returns n different integers in `range(2**32)`, the same in every process and on every machine. The first k are
    `independent_seeds(seed, k)`. They are those that a sampler gives its environments, by `numpy.random.SeedSequence`.

    Raises `ConfigError` if `seed` or `n` is no integer of at least 0.
    """
    integer("seed", seed, least=0, most=None)
    found: dict[int, None] = {}
    for env_rank in range(integer("n", n, least=0)):
        sequence = np.random.SeedSequence(seed, spawn_key=(Purpose.TRAIN, env_rank))
        words = (int(word) for k in itertools.count(1) for word in sequence.generate_state(k)[-1:])
        found[next(word for word in words if word not in found)] = None
    return list(found)


def eval_seed(seed: int, k: int) -> int:
    """The seed of the reset that begins episode k of an evaluation: of each one, whatever is there to play it."""
    return int(np.random.SeedSequence(seed, spawn_key=(Purpose.EVAL_EPISODE, k)).generate_state(1)[0])


@dataclass(frozen=True)
class ColumnStreams:
    """The streams of some environments. They depend on seed, purpose, env_rank, `key` and generation.

    `generation` counts how often the environments were built again after a failure. Each generation has new
    streams, and they are the same in every run.
    """

    seed: int
    env_ranks: Sequence[int]
    generation: int = 0
    #: With several agents: the number of each column's seat in its environment, which `rngs` depend on too.
    seats: Sequence[int] = ()

    def env_seeds(self, purpose: Purpose, *key: int) -> list[int]:
        """Seeds for `env.reset(seed=...)`, in `range(2**32)`, which every environment library accepts.

        Two of n environments get the same seed with a probability of about n² / 2³³ (1 in 2 million for n = 64).
        """
        keys = ((purpose, rank, *self._key(key)) for rank in self.env_ranks)
        sequences = (np.random.SeedSequence(self.seed, spawn_key=key) for key in keys)
        return [int(sequence.generate_state(1)[0]) for sequence in sequences]

    def renewal_seed(self, column: int, purpose: Purpose, renewal: int) -> int:
        """The seed of an environment that was built again after its game had failed, for the `renewal`-th time."""
        # Five numbers: no other key has as many.
        key = (purpose, self.env_ranks[column], 0, self.generation, renewal)
        return int(np.random.SeedSequence(self.seed, spawn_key=key).generate_state(1)[0])

    def rngs(self, purpose: Purpose, *key: int) -> list[np.random.Generator]:
        """One generator per environment, or per seat."""
        seats = zip(self.seats) if self.seats else [()] * len(self.env_ranks)
        columns = zip(self.env_ranks, seats, strict=True)
        return [stream(self.seed, purpose, rank, *seat, *self._key(key)) for rank, seat in columns]

    def _key(self, key: tuple[int, ...]) -> tuple[int, ...]:
        # One number longer than in the first generation, so that no two keys are the same.
        return (*key, self.generation) if self.generation else key
