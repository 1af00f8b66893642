"""What `agent.step` returned: checked and recorded."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.agents.agent import AgentStep
from penstock.buffers.named import ArrayTree, NamedArrays, as_named, fields_of
from penstock.buffers.native import put_row
from penstock.buffers.reports import in_one_line
from penstock.buffers.tree import map_tree, tree_leaves, tree_of
from penstock.envs.rows import as_dtype, dtype_error
from penstock.errors import SpaceError, brief

#: The agent_info of an `AgentStep` without agent_info.
NO_AGENT_INFO = AgentStep(None).agent_info


class ErrorText(NamedTuple):
    """What an error of `write_fields` says: who must write, what decides the shapes and dtypes, what to do."""

    subject: str
    source: str
    remedy: str


_AGENT_INFO = ErrorText("agent.step must return", "as in the agent's first step", "report the same dtype in every step")
_ACTION = ErrorText("agent.step must return", "as in the action space", "convert it in the agent")


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
        """Write row t. The agent's first step decides which fields there are, and their shapes and dtypes. Raises as
        `write_fields`."""
        fields = agent_info if agent_info.__class__ is dict else fields_of(agent_info)
        if not put_row(self._arrays, t, fields):
            write_fields(map_tree(lambda array: array[t], self._arrays), agent_info, "agent_info", _AGENT_INFO)


def write_action(row: ArrayTree, action: Any) -> None:
    """Write the action that `agent.step` returned into `row` `[B, ...]`. Raises as `write_fields`."""
    if row.__class__ is action.__class__ is np.ndarray and action.dtype == row.dtype and action.shape == row.shape:
        row[...] = action
    else:
        write_fields(row, action, "action", _ACTION)


def write_fields(row: Any, value: object, path: str, text: ErrorText) -> None:
    """Write `value` `[B, ...]` into `row` `[B, ...]`: an array, or fields that are nested as those of the value.

    numpy would repeat a smaller array, drop the fraction of a float, or cut off the high bits of an integer. This
    raises `SpaceError` with `path` for other fields or another shape, and `ColumnError` for a value that would change.
    """
    parts = None if row.__class__ is np.ndarray else fields_of(row)
    if parts is not None:
        fields = fields_of(value)
        if fields is None or {str(key) for key in fields} != parts.keys():
            got = brief(value) if fields is None else f"the fields {[str(key) for key in fields]}"
            raise SpaceError(f"{text.subject} {path} with the fields {list(parts)}, {text.source}, got {got}")
        for key, part in fields.items():
            write_fields(parts[str(key)], part, f"{path}.{key}", text)
        return
    array = _as_array(value, path)
    if array.shape != row.shape or array.dtype.kind not in "biufc":
        hint = "" if array.shape == row.shape else ": one row per column"
        raise SpaceError(
            f"{text.subject} {path} with shape {row.shape} and dtype {row.dtype}, {text.source}, got {array.shape} "
            f"{array.dtype}{hint}"
        )
    fitting = as_dtype(array, row.dtype)
    if fitting is None:
        raise dtype_error(path, array, row.dtype, text.source, text.remedy)
    row[...] = fitting
