"""What cannot be sent to workers: the error says where it is, and what to give in its place."""

from __future__ import annotations

import multiprocessing
import re
import threading
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from penstock import (
    AlternatingSampler,
    AsyncSampler,
    ConfigError,
    GpuSampler,
    ParallelSampler,
    RandomAgent,
    SerialSampler,
    evaluate,
    start_evaluation,
)
from penstock.envs import CountingEnv
from penstock.vector import ShmVectorEnv


class Flags:
    """As absl's FLAGS."""

    n = 3

    def __getstate__(self) -> Any:
        raise TypeError("can't pickle FlagValues")


FLAGS = Flags()


class Flagged(CountingEnv):
    def step(self, action: Any) -> Any:
        return [result for _ in range(1) for result in super().step(action) if FLAGS.n]


class Locked(CountingEnv):
    lock = threading.Lock()


class Taking(CountingEnv):
    """Takes something that processes share, and uses it."""

    def __init__(self, thing: Any = None) -> None:
        super().__init__()
        self.thing = thing

    def reset(self, **kwargs: Any) -> Any:
        if isinstance(self.thing, SharedMemory):
            assert self.thing.buf is not None
            self.thing.buf[0] = 7
        elif hasattr(self.thing, "put"):
            self.thing.put("reset")
        else:
            with self.thing:
                pass
        return super().reset(**kwargs)


def closure() -> Any:
    lock = threading.Lock()

    def make() -> Any:
        return CountingEnv(length=5 if lock else 6)

    return make


SHARED = r"Use one of a manager, such as multiprocessing\.Manager\(\)\.Queue\(\).* or a SharedMemory"
ELSEWHERE = r"Pass what is needed of it as an argument, .* put what uses it into a module"
INSIDE = "Create such objects inside the function"
of_spawn = multiprocessing.get_context("spawn")
#: What builds the environment, and what the error says.
CASES: dict[str, tuple[Any, str]] = {
    "Queue": (lambda: partial(Taking, of_spawn.Queue()), SHARED),
    "Lock": (lambda: partial(Taking, of_spawn.Lock()), SHARED),
    "Event": (lambda: partial(Taking, of_spawn.Event()), SHARED),
    "Value": (lambda: partial(Taking, of_spawn.Value("i", 0)), SHARED),
    "Pipe": (lambda: partial(Taking, of_spawn.Pipe()), SHARED),
    "RawArray": (lambda: partial(Taking, of_spawn.RawArray("i", 3)), SHARED),
    "flags": (lambda: Flagged, rf"It is the global variable 'FLAGS', which Flagged\.step uses\. {ELSEWHERE}"),
    "attribute": (lambda: Locked, rf"It is the attribute 'lock', which Locked uses\. {ELSEWHERE}"),
    "closure": (closure, rf"It is the variable 'lock', which closure\.<locals>\.make uses\. {ELSEWHERE}"),
    "thread's lock": (lambda: partial(Taking, threading.Lock()), INSIDE),
}


def sampled(cls: Any, env_fn: Any, **options: Any) -> None:
    with cls(env_fn, batch_T=4, batch_B=2, n_workers=2, **options) as sampler:
        sampler.initialize(RandomAgent(), seed=0)


#: Everything that sends environments to other processes.
USERS: dict[str, Any] = {
    "parallel": partial(sampled, ParallelSampler),
    "forks": partial(sampled, ParallelSampler, start_method="fork"),
    "central": partial(sampled, GpuSampler),
    "central, own process": partial(sampled, GpuSampler, server="process"),
    "alternating": partial(sampled, AlternatingSampler),
    "ahead": partial(sampled, AsyncSampler),
    "vector environment": lambda env_fn: ShmVectorEnv([env_fn] * 2),
    "evaluation": lambda env_fn: evaluate(RandomAgent(), env_fn, episodes=2),
    "evaluation in the background": lambda env_fn: start_evaluation(RandomAgent(), env_fn, episodes=2),
}


@pytest.mark.parametrize("case", CASES)
def test_the_error_says_where_it_is_and_what_to_do(case: str) -> None:
    make, message = CASES[case]
    with pytest.raises(ConfigError, match=message) as caught:
        ShmVectorEnv([make()] * 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("user", USERS)
def test_so_it_does_everywhere(user: str) -> None:
    for case in ("Queue", "flags"):
        make, message = CASES[case]
        with pytest.raises(ConfigError, match=rf"cannot be pickled for .*{message}"):
            USERS[user](make())


def test_the_arguments_of_a_call_too() -> None:
    with SerialSampler(CountingEnv, batch_T=4, batch_B=2) as sampler:
        sampler.initialize(RandomAgent())
        with pytest.raises(ConfigError, match=rf"the arguments for 'has_wrapper_attr' cannot be pickled.*{SHARED}"):
            sampler.call("has_wrapper_attr", of_spawn.Lock())


@pytest.mark.slow
def test_what_the_advice_names_reaches_the_environments() -> None:
    memory = SharedMemory(create=True, size=1)
    with of_spawn.Manager() as manager:
        queue = manager.Queue()
        kwargs = [{"thing": queue}, {"thing": manager.Lock()}, {"thing": memory}]
        with ParallelSampler(Taking, env_kwargs=kwargs, batch_T=1, batch_B=3, max_decorrelation_steps=0) as sampler:
            sampler.initialize(RandomAgent())
        with ShmVectorEnv([partial(Taking, **each) for each in kwargs]) as envs:
            envs.reset()
        assert [queue.get(), queue.get(), queue.qsize()] == ["reset", "reset", 0]
    assert memory.buf is not None
    assert memory.buf[0] == 7
    memory.close()
    memory.unlink()


def test_a_function_that_is_only_imported_is_not_blamed() -> None:
    """`re.compile` uses a global that cannot be pickled, but is pickled by its name."""
    with pytest.raises(ConfigError, match=INSIDE):
        ShmVectorEnv([partial(Taking, [re.compile, threading.Lock()])] * 2)
