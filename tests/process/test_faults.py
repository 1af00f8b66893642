"""The table of faults: where, how and when something fails in each pool, and what the user then sees.

`expected` says it, as docs/failures.md does: the error and the words that matter, how soon it comes, and what goes on.
After each row nothing is left: the fixture `nothing_left` looks for processes, descriptors, shared memory and claims,
and the test for lock files. `make faults` runs the whole table, each row with one start method. Daily some cells run,
in which each two values meet that can, and of ways to fail one of each `KIND`. A new pool, place or way to fail is a
new value of its axis.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle
import psutil
import pytest

from penstock import ClusterError, GameError, PenstockError, WorkerDiedError, WorkerError, WorkerTimeoutError
from penstock.testing import InjectedFault

from ..distributed.conftest import forked_workers, nothing_left, ray_cluster  # noqa: F401 - fixtures
from ..scale import FULL, USUAL_METHODS, covering, scaled
from . import failing
from .failing import ACTS_IN_MAIN, CLOSE_TIMEOUT, HANGS, SAMPLERS, START_TIMEOUT, STEP_TIMEOUT, USES, Cell, Outcome, use
from .support import note

cloudpickle.register_pickle_by_value(failing)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [pytest.mark.timeout(scaled(60, 120)), pytest.mark.slow]

POOLS = (*SAMPLERS, *USES)
#: Their samplers are in processes that are started in other ways.
FAR = ("experiment", "ray")
#: In the constructor, `reset`, `step`, `close` of an environment; when an agent acts; when a collector begins a batch;
#: when a trajectory is sent; between two batches; in a step of an evaluation.
WHERES = ("build", "reset", "step", "act", "begin", "send", "between", "evaluation", "close")
RAISES = {
    "raise": r"raised (\w+\.)*InjectedFault",
    "unpicklable": r"raised (\w+\.)*UnpicklableFault",
    "system exit": "raised SystemExit",
    "garbage": r"raised (\w+\.)*(Space|Config)Error",
    "game error": r"raised (\w+\.)*GameError",
}
DIES = {
    "exit": "exited with code 0",
    "kill": r"was killed by SIGKILL \(out of memory\?\)",
    "segfault": "was killed by SIGSEGV",
}
#: With the function that the stack must show. A stopped worker must go on to answer, and may have come further by then.
STACKS = {"segfault": "_segfault", "hang": "_hang", "spin": "_spin", "hold the gil": "_hold_the_gil", "stop": ""}
#: Daily without "spin", which differs from "hang" only in the load.
HOWS = scaled((*RAISES, *DIES, *HANGS), (*RAISES, *DIES, "hang", "hold the gil", "stop"))
#: Daily, the first way stands for the second, its kind: one way of each kind meets each value of the other axes. The
#: code that tells ways of one kind apart is in one place, for all pools.
KIND = {"unpicklable": "raise", "system exit": "raise", "exit": "kill", "segfault": "kill", "hold the gil": "hang"}
WHENS = ("start-up", "first batch", "later")
POLICIES = ("raise", "restart", "renew")
#: From a fault, or the end of its limit, to the error. Daily, other tests use the CPUs too.
SECONDS = scaled(1.0, 10.0)
#: Of an experiment too: a worker that is stopped counts as silent after 3 s, is asked for its stacks, and is killed.
EXPERIMENT_SECONDS = scaled(6.0, 20.0)
AXES = (POOLS, WHERES, HOWS, WHENS, POLICIES, USUAL_METHODS)


# ---- what is impossible --------------------------------------------------------------------


#: Why there is no row, for these cells.
IMPOSSIBLE: dict[str, Callable[[Cell], bool]] = {
    "an environment is built at start-up": lambda c: c.where == "build" and c.when != "start-up",
    "an environment is closed at the end": lambda c: c.where == "close" and c.when != "later",
    "before the first batch, environments are built and reset, and make random steps": lambda c: (
        c.when == "start-up" and c.where not in ("build", "reset", "step")
    ),
    "nothing is returned there": lambda c: (
        c.how == "garbage" and c.where not in ("build", "reset", "step", "act", "evaluation")
    ),
    "a game is played in reset and step": lambda c: (
        c.how == "game error" and c.where not in ("reset", "step", "evaluation")
    ),
    "on_game_failure is about games": lambda c: c.policy == "renew" and c.how != "game error",
    "the caller's own process would exit or hang": lambda c: (
        (c.pool == "serial" or is_of_main(c.where, c.pool)) and (c.how not in RAISES or c.how == "system exit")
    ),
    "a serial sampler has no workers": lambda c: (
        c.pool == "serial" and (c.where == "send" or c.policy == "restart" or c.start_method != USUAL_METHODS[0])
    ),
    "a vector environment has only resets and steps, in calls of the user": lambda c: (
        c.pool == "vector"
        and (c.where in ("act", "begin", "send", "evaluation") or (c.when == "start-up" and c.where != "build"))
    ),
    "nothing of the user runs there": lambda c: c.pool == "vector" and c.where == "between" and c.how != "kill",
    "there is no on_game_failure": lambda c: c.pool not in SAMPLERS and c.policy == "renew",
    "what a sampler in another process does then is a row of this sampler": lambda c: (
        c.pool in FAR and (c.where not in ("build", "step", "act") or (c.where, c.when) == ("step", "start-up"))
    ),
    "they start their processes in their own way": lambda c: c.pool in FAR and c.start_method != USUAL_METHODS[0],
    "a worker of an experiment answers still: step_timeout of its sampler would end this": lambda c: (
        c.pool == "experiment" and c.how in ("hang", "spin")
    ),
    "a start of such a worker has two minutes": lambda c: (
        c.pool == "experiment" and c.where == "build" and c.how in HANGS
    ),
    "daily, these are enough: each new process takes a second of CPU time": lambda c: (
        not FULL and c.pool in FAR and c.how not in ("raise", "kill", "stop")
    ),
}


def why_not(cell: Cell) -> str | None:
    """Why there is no such row; None if there is one."""
    return next((reason for reason, is_so in IMPOSSIBLE.items() if is_so(cell)), None)


def is_of_main(where: str, pool: str) -> bool:
    """Whether the caller's own process acts."""
    return where == "act" and pool in ACTS_IN_MAIN


