"""An evaluation in a process of its own."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import (
    AsyncSampler,
    CategoricalPgAgent,
    ConfigError,
    SamplerStateError,
    WorkerDiedError,
    evaluate,
    start_evaluation,
)
from penstock.vector.vector_pool import WaitTimeoutError

from ..models import Net
from ..support import assert_same, until
from .reach import TASKS, Guilty, Moody, Reach, hang, moody, played, serial, vla

ARGUMENTS: dict[str, Any] = {"success": "is_success", "episodes": 3, "tasks": TASKS, "n_workers": 1, "batch_B": 2}
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def test_the_same_results() -> None:
    with start_evaluation(vla, Reach, **ARGUMENTS) as running:
        found = running.wait(60)
        assert running.is_done
        assert running.wait() is found
    assert found.episodes == evaluate(vla, Reach, **ARGUMENTS).episodes
    assert played(found) == serial(range(3))
    env, _ = found.episode("policy", "desk", 2).run()
    env.close()


def test_the_agent_as_it_was_and_a_folder_of_both_and_training_beside_it_is_the_same(tmp_path: Path) -> None:
    """The folder takes a process of its own and the caller's for the same policies, and other parameters for others."""

    def batches(evaluates: bool) -> list[Any]:
        agent = CategoricalPgAgent(partial(Net, 4, 2, 0), greedy_eval=True)
        policies = {"agent": agent, "function": lambda observation: (observation[:, 2] > 0).astype(int)}
        play = partial(evaluate, policies, "CartPole-v1", n_workers=1)
        with AsyncSampler("CartPole-v1", batch_T=8, batch_B=2, n_workers=1, lag=1) as sampler:
            sampler.initialize(agent, seed=0)
            sampler.start()
            with contextlib.ExitStack() as stack:
                if evaluates:
                    before = play(episodes=4)
                    play(episodes=1, folder=tmp_path)
                    running = start_evaluation(policies, "CartPole-v1", episodes=4, n_workers=1, folder=tmp_path)
                    stack.enter_context(running)
                found = []
                for itr in range(6):
                    found.append(sampler.obtain_samples(itr)[0].copy())
                    with torch.no_grad():
                        for parameter in agent.model.heads[0].parameters():  # training: now the other action is greedy
                            parameter.mul_(0.9 if itr else -0.9)
                    agent.sync_shared_memory()
                if evaluates:
                    assert running.wait(60).episodes == before.episodes
                    with pytest.raises(ConfigError, match="its code, its parameters"):
                        play(episodes=4, folder=tmp_path)
            return found

    assert_same(batches(True), batches(False))


def fault(path: Path, number: int, t: int) -> None:
    (path / "stepping").touch()
    hang()


def test_it_is_cancelled_and_killed_and_ends_with_its_object(tmp_path: Path) -> None:
    slow, folder = partial(Reach, fault=partial(fault, tmp_path)), tmp_path / "folder"
    running = start_evaluation(vla, slow, **ARGUMENTS, folder=folder)
    until((tmp_path / "stepping").exists, "the first step", 60)
    assert not running.is_done
    with pytest.raises(ConfigError, match="is in use by another evaluation"):
        evaluate(vla, Reach, **ARGUMENTS, folder=folder)
    with pytest.raises(WaitTimeoutError, match="it continues"):
        running.wait(0)
    running.cancel()
    running.cancel()
    with pytest.raises(SamplerStateError, match="was cancelled"):
        running.wait()
    with start_evaluation(vla, slow, **ARGUMENTS) as running:
        os.kill(running.pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="ended without results: it was killed by SIGKILL"):
            running.wait(60)
    (tmp_path / "stepping").unlink()
    running = start_evaluation(vla, slow, **ARGUMENTS)
    until((tmp_path / "stepping").exists, "the first step", 60)
    del running  # the fixture `nothing_left` looks for its processes


def test_errors_and_warnings() -> None:
    with start_evaluation(moody, Reach, **ARGUMENTS) as running, pytest.raises(Moody, match="I will not"):
        running.wait(60)
    with pytest.raises(ConfigError, match="start_evaluation has no argument 'episode': did you mean 'episodes'"):
        start_evaluation(vla, Reach, episode=3)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        start_evaluation(vla, Reach, options=threading.Lock().acquire)
    faulty = partial(Reach, fault=Guilty(partial(operator.truediv, 1, 0), None))
    with (
        start_evaluation(vla, faulty, **{**ARGUMENTS, "episodes": 10, "attempts": 1}) as running,
        pytest.warns(RuntimeWarning, match="episodes failed by their environment"),
    ):
        found = running.wait(60)
    assert found.failed
