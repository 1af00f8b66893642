"""Processes that an environment forks: what comes back into the worker's loop must not work in the worker's place."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="samplers need torch")

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    TrajInfo,
    WorkerDiedError,
)
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv

from ..process.support import is_running
from ..scale import USUAL_METHODS, pairs
from ..support import assert_same, collect_with, until
from ..toy_games import Published

T, B, AT = 6, 4, 15  # episodes have 5 steps; step 15 ends one
WRONG = -100.0
SIZE: dict[str, Any] = {"batch_T": T, "batch_B": B, "max_decorrelation_steps": 0}


class Forking(CountingEnv):
    """Forks in its call number `at` of a method. The child, whose rewards are wrong, does `deed`."""

    def __init__(self, folder: Path, where: str = "step", at: int = AT, deed: str = "return") -> None:
        super().__init__()
        self.folder, self.where, self.at, self.deed = folder, where, at, deed
        self.n, self.is_child = 0, False

    def note_call(self, where: str) -> None:
        self.n += where == self.where
        if where != self.where or self.n != self.at:
            return
        parent = os.getpid()
        if pid := os.fork():
            (self.folder / "pid").write_text(f"{parent} {pid}")
            return
        self.is_child = True
        if self.deed == "raise":
            raise ValueError("no")
        if self.deed == "sys.exit":
            sys.exit()
        if self.deed == "exit":
            os._exit(0)

    def step(self, action: Any) -> Any:
        self.note_call("step")
        observation, reward, *rest = super().step(action)
        return (observation * 0, WRONG, *rest) if self.is_child else (observation, reward, *rest)

    def reset(self, **kwargs: Any) -> Any:
        self.note_call("reset")
        return super().reset(**kwargs)

    def ask(self) -> int:
        self.note_call("ask")
        return os.getpid()

    def close(self) -> None:
        if self.is_child:
            (self.folder / "closed").touch()


class Told(TrajInfo):
    """Of a class of its own, so it goes through a pipe."""


def child_of(folder: Path) -> int:
    return int(until((folder / "pid").read_text).split()[1])


def expected(agent: Any, n_batches: int) -> list[Any]:
    how = {"seed": 0, "bootstrap_value": False}
    return [batch for batch, _ in collect_with(SerialSampler, CountingEnv, agent, n_batches, **how, **SIZE)]


def check(sampler: Any, folder: Path, agent: Any, n_batches: int = 12) -> None:
    for itr, wanted in enumerate(expected(agent, n_batches)):
        samples, infos = sampler.obtain_samples(itr)
        assert_same(samples.numpy(), wanted)
        assert len(infos) == wanted.env.done.sum()
    until(lambda: not is_running(child_of(folder)), "the end of the child")
    assert not (folder / "closed").exists()


SAMPLERS = [
    (ParallelSampler, {}),
    (AlternatingSampler, {}),
    (AsyncSampler, {"lag": None}),
    (GpuSampler, {}),
    (GpuSampler, {"server": "process"}),
]


@pytest.mark.parametrize(("kind", "start_method"), pairs(SAMPLERS, reversed(USUAL_METHODS)))
def test_a_fork_that_comes_back_writes_into_no_batch(tmp_path: Path, kind: Any, start_method: str) -> None:
    cls, options = kind
    fns: Any = [CountingEnv, lambda: Forking(tmp_path), CountingEnv, CountingEnv]
    with cls(fns, n_workers=2, start_method=start_method, **SIZE, **options) as sampler:
        if cls is AsyncSampler:
            sampler.initialize(Published(), seed=0)
            sampler.start()
            check(sampler, tmp_path, Published())
        else:
            sampler.initialize(RandomAgent(), seed=0)
            check(sampler, tmp_path, RandomAgent())


@pytest.mark.parametrize(
    ("where", "at", "deed"),
    [
        ("reset", 2, "raise"),
        ("step", 3, "sys.exit"),
        *(("step", at, deed) for at in (1, T) for deed in ("return", "raise", "exit")),  # T: in the last row
        ("reset", 1, "return"),
        ("reset", 2, "return"),
    ],
)
def test_wherever_it_is_made(tmp_path: Path, where: str, at: int, deed: str) -> None:
    fns: Any = [CountingEnv, lambda: Forking(tmp_path, where, at, deed), CountingEnv, CountingEnv]
    with ParallelSampler(fns, n_workers=2, traj_info_cls=Told, **SIZE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        check(sampler, tmp_path, RandomAgent())
        os.kill(sampler.worker_pids[0], signal.SIGKILL)  # the child has not reported an end in its place
        with pytest.raises(WorkerDiedError, match=r"worker 0 .* was killed by SIGKILL"):
            sampler.obtain_samples(12)


def test_in_a_call_on_the_environments(tmp_path: Path) -> None:
    fns: Any = [lambda at=at: Forking(tmp_path, "ask", at) for at in (0, 2, 0, 0)]
    with ParallelSampler(fns, n_workers=2, **SIZE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        pids = [sampler.worker_pids[0]] * 2 + [sampler.worker_pids[1]] * 2
        for _ in range(4):
            assert sampler.call("ask") == pids
        check(sampler, tmp_path, RandomAgent())


@pytest.mark.slow
def test_in_a_vector_environment(tmp_path: Path, start_method: str) -> None:
    fns: Any = [CountingEnv, lambda: Forking(tmp_path), CountingEnv, CountingEnv]
    with ShmVectorEnv(fns, n_workers=2, context=start_method) as envs, ShmVectorEnv([CountingEnv] * 4) as plain:
        for each in (envs, plain):
            each.reset(seed=0)
        for _ in range(4 * AT):
            for found, right in zip(envs.step([0] * 4)[:4], plain.step([0] * 4)[:4], strict=True):
                np.testing.assert_array_equal(found, right)
    until(lambda: not is_running(child_of(tmp_path)), "the end of the child")


@pytest.mark.slow
@pytest.mark.parametrize(("deed", "how"), [("return", "returned from"), ("raise", "raised ValueError: no in")])
def test_the_child_says_why_it_ends(tmp_path: Path, deed: str, how: str, capfd: pytest.CaptureFixture[str]) -> None:
    fns: Any = [CountingEnv, lambda: Forking(tmp_path, deed=deed), CountingEnv, CountingEnv]
    with ParallelSampler(fns, n_workers=1, start_method="fork", **SIZE) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        for itr in range(6):
            sampler.obtain_samples(itr)
        until(lambda: not is_running(child_of(tmp_path)), "the end of the child")
    line = next(line for line in capfd.readouterr().err.splitlines() if f"process {child_of(tmp_path)} ends" in line)
    assert f"The user's code in worker 0 (pid {(tmp_path / 'pid').read_text().split()[0]}) has forked it" in line
    assert f"it {how} this code. End such a process inside this code with os._exit" in line
