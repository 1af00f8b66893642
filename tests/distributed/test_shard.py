"""What penstock uses of Ray, read from the code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock import RandomAgent, SerialSampler
from penstock.distributed import shard
from penstock.distributed.shard import ShardHost, ShardPlan, ShardSpec
from penstock.envs import CountingEnv, EnvFactory
from penstock.samplers.allocation import Example, SeatingPlan
from penstock.samplers.config import SamplerConfig
from penstock.samplers.sampler_plan import EnvRange
from penstock.samplers.seating import Seating
from penstock.workers.plan import Affinity


@pytest.mark.slow
def test_one_private_module_of_ray_is_used() -> None:
    """They change with each version of Ray. Without this one, Ray would not listen on the loopback address alone."""
    files = [file for room in ("distributed",) for file in Path(penstock.__file__).parent.glob(f"{room}/*.py")]
    found = [line for file in files for line in re.findall(r".*\bray\._.*", file.read_text(encoding="utf-8"))]
    assert found == ["from ray._private import ray_constants"]


def test_the_shards_of_a_run_draw_different_numbers_from_global_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may step its environments in its own process. A rebuilt one draws other numbers than before."""
    monkeypatch.setattr(shard, "_node", lambda: "here")
    monkeypatch.setattr(shard, "limit_threads", lambda n: None)
    config, found = SamplerConfig(env_fn=CountingEnv, batch_T=1, batch_B=2), []
    plans = tuple(
        ShardPlan(worker_rank=i, columns=range(i, i + 1), env_ranks=range(i, i + 1), n_workers=1) for i in range(2)
    )
    env, env_range = CountingEnv(), EnvRange(first_env_rank=0, n_envs=2, first_eval_env_rank=0, n_eval_envs=0)
    example = Example(EnvFactory(CountingEnv), env.observation_space, env.action_space, None)
    seats = SeatingPlan(Seating.of_single(2, 0, env_range), [example])
    setup = {"seed": 3, "n_envs": 2, "n_eval_envs": 0}
    for index, generation, times in ((0, 0, 2), (1, 0, 1), (1, 1, 1)):
        for _ in range(times):
            spec = ShardSpec(SerialSampler, {}, config, RandomAgent(), plans, 1, Affinity(), setup, seats)
            host = ShardHost(index, generation)
            host._make(spec)  # only a Ray actor would call it
            host._sampler.shutdown()
            found.append(np.random.rand())
    assert found[0] == found[1]
    assert len(set(found)) == 3
