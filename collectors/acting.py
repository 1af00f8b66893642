"""What an agent's step returned, taken apart and recorded: without a copy too many, and never what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.agents.base import Agent, AgentStep
from penstock.buffers.named import NamedArrays, fields_of
from penstock.buffers.native import put_row
from penstock.errors import SpaceError, brief

__all__ = ["NO_AGENT_INFO", "AgentInfoWriter", "agent_info_example", "as_agent_step"]

#: What an `AgentStep` has for agent_info where none is given.
NO_AGENT_INFO = AgentStep(None).agent_info


def as_agent_step(step: Any, agent: Agent) -> AgentStep:
    """`step`, which is what `agent.step` returned; raises `SpaceError` unless it is an `AgentStep`.

    A plain tuple is none: it may as well be the action of a Tuple space.
    """
    if isinstance(step, AgentStep):
        return step
    raise SpaceError(f"{type(agent).__name__}.step must return AgentStep(action, agent_info): got {brief(step)}")


def agent_info_example(agent_info: Any, n_columns: int) -> NamedArrays:
    """An agent's first report, as arrays `[n_columns, ...]`.

    Raises `SpaceError` naming the field that is no array of numbers with one entry per column.
    """
    fields = fields_of(agent_info)
    if fields is None:
        raise SpaceError(f"agent_info must be a dict of arrays [B, ...], or left out, got {brief(agent_info)}")
    return _example_of(fields, n_columns, "agent_info")


def _example_of(fields: Mapping[str, Any], n_columns: int, name: str) -> NamedArrays:
    example = {}
    for key, value in fields.items():
        path = f"{name}.{key}"
        parts = fields_of(value)
        if parts is not None:
            example[str(key)] = _example_of(parts, n_columns, path)
            continue
        array = example[str(key)] = _as_array(value, path)
        if array.ndim == 0 or array.shape[0] != n_columns or array.dtype.kind not in "biufc":
            raise SpaceError(
                f"{path} must be a numeric array [B, ...], got {list(array.shape)} {array.dtype} for B={n_columns}"
            )
    return NamedArrays(example)


def _as_array(value: Any, path: str) -> Any:
    try:
        return np.asarray(value)
    except Exception as error:  # ragged; or a tensor that requires a gradient, or is on a GPU
        raise SpaceError(f"{path} cannot be made an array: {type(error).__name__}: {error}") from error


class AgentInfoWriter:
    """Writes an agent's report on one row into `agent_info` `[T, B, ...]`, which numpy alone would do too readily:
    it repeats a single number, and makes NaN of None."""

    def __init__(self, agent_info: NamedArrays, name: str = "agent_info") -> None:
        self._name, self._n = name, len(agent_info)
        self._leaves, self._nodes = [], []
        for key, part in agent_info.items():
            if isinstance(part, NamedArrays):
                self._nodes.append((key, AgentInfoWriter(part, f"{name}.{key}")))
            else:
                self._leaves.append((key, part, part.shape[1:]))
        self._arrays = {key: array for key, array, _ in self._leaves}

    def write(self, t: int, agent_info: Any) -> None:
        """Record `agent_info` as row t. Raises `SpaceError` naming what is not as it was in the first step."""
        try:
            fields: Any = agent_info if agent_info.__class__ is dict else fields_of(agent_info)
            if not self._nodes and put_row(self._arrays, t, fields):
                return
            fits = len(fields) == self._n
            for key, array, shape in self._leaves:
                value = fields[key]
                fits = fits and value.shape == shape
                if fits:
                    array[t] = value
            parts = [(node, fields[key]) for key, node in self._nodes] if self._nodes else ()
        except Exception:  # told below; or it is a list, say, which is fine
            fits = False
        if not fits:
            self._write_closely(t, agent_info)
        else:
            for node, part in parts:
                node.write(t, part)

    def _write_closely(self, t: int, agent_info: Any) -> None:
        wanted = [key for key, *_ in (*self._leaves, *self._nodes)]
        fields = fields_of(agent_info)
        if fields is None or {str(key) for key in fields} != set(wanted):
            got = brief(agent_info) if fields is None else f"the fields {[str(key) for key in fields]}"
            raise SpaceError(
                f"agent.step must return {self._name} with the fields {wanted}, as in its first step, got {got}"
            )
        fields = {str(key): value for key, value in fields.items()}
        for key, array, shape in self._leaves:
            path = f"{self._name}.{key}"
            value = _as_array(fields[key], path)
            if value.shape != shape or value.dtype.kind not in "biufc":
                raise SpaceError(
                    f"agent.step must return {path} with shape {shape} and dtype {array.dtype}, as in its first step, "
                    f"got {value.shape} {value.dtype}"
                )
            array[t] = value
        for key, node in self._nodes:
            node.write(t, fields[key])
