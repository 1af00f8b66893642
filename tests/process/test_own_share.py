"""The environments that the serving process steps itself (`serve_envs`): they raise, they hang, they are slow."""

import os
import re
import signal
import threading
import time
from typing import Any

import psutil
import pytest

from penstock import (
    EvalCollector,
    GpuSampler,
    RandomAgent,
    ResetCollector,
    SamplerClosedError,
    SamplerState,
    WorkerError,
)
from penstock.envs import CountingEnv
from penstock.testing import Fault, InjectedFault, faulty_env
from penstock.workers.monitor import Monitor

from .. import support
from ..scale import pairs, scaled
from .support import check_counting

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

LIMIT = scaled(2.0, 0.5)


def sampler_of(env_fn: Any = CountingEnv, **kwargs: Any) -> GpuSampler:
    """Six environments: two workers step two each, and the serving process steps the last two."""
    sizes = {"batch_B": 6, "serve_envs": 2, "eval_n_envs": 3, "eval_max_steps": 3 * 12, "eval_env_kwargs": {}}
    return support.sampler_of(GpuSampler, env_fn, **{**sizes, **kwargs})


def last_one(faulty: Any) -> list[Any]:
    """env_rank 5 is the serving process's."""
    return [CountingEnv] * 5 + [faulty]


def run(sampler: GpuSampler) -> None:
    sampler.initialize(RandomAgent(), seed=0, bootstrap_value=False)
    for itr in range(2):
        sampler.obtain_samples(itr)
        sampler.evaluate_agent(itr)


# ---- exceptions ----------------------------------------------------------------------------

PLACES = {
    "init": (1, "building env_rank 5"),
    "first reset": (1, "resetting env_rank 5"),
    "reset": (2, "resetting env_rank 5, t=4"),
    "step": (10, "stepping env_rank 5, t=1"),
}


@pytest.mark.parametrize(("on_worker_failure", "where"), pairs(["raise", "restart"], PLACES))
def test_an_environment_that_raises_is_told_as_one_of_a_worker(where: str, on_worker_failure: str) -> None:
    at, doing = PLACES[where]
    faulty = faulty_env(CountingEnv, Fault("raise", at=at), where.removeprefix("first "))
    before = set(psutil.Process().children())
    with sampler_of(last_one(faulty), on_worker_failure=on_worker_failure) as sampler:
        with pytest.raises(WorkerError) as caught:
            run(sampler)
        first = str(caught.value).splitlines()[0]
        assert re.match(rf"worker 2 \(pid {os.getpid()}, env_rank 4 to 5, for evaluation 2\) raised ", first), first
        assert re.search(
            rf"InjectedFault while {re.escape(doing)} \(.*\): a fault was injected: raise at call {at}$", first
        )
        assert isinstance(caught.value.__cause__, InjectedFault)
        assert sampler.state is SamplerState.BROKEN
        assert set(psutil.Process().children()) == before, "the workers have ended too"
        with pytest.raises(WorkerError, match="worker 2") as again:
            sampler.obtain_samples(9)
        assert str(again.value) == str(caught.value)


def in_this_process(cls: Any, fault: Fault, method: str = "collect_evaluation") -> Any:
    """`cls` with a fault in this process and in no worker."""
    me = os.getpid()

    class Here(cls):  # type: ignore[misc]
        def _reached(self) -> None:
            if os.getpid() == me:
                fault.fire()

        def collect_batch(self, itr: int) -> None:
            if method == "collect_batch":
                self._reached()
            super().collect_batch(itr)

        def collect_evaluation(self, itr: int) -> None:
            self._reached()
            super().collect_evaluation(itr)

    return Here


@pytest.mark.parametrize("where", ["training", "evaluation"])
def test_a_collector_that_raises_here(where: str) -> None:
    fault = Fault("raise")
    kwargs: dict[str, Any] = {"eval_collector_cls": in_this_process(EvalCollector, fault)}
    if where == "training":
        kwargs = {"collector_cls": in_this_process(ResetCollector, fault, "collect_batch")}
    during = r"\(itr=0\)" if where == "training" else r"\(evaluation, itr=0\)"
    message = rf"worker 2 .*InjectedFault while beginning {during}: "
    with sampler_of(**kwargs) as sampler, pytest.raises(WorkerError, match=message):
        run(sampler)


# ---- hangs ---------------------------------------------------------------------------------


