"""Ctrl-C is held back, let through, and answered once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import ParallelSampler, RandomAgent, SamplerState, SamplerStateError
from penstock.workers import control, sigint
from penstock.workers import pool as pool_module
from penstock.workers.monitor import Monitor

from ..children import exit_code_of_fork
from ..scale import START_METHODS, methods
from ..support import sampler_of


def ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def _handler_is_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


def test_it_is_answered_at_the_end_or_where_it_may_pass() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), sigint.deferred():
        ctrl_c()
        done.append(1)
        with sigint.deferred(), sigint.deferred():
            done.append(2)
        done.append(3)
        with sigint.allowed():
            done.append(4)
    with pytest.raises(KeyboardInterrupt), sigint.deferred():
        with sigint.deferred():
            ctrl_c()
        done.append(5)
    with pytest.raises(KeyboardInterrupt), sigint.deferred(), sigint.allowed():
        done.append(6)
        ctrl_c()
        done.append(7)
    assert done == [1, 2, 3, 5, 6]


def test_one_that_comes_after_three_seconds_of_waiting_is_answered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done, now = [], [100.0]
    monkeypatch.setattr(sigint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(KeyboardInterrupt), sigint.deferred():
        for second in range(5):
            now[0] = 100.0 + second
            ctrl_c()
            done.append(second)
    assert done == [0, 1, 2, 3]


def test_the_block_inside_one_where_it_may_pass_holds_it_back() -> None:
    done = []
    with sigint.deferred():
        with pytest.raises(KeyboardInterrupt) as caught, sigint.allowed():
            with sigint.deferred():
                ctrl_c()
                done.append(1)
            done.append(2)
        assert sigint.was_allowed(caught.value)
        assert not sigint.was_allowed(KeyboardInterrupt())
    assert done == [1]


def test_one_that_comes_when_the_place_where_it_may_pass_begins_to_end_is_known_as_well() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), sigint.deferred():
        sigint.allowed().__enter__()
        with pytest.raises(KeyboardInterrupt) as caught:
            ctrl_c()  # as before the first line of its `__exit__`
        assert sigint.was_allowed(caught.value)
        ctrl_c()
        done.append(1)
    assert done == [1]


def test_none_leaves_no_trace() -> None:
    with sigint.deferred(), sigint.allowed():
        pass
    with pytest.raises(KeyboardInterrupt):
        ctrl_c()


def test_another_thread_holds_nothing_back() -> None:
    handlers: list[Any] = []

    def in_thread() -> None:
        with sigint.deferred(), sigint.allowed(), sigint.deferred():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]


# ---- samplers at their worst moments -----------------------------------------------------------


def test_between_two_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is given exactly once: nothing is skipped, nothing comes twice."""
    with sampler_of(ParallelSampler, batch_T=4) as sampler:
        sampler.initialize(RandomAgent())
        with monkeypatch.context() as patched:
            between = []

            def interrupted() -> None:
                between.append(list(sampler.run.memory.control.opened))
                if len(between) == 2:  # before the gate of the second worker
                    ctrl_c()

            patched.setattr(control, "fence", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sampler.obtain_samples(0)
        assert sampler.state is SamplerState.SAMPLING
        counts = [sampler.wait_samples()[0].env.observation[0, 0, 1].item()]
        counts.append(sampler.obtain_samples(1)[0].env.observation[0, 0, 1].item())
        assert counts == [0, 4]


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Lets a method that starts or awaits processes be interrupted `times` times in its first call, before it or after
    it. Gives a list, which grows with each call."""

    def let(owner: Any, name: str, times: int, *, after: bool = False) -> list[int]:
        plain, calls = getattr(owner, name), list[int]()

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            calls.append(times)
            found = plain(*args, **kwargs) if after else None
            for _ in range(times if len(calls) == 1 else 0):
                ctrl_c()
            return found if after else plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, interrupted)
        return calls

    return let


@pytest.mark.parametrize(("times", "end_too"), [(1, False), (2, False), (2, True)])  # the second is answered at once
@methods(*START_METHODS)
def test_while_processes_start(interrupt: Any, start_method: str, times: int, end_too: bool) -> None:
    """Nobody has the pool yet, so nobody could close it again, not even if its end is interrupted too. The suite's own
    check finds what is left."""
    started = interrupt(pool_module.Launcher, "start", times, after=True)
    awaited = interrupt(Monitor, "await_deaths", 2) if end_too else [1]
    with sampler_of(ParallelSampler, batch_T=4, start_method=start_method) as sampler, pytest.raises(KeyboardInterrupt):
        sampler.initialize(RandomAgent())
    assert len(started) == 1
    assert awaited


def test_shutdown_that_is_cut_short_is_done_by_the_next(interrupt: Any) -> None:
    sampler = sampler_of(ParallelSampler, batch_T=4)
    sampler.initialize(RandomAgent())
    interrupt(Monitor, "await_deaths", 2)
    with pytest.raises(KeyboardInterrupt):
        sampler.shutdown()
    sampler.shutdown()
    sampler.shutdown()


@pytest.mark.slow
def test_a_fork_may_not_drive_its_parents_workers() -> None:
    with sampler_of(ParallelSampler, batch_T=4) as sampler:
        sampler.initialize(RandomAgent())

        def in_fork() -> None:
            whose = f"was called in process {os.getpid()}, a fork of process {os.getppid()}"
            with pytest.raises(SamplerStateError, match=whose):
                sampler.obtain_samples(0)

        assert exit_code_of_fork(in_fork) == 0
        assert len(sampler.obtain_samples(0)[0].env.reward) == 4
