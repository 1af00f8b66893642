"""Without `step_timeout`, a worker that makes no progress is named in a warning, once in each command."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="samplers need torch")

from penstock import AsyncSampler, GpuSampler, ParallelSampler, RandomAgent
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv
from penstock.workers import monitor

from ..support import until
from ..toy_games import Published

SECONDS = 0.4
SIZE: dict[str, Any] = {"batch_T": 4, "batch_B": 4, "n_workers": 2, "max_decorrelation_steps": 0}
MAIN = os.getpid()


class Held(CountingEnv):
    """Its step number n waits for the file n, and the constructor in a worker for the file 0, if there is a file
    `hold-n`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.n = folder, 0
        if os.getpid() != MAIN:
            self.wait()

    def wait(self) -> None:
        while (self.folder / f"hold-{self.n}").exists() and not (self.folder / str(self.n)).exists():
            time.sleep(0.001)

    def step(self, action: Any) -> Any:
        self.n += 1
        self.wait()
        return super().step(action)

    step_into = None  # type: ignore[assignment] - it would step without this method


class Checks:
    """Counts how often progress was checked, and keeps the warnings."""

    def __init__(self, folder: Path, warnings: list[str]) -> None:
        self.folder, self.warnings, self.n = folder, warnings, 0

    def await_more(self) -> None:
        """Wait for so many checks that a silent worker must have been noticed."""
        n = self.n + 3 * monitor._CHECKS_PER_LIMIT // 2
        until(lambda: self.n > n)

    def hold(self, *numbers: int) -> None:
        for number in numbers:
            (self.folder / f"hold-{number}").touch()

    def release_in_thread(self, number: int, n_warnings: int) -> threading.Thread:
        """Release step `number` when progress has been checked often after `n_warnings` warnings."""

        def release() -> None:
            until(lambda: len(self.warnings) >= n_warnings)
            self.await_more()
            (self.folder / str(number)).touch()

        thread = threading.Thread(target=release)
        thread.start()
        return thread


@pytest.fixture
def checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checks]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    found = Checks(tmp_path, warnings)
    plain = monitor.Monitor._silence  # a check that finds nothing leaves no other trace

    def silence(self: Any, rank: int, *args: Any, **kwargs: Any) -> float:
        found.n += rank == 0
        return plain(self, rank, *args, **kwargs)

    monkeypatch.setattr(monitor.Monitor, "_silence", silence)
    monkeypatch.setattr(monitor, "_WARN_SECONDS", SECONDS)
    logging.getLogger("penstock").addHandler(handler)
    yield found
    logging.getLogger("penstock").removeHandler(handler)


def assert_named(text: str, pid: int, where: str) -> None:
    assert text.startswith(f"worker 0 (pid {pid}, env_rank 0 to 1) has made no progress for 0 s while {where}."), text
    assert "set step_timeout" in text


@pytest.mark.slow
@pytest.mark.parametrize("cls", [ParallelSampler, GpuSampler])
def test_a_sampler_warns_once_in_each_command(cls: Any, tmp_path: Path, checks: Checks) -> None:
    checks.hold(0, 2, 6)
    with cls([CountingEnv, lambda: Held(tmp_path), CountingEnv, CountingEnv], **SIZE) as sampler:
        thread = checks.release_in_thread(0, n_warnings=0)
        sampler.initialize(RandomAgent())
        thread.join()
        assert checks.warnings == [], "the start has a limit of its own"
        for itr, number in enumerate((2, 6)):
            thread = checks.release_in_thread(number, n_warnings=itr + 1)
            sampler.obtain_samples(itr)
            thread.join()
            assert len(checks.warnings) == itr + 1
            assert_named(checks.warnings[itr], sampler.worker_pids[0], "stepping env_rank 1, t=1")
        sampler.obtain_samples(2)
        assert len(checks.warnings) == 2


@pytest.mark.slow
def test_a_vector_environment_warns_too(tmp_path: Path, checks: Checks) -> None:
    checks.hold(2)
    with ShmVectorEnv([CountingEnv, lambda: Held(tmp_path), CountingEnv, CountingEnv], n_workers=2) as envs:
        envs.reset()
        thread = checks.release_in_thread(2, n_warnings=1)
        for _ in range(4):
            envs.step([0] * 4)
        thread.join()
        (warning,) = checks.warnings
        assert_named(warning, envs.worker_pids[0], "stepping env_rank 1")


def test_with_a_limit_there_is_an_error_and_no_warning(tmp_path: Path, checks: Checks) -> None:
    checks.hold(2)
    fns: Any = [CountingEnv, lambda: Held(tmp_path), CountingEnv, CountingEnv]
    with ParallelSampler(fns, step_timeout=60.0, **SIZE) as sampler:
        sampler.initialize(RandomAgent())
        thread = checks.release_in_thread(2, n_warnings=0)
        sampler.obtain_samples(0)
        thread.join()
    assert checks.warnings == []


@pytest.mark.slow
def test_an_asynchronous_sampler_warns_while_the_learner_does_other_work(tmp_path: Path, checks: Checks) -> None:
    checks.hold(6)
    with AsyncSampler([CountingEnv, lambda: Held(tmp_path), CountingEnv, CountingEnv], **SIZE) as sampler:
        sampler.initialize(Published())
        checks.await_more()  # the workers are idle
        sampler.start()
        until(lambda: checks.warnings)
        checks.await_more()
        (warning,) = checks.warnings
        assert_named(warning, sampler.worker_pids[0], "stepping env_rank 1, t=1")
        (tmp_path / "6").touch()
        for itr in range(2):
            sampler.obtain_samples(itr)
        until(lambda: all(map(sampler.run.memory.control.has_arrived, range(2))))
        checks.await_more()  # they wait until the learner takes a batch
        assert len(checks.warnings) == 1
