"""Where × how × start method: every way to fail, in every place, is named rightly, at once, and leaves nothing."""

import re
import time
import warnings
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    EvalCollector,
    ParallelSampler,
    RandomAgent,
    ResetCollector,
    Sampler,
    TrajInfo,
    WorkerDiedError,
    WorkerError,
)
from penstock.envs import CountingEnv
from penstock.testing import (
    FaultyAgent,
    faulty_collector,
    faulty_env,
    faulty_eval_collector,
    faulty_traj_info,
)

from ..scale import FULL
from ..support import sampler_of
from .crashes import HOWS, PLACES
from .support import ERROR_SECONDS, Notebook, NotedFault, killer, note

pytestmark = pytest.mark.slow


def combinations(places: Any) -> list[Any]:
    """The whole matrix. Daily, forkserver: an exception and a kill in each place, and a third way that differs from
    place to place. fork: each place once, with the ways in turn. spawn: some places, since only the start differs."""
    chosen = [
        ("forkserver", where, how)
        for i, where in enumerate(places)
        for j, how in enumerate(HOWS)
        if FULL or len(places) == 1 or how in ("raise", "kill") or i % len(HOWS) == j
    ]
    for shift, method in ((2, "fork"), (5, "spawn")):
        hows = list(HOWS)[shift:] + list(HOWS)[:shift]
        some = [where for where in places if method == "fork" or where in ("init", "step", "parked")]
        every = product(places, HOWS) if FULL else zip(some, cycle(hows), strict=False)
        chosen += [(method, where, how) for where, how in every]
    return [pytest.param(*each, id="-".join(each)) for each in chosen]


def make(where: str, fault: NotedFault, start_method: str, **kwargs: Any) -> tuple[Sampler, Any]:
    """Four environments in two workers, and two for evaluation, with a fault in one place of one worker."""
    arguments: dict[str, Any] = {"env_fn": CountingEnv, "eval_env_kwargs": {}}
    agent: Any = RandomAgent()
    if where in ("init", "first reset", "reset", "step", "close"):
        faulty = faulty_env(CountingEnv, fault, where.removeprefix("first "))
        arguments["env_fn"] = [CountingEnv, CountingEnv, CountingEnv, faulty]
    elif where == "agent":
        agent = FaultyAgent(agent, fault)
    elif where in ("collector", "parked"):
        method = {"collector": "collect_batch", "parked": "reset_if_needed"}[where]
        arguments["collector_cls"] = faulty_collector(ResetCollector, fault, method)
    elif where == "evaluation":
        arguments["eval_collector_cls"] = faulty_eval_collector(EvalCollector, fault)
    else:
        arguments["traj_info_cls"] = faulty_traj_info(TrajInfo, fault, where)
    arguments |= {"eval_n_envs": 2, "eval_max_steps": 2 * 12, "start_method": start_method, **kwargs}
    return sampler_of(ParallelSampler, **arguments), agent


def run(sampler: Sampler, agent: Any) -> None:
    sampler.initialize(agent, seed=3)
    for itr in range(3):
        sampler.obtain_samples(itr)
        if itr:
            sampler.evaluate_agent(itr)


def worker_named(message: str) -> tuple[int, int]:
    """Rank and pid in the first line of an error."""
    found = re.match(r"worker (\d+) \(pid (\d+), env_rank (\d) to (\d)(?:, for evaluation [^)]*)?\) ", message)
    assert found is not None, message
    rank, pid, first, last = map(int, found.groups())
    assert (first, last) == (2 * rank, 2 * rank + 1)
    return rank, pid


@pytest.mark.parametrize(("start_method", "where", "how"), combinations(PLACES))
def test_every_failure_is_named_at_once(tmp_path: Path, start_method: str, where: str, how: str) -> None:
    place, notebook = PLACES[where], Notebook(tmp_path)
    sampler, agent = make(where, notebook.fault(how, place.at), start_method)
    dies = how in ("kill", "segfault", "exit")
    with sampler, pytest.raises(WorkerDiedError if dies else WorkerError) as caught:
        run(sampler, agent)
    seen = time.monotonic()
    struck, pid = notebook.read()
    message = str(caught.value)
    rank, named_pid = worker_named(message)
    assert named_pid == pid
    assert re.search(rf"{HOWS[how]}.* while {place.doing}", message.splitlines()[0]), message
    assert f"the others: worker {1 - rank} " in message or "start-up" in message
    if not dies:
        assert caught.value.__cause__ is not None
    if how == "segfault":
        assert "in _segfault" in message, "the stack says where"
    note(f"crash matrix, {start_method}: fault to error, s", seen - struck, ERROR_SECONDS)


@pytest.mark.parametrize(("start_method", "where", "how"), combinations(["close"]))
def test_a_failure_in_close_is_a_warning(tmp_path: Path, start_method: str, where: str, how: str) -> None:
    notebook = Notebook(tmp_path)
    sampler, agent = make(where, notebook.fault(how), start_method)
    sampler.initialize(agent)
    sampler.obtain_samples(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler.shutdown()
    seen = time.monotonic()
    struck, pid = notebook.read()
    assert [w.category for w in caught] == [RuntimeWarning]
    message = str(caught[0].message)
    assert worker_named(message) == (1, pid)
    assert re.search(HOWS[how], message), message
    assert "closing" in message
    note("crash matrix: fault in close to the end of shutdown, s", seen - struck, ERROR_SECONDS)


def test_a_worker_killed_from_outside_while_parked(start_method: str) -> None:
    with (
        killer() as kill,
        ParallelSampler(CountingEnv, batch_T=4, batch_B=4, n_workers=2, start_method=start_method) as sampler,
    ):
        sampler.initialize(RandomAgent())
        sampler.obtain_samples(0)
        pid = sampler.worker_pids[1]
        kill.kill([pid], 0)
        kill.when()
        began = time.monotonic()
        with pytest.raises(WorkerDiedError) as caught:
            for itr in range(1, 1_000_000):
                sampler.obtain_samples(itr)
        assert worker_named(str(caught.value)) == (1, pid)
        note("killed while parked: call to error, s", time.monotonic() - began, ERROR_SECONDS)
