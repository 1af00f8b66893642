"""Says what samplers and the vector environment do where the process has no descriptor left, or one, or two."""

import os
import resource
from collections.abc import Callable

import torch  # noqa: F401 - it would need descriptors later

from penstock import ConfigError, ParallelSampler, RandomAgent, Sampler, SerialSampler
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv


def attempt(make: Callable[[], object], n_free: int) -> str:
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for fd in taken[len(taken) - n_free :]:
            os.close(fd)
        del taken[len(taken) - n_free :]
    try:
        make()
        return "fine"
    except ConfigError as error:
        return str(error)
    finally:
        for fd in taken:
            os.close(fd)


def initialize(cls: type[Sampler]) -> None:
    cls(CountingEnv, batch_T=5, batch_B=1).initialize(RandomAgent())


resource.setrlimit(resource.RLIMIT_NOFILE, (80, 80))
initialize(SerialSampler)  # imports what is imported late
for n_free in 0, 1, 2:
    print(attempt(lambda: initialize(SerialSampler), n_free), flush=True)
    print(attempt(lambda: initialize(ParallelSampler), n_free), flush=True)
    print(attempt(lambda: ShmVectorEnv([CountingEnv]), n_free), flush=True)
