"""An evaluation in a process of its own, beside training."""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.agents import Agent
from penstock.arguments import seconds, signature, unknown_argument
from penstock.buffers import pickling
from penstock.buffers.descriptors import InheritedFd, anonymous_file
from penstock.buffers.reports import dump_exception_by_value, load_exception
from penstock.buffers.unpicklable import not_picklable
from penstock.envs import EnvFn
from penstock.errors import SamplerStateError, WorkerDiedError, WorkerError
from penstock.evaluation.eval_results import EvalResults
from penstock.evaluation.evaluating import evaluate
from penstock.evaluation.policies import Policy, as_policies
from penstock.vector.vector_pool import WaitTimeoutError
from penstock.workers.affinity import thread_numbers, use_thread_numbers
from penstock.workers.failures import describe_exit
from penstock.workers.launcher import resume_supervisors, start_beside
from penstock.workers.supervisor import SupervisedProcess

if TYPE_CHECKING:
    from typing_extensions import Self

_REAP_SECONDS = 5.0  # until a killed process has ended
_LEAVE_SECONDS = 5.0  # until one that has written its results has ended: threads of the policy may never end

_unkept: list[SupervisedProcess] = []  # evaluations with a folder, to which nothing refers any more


class RunningEvaluation:
    """An evaluation that runs in another process. It ends with this one, with `cancel`, and at the end of a `with`
    block. When nothing refers to this object any more, it goes on if it has a folder, and else ends."""

    def __init__(self, code: bytes, *, has_folder: bool) -> None:
        _unkept[:] = [process for process in _unkept if process.join(0) is None]  # dropping one closes it
        self._file, self._owner = anonymous_file("penstock-evaluation"), os.getpid()
        self._process = start_beside("the evaluation", _run, code, self._file, thread_numbers())
        self._dropped = weakref.finalize(self, _drop, self._process, self._file, self._owner, has_folder)
        self._dropped.atexit = False  # the supervisor ends it then
        self._lock = threading.RLock()  # of the thread that waits for the process: others wait for the lock
        self._outcome: EvalResults | BaseException | None = None
        self._is_cancelled = False

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_done(self) -> bool:
        """Whether it has ended, so that `wait` returns at once."""
        self._require_own("is_done")
        if self._outcome is None and self._lock.acquire(blocking=False):
            try:
                return self._outcome is not None or self._process.join(0) is not None
            finally:
                self._lock.release()
        return self._outcome is not None

    def wait(self, timeout: float | None = None) -> EvalResults:
        """Wait for the results. Any thread may. Warnings of the evaluation are given here again, once.

        Raises what `evaluate` has raised there; `WorkerError` if that is no `Exception`, as `SystemExit`, or cannot be
        pickled; `WorkerDiedError` if the process was killed; `WaitTimeoutError`, also a `TimeoutError`, after `timeout`
        seconds: then it continues; and `SamplerStateError` after `cancel`, or in a fork of this process.
        """
        self._require_own("wait")
        left = -1.0 if timeout is None else min(seconds("timeout", timeout, zero=True), threading.TIMEOUT_MAX)
        until, messages = time.monotonic() + left, list[str]()
        late = WaitTimeoutError(f"the evaluation has not ended within timeout={timeout} s: it continues")
        if not self._lock.acquire(timeout=left):
            raise late
        try:
            if self._outcome is None:
                exitcode = self._process.join(None if timeout is None else max(0.0, until - time.monotonic()))
                if exitcode is None:
                    raise late
                messages = self._finish(exitcode)
        finally:
            self._lock.release()
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _require_own(self, call: str) -> None:
        if os.getpid() != self._owner:
            raise SamplerStateError(
                f"{call} was called in process {os.getpid()}, a fork of process {self._owner}, to which this "
                "evaluation belongs: start one in this process"
            )

    def _finish(self, exitcode: int | None) -> list[str]:
        """Read what the process has written, and release it. Returns its warnings."""
        messages: list[str] = []
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(0)
            content = file.read()
        self._dropped.detach()
        _end(self._process, self._file)
        if self._is_cancelled:
            self._outcome = SamplerStateError("the evaluation was cancelled: start another one")
        elif not content:
            how = "does not end" if exitcode is None else describe_exit(exitcode)
            self._outcome = WorkerDiedError(f"the process of the evaluation has ended without results: it {how}")
        else:
            report, self._outcome, messages = pickle.loads(content)
            if report is not None:
                found = load_exception(*report)
                self._outcome = found.as_cause()
                if not isinstance(found.exception, Exception):  # such as SystemExit, which would end this process
                    self._outcome = WorkerError(f"the evaluation has raised {found.headline}")
                    self._outcome.__cause__ = found.as_cause()
        return messages

    def cancel(self) -> None:
        """End it, with its workers. Episodes that have ended stay in its `folder`. It may be called twice."""
        if self._outcome is not None or os.getpid() != self._owner:
            return
        self._is_cancelled = True
        self._process.kill()
        resume_supervisors()  # one that is stopped does not say that the process has ended
        if self._lock.acquire(timeout=_REAP_SECONDS):  # else the thread that waits for the process releases it
            try:
                if self._outcome is None:
                    self._finish(self._process.join(_REAP_SECONDS))
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()


