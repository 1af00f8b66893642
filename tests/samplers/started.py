"""A sampler in one line, for tests of what environments and agents do in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import AsyncSampler, ConfigError, RandomAgent, Sampler, SerialSampler, WorkerError

from ..support import AT_START


@contextmanager
def started(env_fn: Any, agent: Any = None, cls: type[Sampler] = SerialSampler, **options: Any) -> Iterator[Any]:
    """A sampler of two environments that collects. `options` are those of the sampler and of its `initialize`."""
    given = {"batch_T": 9, "batch_B": 2, "max_decorrelation_steps": 0, "seed": 0, **options}
    with cls(env_fn, **{name: value for name, value in given.items() if name not in AT_START}) as sampler:
        at_start = {name: value for name, value in given.items() if name in AT_START}
        sampler.initialize(RandomAgent() if agent is None else agent, **at_start)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        yield sampler


def check_refused(
    env_fn: Any, message: str, agent: Any = None, *, error: type[Exception] = ConfigError, **options: Any
) -> str:
    """Such a sampler cannot be started. Returns what the error says."""
    with pytest.raises(error, match=message) as told, started(env_fn, agent, **options):
        pytest.fail("it has started")
    return str(told.value)


def check_fails(
    env_fn: Any, message: str, agent: Any = None, *, error: type[Exception] = WorkerError, n: int = 1, **options: Any
) -> str:
    """Such a sampler starts, and fails in one of `n` batches. Returns what the error says."""
    with started(env_fn, agent, **options) as sampler, pytest.raises(error, match=message) as told:
        for itr in range(n):
            sampler.obtain_samples(itr)
    return str(told.value)
