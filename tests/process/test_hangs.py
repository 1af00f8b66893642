"""step_timeout: each way to hang is found in time, with the stack of the hung worker; what is slow is no hang."""

import re
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import ParallelSampler, RandomAgent, WorkerTimeoutError
from penstock.envs import CountingEnv
from penstock.testing import faulty_env

from ..scale import START_METHODS, pairs, scaled
from .support import SLACK, Notebook, note

LIMIT = scaled(2.0, 0.5)
OVER = 0.5 * SLACK  # from the limit to the error

pytestmark = [pytest.mark.timeout(scaled(1800, 60)), pytest.mark.slow]

# How it hangs, the function that the stack must show, and what else the error says.
HANGS = {
    "hang": ("_hang", ""),
    "spin": ("_spin", ""),
    "hold the gil": ("_hold_the_gil", ""),
    "stop": ("fire", "is stopped"),
}


@pytest.mark.parametrize(("how", "start_method"), pairs(HANGS, scaled(START_METHODS, ("fork", "forkserver"))))
def test_a_hang_is_named_with_its_stack(how: str, tmp_path: Path, start_method: str) -> None:
    for i in range(scaled(20, 1)):
        folder = tmp_path / str(i)
        folder.mkdir()
        _hang_once(how, Notebook(folder), start_method)


def _hang_once(how: str, notebook: Notebook, start_method: str) -> None:
    fns = [CountingEnv, CountingEnv, faulty_env(CountingEnv, notebook.fault(how, at=9))]
    arguments: dict[str, Any] = {"batch_T": 8, "batch_B": 3, "n_workers": 3, "max_decorrelation_steps": 0}
    with ParallelSampler(fns, start_method=start_method, step_timeout=LIMIT, **arguments) as sampler:
        sampler.initialize(RandomAgent(), seed=0)
        sampler.obtain_samples(0)
        pids = sampler.worker_pids
        with pytest.raises(WorkerTimeoutError) as caught:
            sampler.obtain_samples(1)
        seen = time.monotonic()
    struck, pid = notebook.read()
    message = str(caught.value)
    function, words = HANGS[how]
    first = message.splitlines()[0]
    assert first.startswith(f"worker 2 (pid {pid}, env_rank 2) made no progress for {LIMIT:g} s"), first
    assert first.endswith(" while stepping env_rank 2, t=0 (itr=1)")
    assert words in first
    assert pid == pids[2]
    ages = dict(re.findall(r"^  worker (\d): .*, last heartbeat ([\d.]+) s ago$", message, re.MULTILINE))
    assert list(ages) == ["0", "1", "2"], message
    assert LIMIT * 0.9 <= float(ages["2"]) <= LIMIT + OVER
    assert message.count("waiting for the next command") == 2
    stack = message.partition("the stack of worker 2:")[2]
    # A stopped one must go on to answer, and may have come a step further by then.
    if how != "stop":
        assert re.search(rf"in {function}$", stack, re.MULTILINE), message
        assert re.search(r"faults\.py.* in step$", stack, re.MULTILINE), message
    assert seen - struck >= LIMIT
    note(f"step_timeout, {how}: limit to error, s", seen - struck - LIMIT, OVER)


class SlowlyReset(CountingEnv):
    def __init__(self, seconds: float) -> None:
        super().__init__(length=3)
        self.seconds = seconds

    def reset(self, **kwargs: Any) -> Any:
        time.sleep(self.seconds)
        return super().reset(**kwargs)


@pytest.mark.parametrize("start_method", ["forkserver"])
def test_slow_is_not_hung(start_method: str) -> None:
    n_workers, seconds, limit, total = scaled((16, 5.0, 30.0, 600.0), (8, 0.2, 2.0, 3.0))
    arguments: dict[str, Any] = {"batch_T": 4, "batch_B": 2 * n_workers, "n_workers": n_workers}
    sampler = ParallelSampler(
        SlowlyReset, env_kwargs={"seconds": seconds}, step_timeout=limit, max_decorrelation_steps=2, **arguments
    )
    with sampler:
        sampler.initialize(RandomAgent(), seed=0)
        began = time.monotonic()
        itr = 0
        while time.monotonic() - began < total:
            sampler.obtain_samples(itr)
            itr += 1
    assert itr >= 2


def test_each_sign_of_life_counts_and_the_learner_may_take_its_time() -> None:
    """A batch, an evaluation and a break between two calls may each take longer than the limit."""

    class Slow(CountingEnv):
        def step(self, action: Any) -> Any:
            time.sleep(0.025)
            return super().step(action)

    arguments: dict[str, Any] = {"batch_T": 20, "batch_B": 2, "n_workers": 2, "max_decorrelation_steps": 0}
    with ParallelSampler(Slow, step_timeout=0.3, eval_n_envs=2, eval_max_steps=40, **arguments) as sampler:
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        assert len(sampler.evaluate_agent(0)) == 8
        time.sleep(0.4)
        sampler.start_samples(1)
        time.sleep(0.6)
        sampler.wait_samples()
