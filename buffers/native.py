"""What a collector does in every row and batch, in C where that was compiled: small copies, and sums.

Each function looks whether its arguments are of the usual kind, with nothing to be converted; works if so, and says
whether it has. What it has not done is for the caller to do with numpy, all of it: some may have been written, and
without the compiled part nothing ever is.

Rows are given as an array `[T, ...]` and t, not as views made before: among thousands of views the processor has
forgotten each by the time that its turn comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "COMPILED",
    "MISSING",
    "copy",
    "copy_fields",
    "copy_row",
    "gather",
    "gather_numbers",
    "mark",
    "put",
    "set_flag",
    "sum_episodes",
]


def _leave_it(*_: Any) -> bool:
    return False


def _sum_nothing(*_: Any) -> int:
    return -1


#: `copy(target, value)`: an array of the target's own shape and dtype.
copy: Callable[[Any, Any], bool]
#: `copy_row(array, t, value)`: an array like the rows of `array` into row t.
copy_row: Callable[[Any, int, Any], bool]
#: `copy_fields(arrays, t, values)`: the same for dicts with the same keys.
copy_fields: Callable[[dict[str, Any], int, Any], bool]
#: `put(arrays, t, b, value)`: an element of a space into `arrays[t, b]`: an array like that, a number of that type, or
#: one of Python's ints into int64. `arrays` may be a dict or tuple of arrays, nested as the value is.
put: Callable[[Any, int, int, Any], bool]
#: `gather(arrays, t, values)`: `put` for a list of values, one for each entry of `arrays[t]`.
gather: Callable[[Any, int, Any], bool]
#: `set_flag(flags, t, b)`: True into bool `flags[t, b]`.
set_flag: Callable[[Any, int, int], bool]
#: `gather_numbers(target, values)`: a list of Python's floats and ints into float32 `[B]`, if that can hold them.
gather_numbers: Callable[[Any, Any], bool]
#: `mark(row, stamps, i, phase, t, now)`: phase, t and heartbeat into a progress row, and `now` into `stamps[i]`.
mark: Callable[[Any, Any, int, int, int, float], bool]
#: `sum_episodes(reward, done, running, records, first_t, first_env_rank, discount)`: the trajectories that finish in
#: rows `[T, B]`, as RECORDs of the trajectory queue, in `records`, which are bytes for T * B of them. Returns how many,
#: or -1. `running` float64 `[5, B]` are the figures of those that had begun before, with the weight of their next
#: reward, and then of those that go on. They are added up step by step, as `TrajInfo.step` does.
sum_episodes: Callable[[Any, Any, Any, Any, int, int, float], int]

try:
    from penstock.buffers._native import (
        copy,
        copy_fields,
        copy_row,
        gather,
        gather_numbers,
        mark,
        put,
        set_flag,
        sum_episodes,
    )
except ImportError as error:  # there was no C compiler, or the checkout is used as it is
    copy = copy_row = copy_fields = put = set_flag = gather = gather_numbers = mark = _leave_it
    sum_episodes = _sum_nothing
    #: Why nothing is done here.
    MISSING = str(error)
else:
    MISSING = ""

#: Whether anything is done here.
COMPILED = not MISSING
