"""How a batch is written and summed up: in C where it was compiled, in Python elsewhere, with the same results.

Only functions are compiled that a measurement showed to save time (benchmarks/native.py). `put_row` and `put_cell`
handle the usual types only. For all others they return False. Then the caller must write the whole row or cell again,
since a part of it may have been written.

Rows are given as an array `[T, ...]` and an index t, since this is faster than a list of T views.

Other parts are compiled where they are used: `agents/distributions.py`, `columns/stepping.py` and `workers/spinning.py`
also `load` an extension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from penstock.buffers.object_pipe import RECORD

_Functions = dict[str, Callable[..., Any]]


def load(extension: str, python: _Functions, layout: str = "") -> tuple[_Functions, str]:
    """The functions of `python`, by name, from the module `extension`, and an empty text. If it is not compiled, or
    was built for another `layout` of what it reads and writes, return `python` itself, and the reason."""
    try:
        module = importlib.import_module(extension)
        functions = {name: getattr(module, name) for name in python}
        if layout and layout != module.LAYOUT:
            raise ImportError(f"{extension} was built for another layout of what it reads and writes: build it again")
    except (ImportError, AttributeError) as error:  # no C compiler, an older build, or a checkout that was never built
        return python, str(error)
    return functions, ""


#: `put_row(arrays, t, values)`: write row t. `arrays` is an array `[T, B, ...]`, or a nested dict or tuple of such.
#: `values` is nested in the same way and has an array `[B, ...]` of the same type for each of them; or it is a list of
#: B elements of a space, each nested in the same way. An element's leaf is an array or number of the same type, a
#: Python int for int64 or float32, or a Python float for float64 or float32.
put_row: Callable[[Any, int, Any], bool]
#: `put_cell(arrays, t, b, value)`: write one such element into `[t, b]`.
put_cell: Callable[[Any, int, int, Any], bool]
#: `sum_episodes(reward, done, valid, running, records, first_t, env_ranks, discount)`: write a RECORD for each
#: trajectory that finishes in the rows `[T, B]` that are `valid` (bool `[T, B]`; None: all) into `records`, uint8
#: `[1, n]` with room for T * B of them. Return how many, or -1 if it cannot handle the arguments; then nothing was
#: written. `running` float64 `[B, 5]` holds the sums of each column's unfinished trajectory and the weight of its next
#: reward. It is read and updated. `env_ranks` is int64 `[1, B]`.
sum_episodes: Callable[[Any, Any, Any, Any, Any, int, Any, float], int]

#: The functions that are used if nothing is compiled.
PYTHON: _Functions = {"put_row": lambda *_: False, "put_cell": lambda *_: False, "sum_episodes": lambda *_: -1}
_LAYOUT = " ".join(f"{name}:{RECORD[name].str[1:]}" for name in RECORD.names or ())
#: Why the compiled functions are not in use; empty if they are.
_functions, WHY_NOT_COMPILED = load("penstock.buffers._native", PYTHON, _LAYOUT)
put_row, put_cell, sum_episodes = _functions.values()
#: Whether the compiled functions are in use.
COMPILED = not WHY_NOT_COMPILED
