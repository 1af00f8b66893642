"""An agent that calls a function of numpy arrays. It needs no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.agents.base import Agent, AgentStep
from penstock.buffers.named import NamedArrays
from penstock.errors import ConfigError


class FunctionAgent(Agent):
    """Acts by calling `fn(observation)`: a scripted policy, a controller, or a model of another library.

    `observation` is an array `[B, ...]`, or `NamedArrays` for Dict and Tuple spaces. `fn` returns actions `[B, ...]`:
    an array, or a dict or tuple of arrays for Dict and Tuple action spaces. If `fn` has a parameter named `rngs`, the
    agent calls `fn(observation, rngs=rngs)`, with one random generator per column. Draw the numbers for column b from
    `rngs[b]`: then they do not depend on the number of workers.

    `fn` may also return `(action, agent_info)`, where agent_info is a dict of arrays `[B, ...]` to record. For a
    Tuple action space, return `AgentStep(action, agent_info)` instead, because a tuple could be the action. Workers
    get `fn` by cloudpickle, so lambdas and closures are allowed.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        if not callable(fn):
            raise ConfigError(f"FunctionAgent needs a function of the observation, got {type(fn).__name__}")
        self._fn = fn
        try:
            signature = inspect.signature(fn)
        except ValueError:  # written in C, without a signature
            self._takes_rngs = False
            return
        self._takes_rngs = "rngs" in signature.parameters
        try:
            signature.bind(None, **({"rngs": ()} if self._takes_rngs else {}))
        except TypeError:
            raise ConfigError(
                f"FunctionAgent calls its function as fn(observation), or as fn(observation, rngs=rngs) if a parameter "
                f"is named rngs; this function has the parameters {signature}"
            ) from None

    def seed_columns(self, rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = rngs

    def reseed_columns(self, columns: npt.NDArray[np.intp], rngs: Sequence[np.random.Generator]) -> None:
        self._rngs = list(self._rngs)
        for b, rng in zip(columns, rngs, strict=True):
            self._rngs[b] = rng

    def step(self, observation: Any, prev_action: Any, prev_reward: npt.NDArray[np.float32]) -> AgentStep:
        rngs = self._rngs if self.selected is None else [self._rngs[b] for b in self.selected]
        result = self._fn(observation, rngs=rngs) if self._takes_rngs else self._fn(observation)
        if isinstance(result, AgentStep):
            return result
        has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping | NamedArrays)
        if has_info and not isinstance(self.action_space, spaces.Tuple):
            return AgentStep(*result)
        return AgentStep(result)
