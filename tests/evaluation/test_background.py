"""An evaluation in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import ConfigError, SamplerStateError, WorkerDiedError, evaluate, start_evaluation
from penstock.vector.vector_pool import WaitTimeoutError

from ..support import assert_same, until
from .reach import TASKS, Reach, hang, played, serial, vla

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


def test_the_agent_as_it_was() -> None:
    from penstock import CategoricalPgAgent, ParallelSampler

    from ..models import Net

    agent = CategoricalPgAgent(partial(Net, 4, 2, 0), greedy_eval=True)
    with ParallelSampler("CartPole-v1", batch_T=4, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        before = evaluate(agent, "CartPole-v1", episodes=4, n_workers=1)
        with start_evaluation(agent, "CartPole-v1", episodes=4, n_workers=1) as running:
            with torch.no_grad():
                for parameter in agent.model.parameters():
                    parameter.zero_()
            sampler.obtain_samples(0)
            found = running.wait(60)
    assert found.episodes == before.episodes


def test_a_folder_takes_both_for_the_same_policies(tmp_path: Path) -> None:
    from penstock import CategoricalPgAgent, ParallelSampler

    from ..models import Net

    agent = CategoricalPgAgent(partial(Net, 4, 2, 0), greedy_eval=True)
    policies = {"agent": agent, "function": lambda observation: (observation[:, 2] > 0).astype(int)}
    evaluate(policies, "CartPole-v1", episodes=1, n_workers=1, folder=tmp_path)
    with ParallelSampler("CartPole-v1", batch_T=4, batch_B=2) as sampler:
        sampler.initialize(agent, seed=0)
        sampler.obtain_samples(0)
        with start_evaluation(policies, "CartPole-v1", episodes=2, n_workers=1, folder=tmp_path) as running:
            assert len(running.wait(60).episodes) == 4
        evaluate(policies, "CartPole-v1", episodes=3, n_workers=1, folder=tmp_path)


def test_training_beside_it_is_the_same() -> None:
    from penstock import AsyncSampler, CategoricalPgAgent

    from ..models import Net

    def batches(evaluates: bool) -> list[Any]:
        agent = CategoricalPgAgent(partial(Net, 4, 2, 0))
        with AsyncSampler("CartPole-v1", batch_T=8, batch_B=2, n_workers=1, lag=1) as sampler:
            sampler.initialize(agent, seed=0)
            sampler.start()
            with contextlib.ExitStack() as stack:
                if evaluates:
                    running = stack.enter_context(start_evaluation(agent, "CartPole-v1", episodes=3, n_workers=1))
                found = []
                for itr in range(6):
                    found.append(sampler.obtain_samples(itr)[0].copy())
                    with torch.no_grad():
                        agent.model.heads[0].bias += 0.1  # training
                    agent.sync_shared_memory()
                if evaluates:
                    running.wait(60)
            return found

    assert_same(batches(True), batches(False))


def fault(path: Path, number: int, t: int) -> None:
    (path / "stepping").touch()
    hang()


def test_it_is_cancelled_and_killed(tmp_path: Path) -> None:
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
        with pytest.raises(WorkerDiedError, match="ended without results: killed by SIGKILL"):
            running.wait(60)


def test_it_ends_with_its_object(tmp_path: Path) -> None:
    running = start_evaluation(vla, partial(Reach, fault=partial(fault, tmp_path)), **ARGUMENTS)
    until((tmp_path / "stepping").exists, "the first step", 60)
    del running  # the fixture `nothing_left` looks for its processes


class Mood(Exception):
    """An exception of the user's."""


def moody(observation: Any) -> Any:
    raise Mood("I will not")


def test_errors_and_warnings() -> None:
    with start_evaluation(moody, Reach, **ARGUMENTS) as running, pytest.raises(Mood, match="I will not"):
        running.wait(60)
    with pytest.raises(ConfigError, match="start_evaluation has no argument 'episode': did you mean 'episodes'"):
        start_evaluation(vla, Reach, episode=3)
    with pytest.raises(ConfigError, match="cannot be pickled"):
        start_evaluation(vla, Reach, options=threading.Lock().acquire)
    with (
        start_evaluation(vla, partial(Reach, fault=only_first), **{**ARGUMENTS, "attempts": 1}) as running,
        pytest.warns(RuntimeWarning, match="episodes failed by their environment"),
    ):
        found = running.wait(60)
    assert found.failed


def only_first(number: int, t: int) -> None:
    if number % 3 == 0:
        raise OSError("no more")
