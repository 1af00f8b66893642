"""Tries an installed penstock without torch: versions, the compiled parts, workers with each start method."""

import platform
from importlib.metadata import version

import penstock
from penstock.envs import CountingEnv
from penstock.tools import doctor
from penstock.vector import ShmVectorEnv

assert version("penstock") == penstock.__version__, "metadata and package have different versions"
assert doctor.describe_machine()["compiled parts"] == "in use", "the wheel lacks compiled code"
for start_method in ("fork", "forkserver", "spawn"):
    with ShmVectorEnv([CountingEnv] * 4, n_workers=2, context=start_method) as envs:
        envs.reset(seed=0)
        observation, *_ = envs.step([0, 1, 2, 0])
        assert observation.shape[0] == 4
print(f"penstock {penstock.__version__} works with Python {platform.python_version()}, from {penstock.__path__[0]}")