class Hanging(CountingEnv):
    """Hangs in the process `pid`: for ever, or until Ctrl-C has been pressed twice in vain. Or for `seconds`."""

    def __init__(self, where: str, pid: int, seconds: float | None = None) -> None:
        super().__init__()
        self.where, self.pid, self.seconds, self.calls = where, pid, seconds, 0

    def _reach(self, where: str) -> None:
        if where != self.where or os.getpid() != self.pid:
            return
        self.calls += 1
        if self.calls == 3 or where == "reset":
            if self.seconds is not None:
                time.sleep(self.seconds)
                return
            signal.raise_signal(signal.SIGINT)  # is held back: the step may end
            signal.raise_signal(signal.SIGINT)  # does not wait
            while True:
                time.sleep(60)

    def reset(self, **kwargs: Any) -> Any:
        self._reach("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self._reach("step")
        return super().step(action)


def hanging(where: str, seconds: float | None = None) -> dict[str, Any]:
    """Arguments of a sampler of which an environment here hangs: in training, in evaluation, or at the start."""
    hangs = {"where": "reset" if where == "start-up" else "step", "pid": os.getpid(), "seconds": seconds}
    harmless = {"where": "nowhere", "pid": 0}
    is_eval = where == "evaluation"
    return {
        "env_fn": Hanging,
        "env_kwargs": harmless if is_eval else [harmless] * 5 + [hangs],
        "eval_env_kwargs": hangs if is_eval else harmless,
    }


@pytest.mark.parametrize("where", ["training", "evaluation", "start-up"])
def test_a_second_ctrl_c_ends_an_environment_that_hangs_here(where: str) -> None:
    """`step_timeout` cannot: it is the caller itself that hangs."""
    with sampler_of(**hanging(where), step_timeout=LIMIT) as sampler:
        with pytest.raises(KeyboardInterrupt):
            run(sampler)
        pids = [] if where == "start-up" else sampler.worker_pids
        if where == "start-up":
            assert sampler.state is SamplerState.CREATED
        else:
            with pytest.raises(WorkerError, match=r"worker 2 \(pid .* was interrupted while it ran its command"):
                sampler.wait_samples() if where == "training" else sampler.obtain_samples(9)
            assert sampler.state is SamplerState.BROKEN
    assert not any(map(psutil.pid_exists, pids))


@pytest.mark.parametrize("where", ["training", "evaluation", "start-up"])
def test_an_environment_that_is_slow_here_makes_nobody_overdue(where: str) -> None:
    """Neither itself nor the workers, who wait for their actions meanwhile."""
    with sampler_of(**hanging(where, seconds=1.5 * LIMIT), step_timeout=LIMIT) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        samples, _ = sampler.obtain_samples(0)
        check_counting(samples.env.observation, samples.env.reward, samples.env.done, 5)
        assert len(sampler.evaluate_agent(0)) == 3 * 2
        assert sampler.stats().restarts == 0


# ---- another thread ------------------------------------------------------------------------


class Asking(CountingEnv):
    """In the process `pid`, its third step asks for something through the pipe `ask`, and waits for `done`."""

    def __init__(self, pid: int = 0, ask: int = -1, done: int = -1) -> None:
        super().__init__()
        self.pid, self.ask, self.done, self.calls = pid, ask, done, 0

    def step(self, action: Any) -> Any:
        self.calls += 1
        if os.getpid() == self.pid and self.calls == 3:
            os.write(self.ask, b"x")
            os.read(self.done, 1)
        return super().step(action)


def test_a_shutdown_by_another_thread_is_no_error_of_an_environment_here() -> None:
    asked, ask = os.pipe()
    wait, done = os.pipe()

    def shut_down() -> None:
        os.read(asked, 1)
        sampler.shutdown()
        os.write(done, b"x")

    asking = {"pid": os.getpid(), "ask": ask, "done": wait}
    with sampler_of(Asking, env_kwargs=[{}] * 5 + [asking]) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        thread = threading.Thread(target=shut_down)
        thread.start()
        with pytest.raises(SamplerClosedError, match="shut down by another thread during itr=0"):
            sampler.obtain_samples(0)
        thread.join()
        assert sampler.state is SamplerState.CLOSED
    for descriptor in (asked, ask, wait, done):
        os.close(descriptor)


def test_a_pool_that_another_thread_has_closed_before_the_wait() -> None:
    with sampler_of() as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.start_samples(0)
        assert sampler._pool is not None
        sampler._pool.close()  # as by a thread that comes between the check of the state and the wait
        with pytest.raises(SamplerClosedError, match="shut down by another thread during itr=0"):
            sampler.wait_samples()


# ---- waits -----------------------------------------------------------------------------------


def test_no_wait_begins_when_the_environments_here_can_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others wait for them in lock-step, so nothing would end that sleep but its time limit."""
    original, needless = Monitor._watch, []

    def watch(monitor: Monitor, *args: Any, **kwargs: Any) -> list[int]:
        worker = sampler._pool._in_place  # type: ignore[union-attr]
        if worker is not None and worker.is_at_work and worker.progress.has_reply:
            needless.append(worker.status())
        return original(monitor, *args, **kwargs)

    with sampler_of(batch_T=64) as sampler:
        sampler.initialize(RandomAgent(), seed=0, bootstrap_value=False)
        monkeypatch.setattr(Monitor, "_watch", watch)
        for itr in range(30):
            sampler.obtain_samples(itr)
    assert not needless
