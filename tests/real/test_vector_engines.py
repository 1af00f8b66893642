"""ALE's `AtariVectorEnv` and EnvPool: one batch per seed whatever the workers, and what a plain loop sees."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, SerialSampler
from penstock.envs import BatchedEnvPool

from ..scale import FULL, scaled, some
from ..support import assert_as_plain_loop, assert_same, collect_with, env_seeds, without_infos

pytestmark = pytest.mark.slow

#: To make and reset an environment of ALE takes a third of a second, the end of an episode a sixth: few of both.
SMALL = {"img_height": 21, "img_width": 21, "max_num_frames_per_episode": scaled(60, 28), "noop_max": 8}
#: Daily a fork, which need not import EnvPool or ALE.
METHOD = scaled("forkserver", "fork")
T, B, ENDS = scaled((30, 4, 8), (10, 3, 5))


def pong(num_envs: int, mode: str) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs, autoreset_mode=mode, num_threads=1, **SMALL)


# An environment id means the mode NextStep.
@pytest.mark.parametrize("mode", some(["id", "SameStep", "NextStep"], 1))
def test_ale_gives_one_batch_per_seed_whatever_the_workers(mode: str) -> None:
    """At full scale with evaluations. Daily, EnvPool has them, and `test_whole_games.py` has SameStep."""
    ale_py = pytest.importorskip("ale_py")
    own: dict[str, Any] = scaled({"evaluate": range(2), "eval_n_envs": 3, "eval_max_steps": 120}, {})
    env_fn: Any = partial(pong, mode=mode)
    if mode == "id":
        import gymnasium as gym

        gym.register_envs(ale_py)
        env_fn, mode = "ALE/Pong-v5", "NextStep"
        own = {"env_kwargs": {**SMALL, "repeat_action_probability": 0.0, "num_threads": 1}}
    sizes = {"batch_T": T, "batch_B": B, "batched": True, "start_method": METHOD, **own}
    found = collect_with(ParallelSampler, env_fn, None, 2, n_workers=2, **sizes)
    for n_workers in scaled((1, 3), ()):
        assert_same(found, collect_with(ParallelSampler, env_fn, None, 2, n_workers=n_workers, **sizes))
    if FULL:
        assert_same(found, collect_with(SerialSampler, env_fn, None, 2, **sizes))
    n_ends = assert_as_plain_loop(pong(B, mode), np.array(env_seeds(B)), without_infos(found))
    assert n_ends > (4 if "env_kwargs" in own else ENDS)


TASKS: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"max_episode_steps": 20},
    "Pong-v5": {"img_height": 21, "img_width": 21, "max_episode_steps": 12},
}


# Pong takes 10 s of CPU time, most of it in resets. In vector/test_batched.py, it is played daily.
@pytest.mark.parametrize("task", scaled([*TASKS], ["CartPole-v1"]))
def test_envpool_gives_one_batch_per_seed_whatever_the_workers(task: str) -> None:
    pytest.importorskip("envpool")
    env_fn = partial(BatchedEnvPool, task, **TASKS[task])
    sizes: dict[str, Any] = {"batch_T": 30, "batch_B": 4, "eval_n_envs": 3, "eval_max_steps": 120}
    sizes |= {"batched": True, "start_method": METHOD}
    found = collect_with(SerialSampler, env_fn, None, 2, range(2), **sizes)
    for n_workers in scaled((1, 2, 3), (2,)):
        assert_same(found, collect_with(ParallelSampler, env_fn, None, 2, range(2), n_workers=n_workers, **sizes))
    assert assert_as_plain_loop(env_fn(4), env_seeds(4, small=False), without_infos(found)) > 8
