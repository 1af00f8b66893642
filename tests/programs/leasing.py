"""Samples until it is killed, with environments that have leased a port. Says the ports, and the workers."""

import json
import sys
from typing import Any

from penstock import ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.games import lease_port

how: dict[str, Any] = json.loads(sys.argv[1])


class Leasing(CountingEnv):
    def __init__(self) -> None:
        super().__init__()
        self.lease = lease_port()

    @property
    def port(self) -> int:
        return self.lease.port


sampler = ParallelSampler(Leasing, batch_T=20, batch_B=4, n_workers=2, **how)
sampler.initialize(RandomAgent())
print(*sampler.get_attr("port"), flush=True)
print(*sampler.worker_pids, flush=True)
for itr in range(1000000):
    sampler.obtain_samples(itr)