def every_cell() -> list[Cell]:
    return [cell for values in product(*AXES) if why_not(cell := Cell(*values)) is None]


def with_one_start_method() -> list[Cell]:
    """Every cell, with one of its start methods: they take turns."""
    groups = defaultdict(list)
    for cell in every_cell():
        groups[cell[:-1]].append(cell)
    return [cells[k % len(cells)] for k, cells in enumerate(groups.values())]


@cache
def daily() -> list[Cell]:
    """`DAILY`, and cells in which each two values of two axes meet. A way to fail counts as its `KIND`."""
    cells, of_kind = every_cell(), defaultdict(list)
    for cell in random.Random(1).sample(cells, len(cells)):  # of equal ones, not always those with the first values
        of_kind[kind_of(cell)].append(cell)
    chosen = covering(list(of_kind), [kind_of(cell) for cell in DAILY])
    return [*DAILY, *(of_kind[kind][0] for kind in chosen[len(DAILY) :])]


def kind_of(cell: Cell) -> Cell:
    return cell._replace(how=KIND.get(cell.how, cell.how))


#: They run in any case.
DAILY = (
    # The thread that notes progress while the learner trains took this for a wait until somebody reads the pipe.
    Cell("ahead", "send", "stop", "first batch", "raise", "forkserver"),
    # Its exception crosses two processes.
    Cell("central, own process", "act", "raise", "later", "raise", "forkserver"),
    # `mutants.txt` names it.
    Cell("parallel", "close", "hang", "later", "raise", "fork"),
)


# ---- what is expected ----------------------------------------------------------------------


class Expected(NamedTuple):
    error: type[Exception] | None  #: None: the run goes on
    words: tuple[str, ...] = ()  #: patterns that the error has, or the warning of a close, in this order
    cause: tuple[type[BaseException], ...] = ()
    limit: float = 0.0  #: seconds that must pass before it is noticed
    restarts: int = 0
    renewals: int = 0


def expected(where: str, how: str, when: str, policy: str, pool: str) -> Expected:
    """What docs/failures.md says of this row; of an experiment, docs/control_plane.md."""
    if pool == "experiment":
        return expected_of_experiment(where, how, when, policy)
    limit, limit_name = limit_of(where, when)
    if how not in HANGS:
        limit = 0.0
    if where == "close":  # it is only a warning
        ends = rf" and was killed \({limit_name}={limit:g}\)" if how in HANGS else ""
        return Expected(None, (who(where, pool), closed_text(how), f"while closing env_rank 3{ends}"), limit=limit)
    if policy == "renew":
        return Expected(None, renewals=1)
    refusal = None
    if policy == "restart" and not is_of_main(where, pool):
        refusal = why_not_replaced(where, how, pool)
        if refusal is None:
            return Expected(None, limit=limit, restarts=1)
    stack = f"(?s)the stack of .*in {STACKS[how]}" if how in STACKS else ""
    others = r"(?s)\n  .*: .*, (last heartbeat [\d.]+ s ago|no heartbeat yet)\n" if how in HANGS else ""
    words = (
        who(where, pool),
        how_text(how, limit, limit_name),
        f"while {doing(where, when, pool)}",
        others,
        refusal or "",
        stack,
    )
    if how in DIES:
        return Expected(WorkerDiedError, words)
    if how in HANGS:
        return Expected(WorkerTimeoutError, words, limit=limit)
    cause = {"raise": InjectedFault, "game error": GameError, "garbage": PenstockError}.get(how, BaseException)
    return Expected(WorkerError, words, (cause,))


