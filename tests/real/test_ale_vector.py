"""ALE's `AtariVectorEnv` in workers: one batch per seed whatever the workers, and the final observations of a loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock import ParallelSampler, SerialSampler

from ..scale import FULL, scaled
from ..support import assert_as_plain_loop, assert_same, collect_with, env_seeds, without_infos

pytest.importorskip("ale_py")
pytestmark = pytest.mark.slow


#: To make and reset an environment takes a third of a second, and the end of an episode a sixth: few of both.
SMALL = {"img_height": 21, "img_width": 21, "max_num_frames_per_episode": scaled(60, 28), "noop_max": 8}
T, B, ENDS = scaled((30, 4, 8), (10, 3, 5))


def pong(num_envs: int, mode: str) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv("pong", num_envs, autoreset_mode=mode, num_threads=1, **SMALL)


def compare(env_fn: Any, mode: str, *all_workers: int, **kwargs: Any) -> int:
    """The batches are those of a plain loop, and at full scale the same for every number of workers. Returns the number
    of episodes that ended."""
    sizes = {"batch_T": T, "batch_B": B, "batched": True, **kwargs}
    found = collect_with(ParallelSampler, env_fn, None, 2, n_workers=2, **sizes)
    for n_workers in scaled(all_workers, ()):
        assert_same(found, collect_with(ParallelSampler, env_fn, None, 2, n_workers=n_workers, **sizes))
    if FULL:
        assert_same(found, collect_with(SerialSampler, env_fn, None, 2, **sizes))
    return assert_as_plain_loop(pong(B, mode), np.array(env_seeds(B)), without_infos(found))


def test_an_environment_id_means_the_batched_environment() -> None:
    import ale_py
    import gymnasium as gym

    gym.register_envs(ale_py)
    own = {**SMALL, "repeat_action_probability": 0.0, "num_threads": 1}
    assert compare("ALE/Pong-v5", "NextStep", env_kwargs=own) > 4


# An environment id means the other mode.
@pytest.mark.parametrize("mode", scaled(["SameStep", "NextStep"], ["SameStep"]))
def test_one_batch_per_seed_whatever_the_workers(mode: str) -> None:
    # At full scale with evaluations. Daily, test_envpool_vector.py has them.
    own: dict[str, Any] = {"evaluate": range(2), "eval_n_envs": 3, "eval_max_steps": 120}
    assert compare(partial(pong, mode=mode), mode, 1, 3, **scaled(own, {})) > ENDS
