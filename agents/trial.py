"""The trial of an agent before any worker exists: what it reports, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.agents.agent import Agent, as_agent_step, zeros_of
from penstock.agents.joint import JointSeats
from penstock.agents.outputs import agent_info_example, write_action
from penstock.buffers.named import NamedArrays, map_leaves
from penstock.buffers.reports import in_one_line
from penstock.buffers.slots import SampleSpec
from penstock.envs.examples import observation_example
from penstock.envs.rows import arrays_like, write_row
from penstock.envs.seeding import ColumnStreams, Purpose
from penstock.errors import PenstockError, SpaceError

_COLUMNS = 2  # more than one, so that a lost dimension shows
_CHECKED_ROWS = 16  # observations on which fast inference is compared with torch

#: Returns up to so many observations of an environment.
Observe = Callable[[int], Sequence[Any]]


def try_agent(
    agent: Agent, observe: Observe, n_envs: int, *, dtype: npt.DTypeLike | None, has_values: bool
) -> SampleSpec:
    """Step a copy of this worker's agent once; returns what is recorded of it. Raises `SpaceError` if something does
    not fit.

    The first trial is on zeros. An agent may not take these (a mask of zeros allows no action), so the second trial is
    on an observation that an environment returns. It is not the first, since `env.reset` may take long.
    """
    n = _COLUMNS * (agent.k if isinstance(agent, JointSeats) else 1)
    try:
        return _step_once(agent, _inputs(agent, n, dtype), n_envs, has_values)
    except PenstockError:
        if not (observed := observe(1)):
            raise
    return _step_once(agent, _inputs(agent, n, dtype, [*observed] * n), n_envs, has_values)


def inference_difference(agent: Agent, observe: Observe, dtype: npt.DTypeLike | None) -> float | None:
    """The largest difference between this worker's agent and torch, as `AgentRuntime.inference_difference` says."""

    def make_inputs() -> Sequence[Any]:
        observed = observe(_CHECKED_ROWS)
        return _inputs(agent, max(1, len(observed)), dtype, observed)  # zeros, if the environment does not reset

    return agent.runtime.inference_difference(make_inputs)


def _inputs(agent: Agent, n: int, dtype: npt.DTypeLike | None, observed: Sequence[Any] = ()) -> tuple[Any, Any, Any]:
    """Inputs of `agent.step` for n columns, with these observations; zeros without them."""
    example = observation_example(agent.observation_space, dtype)
    rows = map_leaves(lambda leaf: np.zeros((n, *leaf.shape), leaf.dtype), example)
    if observed:
        write_row(arrays_like(agent.observation_space, rows[np.newaxis]), 0, observed)
    return rows, zeros_of(agent.action_space, n), np.zeros(n, np.float32)


def _step_once(agent: Agent, inputs: tuple[Any, Any, Any], n_envs: int, has_values: bool) -> SampleSpec:
    observation, action, reward = inputs
    n = len(reward)
    try:
        trial = agent.runtime.column_copy(ColumnStreams(0, range(n)).rngs(Purpose.ACTION))
        trial.runtime.set_columns([0] * n, n_envs)  # all stand for the first environment: there may be only one
        trial.sample_mode(0)
        step = as_agent_step(trial.step(*inputs), agent)
        value = np.asarray(trial.value(*inputs)) if has_values else None
    except PenstockError:
        raise
    except Exception as error:
        shapes = observation if isinstance(observation, NamedArrays) else observation.shape
        raise SpaceError(
            f"{type(agent).__name__} failed on example observations of shape {shapes}: {in_one_line(error)}"
        ) from error
    write_action(zeros_of(agent.action_space, n), step.action)  # raises if it does not fit
    if value is not None and value.shape != (n,):
        raise SpaceError(f"agent.value must return one value per column: shape [B], got {list(value.shape)} for B={n}")
    return SampleSpec(observation[0], action[0], agent_info_example(step.agent_info, n)[0], has_values)
