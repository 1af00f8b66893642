"""ALE's `AtariVectorEnv` in workers: one batch per seed whatever the workers, and the final observations of a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, SerialSampler, VectorEnvCollector

from ..batched_support import assert_as_plain_loop, env_seeds
from ..scale import scaled
from ..support import assert_same, batches_of, run

pytest.importorskip("ale_py")
pytestmark = pytest.mark.slow


def pong(num_envs: int, mode: str) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    small = {"img_height": 21, "img_width": 21, "num_threads": 1, "max_num_frames_per_episode": 60, "noop_max": 8}
    return AtariVectorEnv("pong", num_envs, autoreset_mode=mode, **small)


def test_an_environment_id_means_the_batched_environment() -> None:
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    small = {"img_height": 21, "img_width": 21, "max_num_frames_per_episode": 60, "repeat_action_probability": 0.0}
    kwargs: dict[str, Any] = {"batch_T": 30, "batch_B": 4, "collector_cls": VectorEnvCollector}
    kwargs["env_kwargs"] = {**small, "num_threads": 1, "noop_max": 8}
    found = run(SerialSampler, "ALE/Pong-v5", None, 2, **kwargs)
    assert_same(found, run(ParallelSampler, "ALE/Pong-v5", None, 2, n_workers=2, **kwargs))
    assert assert_as_plain_loop(pong(4, "NextStep"), np.array(env_seeds(4)), batches_of(found)) > 4


def batches(cls: Any, mode: str, **kwargs: Any) -> Any:
    sizes = {"batch_T": 30, "batch_B": 4, "eval_n_envs": 3, "eval_max_steps": 120, "collector_cls": VectorEnvCollector}
    return run(cls, partial(pong, mode=mode), None, 2, range(2), **sizes, **kwargs)


# An environment id means the other mode.
@pytest.mark.parametrize("mode", scaled(["SameStep", "NextStep"], ["SameStep"]))
def test_one_batch_per_seed_whatever_the_workers(mode: str) -> None:
    found = batches(SerialSampler, mode)
    for n_workers in scaled((1, 2, 3), (3,)):
        assert_same(found, batches(ParallelSampler, mode, n_workers=n_workers))
    assert assert_as_plain_loop(pong(4, mode), np.array(env_seeds(4)), batches_of(found)) > 8
