"""shutdown from another thread or a signal handler, at any moment of a call: SamplerClosedError, and nothing left."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock import RandomAgent, Sampler, SamplerClosedError, SamplerState
from penstock.envs import CountingEnv, EnvContext
from penstock.vector import ShmVectorEnv
from penstock.workers import pool as pool_module
from penstock.workers.monitor import Monitor

from ..scale import scaled, some
from ..support import BOUND, sampler_of, until
from .failing import SAMPLERS
from .support import SLACK

CLOSE_SECONDS = 2.5 * SLACK
KINDS = ("serial", "parallel", "central", "central, own process", "alternating")
CALLS: dict[str, Callable[[Sampler], Any]] = {
    "obtain_samples": lambda sampler: sampler.obtain_samples(0),
    "evaluate_agent": lambda sampler: sampler.evaluate_agent(0),
    "get_attr": lambda sampler: sampler.get_attr("render_mode"),
}

pytestmark = [pytest.mark.timeout(scaled(600, 120)), pytest.mark.slow]
every_kind = pytest.mark.parametrize("kind", KINDS)
N_TIMES = scaled(30, 1)


def sampler_of_kind(kind: str, env_fn: Any = CountingEnv, **kwargs: Any) -> Sampler:
    cls, own = SAMPLERS[kind]
    sampler: Sampler = sampler_of(cls, env_fn, batch_T=64, eval_n_envs=2, eval_max_steps=100, **own, **kwargs)
    return sampler


class Call(threading.Thread):
    """Runs `work` and keeps what it raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work, self.error = work, None
        self.start()

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error: BaseException | None = error

    def assert_closed(self, sampler: Sampler) -> None:
        self.join(BOUND)
        assert not self.is_alive()
        assert isinstance(self.error, SamplerClosedError), repr(self.error)
        assert "\n" not in str(self.error)
        assert_closed(sampler)


def assert_closed(sampler: Sampler) -> None:
    assert sampler.state is SamplerState.CLOSED
    with pytest.raises(SamplerClosedError, match="obtain_samples was called after shutdown"):
        sampler.obtain_samples(0)
    assert sampler.worker_pids == []


def shut_down(sampler: Sampler) -> None:
    began = time.monotonic()
    sampler.shutdown()
    assert time.monotonic() - began < CLOSE_SECONDS
    assert sampler.state is SamplerState.CLOSED


@every_kind
@pytest.mark.parametrize("name", CALLS)
def test_in_the_middle_of_calls(kind: str, name: str) -> None:
    for _ in range(N_TIMES):
        sampler, done = sampler_of_kind(kind), [0]
        sampler.initialize(RandomAgent())

        def repeat(sampler: Sampler = sampler, done: list[int] = done) -> None:
            while True:
                CALLS[name](sampler)
                done[0] += 1

        call = Call(repeat)
        until(lambda done=done: done[0] >= 2)
        shut_down(sampler)
        call.assert_closed(sampler)


@pytest.mark.parametrize("kind", some(KINDS, 2))
def test_while_initialize_builds_the_example(kind: str) -> None:
    """It cannot be interrupted there: it closes what it has made when the user's code returns."""
    entered, leave = threading.Event(), threading.Event()

    sampler = sampler_of_kind(kind, _Blocking(entered, leave))
    call = Call(lambda: sampler.initialize(RandomAgent()))
    assert entered.wait(BOUND)
    shut_down(sampler)
    leave.set()
    call.assert_closed(sampler)


class _Blocking:
    """Blocks while the main process builds its example; a worker gets a plain environment."""

    def __init__(self, entered: threading.Event, leave: threading.Event) -> None:
        self._entered, self._leave = entered, leave

    def __call__(self, context: EnvContext) -> CountingEnv:
        if context.worker_rank < 0:
            self._entered.set()
            self._leave.wait(BOUND)
        return CountingEnv()

    def __reduce__(self) -> Any:
        return CountingEnv, ()


@pytest.mark.parametrize("kind", ["parallel", "central"])
def test_while_the_workers_are_started(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, closers = sampler_of_kind(kind), list[Call]()
    plain = pool_module.Launcher.start

    def start(*args: Any, **kwargs: Any) -> Any:
        process = plain(*args, **kwargs)
        closers.append(Call(lambda: shut_down(sampler)))
        until(lambda: sampler.state is SamplerState.CLOSED)
        return process

    monkeypatch.setattr(pool_module.Launcher, "start", start)
    with pytest.raises(SamplerClosedError) as caught:
        sampler.initialize(RandomAgent())
    assert "\n" not in str(caught.value)
    (closing,) = closers  # one worker was started
    closing.join(BOUND)
    assert closing.error is None
    assert_closed(sampler)


@pytest.mark.parametrize("kind", ["parallel", "central", "central, own process"])
def test_while_the_workers_are_awaited(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, waits = sampler_of_kind(kind, env_kwargs={"length": 5}), threading.Event()
    plain = Monitor.wait

    def wait(monitor: Any, *args: Any, **kwargs: Any) -> Any:
        waits.set()
        until(lambda: sampler.state is SamplerState.CLOSED)
        return plain(monitor, *args, **kwargs)

    monkeypatch.setattr(Monitor, "wait", wait)
    call = Call(lambda: sampler.initialize(RandomAgent()))
    assert waits.wait(BOUND)
    shut_down(sampler)
    call.assert_closed(sampler)


def test_a_step_in_the_main_process_that_does_not_end() -> None:
    """Its environment is not closed under it, but when the step ends."""
    entered, leave, closed = threading.Event(), threading.Event(), []

    class Endless(CountingEnv):
        def step(self, action: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                leave.wait(BOUND)
                assert not closed
            return super().step(action)

        def close(self) -> None:
            closed.append(self)

    sampler = sampler_of_kind("serial", Endless)
    sampler.initialize(RandomAgent())
    closed.clear()  # the example
    call = Call(lambda: sampler.obtain_samples(0))
    assert entered.wait(BOUND)
    shut_down(sampler)
    assert not closed
    leave.set()
    call.assert_closed(sampler)
    assert closed


@every_kind
@pytest.mark.parametrize("name", ["obtain_samples", "get_attr"])
def test_from_a_signal_handler(kind: str, name: str) -> None:
    for _ in range(N_TIMES):
        sampler = sampler_of_kind(kind)
        sampler.initialize(RandomAgent())
        previous = signal.signal(signal.SIGALRM, lambda *_, sampler=sampler: shut_down(sampler))
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        try:
            with pytest.raises(SamplerClosedError) as caught:
                while True:
                    CALLS[name](sampler)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
        assert "\n" not in str(caught.value)
        assert_closed(sampler)


def test_a_vector_environment() -> None:
    for _ in range(N_TIMES):
        envs, done = ShmVectorEnv([CountingEnv] * 4, n_workers=2), list[Any]()
        envs.reset(seed=0)

        def repeat(envs: ShmVectorEnv = envs, done: list[Any] = done) -> None:
            while True:
                done.append(envs.step(envs.action_space.sample()))

        call = Call(repeat)
        until(lambda done=done: len(done) > 10)
        envs.close()
        call.join(BOUND)
        assert isinstance(call.error, SamplerClosedError), repr(call.error)
