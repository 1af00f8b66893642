"""Calls on the environments between two batches: methods, attributes, for curricula and the like."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import gymnasium as gym

from penstock.buffers.trajectory_queue import Frame, Unreadable
from penstock.errors import ConfigError, EnvCallError
from penstock.workers.reports import in_one_line, read_account, write_account

__all__ = ["EnvCall", "perform", "results"]


@dataclass(frozen=True)
class EnvCall:
    """What is to be done on every training environment, or on every evaluation environment."""

    verb: str  #: the sampler's method: "call", "get_attr" or "set_attr"
    name: str
    evaluation: bool = False
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    values: Sequence[Any] | None = None  #: of "set_attr", one per environment

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"{self.verb} needs the name of a method or an attribute, got {self.name!r}")

    def dumps(self) -> bytes:
        """Pickled, by value where it comes from a script. Raises `ConfigError` if that is impossible."""
        try:
            return bytes(cloudpickle.dumps(self))
        except Exception as error:
            raise ConfigError(f"the arguments for {self.name!r} cannot be pickled for the workers: {error}") from error


def perform(call: EnvCall, envs: Sequence[gym.Env[Any, Any]], columns: range, env_ranks: range) -> list[Frame]:
    """Worker: do it on its environments. An exception is a result too; it does not harm the worker."""
    frames: list[Frame] = []
    for env, column, env_rank in zip(envs, columns, env_ranks, strict=True):
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
    attribute = env.get_wrapper_attr(call.name)
    return attribute(*call.args, **(call.kwargs or {})) if call.verb == "call" else attribute


def results(call: EnvCall, frames: Sequence[Frame]) -> list[Any]:
    """Main process: what the environments returned, in order; raises `EnvCallError` naming the first that raised."""
    found = []
    for _, env_rank, outcome in sorted(frames, key=lambda frame: frame[1]):
        where = f"{call.verb} {call.name!r} on env_rank {env_rank}"
        if isinstance(outcome, Unreadable):
            problem = f"what cannot be unpickled in the main process: {in_one_line(outcome.error)}"
            raise EnvCallError(f"{where} gave {problem}") from outcome.error
        if "error" in outcome:
            report = read_account(*outcome["error"])
            raise EnvCallError(f"{where} raised {report.headline}") from report.as_cause()
        found.append(outcome["result"])
    return found
