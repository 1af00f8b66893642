"""The first environment starts a program that serves all environments of the process, of two samplers in a row."""

import subprocess
from typing import Any

from penstock import RandomAgent, SerialSampler
from penstock.envs import CountingEnv


class Client(CountingEnv):
    server: Any = None

    def __init__(self) -> None:
        super().__init__()
        if Client.server is None:
            Client.server = subprocess.Popen(["cat"], stdin=-1, stdout=-1, bufsize=0)

    def step(self, action: Any) -> Any:
        self.server.stdin.write(b"x")
        assert self.server.stdout.read(1) == b"x"
        return super().step(action)


for _ in range(2):
    with SerialSampler(Client, batch_T=5, batch_B=2) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
Client.server.communicate()
