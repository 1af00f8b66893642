"""Failures of a vector environment beyond the table of `test_faults.py`: what replacements give, kills, Ctrl-C."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from ..scale import scaled
from ..support import until

pytestmark = [pytest.mark.timeout(scaled(600, 60)), pytest.mark.slow]

N = 4


def failing_envs(fault: Fault, **kwargs: Any) -> ShmVectorEnv:
    """The last of four environments, in the second of two workers, has the fault in its step."""
    fns = [CountingEnv] * (N - 1) + [faulty_env(CountingEnv, fault)]  # type: ignore[list-item]
    return ShmVectorEnv(fns, in_series=2, **kwargs)


def reset_and_step(envs: ShmVectorEnv, n_steps: int = 8) -> None:
    envs.reset(seed=1)
    for _ in range(n_steps):
        envs.step(np.zeros(N, int))


def test_replacements_are_reproducible(tmp_path: Path) -> None:
    def rewards(marker: str) -> Any:
        import gymnasium as gym

        fns = [partial(gym.make, "Pendulum-v1"), faulty_env("Pendulum-v1", Fault("kill", at=5, marker=marker))]
        with ShmVectorEnv(fns, on_worker_failure="restart") as envs:
            envs.reset(seed=7)
            return np.stack([envs.step(np.zeros((2, 1), np.float32))[1] for _ in range(15)])

    one, other = rewards(str(tmp_path / "1")), rewards(str(tmp_path / "2"))
    np.testing.assert_array_equal(one, other)
    assert one[4, 1] == 0
    assert not {*one[:4, 1]} & {*one[5:, 1]}  # it does not begin as before


def test_first_ready_steps_survive_kills() -> None:
    """Each environment is received once for each time that it was sent to, whoever dies in between."""
    with ShmVectorEnv(
        [partial(CountingEnv, length=7)] * 6, in_series=2, on_worker_failure="restart", max_restarts=10**6
    ) as envs:
        envs.reset(seed=0)
        counts, cuts = np.zeros(6, int), 0
        envs.send(np.zeros(6, int))
        killed, n_received, n_steps = list[int](), 0, np.zeros(3, int)  # steps of each worker since its last kill
        while len(killed) < scaled(200, 12) or n_received < 600:
            pids = envs.worker_pids  # of those that live
            # One that has not stepped has no episodes to lose: it is still dying, or starting.
            able = np.flatnonzero(n_steps >= 6)
            if n_received >= 50 * (len(killed) + 1) and len(pids) == 3 and len(able):
                worker = able[len(killed) % len(able)]
                n_steps[worker] = 0
                killed.append(pids[worker])
                os.kill(killed[-1], signal.SIGKILL)
            _, reward, _, truncated, infos = envs.recv()
            ids = infos["env_id"]
            n_received += len(ids)
            cuts += int(truncated.sum())
            for i, r, cut in zip(ids.tolist(), reward.tolist(), truncated.tolist(), strict=True):
                assert r in (0, counts[i] + 1), (i, r, counts[i])
                counts[i] = 0 if cut or r in (0, 7) else r
                n_steps[i // 2] += r > 0
            envs.send(np.zeros(len(ids), int), ids)
        envs.get_attr("count")  # the last kill is noticed too
        assert envs.n_restarts == len(killed)
        assert cuts >= len(killed)


class Interrupting(CountingEnv):
    """Its second step is a Ctrl-C."""

    def __init__(self, main_process: int) -> None:
        super().__init__()
        self.main_process = main_process

    def step(self, action: Any) -> Any:
        if self.count == 1:
            os.kill(self.main_process, signal.SIGINT)
        return super().step(action)


def test_ctrl_c_can_be_gone_on_from() -> None:
    with ShmVectorEnv([CountingEnv, partial(Interrupting, os.getpid())]) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
            until(lambda: False, "Ctrl-C")
        assert envs.step_wait()[1].tolist() == [2, 2]
        assert envs.step([0, 0])[1].tolist() == [3, 3]


def test_forgotten_it_ends_its_workers() -> None:
    envs = failing_envs(Fault("raise", at=999))
    reset_and_step(envs)
    pids = envs.worker_pids
    del envs
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the workers")
