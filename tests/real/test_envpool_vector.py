"""EnvPool in workers: one batch per seed whatever the workers, and what a plain loop sees."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from penstock import ParallelSampler, SerialSampler
from penstock.envs import BatchedEnvPool

from ..scale import scaled
from ..support import assert_as_plain_loop, assert_same, collect_with, env_seeds, without_infos

pytestmark = pytest.mark.slow

TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"max_episode_steps": 20},
    "Pong-v5": {"img_height": 21, "img_width": 21, "max_episode_steps": 12},
}


@pytest.fixture(autouse=True)
def _envpool() -> None:
    pytest.importorskip("envpool")  # here, since it takes more than a second: each process of the suite collects tests


# Pong takes 10 s of CPU time, most of it in resets. In vector/test_batched.py, it is played daily.
@pytest.mark.parametrize("task", scaled([*TASKS], ["CartPole-v1"]))
def test_one_batch_per_seed_whatever_the_workers(task: str) -> None:
    env_fn = partial(BatchedEnvPool, task, **TASKS[task])
    sizes: dict[str, Any] = {"batch_T": 30, "batch_B": 4, "eval_n_envs": 3, "eval_max_steps": 120}
    # Daily a fork, which need not import EnvPool.
    sizes |= {"batched": True, "start_method": scaled("forkserver", "fork")}
    found = collect_with(SerialSampler, env_fn, None, 2, range(2), **sizes)
    for n_workers in scaled((1, 2, 3), (2,)):
        assert_same(found, collect_with(ParallelSampler, env_fn, None, 2, range(2), n_workers=n_workers, **sizes))
    assert assert_as_plain_loop(env_fn(4), env_seeds(4, small=False), without_infos(found)) > 8
