"""What `agent.step` returned: checked and recorded."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.agents.agent import Agent, AgentStep
from penstock.buffers.named import NamedArrays, as_named, fields_of
from penstock.buffers.native import put_row
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import tree_leaves, tree_of
from penstock.envs.rows import as_dtype, dtype_error
from penstock.errors import SpaceError, brief

#: The agent_info of an `AgentStep` without agent_info.
NO_AGENT_INFO = AgentStep(None).agent_info


def as_agent_step(step: object, agent: Agent) -> AgentStep:
    """`step`, which `agent.step` returned. Raises `SpaceError` unless it is an `AgentStep`.

    A plain tuple is not accepted: it could be the action of a Tuple space.
    """
    if isinstance(step, AgentStep):
        return step
    raise SpaceError(f"{type(agent).__name__}.step must return AgentStep(action, agent_info): got {brief(step)}")


def agent_info_example(agent_info: object, n_columns: int) -> NamedArrays:
    """The agent_info of an agent's first step, as arrays `[n_columns, ...]`.

    Raises `SpaceError` with the name of the first field that is not a numeric array with one entry per column.
    """
    given, example = as_named(agent_info), []
    if not isinstance(given, NamedArrays):
        raise SpaceError(f"agent_info must be a dict of arrays [B, ...], or be left out, got {brief(given)}")
    for path, value in tree_leaves(given, "agent_info"):
        example.append(array := _as_array(value, path))
        if array.ndim == 0 or array.shape[0] != n_columns or array.dtype.kind not in "biufc":
            raise SpaceError(
                f"{path} must be a numeric array [B, ...], got {list(array.shape)} {array.dtype} for B={n_columns}"
            )
    named: NamedArrays = tree_of(given, example)
    return named


def _as_array(value: object, path: str) -> Any:
    try:
        return np.asarray(value)
    except Exception as error:  # ragged; or a tensor that requires a gradient, or is on a GPU
        raise SpaceError(f"{path} cannot be converted to an array: {in_one_line(error)}") from error


class AgentInfoWriter:
    """Writes agent_info into rows of `agent_info` `[T, B, ...]`.

    The shapes are checked first, because numpy would repeat a single number over the row, and write None as NaN.
    """

    def __init__(self, agent_info: NamedArrays) -> None:
        self._arrays = agent_info.to_dict()

    def write(self, t: int, agent_info: object) -> None:
        """Write row t. The agent's first step decides which fields there are, and their shapes and dtypes.

        Raises `SpaceError` with the name of a field that differs, or `ColumnError` for a value that would change in the
        dtype of its field.
        """
        fields = agent_info if agent_info.__class__ is dict else fields_of(agent_info)
        if not put_row(self._arrays, t, fields):
            _write_fields(self._arrays, t, agent_info, "agent_info")


def _write_fields(arrays: dict[str, Any], t: int, agent_info: object, name: str) -> None:
    fields = fields_of(agent_info)
    if fields is None or {str(key) for key in fields} != arrays.keys():
        got = brief(agent_info) if fields is None else f"the fields {[str(key) for key in fields]}"
        raise SpaceError(
            f"agent.step must return {name} with the fields {list(arrays)}, as in its first step, got {got}"
        )
    for key, part in fields.items():
        path, array = f"{name}.{key}", arrays[str(key)]
        if isinstance(array, dict):
            _write_fields(array, t, part, path)
            continue
        value = _as_array(part, path)
        if value.shape != array.shape[1:] or value.dtype.kind not in "biufc":
            raise SpaceError(
                f"agent.step must return {path} with shape {array.shape[1:]} and dtype {array.dtype}, as in its first "
                f"step, got {value.shape} {value.dtype}"
            )
        fitting = as_dtype(value, array.dtype)
        if fitting is None:
            why, remedy = "as in the agent's first step", "report the same dtype in every step"
            raise dtype_error(path, value, array.dtype, why, remedy)
        array[t] = fitting
