"""Samples 200 MB, far more than the 64 MB of /dev/shm."""

import sys
from typing import Any

import numpy as np
from gymnasium import spaces

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv


class Wide(CountingEnv):
    step_into = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(0, 2**20, (50_000,), np.float32)

    def observe(self) -> Any:
        return np.full(50_000, self.count, np.float32)


sizes: dict[str, Any] = {
    "start_method": sys.argv[1],
    "batch_T": 250,
    "batch_B": 4,
    "n_workers": 2,
    "max_decorrelation_steps": 0,
}
with ParallelSampler(Wide, record_final_obs=False, **sizes) as sampler:
    sampler.initialize(RandomAgent())
    samples, infos = sampler.obtain_samples(0)
    assert samples.env.observation.nbytes == 200_000_000
    assert len(infos) == 200
    assert float(samples.env.observation[249].max()) == 4
print("fine")
