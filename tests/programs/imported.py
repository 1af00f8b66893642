"""Says what workers of a GpuSampler, and then of a vector environment, have imported: `imported.py START_METHOD`."""

import os
import sys
from typing import Any

import torch
from torch import nn

from penstock import CategoricalPgAgent, GpuSampler
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

ROOMS = "vector", "learning", "games", "distributed", "evaluation", "testing", "tools"
OPTIONAL = tuple(f"penstock.{room}" for room in ROOMS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 4)

    def forward(self, observation: torch.Tensor) -> Any:
        out = self.head(observation)
        return out[:, :3], out[:, 3]


class Looking(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.parent, self.had = os.getppid(), [name for name in sys.modules if name.startswith(OPTIONAL)]

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, float("torch" in sys.modules), *rest


how: dict[str, Any] = {"start_method": sys.argv[1]}
sizes: dict[str, Any] = {"batch_T": 3, "batch_B": 2, "n_workers": 2, "eval_n_envs": 2, "eval_max_steps": 20}
with GpuSampler(Looking, **sizes, **how) as sampler:
    sampler.initialize(CategoricalPgAgent(Model), seed=0, bootstrap_value=True)
    samples, _ = sampler.obtain_samples(0)
    infos = sampler.evaluate_agent(0)
    print(float(samples.env.reward.sum()), sum(info.Return for info in infos), len(infos))
    print("of the sampler:", sampler.get_attr("had")[0])
    parents = sampler.get_attr("parent")
with ShmVectorEnv([Looking] * 2, context=how["start_method"]) as envs:
    print("of the vector environment:", "penstock.vector.step_program" in envs.get_attr("had")[0])
    print("one supervisor:", set(envs.get_attr("parent")) == set(parents))
