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
from gymnasium.vector import AutoresetMode

from penstock import WorkerDiedError, WorkerError
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


def test_first_ready_stepping_fails_as_loudly() -> None:
    with failing_envs(Fault("kill", at=2)) as envs:
        envs.reset()
        with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL.*while stepping env_rank 3"):
            for _ in range(100):
                envs.send(np.zeros(N, int))
                envs.recv(N)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_a_replaced_workers_episodes_are_cut_where_they_were(mode: AutoresetMode, tmp_path: Path) -> None:
    fault = Fault("kill", at=3, marker=str(tmp_path / "marker"))
    with failing_envs(fault, autoreset_mode=mode, on_worker_failure="restart") as envs:
        envs.reset(seed=1)
        for _ in range(2):
            envs.step(np.zeros(N, int))
        observation, reward, terminated, truncated, infos = envs.step(np.zeros(N, int))
        assert envs.n_restarts == 1
        assert reward.tolist() == [3, 3, 0, 0]
        assert truncated.tolist() == [False, False, True, True]
        assert not terminated.any()
        last = [0, 2]
        if mode is AutoresetMode.SAME_STEP:
            assert [final.tolist() for final in infos["final_obs"][2:]] == [last, last]
            assert infos["final_info"]["worker_restarted"].tolist() == [False, False, True, True]
            assert observation[2:].tolist() == [[0, 0], [0, 0]]
        else:
            assert observation[2:].tolist() == [last, last]
            assert infos["worker_restarted"].tolist() == [False, False, True, True]
        if mode is AutoresetMode.DISABLED:
            envs.reset(options={"reset_mask": truncated})
        observation, reward, *_ = envs.step(np.zeros(N, int))
        again = [0, 0] if mode is AutoresetMode.NEXT_STEP else [1, 1]  # there, this step is the reset
        assert reward.tolist() == [4, 4, *again]
        assert observation[:, 1].tolist() == [4, 4, *again]


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
        n_kills, n_received = 0, 0
        while n_kills < scaled(200, 12) or n_received < 600:
            if n_received >= 50 * (n_kills + 1):
                workers = envs.worker_pids  # without those that are dead and not replaced yet
                os.kill(workers[n_kills % len(workers)], signal.SIGKILL)
                n_kills += 1
            _, reward, _, truncated, infos = envs.recv()
            ids = infos["env_id"]
            n_received += len(ids)
            cuts += int(truncated.sum())
            for i, r, cut in zip(ids.tolist(), reward.tolist(), truncated.tolist(), strict=True):
                assert r in (0, counts[i] + 1), (i, r, counts[i])
                counts[i] = 0 if cut or r in (0, 7) else r
            envs.send(np.zeros(len(ids), int), ids)
        envs.get_attr("count")  # the last kill is noticed too
        assert envs.n_restarts == n_kills
        assert cuts >= n_kills


def test_the_quota_of_replacements_ends_with_the_history() -> None:
    told = r"(?s)max_restarts=2 in 60 s are used up, earlier:.*InjectedFault"
    restarting: dict[str, Any] = {"on_worker_failure": "restart", "max_restarts": 2}
    with failing_envs(Fault("raise", at=2), **restarting) as envs, pytest.raises(WorkerError, match=told):
        reset_and_step(envs, 100)


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
