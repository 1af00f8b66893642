"""Opens and closes samplers, and says by how much that makes the process grow."""

import gc
import json
import sys
from typing import Any

import psutil

from penstock import ParallelSampler, RandomAgent, TrajInfo

given = json.loads(sys.argv[1])


class Told(TrajInfo):
    pass


def once(traj_info_cls: type[TrajInfo]) -> None:
    sizes: dict[str, Any] = {"batch_T": 20, "batch_B": 4, "n_workers": 2, "eval_n_envs": 2, "eval_max_steps": 20}
    how = {"start_method": given["start_method"], "traj_info_cls": traj_info_cls}
    with ParallelSampler("CartPole-v1", **sizes, **how) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0)


def holdings() -> tuple[int, ...]:
    """Memory, descriptors, threads and children."""
    gc.collect()
    n_children = len(process.children(recursive=True))
    return process.memory_full_info().uss, process.num_fds(), process.num_threads(), n_children


process = psutil.Process()
for _ in range(given["n_before"]):
    once(TrajInfo)
    once(Told)
before = holdings()
for i in range(given["n"]):
    once((TrajInfo, Told)[i % 2])
print(*(b - a for a, b in zip(before, holdings(), strict=True)), flush=True)
