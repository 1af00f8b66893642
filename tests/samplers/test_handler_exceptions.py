"""The exception of a signal handler that comes at each call of a Python function, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock import GpuSampler, ParallelSampler, RandomAgent, SerialSampler, TrajInfo
from penstock.envs import CountingEnv
from penstock.errors import PenstockError
from penstock.vector import ShmVectorEnv

from ..scale import scaled

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(scaled(900, 120)),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # in a generator that is closed
]

T, ENDLESS = 3, 1_000_000
WHOLE_PROCESS = ("penstock.workers.sigint", "penstock.workers.marking")


class Own(TrajInfo):
    """Goes through a pipe, as all classes but the stock one."""


@contextmanager
def raised_at(k: int) -> Iterator[list[int]]:
    """Raise TimeoutError at the kth call of a Python function, where the handler of a signal could. Gives a list, which
    grows with each call. Not where a `with` block begins or ends that changes the whole process: the deferral of Ctrl-C
    or the marks of programs would last longer after that."""
    calls: list[int] = []

    def watch(frame: Any, event: str, argument: object) -> None:
        if event != "call":
            return
        frames = [frame]
        while frames[-1].f_back is not None:
            frames.append(frames[-1].f_back)
        is_block = frame.f_code.co_name in ("__enter__", "__exit__")
        if not is_block and not any(own.f_globals["__name__"] in WHOLE_PROCESS for own in frames):
            calls.append(k)
            if len(calls) == k:
                sys.setprofile(None)
                raise TimeoutError("of a handler")

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def says_so(error: PenstockError) -> bool:
    return any(said in str(error) for said in ("TimeoutError", "xception of a signal handler"))


class OfSampler:
    def __init__(self, cls: Any) -> None:
        sizes: dict[str, Any] = {"batch_T": T, "batch_B": 4, "max_decorrelation_steps": 0, "traj_info_cls": Own}
        evaluation = {"eval_n_envs": 2, "eval_env_kwargs": {"length": 3}, "eval_max_steps": 12}
        workers = {} if cls is SerialSampler else {"n_workers": 2, "start_method": "fork"}
        self.sampler = cls(CountingEnv, env_kwargs={"length": ENDLESS}, **sizes, **evaluation, **workers)
        self.sampler.initialize(RandomAgent(), seed=0)
        self.close = self.sampler.shutdown

    def obtain(self) -> None:
        if self.sampler.state.name == "SAMPLING":  # the batch of the call that was interrupted
            self.sampler.wait_samples()
        count = self.sampler.obtain_samples(0)[0].env.observation[:, :, 1]
        assert (count == count[:1, :1] + count.new_tensor(range(T))[:, None]).all()

    def evaluate(self) -> None:
        assert [info.Length for info in self.sampler.evaluate_agent(0)] == [3] * 4

    def ask(self) -> None:
        assert len(set(self.sampler.get_attr("count"))) == 1

    calls = (obtain, evaluate, ask)


class OfVectorEnv:
    def __init__(self, cls: Any) -> None:
        self.envs = cls([CountingEnv] * 4, n_workers=2, context="fork")
        self.close = self.envs.close
        self.envs.reset()

    def step(self) -> None:
        if self.envs.reset()[0][:, 1].any():
            raise AssertionError("a reset returned the observations of a step")
        assert self.envs.step([0] * 4)[0][:, 1].tolist() == [1] * 4

    def ask(self) -> None:
        assert len(set(self.envs.get_attr("length"))) == 1

    calls = (step, ask)


@pytest.mark.parametrize("cls", [SerialSampler, ParallelSampler, GpuSampler, ShmVectorEnv])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_follows_is_right_or_says_what_has_happened(cls: Any, which: int) -> None:
    make = OfVectorEnv if cls is ShmVectorEnv else OfSampler
    if which >= len(make.calls):
        pytest.skip("a vector environment has two kinds of calls")
    work: Callable[[Any], None] = make.calls[which]
    made = make(cls)
    work(made)
    with raised_at(0) as calls:
        work(made)
    for k in range(1, len(calls) + 1, scaled(1, 23 if cls is SerialSampler else 97)):
        try:
            with raised_at(k):
                work(made)
        except TimeoutError:
            pass
        except PenstockError as error:
            if not says_so(error):
                raise
        try:
            for call in make.calls:
                call(made)
        except PenstockError as error:
            if not says_so(error):
                raise
            made.close()
            made = make(cls)
    made.close()
