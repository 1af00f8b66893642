"""Failures of samplers beyond the table of `process/test_faults.py`: strange exceptions, several workers, Ctrl-C."""

import os
import signal
import time
from functools import partial
from typing import Any

import psutil
import pytest

from penstock import (
    ParallelSampler,
    RandomAgent,
    SamplerClosedError,
    SamplerState,
    SerialSampler,
    TrajInfo,
    WorkerError,
    WorkerTimeoutError,
)
from penstock.envs import CountingEnv, SlowEnv
from penstock.envs.toy import ScriptedGame
from penstock.testing import Fault, UnprintableFault
from penstock.testing.faults import Trigger

from ..children import descriptors
from ..support import crashing_env, sampler_of, until
from ..toy_games import TurnGame
from .started import check_refused, started

pytestmark = pytest.mark.slow


class TerseTrajInfo(TrajInfo):
    def terminate(self, final_observation: Any) -> None:
        raise KeyError("nothing to say")


def test_a_trajectory_info_that_raises_is_named_with_the_step_that_ended_it() -> None:
    with sampler_of(ParallelSampler, traj_info_cls=TerseTrajInfo) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(WorkerError, match=r"KeyError while stepping env_rank \d, t=4 \(.*\): 'nothing to say'"):
            sampler.obtain_samples(0)
        assert sampler.worker_pids == [], "the system may give their numbers to other processes"


class Leaving(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


@pytest.mark.parametrize(
    ("exception", "text"),
    [
        (UnprintableFault("x"), r"UnprintableFault .*: \(its message could not be formatted"),
        (Leaving(), r"Leaving .*: \(its message could not be formatted"),
        (WorkerError("of another sampler"), r"penstock\.errors\.WorkerError .*: of another sampler"),
    ],
)
def test_whatever_an_environment_raises_breaks_the_serial_sampler(exception: Any, text: str) -> None:
    class Raising(CountingEnv):
        def step(self, action: Any) -> Any:
            raise exception

    kind, message = text.split(" .*: ")
    where = r"while stepping env_rank 4, t=0 \(itr=0\)"
    with started([CountingEnv] * 4 + [Raising], batch_B=5) as sampler:
        with pytest.raises(WorkerError, match=rf"worker 0 .* raised .*{kind} {where}: {message}"):
            sampler.obtain_samples(0)
        assert sampler.state is SamplerState.BROKEN


class Interrupting(CountingEnv):
    """Ctrl-C comes in its step, or when the third one is built."""

    def __init__(self, when: str, n_open: list[int]) -> None:
        super().__init__()
        if when == "built" and n_open[0] == 3:
            os.kill(os.getpid(), signal.SIGINT)
        n_open[0] += 1
        self.when, self.n_open = when, n_open

    def step(self, action: Any) -> Any:
        if self.when == "step":
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)

    def close(self) -> None:
        self.n_open[0] -= 1


@pytest.mark.parametrize("when", ["step", "built"])
def test_ctrl_c_closes_all_environments_of_the_serial_sampler(when: str) -> None:
    n_open = [0]
    sampler = SerialSampler(partial(Interrupting, when, n_open), batch_T=4, batch_B=5, max_decorrelation_steps=0)
    with pytest.raises(KeyboardInterrupt):
        sampler.initialize(RandomAgent(), seed=0)
        assert when == "step"
        sampler.obtain_samples(0)
    if when == "step":
        with pytest.raises(WorkerError, match="KeyboardInterrupt while stepping env_rank 0"):
            sampler.obtain_samples(1)
    sampler.shutdown()
    assert n_open == [0]


def test_worker_pids_names_no_worker_that_has_ended() -> None:
    with sampler_of(ParallelSampler, on_worker_failure="restart") as sampler:
        sampler.initialize(RandomAgent())
        first, second = sampler.worker_pids
        os.kill(first, signal.SIGKILL)
        until(lambda: not psutil.pid_exists(first))  # a process that was not collected still exists
        assert sampler.worker_pids == [second]
        sampler.obtain_samples(0)
        assert len(sampler.worker_pids) == 2
        assert first not in sampler.worker_pids
    assert sampler.worker_pids == []


def test_where_warnings_are_errors_close_leaves_nothing_open_either() -> None:
    def is_open() -> set[str]:
        """Less the memory, which is mapped as long as somebody has the samples."""
        return {what for what in descriptors().values() if what[0] != "0"}

    fns = [CountingEnv] * 3 + [partial(crashing_env, "close", spare_pid=os.getpid())]
    sampler = sampler_of(ParallelSampler, fns)
    before = is_open()
    sampler.initialize(RandomAgent())
    assert is_open() > before
    with pytest.raises(RuntimeWarning, match="while closing"):
        sampler.shutdown()
    assert is_open() <= before
    with pytest.raises(SamplerClosedError):
        sampler.obtain_samples(0)


def _stuck(game: Any) -> Any:
    """The game, of which the third step in a worker never ends."""

    class Stuck(game):  # type: ignore[misc]
        trigger = Trigger(Fault("hang", at=3, spare_pid=os.getpid()))

        def step(self, *actions: Any) -> Any:
            self.trigger.call()
            return super().step(*actions)

    return Stuck


@pytest.mark.parametrize("kind", ["step", "reset", "seats", "turns"])
def test_step_timeout_counts_from_the_first_random_step_on(kind: str) -> None:
    fns = {"seats": _stuck(ScriptedGame), "turns": _stuck(TurnGame)}
    env_fn = fns.get(kind) or partial(crashing_env, kind, "hang", at=3, spare_pid=os.getpid())
    limits = {"step_timeout": 0.4, "start_timeout": 60, "on_worker_failure": "restart", "max_restarts": 1}
    began = time.monotonic()
    # The worker that replaces the first one hangs too.
    message = r"\(step_timeout=0.4\) while .* \(start-up\)"
    options: dict[str, Any] = {"cls": ParallelSampler, "batch_B": 1, "max_decorrelation_steps": 1000, **limits}
    check_refused(env_fn, message, error=WorkerTimeoutError, **options)
    assert time.monotonic() - began < 30


def test_each_random_step_has_its_own_time() -> None:
    env = partial(SlowEnv, 0.02, length=1000)
    with started(env, cls=ParallelSampler, batch_B=4, max_decorrelation_steps=80, step_timeout=0.4) as sampler:
        samples, _ = sampler.obtain_samples(0)
    assert samples.env.observation[0, :, 1].max() > 20, "more than the limit in all"
