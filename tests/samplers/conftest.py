"""What several tests of samplers need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def no_idle_cpu() -> Iterator[None]:
    """As if other programs used all CPUs: `serve_envs="auto"` then starts no workers, unless `n_workers` is given."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.samplers.central.idle_cpus", lambda seconds: 0.0)
        yield
