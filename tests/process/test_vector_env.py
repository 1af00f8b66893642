"""A vector environment fails as samplers do: at once, by name, once and for all, or not at all if it may restart."""

from __future__ import annotations

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from gymnasium.vector import AutoresetMode

from penstock import WorkerDiedError, WorkerError, WorkerTimeoutError
from penstock.envs import CountingEnv
from penstock.testing import Fault, InjectedFault, faulty_env
from penstock.vector import ShmVectorEnv

from ..scale import methods, pairs, scaled
from ..support import until
from .crashes import HOWS
from .support import ERROR_SECONDS, note

pytestmark = [pytest.mark.timeout(scaled(600, 60)), pytest.mark.slow]

N = 4


def make(where: str, fault: Fault, **kwargs: Any) -> ShmVectorEnv:
    """The last of four environments, in the second of two workers, has the fault."""
    fns = [CountingEnv] * (N - 1) + [faulty_env(CountingEnv, fault, where)]  # type: ignore[list-item]
    return ShmVectorEnv(fns, in_series=2, **kwargs)


def run(envs: ShmVectorEnv, n_steps: int = 8) -> None:
    envs.reset(seed=1)
    for _ in range(n_steps):
        envs.step(np.zeros(N, int))


def _workers(envs: ShmVectorEnv) -> list[int]:
    return envs.worker_pids


PLACES = {
    "init": r"building env_rank 3 \(start-up\)",
    "reset": r"resetting env_rank 3 \((reset|step)\)",
    "step": r"stepping env_rank 3 \(step\)",
}


@methods("forkserver")
@pytest.mark.parametrize(("how", "where"), pairs(HOWS, ["step", "reset", "init"]))
def test_every_failure_has_a_name(where: str, how: str, start_method: str) -> None:
    kind = WorkerError if how in ("raise", "unpicklable", "system exit") else WorkerDiedError
    fault = Fault(how, at=1 if where == "init" else 2, spare_pid=os.getpid())
    told = rf"worker 1 \(pid \d+, env_rank 2 to 3\) {HOWS[how]}(.|\n)*{PLACES[where]}"
    with pytest.raises(kind, match=told) as error, make(where, fault, context=start_method) as envs:
        run(envs)
    if how == "raise":
        assert isinstance(error.value.__cause__, InjectedFault)


def test_once_broken_it_gives_the_same_error_ever_after() -> None:
    with make("step", Fault("raise", at=3)) as envs:
        with pytest.raises(WorkerError) as first:
            run(envs)
        for call in (lambda: envs.step(np.zeros(N, int)), envs.reset, lambda: envs.get_attr("count"), envs.recv):
            with pytest.raises(WorkerError, match=re.escape(str(first.value))):
                call()


def test_a_kill_between_two_calls_is_found_by_the_next() -> None:
    with make("step", Fault("raise", at=999)) as envs:
        run(envs)
        os.kill(_workers(envs)[0], signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL"):
            for _ in range(10**6):
                envs.step(np.zeros(N, int))
        note("vector environment, killed between two calls: call to error, s", time.monotonic() - began, ERROR_SECONDS)


@pytest.mark.parametrize("how", scaled(["hang", "hold the gil", "spin", "stop"], ["hang", "hold the gil"]))
def test_a_hang_ends_at_its_limit(how: str) -> None:
    began = time.monotonic()
    told = r"(?s)worker 1 .* made no progress for 0\.5 s.*stepping env_rank 3"
    with make("step", Fault(how, at=3), step_timeout=0.5) as envs, pytest.raises(WorkerTimeoutError, match=told):
        run(envs)
    assert time.monotonic() - began < 20


def test_first_ready_stepping_fails_as_loudly() -> None:
    with make("step", Fault("kill", at=2)) as envs:
        envs.reset()
        with pytest.raises(WorkerDiedError, match=r"was killed by SIGKILL.*while stepping env_rank 3"):
            for _ in range(100):
                envs.send(np.zeros(N, int))
                envs.recv(N)


@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_a_replaced_workers_episodes_are_cut_where_they_were(mode: AutoresetMode, tmp_path: Path) -> None:
    fault = Fault("kill", at=3, marker=str(tmp_path / "marker"))
    with make("step", fault, autoreset_mode=mode, on_worker_failure="restart") as envs:
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
                workers = _workers(envs)  # without those that are dead and not replaced yet
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
    with make("step", Fault("raise", at=2), **restarting) as envs, pytest.raises(WorkerError, match=told):
        run(envs, 100)


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
    envs = make("step", Fault("raise", at=999))
    run(envs)
    pids = _workers(envs)
    del envs
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the workers")


def test_a_close_that_raises_warns_and_one_that_hangs_is_bounded() -> None:
    envs = make("close", Fault("raise", spare_pid=os.getpid()))
    with pytest.warns(RuntimeWarning, match="InjectedFault.*while closing env_rank 3"):
        envs.close()
    envs = make("close", Fault("hang", spare_pid=os.getpid()), close_timeout=0.2)
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="did not exit while closing env_rank 3 and was killed"):
        envs.close()
    note("vector environment: a close that hangs, s", time.monotonic() - began, 5)
