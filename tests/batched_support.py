"""What tests of batched environments share: a plain loop, to compare what a sampler has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.envs.seeding import ColumnStreams, Purpose

_NEXT, _DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED


def env_seeds(n: int, seed: int = 7, small: bool = True) -> list[int]:
    """The seeds of n training environments."""
    seeds = ColumnStreams(seed, range(n)).env_seeds(Purpose.TRAIN)
    return [each % 2**31 for each in seeds] if small else seeds


def assert_as_plain_loop(env: VectorEnv[Any, Any, Any], seed: Any, batches: Sequence[Any]) -> int:
    """Step `env` with the recorded actions: `batches` (numpy, in order) have what it returns. Returns the number of
    episodes that ended."""
    mode, n_ends = env.metadata["autoreset_mode"], 0
    observation, _ = env.reset(seed=seed)
    resets = np.zeros(env.num_envs, bool)
    starts = np.ones(env.num_envs, bool)
    for samples in batches:
        for t in range(len(samples.env.done)):
            row = samples[t]
            assert (row.env.valid == ~resets).all()
            assert (row.env.prev_done == (starts & ~resets)).all()
            expected = np.array(observation)
            expected[resets] = 0
            np.testing.assert_array_equal(row.env.observation, expected)
            observation, reward, terminated, truncated, infos = env.step(row.agent.action)
            done = np.logical_or(terminated, truncated)
            starts = np.where(resets, True, done)
            for name, wanted in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
                np.testing.assert_array_equal(row.env[name], wanted, name)
            assert (row.env.done == done).all()
            final = infos.get("final_obs", observation)
            for b in range(env.num_envs):
                wanted = final[b] if done[b] else np.zeros_like(observation[b])
                np.testing.assert_array_equal(row.env.final_obs[b], wanted)
            if mode is _DISABLED and done.any():
                observation, _ = env.reset(options={"reset_mask": done})
            resets, n_ends = done & (mode is _NEXT), n_ends + int(done.sum())
    env.close()
    return n_ends
