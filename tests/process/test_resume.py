"""A run that is killed again and again, and continued with another number of workers, has the batches of one run."""

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import RandomAgent, SerialSampler

from ..scale import scaled
from ..support import PROGRAMS
from .support import Script, generator, pause

pytestmark = [pytest.mark.timeout(scaled(3600, 60)), pytest.mark.slow]


def straight(env_id: str, n_batches: int, options: dict[str, Any]) -> list[str]:
    """The digests of one run."""
    digests = []
    with SerialSampler(env_id, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=7)
        for itr in range(n_batches):
            _, infos = sampler.obtain_samples(itr)
            words = hashlib.sha256(repr([vars(info) for info in infos]).encode())
            for _, leaf in sampler.samples_np.leaves():
                words.update(leaf.tobytes())
            digests.append(words.hexdigest())
    return digests


@pytest.mark.parametrize("env_id", scaled(("CartPole-v1", "Blackjack-v1", "FrozenLake-v1"), ("CartPole-v1",)))
def test_a_run_that_is_killed_continues_as_if_nothing_had_happened(env_id: str, tmp_path: Path) -> None:
    n_batches, n_kills = scaled(60, 8), scaled(12, 2)
    options: dict[str, Any] = {"batch_T": 20, "batch_B": 6, "max_decorrelation_steps": 30, "seed_episodes": True}
    rng, path = generator("resume", env_id), tmp_path / "checkpoint.pt"
    variables = {"env_id": env_id, "path": str(path), "n_batches": n_batches, "settings": options}
    for i in range(n_kills + 1):
        kind, n_workers = rng.choice([("serial", 1), ("parallel", 1), ("parallel", 2), ("parallel", 3)])
        with Script(tmp_path, PROGRAMS / "resumed.py", kind=kind, n_workers=n_workers, **variables) as script:
            _, began = script.line()
            if i == n_kills:
                _, errors = script.end()
                assert script.process.returncode == 0, errors
                break
            for _ in range(min(rng.randrange(1, 4), n_batches - int(began) - 1)):
                script.line()
            pause(rng.uniform(0, 0.03))
            os.kill(script.pid, signal.SIGKILL)
            script.end()
    assert torch.load(path)["digests"] == straight(env_id, n_batches, options)
