"""Under each limit on descriptors there is either one ConfigError with both numbers, or a batch: nothing between."""

import json
import re
import resource
import sys
from typing import Any

from penstock import ConfigError, ParallelSampler, RandomAgent, system
from penstock.envs import CountingEnv

given = json.loads(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
REFUSED = r"3 workers need about (\d+) file descriptors and this process may open only (\d+) more: .*ulimit -n.*"

allow_files, system.allow_files = system.allow_files, lambda needed: allow_files(0)  # nothing raises the soft limit


def attempt(limit: int) -> str:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))  # the hard limit could not be raised again
    sizes: dict[str, Any] = {"batch_T": 5, "batch_B": 3, "n_workers": 3}
    try:
        with ParallelSampler(CountingEnv, start_method=given["start_method"], **sizes) as sampler:
            sampler.initialize(RandomAgent())
            sampler.obtain_samples(0)
        return "fine"
    except ConfigError as error:
        found = re.fullmatch(REFUSED, str(error))
        is_true = found is not None and int(found[1]) > int(found[2])
        return "refused" if is_true else f"wrong: {error}"


attempt(1000)
print(*[attempt(limit) for limit in given["limits"]], flush=True)
