"""Batches of environments in processes of their own, while somebody kills processes. Each batch is checked.

Goes on until there is a file `stop` in the folder. Says "up", and at the end the error that came, or how many batches.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from penstock import EnvProcess, ParallelSampler, PenstockError, RandomAgent

folder, start_method, programs = Path(sys.argv[1]), sys.argv[2], str(Path(__file__).parent)


def check(samples: Any) -> None:
    """Each step follows from the one before it."""
    env, action = samples.env, samples.agent.action
    k, total = env.observation[..., 0], env.observation[..., 1]
    goes_on, begins = (env.valid[1:] & env.valid[:-1] & is_so for is_so in (~env.done[:-1], env.done[:-1]))
    np.testing.assert_array_equal(k[1:][goes_on], k[:-1][goes_on] + 1)
    np.testing.assert_array_equal(total[1:][goes_on], (total + action)[:-1][goes_on])
    assert not k[1:][begins].any()
    assert not total[1:][begins].any()
    whole = env.valid & (~env.done | (k == 6))  # others were cut
    np.testing.assert_array_equal(env.reward[whole], (10 * (k + 1) + action)[whole])
    assert env.done[env.valid & (k == 6)].all()


def main() -> None:
    make = partial(EnvProcess, "own_envs:Counted", path=[programs], step_timeout=2.0, stop_timeout=0.5, renew_every=9)
    limits: dict[str, Any] = {"max_restarts": 999, "max_renewals": 999, "max_decorrelation_steps": 0}
    how: dict[str, Any] = {"on_worker_failure": "restart", "on_game_failure": "renew", "start_method": start_method}
    n_batches = 0
    try:
        with ParallelSampler(make, batch_T=20, batch_B=4, n_workers=2, **limits, **how) as sampler:
            sampler.initialize(RandomAgent(), seed=1)
            while not (folder / "stop").exists():
                check(sampler.obtain_samples(n_batches)[0].numpy())
                n_batches += 1
                if n_batches == 1:
                    print("up", flush=True)
    except PenstockError as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
    else:
        print(n_batches, "batches", flush=True)


if __name__ == "__main__":
    main()