def why_not_replaced(where: str, how: str, pool: str) -> str | None:
    if where == "act" and "own process" in pool:
        return "the inference server is not replaced"
    if how == "segfault":
        return r"worker \d is not replaced: after a SIGSEGV the memory that it shared cannot be trusted"
    return r"worker \d is not replaced: the same would happen again" if how == "garbage" else None


def expected_of_experiment(where: str, how: str, when: str, policy: str) -> Expected:
    """Once all workers have started, one that fails is started again, whatever it was, unless it fails too often."""
    ends = {"exit": "exited with code 0", "kill": "killed by SIGKILL", "segfault": "killed by SIGSEGV"}
    limit = STEP_TIMEOUT if how in HANGS else 0.0
    if how in HANGS:
        text = f"it did not answer for hang_timeout={limit:g} s"
    elif how in DIES:
        text = ends[how]
    elif how == "system exit":  # it ends the actor itself, so no sampler says where
        text = "SystemExit: a fault was injected"
    else:  # env_rank counts the environments of all actors
        text = f"{RAISES[how]} while {doing(where, when, 'experiment').replace('env_rank 3', 'env_rank [37]')}"
    if where == "build":  # nothing has run yet
        if how == "system exit":
            return Expected(ClusterError, (r"^worker/actor/\d", "configure raised SystemExit"))
        return Expected(ClusterError, (r"^worker/actor/\d", "is lost" if how in DIES else "configure raised", text))
    if policy == "restart":
        return Expected(None, limit=limit, restarts=1)
    words = (r"^worker actor/\d has failed 1 times in a row, .* with max_restarts=0\. The last time: ", text)
    return Expected(ClusterError, words, limit=limit)


def limit_of(where: str, when: str) -> tuple[float, str]:
    """The limit of time that is exceeded. Random steps are steps."""
    if where == "close":
        return CLOSE_TIMEOUT, "close_timeout"
    if when == "start-up" and where != "step":
        return START_TIMEOUT, "start_timeout"
    return STEP_TIMEOUT, "step_timeout"


def how_text(how: str, limit: float, limit_name: str) -> str:
    if how in HANGS:
        stopped = " and is stopped by a signal" if how == "stop" else ""
        return rf"made no progress for {limit:g} s \({limit_name}={limit:g}\){stopped}"
    return {**RAISES, **DIES}[how]


def closed_text(how: str) -> str:
    return "did not exit" if how in HANGS else {**RAISES, **DIES}[how]


def who(where: str, pool: str) -> str:
    """Who has failed, at the begin of the message. `{pid}` is its process."""
    if where == "act" and pool in ACTS_IN_MAIN and pool != "serial":
        return "^the inference server"
    if where == "act" and "own process" in pool:
        return r"^the inference server \(pid {pid}\)"
    if pool == "ray":  # one worker in each shard
        return r"^shard [01] \(node .*, env_rank \d to \d\): worker \d \(pid {pid}, env_rank \d to \d"
    if pool == "serial":
        return r"^worker 0 \(pid {pid}, env_rank 0 to 3"
    if where in ("build", "reset", "step", "close"):
        return r"^worker 1 \(pid {pid}, env_rank 2 to 3"
    return r"^worker [01] \(pid {pid}, env_rank \d to \d"


