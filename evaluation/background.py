"""An evaluation in a process of its own, beside training."""

from __future__ import annotations

import pickle
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
from penstock.workers.failures import describe_exit
from penstock.workers.launcher import start_beside
from penstock.workers.supervisor import SupervisedProcess

if TYPE_CHECKING:
    from typing_extensions import Self

_REAP_SECONDS = 5.0  # until a killed process has ended


class RunningEvaluation:
    """An evaluation that runs in another process. It ends with this one, with `cancel`, at the end of a `with` block,
    and when nothing refers to this object any more."""

    def __init__(self, code: bytes) -> None:
        self._file = anonymous_file("penstock-evaluation")
        self._process = start_beside("the evaluation", _run, code, self._file)
        self._end = weakref.finalize(self, _end, self._process, self._file)
        self._results: EvalResults | None = None
        self._error: BaseException | None = None

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def is_done(self) -> bool:
        """Whether it has ended, so that `wait` returns at once."""
        return self._results is not None or self._process.join(0) is not None

    def wait(self, timeout: float | None = None) -> EvalResults:
        """Wait for the results. Warnings of the evaluation are given here again.

        Raises what `evaluate` has raised there; `WorkerDiedError` if the process was killed; `WaitTimeoutError`, also a
        `TimeoutError`, after `timeout` seconds: then it continues; and `SamplerStateError` after `cancel`.
        """
        if self._results is not None:
            return self._results
        if self._error is not None:
            raise self._error
        if not self._end.alive:
            raise SamplerStateError("the evaluation was cancelled: start another one")
        left = None if timeout is None else seconds("timeout", timeout, zero=True)
        if (exitcode := self._process.join(left)) is None:
            raise WaitTimeoutError(f"the evaluation has not ended within timeout={timeout:g} s: it continues")
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(0)
            content = file.read()
        self._end()
        if not content:
            how = describe_exit(exitcode)
            self._error = WorkerDiedError(f"the process of the evaluation has ended without results: it {how}")
            raise self._error
        report, results, messages = pickle.loads(content)
        for message in messages:
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        if report is not None:
            found = load_exception(*report)
            self._error = found.as_cause()
            if found.exception is None:
                self._error = WorkerError(found.headline)
                self._error.__cause__ = found.as_cause()
            raise self._error
        self._results = results
        return results  # type: ignore[no-any-return]

    def cancel(self) -> None:
        """End it, with its workers. Episodes that have ended stay in its `folder`. It may be called twice."""
        self._end()

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
    return RunningEvaluation(code)


def _copied(policy: Any) -> Any:
    """The policy as it is now. An agent without spaces is initialized where it acts."""
    is_agent = isinstance(policy, Agent) and "observation_space" in vars(policy)
    return policy.runtime.worker_copy() if is_agent else policy


def _run(code: bytes, results_file: InheritedFd) -> int:
    """The function of the process. It writes what has come out into the file."""
    report = results = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            results = pickle.loads(code)()
        except Exception as error:
            report = dump_exception_by_value(error)
    messages = [str(each.message) for each in caught if issubclass(each.category, RuntimeWarning)]
    with open(results_file.fd, "wb", closefd=False) as file:
        file.write(pickling.dumps((report, results, messages)))
    return 0


def _end(process: SupervisedProcess, file: InheritedFd) -> None:
    process.kill()
    process.join(_REAP_SECONDS)
    process.close()
    file.close()
