"""What pages of docs/migration say that other libraries *do*. A library can have every name on a page, and still do
something else with it. `make peers-docs` runs each in the version that its page names."""

from __future__ import annotations

import importlib.util
import multiprocessing
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

PAGES = Path(__file__).parent.parent.parent / "docs" / "migration"


class Seen(gym.Env[np.ndarray, int]):
    """Observes the seed of its reset. Counts the steps of all its instances in this process."""

    observation_space, action_space, n_steps = gym.spaces.Box(0, 1e6, (1,), np.float32), gym.spaces.Discrete(2), 0

    def __init__(self, reward: Any = 1.0) -> None:
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.seen = np.full(1, seed or 0, np.float32)
        return self.seen.copy(), {}

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, dict[str, Any]]:
        Seen.n_steps += 1
        return self.seen.copy(), self.reward, False, False, {}


def gymnasium() -> None:
    """Environment i gets the seed + i."""
    assert gym.vector.SyncVectorEnv([Seen] * 3).reset(seed=5)[0].ravel().tolist() == [5, 6, 7]


def pufferlib() -> None:
    """Environment j of worker w gets the seed + w + j. `recv` returns eight values."""
    from pufferlib import emulation, vector

    creator, sizes = partial(emulation.GymnasiumPufferEnv, env_creator=Seen), {"num_envs": 8, "num_workers": 4}
    envs = vector.make(creator, backend=vector.Multiprocessing, overwork=True, **sizes)
    envs.async_reset(seed=0)
    found = envs.recv()
    envs.close()
    assert len(found) == 8
    seeds = " ".join(map(str, found[0].ravel().astype(int)))
    assert f"the seeds are {seeds}." in (PAGES / "pufferlib.md").read_text(encoding="utf-8"), seeds


def sb3() -> None:
    """`SubprocVecEnv` keeps the type of rewards, `DummyVecEnv` does not."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    for reward, dtype in ((1.0, np.float64), (np.float32(1), np.float32)):
        for cls, expected in ((SubprocVecEnv, dtype), (DummyVecEnv, np.float32)):
            envs = cls([partial(Seen, reward)])
            envs.reset()
            assert envs.step(np.zeros(1, np.int64))[1].dtype == expected, (cls, reward)
            envs.close()


def skrl() -> None:
    """Agents that learn on-policy store "truncated"."""
    from skrl.agents.torch import a2c, ddpg, dqn, ppo, rpo, sac, td3, trpo
    from skrl.memories.torch import RandomMemory

    spaces = {"observation_space": Seen.observation_space, "action_space": gym.spaces.Box(-1, 1)}
    on_policy = (a2c.A2C, ppo.PPO, rpo.RPO, trpo.TRPO)
    for cls in (*on_policy, ddpg.DDPG, dqn.DQN, sac.SAC, td3.TD3):
        memory = RandomMemory(memory_size=4, num_envs=1, device="cpu")
        if cls is dqn.DQN:
            spaces = {**spaces, "action_space": Seen.action_space}
        cls(models={}, memory=memory, device="cpu", **spaces).init(trainer_cfg=None)
        assert ("truncated" in memory.get_tensor_names()) is (cls in on_policy), cls


def tianshou() -> None:
    """With `wait_num`, a step returns the environments that are ready. Between two collections, nothing steps."""
    from tianshou.data import AsyncCollector, Collector
    from tianshou.env import SubprocVectorEnv

    assert issubclass(AsyncCollector, Collector), "it steps in `collect` alone"
    goes_on = multiprocessing.Event()

    class Waits(Seen):
        def step(self, action: int) -> Any:
            goes_on.wait(30)
            return super().step(action)

    envs = SubprocVectorEnv([Seen, Seen, Seen, Waits], wait_num=3)
    envs.reset()
    assert len(envs.step(np.zeros(4, np.int64), np.arange(4))[0]) == 3
    assert envs.waiting_id == [3], "the fourth is fetched later"
    goes_on.set()
    envs.close()


def torchrl() -> None:
    """`AsyncBatchedCollector` goes on while nobody asks for a batch, until its queue is full."""
    import torch
    from tensordict.nn import TensorDictModule
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.envs import GymWrapper

    def act(observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(observation.shape[:-1], dtype=torch.int64)

    collector = AsyncBatchedCollector(
        [lambda: GymWrapper(Seen(), categorical_action_encoding=True)] * 2,
        policy=TensorDictModule(act, ["observation"], ["action"]),
        frames_per_batch=8,
        env_backend="threading",
        transport="driver",
    )
    next(iter(collector))
    before = Seen.n_steps
    wait_until(lambda: Seen.n_steps > before + 4)
    wait_until(is_standing)
    collector.shutdown()
    assert Seen.n_steps < before + 40


def is_standing() -> bool:
    before = Seen.n_steps
    time.sleep(0.5)
    return before == Seen.n_steps


def wait_until(is_true: Any) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.01)


CHECKS = {
    "gymnasium": gymnasium,
    "pufferlib": pufferlib,
    "sb3": sb3,
    "skrl": skrl,
    "tianshou": tianshou,
    "torchrl": torchrl,
}


@pytest.mark.slow
@pytest.mark.parametrize("page", CHECKS)
def test_a_library_does_what_its_page_says(page: str) -> None:
    """In a process of its own: these libraries leave threads and descriptors until theirs ends."""
    library = "stable_baselines3" if page == "sb3" else page
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    done = subprocess.run([sys.executable, __file__, page], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