def doing(where: str, when: str, pool: str) -> str:
    """What it was doing, with env_rank, t and itr. Episodes have 5 steps and batches 8, see `failing.CALLS`."""
    itr = {"start-up": "start-up", "first batch": "itr=0", "later": "itr=1"}[when]
    if pool == "experiment" and when != "start-up":
        itr = r"itr=\d+"  # the version of the parameters
    if pool.startswith("ahead") and when == "later" and where != "evaluation":
        itr = "itr=[01]"  # of the call that reports it: the workers may be ahead
    if pool == "central, first-ready" and when == "later" and where == "act":
        itr = "itr=[01]"  # the agent acts once or twice in each step
    if pool == "vector":
        itr = {"build": "start-up", "step": "step", "between": "step"}.get(where, r"reset|step")
        return {"build": "building env_rank 3", "reset": "resetting env_rank 3", "step": "stepping env_rank 3"}.get(
            where, "waiting for the next command"
        ) + rf" \(({itr})\)"
    t = {"reset": {"first batch": ", t=4", "later": ", t=1"}.get(when, ""), "step": ", t=2"}.get(where, "")
    if where == "act":
        is_central = pool in ACTS_IN_MAIN and pool != "serial"
        return rf"acting for env_rank \[?[\d, ]+\]? \({itr}\)" if is_central else rf"acting(, t=2)? \({itr}\)"
    if where == "between":
        return r"waiting for the next command \(itr=\d\)"
    if where == "evaluation":
        return rf"stepping env_rank [01], t=3 \(evaluation, {itr}\)"
    return (
        {
            "build": "building env_rank 3",
            "reset": "resetting env_rank 3",
            "step": f"stepping env_rank 3{' in the random steps before the first batch' if when == 'start-up' else ''}",
            "begin": r"\w[^()]*",
            "send": "sending results",
        }[where]
        + t * (when != "start-up")
        + rf" \({itr}\)"
    )


# ---- the table -----------------------------------------------------------------------------


def as_parameter(cell: Cell) -> Any:
    return pytest.param(cell, id="-".join(cell).replace(" ", "_"), marks=pytest.mark.ray if cell.pool == "ray" else ())


@pytest.mark.parametrize("cell", [as_parameter(cell) for cell in (with_one_start_method() if FULL else daily())])
def test_what_the_user_sees(cell: Cell, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if cell.pool == "experiment":
        pytest.importorskip("zmq", reason="a wire needs pyzmq")
        pytest.importorskip("msgpack", reason="a wire needs msgpack")
        request.getfixturevalue("forked_workers")
    if cell.pool == "ray":
        request.getfixturevalue("ray_cluster")
    wanted = expected(cell.where, cell.how, cell.when, cell.policy, cell.pool)
    locked = set(lock_files())  # a test that kills whole programs may have left some before
    outcome = use(cell, tmp_path)
    if wanted.error is None and outcome.error is not None:
        raise outcome.error
    check_text(outcome, wanted)
    check_time(cell, outcome, wanted)
    assert (outcome.restarts, outcome.renewals) == (wanted.restarts, wanted.renewals)
    if outcome.error is not None:
        assert cell.pool in FAR or isinstance(outcome.error.__cause__, wanted.cause or type(None))
        if cell.pool not in FAR and (cell.pool, cell.where) != ("vector", "build"):
            assert type(outcome.again) is type(outcome.error), "it stays broken"
            assert str(outcome.again) == str(outcome.error)
        assert outcome.left == []
    assert cell.pool == "serial" or outcome.struck[1] == os.getpid() or not psutil.pid_exists(outcome.struck[1])
    assert set(lock_files()) <= locked


def check_text(outcome: Outcome, wanted: Expected) -> None:
    assert isinstance(outcome.error, wanted.error or type(None)), outcome.error
    message = str(outcome.error)
    if wanted.error is None:
        assert len(outcome.warnings) == bool(wanted.words), outcome.warnings
        message = "".join(outcome.warnings)
    begin = 0
    for pattern in wanted.words:
        found = re.compile(pattern.replace("{pid}", str(outcome.struck[1]))).search(message, begin)
        assert found is not None, f"{pattern} is not in, or not in this order: {message}"
        begin = found.end()


def check_time(cell: Cell, outcome: Outcome, wanted: Expected) -> None:
    if wanted.error is None and not wanted.words:
        return
    noticed = max(outcome.struck[0] + wanted.limit, outcome.called)
    kind = "hang" if cell.how in HANGS else "fault"
    seconds = EXPERIMENT_SECONDS if cell.pool == "experiment" else SECONDS
    note(f"{cell.pool}: {kind} to the error, or to the end of close, s", outcome.seen - noticed, seconds)
    assert outcome.seen - outcome.struck[0] >= wanted.limit


def lock_files() -> Iterator[Path]:
    for kind in ("PORT", "CPU", "RUN"):
        folder = Path(os.environ[f"PENSTOCK_{kind}_FOLDER"])
        yield from folder.iterdir() if folder.is_dir() else ()


def test_each_two_values_of_the_table_that_can_meet_do_so_daily() -> None:
    found = {pair for cell in daily() for pair in combinations(enumerate(kind_of(cell)), 2)}
    assert found == {pair for cell in every_cell() for pair in combinations(enumerate(kind_of(cell)), 2)}
    assert {value for cell in daily() for value in cell} == {value for axis in AXES for value in axis}
