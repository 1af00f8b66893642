"""A shard's host, without Ray."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock
from penstock import RandomAgent, SerialSampler
from penstock.cluster.shard import ShardHost


def test_trajectories_of_a_batch_do_not_count_for_the_evaluation_after_it() -> None:
    with SerialSampler("CartPole-v1", batch_T=200, batch_B=1) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        n_finished = len(sampler.obtain_samples(0)[1])
        host = ShardHost.__new__(ShardHost)  # without its thread
        host._sampler, host._is_evaluating = sampler, False
        host.stop_evaluation()
        assert (host.n_finished(), sampler._memory.control.stop_eval) == (0, False)
        host._is_evaluating = True
        host.stop_evaluation()
        assert (host.n_finished(), sampler._memory.control.stop_eval) == (n_finished, True)
        assert n_finished > 0


@pytest.mark.slow
def test_one_private_module_of_ray_is_used() -> None:
    """They change with each version of Ray. Without this one, Ray would not listen on the loopback address alone."""
    files = [file for room in ("cluster", "control") for file in Path(penstock.__file__).parent.glob(f"{room}/*.py")]
    found = [line for file in files for line in re.findall(r".*\bray\._.*", file.read_text(encoding="utf-8"))]
    assert found == ["from ray._private import ray_constants"]
