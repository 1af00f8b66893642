"""Ctrl-C is held back, let through, and answered once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
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


def test_it_is_answered_at_the_end() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), sigint.deferred():
        ctrl_c()
        done.append(1)
        with sigint.deferred(), sigint.deferred():
            done.append(2)
        done.append(3)
    assert done == [1, 2, 3]


def test_it_is_answered_where_it_may_pass() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), sigint.deferred():
        ctrl_c()
        done.append(1)
        with sigint.allowed():
            done.append(2)
    with pytest.raises(KeyboardInterrupt), sigint.deferred(), sigint.allowed():
        done.append(3)
        ctrl_c()
        done.append(4)
    assert done == [1, 3]


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


@pytest.mark.parametrize("times", [1, 2])  # the second is answered at once
@methods(*START_METHODS)
def test_while_processes_start(monkeypatch: pytest.MonkeyPatch, start_method: str, times: int) -> None:
    started = []
    plain = pool_module.Launcher.start

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        process = plain(*args, **kwargs)
        started.append(process.pid)
        for _ in range(times):
            ctrl_c()
        return process

    monkeypatch.setattr(pool_module.Launcher, "start", interrupted)
    with sampler_of(ParallelSampler, batch_T=4, start_method=start_method) as sampler, pytest.raises(KeyboardInterrupt):
        sampler.initialize(RandomAgent())
    assert len(started) == 1  # the suite's own check finds that it is gone


@methods(*START_METHODS)
def test_a_start_whose_end_is_interrupted_too(monkeypatch: pytest.MonkeyPatch, start_method: str) -> None:
    """Nobody has the pool yet, so nobody could close it again. The suite's own check finds what is left."""
    start, await_deaths, awaited = pool_module.Launcher.start, Monitor.await_deaths, list[Any]()

    def twice(*args: Any, **kwargs: Any) -> Any:
        process = start(*args, **kwargs)
        ctrl_c()
        ctrl_c()
        return process

    def interrupted(*args: Any) -> Any:
        awaited.append(args)
        if len(awaited) == 1:
            ctrl_c()
            ctrl_c()
        return await_deaths(*args)

    monkeypatch.setattr(pool_module.Launcher, "start", twice)
    monkeypatch.setattr(Monitor, "await_deaths", interrupted)
    with sampler_of(ParallelSampler, batch_T=4, start_method=start_method) as sampler, pytest.raises(KeyboardInterrupt):
        sampler.initialize(RandomAgent())
    assert awaited


def test_shutdown_that_is_cut_short_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampler_of(ParallelSampler, batch_T=4)
    sampler.initialize(RandomAgent())
    plain = Monitor.await_deaths

    def interrupted(crew: Any, members: Any, seconds: float) -> Any:
        ctrl_c()
        ctrl_c()
        return plain(crew, members, seconds)

    with monkeypatch.context() as patched:
        patched.setattr(Monitor, "await_deaths", interrupted)
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
