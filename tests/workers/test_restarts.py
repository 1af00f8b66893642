"""Who may be replaced, and how often."""

import itertools
import signal

import pytest

from penstock.buffers.reports import Report
from penstock.errors import SpaceError
from penstock.workers import failures as module
from penstock.workers.control import ControlBlock
from penstock.workers.failures import Restarts, WorkerFailure, WorkerStatus
from penstock.workers.plan import WorkerPlan

PLANS = [WorkerPlan(worker_rank=rank, columns=own, env_ranks=own) for rank, own in enumerate((range(2), range(2, 4)))]


def failure(rank: int = 0, exitcode: int = -signal.SIGKILL, report: Report | None = None) -> WorkerFailure:
    row = ControlBlock(2, 1, shared=False).snapshot(rank)
    return WorkerFailure(WorkerStatus(PLANS[rank], 100 + rank, row), exitcode, report)


def test_a_policy_of_none_refuses_without_a_word() -> None:
    restarts = Restarts(0, 60)
    assert restarts.refusal([failure()]) == ""


def test_the_quota_is_a_rate_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 10.0)
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    restarts = Restarts(max_restarts=3, window=60)
    for _ in range(3):
        now[0] = next(clock)
        assert restarts.refusal([failure()]) is None
        restarts.note(failure().rank, failure().describe("itr=7"), n_lost=2)
    refusal = restarts.refusal([failure()])
    assert refusal is not None
    assert refusal.startswith("max_restarts=3 in 60 s are used up, earlier:")
    assert refusal.count("worker 0 (pid 100, env_rank 0 to 1) was killed by SIGKILL") == 3
    assert "20.0 s ago" in refusal
    assert "(itr=7)" in refusal
    now[0] = 61.0  # the first of them no longer counts
    assert restarts.refusal([failure()]) is None
    assert restarts.total == 3
    assert restarts.per_worker == {0: 3}
    assert restarts.lost_per_worker == {0: 6}


def test_several_at_once_count_each() -> None:
    restarts = Restarts(max_restarts=1, window=60)
    assert restarts.refusal([failure(0)]) is None
    assert restarts.refusal([failure(0), failure(1)]) == "max_restarts=1 in 60 s are used up"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"])
def test_after_a_crash_the_memory_is_not_trusted(name: str) -> None:
    refusal = Restarts(9, 60).refusal([failure(exitcode=-signal.Signals[name])])
    assert refusal == f"worker 0 is not replaced: after a {name} the memory that it shared cannot be trusted"


def test_what_would_happen_again_is_not_tried_again() -> None:
    report = Report("SpaceError: wrong shape", "", SpaceError("wrong shape"))
    assert "would happen again" in (Restarts(9, 60).refusal([failure(1, 1, report)]) or "")
    report = Report("OSError: no game", "", OSError("no game"))
    assert Restarts(9, 60).refusal([failure(1, 1, report)]) is None
