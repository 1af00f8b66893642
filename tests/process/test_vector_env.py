"""Failures of a vector environment beyond the table of `test_faults.py`: what replacements give, kills, Ctrl-C, odd
infos, and waits that go on through many calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock import ConfigError, EnvCallError, SpaceError, WorkerError, WorkerTimeoutError
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from ..scale import scaled
from ..support import until

pytestmark = [pytest.mark.timeout(scaled(600, 60)), pytest.mark.slow]

MAIN = os.getpid()


def test_replacements_are_reproducible(tmp_path: Path) -> None:
    def rewards(marker: str) -> Any:
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


class Pressing(CountingEnv):
    """Its second call of `where` is a Ctrl-C."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.n = where, 0

    def call(self, where: str) -> None:
        self.n += where == self.where
        if where == self.where and self.n == 2:
            os.kill(MAIN, signal.SIGINT)

    def reset(self, **kwargs: Any) -> Any:
        self.call("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.call("step")
        return super().step(action)


def test_ctrl_c_can_be_gone_on_from() -> None:
    with ShmVectorEnv([CountingEnv, partial(Pressing, "step")]) as envs:
        envs.reset()
        envs.step([0, 0])
        with pytest.raises(KeyboardInterrupt):
            envs.step([0, 0])
            until(lambda: False, "Ctrl-C")
        assert envs.step_wait()[1].tolist() == [2, 2]
        assert envs.step([0, 0])[1].tolist() == [3, 3]


def test_after_ctrl_c_in_a_reset_one_can_send_step_and_reset() -> None:
    with ShmVectorEnv([partial(Pressing, "reset"), CountingEnv], autoreset_mode="DISABLED") as envs:
        envs.reset()
        envs.send([0], [1])
        with pytest.raises(KeyboardInterrupt):
            envs.reset(options={"reset_mask": np.array([True, False])})
        observation, *_, infos = envs.recv(2)
        assert (infos["env_id"].tolist(), observation.tolist()) == ([1], [[0, 1]])
        envs.send([0, 0])
        assert envs.recv(2)[0].tolist() == [[1, 1], [0, 2]]
        assert envs.reset()[0].tolist() == [[2, 0], [1, 0]]


class Reusing(CountingEnv):
    """One info for all its life."""

    def __init__(self) -> None:
        super().__init__(length=3)
        self.info: dict[str, Any] = {}

    def reset(self, **kwargs: Any) -> Any:
        observation, _ = super().reset(**kwargs)
        self.info["count"] = 0
        return observation, self.info

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        self.info["count"] = self.count
        return (*rest, self.info)


def test_an_info_is_told_as_it_was_when_it_was_returned() -> None:
    with ShmVectorEnv([Reusing] * 2, autoreset_mode="SAME_STEP") as envs:
        envs.reset()
        for _ in range(3):
            infos = envs.step([0, 0])[4]
        assert infos["final_info"]["count"].tolist() == [3, 3]
        assert infos["count"].tolist() == [0, 0]


def test_a_hang_is_found_while_others_go_on_stepping() -> None:
    hanging: Any = faulty_env(CountingEnv, Fault("hang"))
    message = r"worker 0 .* made no progress for 0\.5 s \(step_timeout=0\.5\) while stepping env_rank 0"
    with ShmVectorEnv([hanging, partial(CountingEnv, length=10**6)], step_timeout=0.5) as envs:
        envs.reset()
        envs.send([0, 0])
        with pytest.raises(WorkerTimeoutError, match=message):
            while True:
                ids = envs.recv()[4]["env_id"]
                envs.send([0] * len(ids), ids)


class Dying(CountingEnv):
    """Dies a moment after its first call or step, while its neighbour is in it. A replacement takes long to build."""

    def __init__(self, rank: int, marker: Path) -> None:
        super().__init__(length=100)
        self.rank, self.marker = rank, marker
        if rank == 0 and marker.exists():
            time.sleep(1.5)

    def ask(self) -> int:
        if self.rank == 0 and not self.marker.exists():
            self.marker.touch()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.rank == 1:
            time.sleep(0.3)
        return self.rank

    def step(self, action: Any) -> Any:
        self.ask()
        return super().step(action)


def test_a_death_after_the_answer_to_a_call_loses_nothing(tmp_path: Path) -> None:
    fns = [partial(Dying, rank, tmp_path / "marker") for rank in range(2)]
    with ShmVectorEnv(fns, on_worker_failure="restart") as envs:
        envs.reset()
        assert envs.call("ask") == (0, 1)
        assert envs.n_restarts == 1
        assert envs.call("ask") == (0, 1)


def test_a_replacement_has_the_time_of_a_start_in_later_waits_too(tmp_path: Path) -> None:
    fns = [partial(Dying, rank, tmp_path / "marker") for rank in range(2)]
    with ShmVectorEnv(fns, on_worker_failure="restart", max_restarts=1, step_timeout=0.8) as envs:
        envs.reset()
        for _ in range(4):
            envs.step([0, 0])
        assert envs.n_restarts == 1


class Unreadable(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


class OddInfo(CountingEnv):
    def __init__(self, what: Any) -> None:
        super().__init__(length=100)
        self.what = what

    def step(self, action: Any) -> Any:
        *rest, info = super().step(action)
        return (*rest, {**info, "odd": self.what()} if action == 1 else info)


def test_an_info_that_cannot_be_unpickled_costs_one_step() -> None:
    with ShmVectorEnv([partial(OddInfo, partial(Unreadable, 1, 2))] * 3, in_series=2) as envs:
        envs.reset()
        with pytest.raises(EnvCallError, match="the info of env_rank 1 has an entry that cannot be unpickled"):
            envs.step([0, 1, 0])
        assert envs.step([0, 0, 0])[4]["count"].tolist() == [2, 2, 2]
        envs.send([1, 0, 0])
        with pytest.raises(EnvCallError, match="the info of env_rank 0"):
            while True:
                envs.recv(3)
        assert envs.step([0, 0, 0])[4]["count"].tolist() == [4, 4, 4]


def test_an_info_that_cannot_be_pickled_is_named() -> None:
    with ShmVectorEnv([CountingEnv, partial(OddInfo, threading.Lock)], n_workers=1) as envs:
        envs.reset()
        with pytest.raises(WorkerError, match=r"info\['odd'\] of env_rank 1 cannot be pickled") as error:
            envs.step([1, 1])
        assert isinstance(error.value.__cause__, SpaceError)


def test_what_does_not_fit_is_refused() -> None:
    with ShmVectorEnv([partial(CountingEnv, dtype=np.float32)] * 2) as envs:
        envs.reset()
        with pytest.raises(
            SpaceError, match="action has values from 0 to 9223372036854775808, which int64 cannot hold"
        ):
            envs.step(np.array([2**63, 0], np.uint64))
        with pytest.raises(EnvCallError, match=r"^call 'nothing' on env_rank 0 raised AttributeError"):
            envs.call("nothing")
    with pytest.raises(ConfigError, match="copy must be True or False"):
        ShmVectorEnv([CountingEnv], copy="no")  # type: ignore[arg-type]


def test_a_fault_in_a_step_of_a_replacement_is_one_more() -> None:
    env: Any = faulty_env(CountingEnv, Fault("kill", at=2))
    with ShmVectorEnv([env], on_worker_failure="restart", max_restarts=10) as envs:
        envs.reset()
        for _ in range(6):
            envs.step([0])
        assert envs.n_restarts >= 2
