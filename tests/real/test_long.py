"""20,000 steps of many real environments, with `make real`: too long for every day.

`SerialSampler` equals `ParallelSampler` with 1, 2 and 4 workers, and `ShmVectorEnv` equals `SyncVectorEnv`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import iterate

from penstock import ParallelSampler, RandomAgent, Sampler, SerialSampler
from penstock.vector import ShmVectorEnv

STEPS = int(os.environ.get("PENSTOCK_REAL_STEPS", "0"))
N_ENVS, BATCH_T = 4, 100

pytestmark = [
    pytest.mark.timeout(3600),
    pytest.mark.skipif(STEPS == 0, reason="only in `make real`, which sets PENSTOCK_REAL_STEPS"),
    # The environments' own warnings are not penstock's.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]


def registered(module: str, env_id: str, /, **kwargs: Any) -> gym.Env[Any, Any]:
    """An environment that the import of `module` registers."""
    found = __import__(module)
    if hasattr(gym, "register_envs"):
        gym.register_envs(found)
    return gym.make(env_id, **kwargs)


def breakout() -> gym.Env[Any, Any]:
    env = registered("ale_py", "ALE/Breakout-v5", frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env), 4)


def minigrid_images() -> gym.Env[Any, Any]:
    from minigrid.wrappers import ImgObsWrapper

    return ImgObsWrapper(registered("minigrid", "MiniGrid-DoorKey-5x5-v0"))


#: By name: the modules that must be installed, and what builds the environment.
ENVIRONMENTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "Atari ram": ("ale_py", partial(registered, "ale_py", "ALE/Pong-v5", obs_type="ram")),
    "Atari preprocessed": ("ale_py cv2", breakout),
    "HalfCheetah": ("mujoco", partial(gym.make, "HalfCheetah-v5")),
    "Humanoid": ("mujoco", partial(gym.make, "Humanoid-v5")),
    "MiniGrid raw": ("minigrid", partial(registered, "minigrid", "MiniGrid-DoorKey-5x5-v0")),
    "MiniGrid images": ("minigrid", minigrid_images),
    "dm_control": ("shimmy dm_control", partial(registered, "shimmy", "dm_control/cartpole-swingup-v0")),
    "highway": ("highway_env", partial(registered, "highway_env", "highway-fast-v0")),
    "robotics": ("gymnasium_robotics", partial(registered, "gymnasium_robotics", "PointMaze_UMaze-v3")),
    "panda": ("panda_gym", partial(registered, "panda_gym", "PandaReach-v3")),
}
#: Spaces without fixed shapes: the samplers refuse them.
NO_SAMPLER = {"MiniGrid raw"}


def reproducible_env_fn(name: str) -> Callable[[], Any]:
    modules, env_fn = ENVIRONMENTS[name]
    for module in modules.split():
        pytest.importorskip(module, exc_type=ImportError)
    # Fails here if the environment itself does not work.
    if plain_runs(env_fn) != plain_runs(env_fn):
        pytest.skip("two plain runs with the same seeds differ: the environment is not reproducible")
    return env_fn


def plain_runs(env_fn: Callable[[], Any]) -> str:
    """A digest of two environments that are stepped in turns without penstock."""
    digest, envs = hashlib.sha256(), [env_fn(), env_fn()]
    for i, env in enumerate(envs):
        env.reset(seed=i)
        env.action_space.seed(i)
    for _ in range(500):
        for env in envs:
            observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            digest.update(pickle.dumps((observation, float(reward))))
            if terminated or truncated:
                env.reset()
    for env in envs:
        env.close()
    return digest.hexdigest()


def digest_of_sampling(cls: type[Sampler], env_fn: Any, **kwargs: Any) -> tuple[str, list[Any]]:
    """A digest of all batches, and the trajectories."""
    digest, infos = hashlib.sha256(), []
    with cls(env_fn, batch_T=BATCH_T, batch_B=N_ENVS, **kwargs) as sampler:
        sampler.initialize(RandomAgent(), seed=3)
        for itr in range(-(-STEPS // (BATCH_T * N_ENVS))):
            _, finished = sampler.obtain_samples(itr)
            for field, array in sampler.samples_np.leaves():
                digest.update(field.encode() + np.ascontiguousarray(array).tobytes())
            infos += [vars(info) for info in finished]
    return digest.hexdigest(), infos


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name not in NO_SAMPLER])
def test_any_number_of_workers_gives_the_same(name: str) -> None:
    env_fn = reproducible_env_fn(name)
    reference = digest_of_sampling(SerialSampler, env_fn)
    for n_workers in (1, 2, 4):
        assert digest_of_sampling(ParallelSampler, env_fn, n_workers=n_workers) == reference, n_workers


def trajectory(envs: Any) -> str:
    """A digest of observations, rewards and flags."""
    digest = hashlib.sha256()
    envs.action_space.seed(3)

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                add(value[key])
        elif isinstance(value, tuple):
            for part in value:
                add(part)
        else:
            digest.update(value.encode() if isinstance(value, str) else np.ascontiguousarray(value).tobytes())

    try:
        add(envs.reset(seed=3)[0])
        for _ in range(STEPS // N_ENVS):
            actions = envs.action_space.sample()
            if envs.single_action_space.dtype is not None and not isinstance(actions, np.ndarray):
                actions = np.array(list(iterate(envs.action_space, actions)))
            observation, *rest, _ = envs.step(actions)
            add((observation, *rest))
    finally:
        envs.close()
    return digest.hexdigest()


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_vector_environment_gives_the_same(name: str) -> None:
    env_fn = reproducible_env_fn(name)
    mode = AutoresetMode.SAME_STEP
    expected = trajectory(SyncVectorEnv([env_fn] * N_ENVS, autoreset_mode=mode))
    assert trajectory(ShmVectorEnv([env_fn] * N_ENVS, n_workers=2, autoreset_mode=mode)) == expected
