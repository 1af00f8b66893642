"""Random streams: one per environment and purpose, hung on `env_rank` and never on the worker.

Every stream is a `numpy.random.SeedSequence` with the user's seed as entropy and
`(purpose, env_rank, ...)` as spawn key, so neighbouring seeds share nothing either.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

__all__ = ["ColumnStreams", "Purpose", "fresh_seed", "stream"]


class Purpose(enum.IntEnum):
    """What a stream is for."""

    TRAIN = 0
    EVAL = 1
    DECORRELATE = 2
    ACTION = 3
    EVAL_ACTION = 4
    MODEL = 5


def fresh_seed() -> int:
    """A seed from the operating system, for a caller who gave none; 32 bits, to be easily noted down."""
    return int(np.random.SeedSequence().generate_state(1)[0])


def stream(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """The generator of `purpose` for `key`, usually the env_rank."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, *key))))


@dataclass(frozen=True)
class ColumnStreams:
    """The streams of some environments; everything hangs on seed, purpose, env_rank, `key` and generation.

    `generation` counts how often the environments have been built anew after a failure: each time with
    streams that are fresh, and the same in every run.
    """

    seed: int
    env_ranks: range
    generation: int = 0

    def env_seeds(self, purpose: Purpose, *key: int) -> list[int]:
        """Seeds for `env.reset(seed=...)`, in `range(2**32)`, which every environment library accepts.

        32 bits out of a `SeedSequence` per environment: two of n environments coincide with a chance
        of about n² / 2³³ (1 in 2 million for 64).
        """
        keys = ((purpose, rank, *self._key(key)) for rank in self.env_ranks)
        sequences = (np.random.SeedSequence(self.seed, spawn_key=key) for key in keys)
        return [int(sequence.generate_state(1)[0]) for sequence in sequences]

    def rngs(self, purpose: Purpose, *key: int) -> list[np.random.Generator]:
        """One generator per environment."""
        return [stream(self.seed, purpose, rank, *self._key(key)) for rank in self.env_ranks]

    def _key(self, key: tuple[int, ...]) -> tuple[int, ...]:
        # One number longer than in the first generation, so that no two can be the same.
        return (*key, self.generation) if self.generation else key
