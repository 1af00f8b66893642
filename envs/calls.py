"""Calls on the environments between two batches: methods, attributes, for curricula and the like."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym

from penstock.buffers.reports import in_one_line, read_account, write_account
from penstock.buffers.trajectory_queue import ObjectMessage, Unreadable
from penstock.errors import ConfigError, EnvCallError

__all__ = ["EnvCall", "perform", "pickled", "results"]


@dataclass(frozen=True)
class EnvCall:
    """What is to be done on every training environment, or on every evaluation environment."""

    verb: str  #: the caller's method: "call", "get_attr" or "set_attr"; "call_or_get", whichever it allows; or "apply"
    name: str
    evaluation: bool = False
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    values: Sequence[Any] | None = None  #: of "set_attr", one per environment
    only: frozenset[int] | None = None  #: the columns that it concerns; None: all

    @property
    def shown(self) -> str:
        """The verb as errors have it."""
        return self.verb.removesuffix("_or_get")

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"{self.shown} needs the name of a method or an attribute, got {self.name!r}")

    def dumps(self) -> bytes:
        """Pickled, by value where it comes from a script. Raises `ConfigError` if that is impossible."""
        return pickled(self, f"the arguments for {self.name!r}")


def pickled(order: Any, what: str) -> bytes:
    """An order for the workers; raises `ConfigError` saying that `what` cannot be pickled if it cannot."""
    try:
        return bytes(cloudpickle.dumps(order))
    except Exception as error:
        raise ConfigError(f"{what} cannot be pickled for the workers: {error}") from error


def perform(call: EnvCall, envs: Sequence[gym.Env[Any, Any]], columns: range, env_ranks: range) -> list[ObjectMessage]:
    """Worker: do it on its environments. An exception is a result too; it does not harm the worker."""
    frames: list[ObjectMessage] = []
    for env, column, env_rank in zip(envs, columns, env_ranks, strict=True):
        if call.only is not None and column not in call.only:
            continue
        try:
            outcome = {"result": _perform_one(call, env, column)}
            pickle.loads(pickle.dumps(outcome))
        except Exception as error:
            outcome = {"error": write_account(error)}
        frames.append((0, env_rank, outcome))
    return frames


def _perform_one(call: EnvCall, env: gym.Env[Any, Any], column: int) -> Any:
    if call.verb == "set_attr":
        assert call.values is not None
        env.set_wrapper_attr(call.name, call.values[column])
        return None
    if call.verb == "apply":
        return call.args[0](env)
    attribute = env.get_wrapper_attr(call.name)
    if call.verb == "call" or (call.verb == "call_or_get" and callable(attribute)):
        return attribute(*call.args, **(call.kwargs or {}))
    return attribute


def results(call: EnvCall, frames: Sequence[ObjectMessage]) -> list[Any]:
    """Main process: what the environments returned, in order; raises `EnvCallError` naming the first that raised."""
    found = []
    for _, env_rank, outcome in sorted(frames, key=lambda frame: frame[1]):
        where = f"{call.shown} {call.name!r} on env_rank {env_rank}"
        if isinstance(outcome, Unreadable):
            problem = f"what cannot be unpickled in the main process: {in_one_line(outcome.error)}"
            raise EnvCallError(f"{where} gave {problem}") from outcome.error
        if "error" in outcome:
            report = read_account(*outcome["error"])
            raise EnvCallError(f"{where} raised {report.headline}") from report.as_cause()
        found.append(outcome["result"])
    return found
