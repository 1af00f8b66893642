"""What was once wrong with vector environments: rare moments, odd infos, and waits that go on through many calls."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import ConfigError, EnvCallError, SpaceError, WorkerError, WorkerTimeoutError
from penstock.envs import CountingEnv
from penstock.testing import Fault, faulty_env
from penstock.vector import ShmVectorEnv

from ..scale import scaled

pytestmark = [pytest.mark.timeout(scaled(600, 60)), pytest.mark.slow]


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


class Hanging(CountingEnv):
    def step(self, action: Any) -> Any:
        threading.Event().wait()


def test_a_hang_is_found_while_others_go_on_stepping() -> None:
    with ShmVectorEnv([Hanging, partial(CountingEnv, length=10**6)], step_timeout=0.5) as envs:
        envs.reset()
        envs.send([0, 0])
        with pytest.raises(
            WorkerTimeoutError,
            match=r"worker 0 .* made no progress for 0\.5 s \(step_timeout=0\.5\) while stepping env_rank 0",
        ):
            while True:
                ids = envs.recv()[4]["env_id"]
                envs.send([0] * len(ids), ids)


class Answering(CountingEnv):
    """Dies a moment after it has answered a call, while its neighbour is still in it."""

    def __init__(self, rank: int, marker: Path) -> None:
        super().__init__()
        self.rank, self.marker = rank, marker

    def ask(self) -> int:
        if self.rank == 0 and not self.marker.exists():
            self.marker.touch()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif self.rank == 1:
            time.sleep(0.6)
        return self.rank


def test_a_death_after_the_answer_to_a_call_loses_nothing(tmp_path: Path) -> None:
    fns = [partial(Answering, rank, tmp_path / "marker") for rank in range(2)]
    with ShmVectorEnv(fns, on_worker_failure="restart") as envs:
        envs.reset()
        assert envs.call("ask") == (0, 1)
        assert envs.n_restarts == 1
        assert envs.call("ask") == (0, 1)


class SlowToBuild(CountingEnv):
    """Takes long to build in a replacement, and dies a moment after its first step."""

    def __init__(self, rank: int, marker: Path) -> None:
        super().__init__(length=100)
        self.rank, self.marker = rank, marker
        if rank == 0 and marker.exists():
            time.sleep(1.5)

    def step(self, action: Any) -> Any:
        if self.rank == 1:
            time.sleep(0.3)
        elif not self.marker.exists():
            self.marker.touch()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return super().step(action)


def test_a_replacement_has_the_time_of_a_start_in_later_waits_too(tmp_path: Path) -> None:
    fns = [partial(SlowToBuild, rank, tmp_path / "marker") for rank in range(2)]
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


class Resetting(CountingEnv):
    """Its second reset is a Ctrl-C."""

    def __init__(self, main_process: int) -> None:
        super().__init__()
        self.main_process = main_process

    def reset(self, **kwargs: Any) -> Any:
        if self.episode == 0:
            os.kill(self.main_process, signal.SIGINT)
        return super().reset(**kwargs)


def test_after_ctrl_c_in_a_reset_one_can_send_step_and_reset() -> None:
    with ShmVectorEnv([partial(Resetting, os.getpid()), CountingEnv], autoreset_mode="DISABLED") as envs:
        envs.reset()
        envs.send([0], [1])
        with pytest.raises(KeyboardInterrupt):
            envs.reset(options={"reset_mask": np.array([True, False])})
        observation, *_, infos = envs.recv(2)
        assert (infos["env_id"].tolist(), observation.tolist()) == ([1], [[0, 1]])
        envs.send([0, 0])
        assert envs.recv(2)[0].tolist() == [[1, 1], [0, 2]]
        assert envs.reset()[0].tolist() == [[2, 0], [1, 0]]


def test_what_does_not_fit_is_refused() -> None:
    with ShmVectorEnv([partial(CountingEnv, dtype=np.float32)] * 2) as envs:
        envs.reset()
        with pytest.raises(
            SpaceError, match="action has values from 0 to 9223372036854775808, which int64 cannot hold"
        ):
            envs.step(np.array([2**63, 0], np.uint64))
        with pytest.raises(ConfigError, match="options must be None, a dict, or a list of 2 dicts, got 5"):
            envs.reset(options=5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="seed must be"):
            envs.reset(seed="ab")  # type: ignore[arg-type]
        with pytest.raises(EnvCallError, match=r"^call 'nothing' on env_rank 0 raised AttributeError"):
            envs.call("nothing")
    with pytest.raises(ConfigError, match="copy must be True or False"):
        ShmVectorEnv([CountingEnv], copy="no")  # type: ignore[arg-type]
    with ShmVectorEnv([CountingEnv], copy=False) as envs, pytest.raises(ConfigError, match="copy=True"):
        envs.to_sb3()
    with pytest.raises(ConfigError, match="env_fns must be a list of callables"):
        ShmVectorEnv("CartPole-v1")


def test_a_fault_in_a_step_of_a_replacement_is_one_more() -> None:
    env: Any = faulty_env(CountingEnv, Fault("kill", at=2))
    with ShmVectorEnv([env], on_worker_failure="restart", max_restarts=10) as envs:
        envs.reset()
        for _ in range(6):
            envs.step([0])
        assert envs.n_restarts >= 2
