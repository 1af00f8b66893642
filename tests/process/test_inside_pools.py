"""Samplers in processes of other pools: multiprocessing's, torch's and joblib's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..scale import methods, scaled
from ..starter import run

pytestmark = [pytest.mark.timeout(200), pytest.mark.slow]

SCRIPT = """
import sys
import gymnasium as gym
import numpy as np
from penstock import ParallelSampler, RandomAgent
from penstock.vector import ShmVectorEnv

class MyEnv(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}
    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {"of": MyEnv}

def run(i):
    with ShmVectorEnv([MyEnv], context=sys.argv[2]) as envs:
        envs.reset()
        assert envs.step([0])[4]["of"][0].__name__ == "MyEnv"
        assert envs.apply(lambda env: type(env).__name__) == ("MyEnv",)
    with ParallelSampler(MyEnv, batch_T=3, batch_B=2, n_workers=1, start_method=sys.argv[2]) as sampler:
        sampler.initialize(RandomAgent(), seed=i)
        return float(sampler.obtain_samples(0)[0].env.reward.sum())

if __name__ == "__main__":
    if sys.argv[1] == "loky":
        from joblib import Parallel, delayed
        print(Parallel(n_jobs=2)(delayed(run)(i) for i in range(2)))
    elif sys.argv[1] == "torch":
        import torch.multiprocessing
        torch.multiprocessing.spawn(run, nprocs=2)
        print([6.0, 6.0])
    else:
        import multiprocessing
        with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
            print(pool.map(run, range(2)))
"""


@methods("forkserver")
@pytest.mark.parametrize("pool", scaled(["spawn", "forkserver", "torch", "loky"], ["spawn", "loky"]))
def test_classes_of_the_script_reach_the_workers(tmp_path: Path, pool: str, start_method: str) -> None:
    if pool == "loky":
        pytest.importorskip("joblib")
    if start_method == "fork":
        pytest.skip("a pool's process has threads, so fork is refused")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    # Processes of a pool start supervisors of their own: they must be new interpreters, as for a user.
    done = run(path, pool, start_method, cwd=tmp_path, seconds=180, forks_supervisor=False)
    assert done.stdout == "[6.0, 6.0]\n", done.stderr
