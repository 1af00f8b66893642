"""Workers that fail: what errors say of them, who may be replaced, and how often."""

from __future__ import annotations

import bdb
import pickle
import re
import signal
import threading
from typing import Any

import pytest

from penstock.buffers.reports import Report, dump_exception_by_value, in_one_line
from penstock.errors import SamplerBrokenError, SpaceError
from penstock.workers import failures
from penstock.workers.control import Phase, ProgressSnapshot
from penstock.workers.failures import Restarts, WorkerFailure, WorkerStatus, add_killed, describe_exit, raised
from penstock.workers.plan import WorkerPlan


def failure_of(rank: int, exitcode: int | None = -9, error: BaseException | None = None) -> WorkerFailure:
    progress = ProgressSnapshot(Phase.WAITING, -1, 0, 0.0, 0, 0, 0.0, 0.0, 0.0, 0.0)
    status = WorkerStatus(WorkerPlan(worker_rank=rank), 1000 + rank, progress)
    return WorkerFailure(status, exitcode, None if error is None else Report(in_one_line(error), "", error))


def test_workers_that_were_killed_as_well_are_named_in_words() -> None:
    error = SamplerBrokenError("worker 0 has failed")
    add_killed(error, [failure_of(1), failure_of(2)])
    assert str(error).splitlines()[2:] == [
        f"worker {rank} (pid {1000 + rank}) was killed by SIGKILL (out of memory?) while waiting for the next command"
        for rank in (1, 2)
    ]


def test_an_exception_that_nothing_can_pickle_is_told_in_words() -> None:
    class Holds(Exception):
        lock = threading.Lock()

    headline, text, pickled = dump_exception_by_value(Holds("a lock"))
    assert headline.endswith(b"Holds: a lock")
    assert b"Holds: a lock" in text
    assert pickled == b""


def test_a_breakpoint_in_a_worker_gets_a_hint() -> None:
    text = failure_of(0, 1, bdb.BdbQuit()).describe("itr=3")
    assert re.search(
        r"raised bdb\.BdbQuit while .* \(itr=3\): breakpoint\(\) needs a terminal.*SerialSampler.*episode", text
    )


@pytest.mark.parametrize(
    ("raiser", "doing", "hint"),
    [
        (lambda action: action.item(), "stepping env_rank 3, t=2", "discrete actions are Python ints here"),
        (
            lambda action: action[0],
            "stepping env_rank 3 in the random steps before the first batch",
            "discrete actions are Python ints here",
        ),
        (len, "stepping env_rank 3, t=2", "discrete actions are Python ints here"),
        (lambda action: action.item(), "acting, t=2", ""),
        (lambda action: [].item(), "stepping env_rank 3, t=2", ""),
        (
            lambda action: pickle.dumps(OfMain()),
            "stepping env_rank 3",
            "put it into a module, or use start_method='fork'",
        ),
        (lambda action: pickle.dumps(lambda: 0), "stepping env_rank 3", ""),
        (
            lambda action: Seedless().reset(seed=3),
            "resetting env_rank 3",
            r"demands reset\(self, \*, seed=None, options=None\)",
        ),
    ],
)
def test_common_mistakes_get_a_hint(raiser: Any, doing: str, hint: str) -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)) as caught:
        raiser(1)
    text, message = raised("worker 0", f"{doing} (itr=0)", in_one_line(caught.value)), str(caught.value)
    assert text.startswith(
        f"worker 0 raised {caught.type.__name__} while {doing}".replace("Pickling", "_pickle.Pickling")
    )
    assert re.search(rf"{re.escape(message)} \(.*{hint}\)$" if hint else rf"{re.escape(message)}$", text)


class Seedless:
    def reset(self) -> None: ...


class OfMain:
    """As a class of the user's script, which a worker does not know."""


OfMain.__module__ = "__main__"


def test_an_exception_without_text_leaves_no_empty_end_and_an_unknown_exit_code_says_why() -> None:
    text = failure_of(0, 1, AssertionError()).describe("itr=3")
    assert text.endswith("raised AssertionError while waiting for the next command (itr=3)")
    assert "the supervisor, which starts the workers, does not answer" in describe_exit(None)


# ---- who may be replaced, and how often ----------------------------------------------------


def test_the_quota_is_a_rate_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [0.0]
    monkeypatch.setattr(failures.time, "monotonic", lambda: times[-1])
    restarts = Restarts(max_restarts=3, window=60)
    for now in (0.0, 10.0, 20.0):
        times.append(now)
        assert restarts.refusal([failure_of(0)]) is None
        restarts.note(0, failure_of(0).describe("itr=7"), n_lost=2)
    refusal = restarts.refusal([failure_of(0)])
    assert refusal is not None
    assert refusal.startswith("max_restarts=3 in 60 s are used up, earlier:")
    assert refusal.count("worker 0 (pid 1000) was killed by SIGKILL") == 3
    assert "20.0 s ago" in refusal
    assert "(itr=7)" in refusal
    times.append(61.0)  # the first of them no longer counts
    assert restarts.refusal([failure_of(0)]) is None
    assert restarts.total == 3
    assert restarts.per_worker == {0: 3}
    assert restarts.lost_per_worker == {0: 6}


def test_several_at_once_count_each_and_a_policy_of_none_refuses_without_a_word() -> None:
    restarts = Restarts(max_restarts=1, window=60)
    assert restarts.refusal([failure_of(0)]) is None
    assert restarts.refusal([failure_of(0), failure_of(1)]) == "max_restarts=1 in 60 s are used up"
    assert Restarts(0, 60).refusal([failure_of(0)]) == ""


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"])
def test_after_a_crash_the_memory_is_not_trusted(name: str) -> None:
    refusal = Restarts(9, 60).refusal([failure_of(0, -signal.Signals[name])])
    assert refusal == f"worker 0 is not replaced: after a {name} the memory that it shared cannot be trusted"


def test_what_would_happen_again_is_not_tried_again() -> None:
    refusal = Restarts(9, 60).refusal([failure_of(1, 1, SpaceError("wrong shape"))])
    assert "would happen again" in (refusal or "")
    assert Restarts(9, 60).refusal([failure_of(1, 1, OSError("no game"))]) is None