def start_evaluation(policies: Policy | Mapping[str, Policy], env_fn: EnvFn, **arguments: Any) -> RunningEvaluation:
    """Start `evaluate` with these arguments in a process of its own, and return. The policies act as they are now, on
    the CPU if they are agents; training may go on.

    Raises `ConfigError` for an argument that `evaluate` does not have, or that cannot be pickled.
    """
    known = list(signature(evaluate).parameters)
    for name in arguments:
        if name not in known:
            raise unknown_argument("start_evaluation", name, known, {})
    named = {name: _copied(policy) for name, policy in as_policies(policies).items()}
    call = partial(evaluate, named, env_fn, **arguments)
    try:
        code = pickling.dumps(call)
    except Exception as error:  # pickling runs the user's code, which may raise anything
        what = "an argument of start_evaluation cannot be pickled for its process"
        raise not_picklable(what, call, error) from error
    return RunningEvaluation(code, has_folder=arguments.get("folder") is not None)


def _copied(policy: Any) -> Any:
    """The policy as it is now. An agent without spaces is initialized where it acts."""
    is_agent = isinstance(policy, Agent) and "observation_space" in vars(policy)
    return policy.runtime.worker_copy() if is_agent else policy


def _run(code: bytes, results_file: InheritedFd, threads: Mapping[str, int]) -> int:
    """The function of the process. It writes what has come out into the file."""
    me, report, results = os.getpid(), None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            call = pickle.loads(code)
            use_thread_numbers(threads)  # of what this has imported too
            results = call()
        except BaseException as error:  # SystemExit too
            report = dump_exception_by_value(error)
    if os.getpid() != me:  # a policy has forked, and returned in both processes
        os._exit(0)
    messages = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
    with open(results_file.fd, "wb", closefd=False) as file:
        file.write(pickling.dumps((report, results, messages)))
    leave = threading.Timer(_LEAVE_SECONDS, os._exit, (0,))
    leave.daemon = True
    leave.start()
    return 0


def _drop(process: SupervisedProcess, file: InheritedFd, owner: int, has_folder: bool) -> None:
    """Nothing refers to the `RunningEvaluation` any more."""
    runs = os.getpid() == owner and process.join(0) is None
    if runs and has_folder:
        file.close()
        _unkept.append(process)
        return
    if os.getpid() == owner:
        _end(process, file)
    if runs:
        warnings.warn(
            "an evaluation was ended, since nothing referred to it any more: keep what start_evaluation returns, or "
            "give it a folder",
            ResourceWarning,
            stacklevel=2,
        )


def _end(process: SupervisedProcess, file: InheritedFd) -> None:
    process.kill()
    process.join(_REAP_SECONDS)
    process.close()
    file.close()
