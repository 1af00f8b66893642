"""Samples in the processes of a pool: `in_a_pool.py POOL START_METHOD`."""

import sys
from typing import Any

import gymnasium as gym
import numpy as np

from penstock import ParallelSampler, RandomAgent
from penstock.vector import ShmVectorEnv


class MyEnv(gym.Env[Any, Any]):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {"of": MyEnv}


def rewards_in_pool(i: int) -> float:
    start_method: Any = sys.argv[2]
    with ShmVectorEnv([MyEnv], context=start_method) as envs:
        envs.reset()
        assert envs.step([0])[4]["of"][0].__name__ == "MyEnv"
        assert envs.apply(lambda env: type(env).__name__) == ("MyEnv",)
    with ParallelSampler(MyEnv, batch_T=3, batch_B=2, n_workers=1, start_method=start_method) as sampler:
        sampler.initialize(RandomAgent(), seed=i)
        return float(sampler.obtain_samples(0)[0].env.reward.sum())


if __name__ == "__main__":
    if sys.argv[1] == "loky":
        from joblib import Parallel, delayed  # type: ignore[import-untyped]

        print(Parallel(n_jobs=2)(delayed(rewards_in_pool)(i) for i in range(2)))
    elif sys.argv[1] == "torch":
        import torch.multiprocessing

        torch.multiprocessing.spawn(rewards_in_pool, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
        print([6.0, 6.0])
    else:
        import multiprocessing

        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            print(pool.map(rewards_in_pool, range(2)))
