"""Method calls, and reads and writes of attributes, in all environments, between two batches."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gymnasium.vector import VectorEnv, VectorWrapper

from penstock.buffers import pickling
from penstock.buffers.object_pipe import MessageKind, ObjectMessage, Unreadable, dumped, loaded
from penstock.buffers.reports import dump_exception, in_one_line, load_exception
from penstock.buffers.unpicklable import not_picklable
from penstock.errors import ConfigError, EnvCallError


@dataclass(frozen=True)
class EnvCall:
    """A call on every training environment, or on every evaluation environment."""

    #: "call", "get_attr", "has_attr", "set_attr" (whose result says whether the attribute is new, and the nearest one);
    #: "call_or_get": call the attribute if it is callable; "apply": `args[0](env)`
    verb: str
    name: str
    evaluation: bool = False
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    values: Sequence[Any] | None = None  #: for "set_attr": one per environment
    only: frozenset[int] | None = None  #: the columns to do it in; None for all

    @property
    def verb_in_errors(self) -> str:
        """The verb as the user knows it."""
        return self.verb.removesuffix("_or_get")

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"{self.verb_in_errors} needs the name of a method or an attribute, got {self.name!r}")

    def dumps(self) -> bytes:
        """The call, pickled. Raises `ConfigError` if that is impossible."""
        return pickled(self, f"the arguments for {self.name!r}")


def pickled(message: object, what: str) -> bytes:
    """`message`, pickled for the workers. Raises `ConfigError`, with `what`, if that is impossible."""
    try:
        return pickling.dumps(message)
    except Exception as error:
        raise not_picklable(f"{what} cannot be pickled for the workers", message, error) from error


def perform(call: EnvCall, envs: Sequence[Any], columns: range, env_ranks: range) -> list[ObjectMessage]:
    """Worker: make the call on its environments. An exception is returned as a result, and the worker continues."""
    messages = []
    for env, column, env_rank in zip(envs, columns, env_ranks, strict=True):
        if call.only is not None and column not in call.only:
            continue
        try:
            outcome = {"result": _perform_one(call, env, column)}
        except Exception as error:
            outcome = {"error": dump_exception(error)}
        else:
            kind = type(outcome["result"]).__qualname__
            remedy = "Call it by its name" if callable(outcome["result"]) else "Return a part of it"
            try:  # here the environment is known
                if isinstance(sent := loaded(dumped(outcome)), Unreadable):
                    outcome = {
                        "error": dump_exception(sent.error),
                        "unpicklable": (f"a {kind}, cannot be unpickled", remedy),
                    }
            except Exception as error:
                outcome = {"error": dump_exception(error), "unpicklable": (f"a {kind}, cannot be pickled", remedy)}
        messages.append(ObjectMessage(MessageKind.CALL_RESULT, 0, env_rank, outcome))
    return messages


def _perform_one(call: EnvCall, env: Any, column: int) -> Any:
    if call.verb == "apply":
        return call.args[0](env)
    is_batched = isinstance(env, VectorEnv)  # such environments have no methods for attributes of wrappers
    while is_batched and isinstance(env, VectorWrapper) and not hasattr(env, call.name):
        env = env.env
    if call.verb in ("has_attr", "set_attr"):
        has_attr = hasattr(env, call.name) if is_batched else env.has_wrapper_attr(call.name)
        if call.verb == "has_attr":
            return has_attr
        assert call.values is not None
        is_new = not has_attr
        near = difflib.get_close_matches(call.name, dir(env.unwrapped), 1) if is_new else []
        (partial(setattr, env) if is_batched else env.set_wrapper_attr)(call.name, call.values[column])
        return is_new, "".join(near)
    attribute = getattr(env, call.name) if is_batched else env.get_wrapper_attr(call.name)
    if call.verb == "call" or (call.verb == "call_or_get" and callable(attribute)):
        return attribute(*call.args, **(call.kwargs or {}))
    return attribute


def single_results(what: str, messages: Sequence[ObjectMessage]) -> list[Any]:
    """Main process: what each message carries, by env_rank. `what` names the call in errors, which are as those of
    `results`."""
    results = []
    for message in sorted(messages, key=lambda message: message.env_rank):
        where, outcome = f"{what} on env_rank {message.env_rank}", message.payload
        if isinstance(outcome, Unreadable):
            problem = f"a result that cannot be unpickled in the main process: {in_one_line(outcome.error)}"
            raise EnvCallError(f"{where} returned {problem}") from outcome.error
        if "error" in outcome:
            report = load_exception(*outcome["error"])
            problem = f"{where} raised {report.headline}"
            if "unpicklable" in outcome:
                result, remedy = outcome["unpicklable"]
                problem = f"the result of {where}, {result}: {report.headline}. {remedy}"
            raise EnvCallError(problem) from report.as_cause()
        results.append(outcome["result"])
    return results


def results(call: EnvCall, messages: Sequence[ObjectMessage]) -> list[Any]:
    """Main process: what the environments returned, by env_rank. Raises `EnvCallError` for the first that raised."""
    return single_results(f"{call.verb_in_errors} {call.name!r}", messages)
