"""Infos delivered == dones recorded, in every batch, in a fixed order: none late, none lost, none twice."""

from typing import Any

import numpy as np
import pytest

from penstock import AsyncSampler, ParallelSampler, RandomAgent, Sampler, TrajInfo
from penstock.envs import CountingEnv

from ..scale import scaled
from ..support import Diary
from .support import note

N_BATCHES = scaled(10_000, 40)
N_EPISODES = scaled(1_000_000, 4000)
T, B = 50, 8
CYCLE = scaled(1000, 200)  # episodes until returns repeat: float32 holds them exactly

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


class Signed(CountingEnv):
    """Episodes of 1 to 4 steps; the return of each tells column and episode."""

    def __init__(self, column: int = 0) -> None:
        super().__init__()
        self.column = column

    def reset(self, **kwargs: Any) -> Any:
        result = super().reset(**kwargs)
        self.length = 1 + (self.episode * 7 + self.column * 3) % 4
        return result

    def step(self, action: Any) -> Any:
        observation, _, terminated, truncated, info = super().step(action)
        reward = self.column + 100.0 * (self.episode % CYCLE) if terminated else 0.0
        return observation, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("cls", "traj_info_cls"), [(ParallelSampler, TrajInfo), (ParallelSampler, Diary), (AsyncSampler, TrajInfo)]
)
def test_every_done_has_its_info_in_order(cls: type[Sampler], traj_info_cls: type[TrajInfo]) -> None:
    n_batches = N_BATCHES if traj_info_cls is TrajInfo else N_BATCHES // 3
    n_episodes = 0
    last = np.full(B, -1.0)
    sizes: dict[str, Any] = {"batch_T": T, "batch_B": B, "n_workers": 3, "max_decorrelation_steps": 0}
    columns = [{"column": b} for b in range(B)]
    with cls(Signed, env_kwargs=columns, traj_info_cls=traj_info_cls, **sizes) as sampler:
        sampler.initialize(RandomAgent(), seed=1)
        if isinstance(sampler, AsyncSampler):
            sampler.start()
        for itr in range(n_batches):
            _, infos = sampler.obtain_samples(itr)
            returns = [info.Return for info in infos]
            env = sampler.samples_np.env
            assert returns == [env.reward[t, b] for t, b in np.argwhere(env.done)], "by time step, then env_rank"
            # Over all batches, every column's episodes come one after the other.
            for return_ in returns:
                episode, column = divmod(return_, 100)
                assert episode == (last[int(column)] + 1) % CYCLE
                last[int(column)] = episode
            n_episodes += len(infos)
        assert sum(worker.trajectories for worker in sampler.stats().workers) == n_episodes
    assert n_episodes >= (N_EPISODES if traj_info_cls is TrajInfo else 1)
    note(f"episodes accounted for ({traj_info_cls.__name__})", n_episodes, float("inf"))
