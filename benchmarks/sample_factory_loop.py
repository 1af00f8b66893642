"""Sample Factory's sampler, a contestant of `peers.py`. It needs an older Gymnasium than penstock, so it runs in a
virtual environment of its own, and imports no penstock.

    python sample_factory_loop.py MAKE_ENV WORKERS ENVS_PER_WORKER T

For each line of stdin it prints the steps of the next trajectories. MAKE_ENV is a pickled function, in hexadecimal
digits.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

from sample_factory.algo.sampling.simplified_sampling_api import SyncSamplingAPI
from sample_factory.algo.utils.env_info import obtain_env_info_in_a_separate_process
from sample_factory.algo.utils.rl_utils import samples_per_trajectory
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env


def make_env(make: Callable[[], Any], *_: Any, **__: Any) -> Any:
    """What Sample Factory calls, with its own arguments."""
    return make()


def main(pickled: str, n_workers: int, n_envs: int, T: int, folder: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Sample Factory prints
    register_env("env", partial(make_env, pickle.loads(bytes.fromhex(pickled))))
    options = {
        "env": "env",
        "device": "cpu",
        "num_workers": n_workers,
        "num_envs_per_worker": n_envs,
        "worker_num_splits": 2 if n_envs > 1 else 1,  # one half acts while the other steps
        "rollout": T,
        "batch_size": T * n_workers * n_envs,
        "use_rnn": False,
        "nonlinearity": "tanh",
        "normalize_input": False,
        "decorrelate_experience_max_seconds": 0,
        "train_dir": folder,
    }
    argv = [f"--{option}={value}" for option, value in options.items()] + ["--encoder_mlp_layers", "64", "64"]
    config = parse_full_cfg(parse_sf_args(argv)[0], argv)
    sampler = SyncSamplingAPI(config, obtain_env_info_in_a_separate_process(config))
    sampler.start()
    for _ in sys.stdin:
        print(samples_per_trajectory(sampler.get_trajectories_sync()), file=answers, flush=True)
    sampler.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1], *map(int, sys.argv[2:]), folder)
