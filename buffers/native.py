"""What a collector does in every row and at every episode's end, in C where that was compiled: small copies.

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
    "PYTHON",
    "copy",
    "copy_fields",
    "copy_row",
    "gather",
    "gather_numbers",
    "mark",
    "put_end",
]


def _leave_it(*_: Any) -> bool:
    return False


#: `copy(target, value)`: an array of the target's own shape and dtype.
copy: Callable[[Any, Any], bool]
#: `copy_row(array, t, value)`: an array like the rows of `array` into row t.
copy_row: Callable[[Any, int, Any], bool]
#: `copy_fields(arrays, t, values)`: the same for dicts with the same keys.
copy_fields: Callable[[dict[str, Any], int, Any], bool]
#: `gather(arrays, t, values)`: a list of elements of a space into row t, one for each entry: arrays like those, numbers
#: of that type, or Python's ints into int64. `arrays` may be a dict or tuple of arrays, nested as the values are.
gather: Callable[[Any, int, Any], bool]
#: `put_end((done, terminated, truncated, arrays), t, b, value, is_terminated, is_truncated)`: one such element into
#: `arrays[t, b]`; True and the two bools into flags `[T, B]`.
put_end: Callable[[Any, int, int, Any, Any, Any], bool]
#: `gather_numbers(target, values)`: a list of Python's floats and ints into float32 `[B]`, if that can hold them.
gather_numbers: Callable[[Any, Any], bool]
#: `mark(row, stamps, i, phase, t, now)`: phase, t and heartbeat into a progress row, and `now` into `stamps[i]`.
mark: Callable[[Any, Any, int, int, int, float], bool]

#: What is used where nothing is compiled, by name.
PYTHON: dict[str, Callable[..., Any]] = dict.fromkeys(
    ("copy", "copy_row", "copy_fields", "gather", "put_end", "gather_numbers", "mark"), _leave_it
)

try:
    from penstock.buffers._native import copy, copy_fields, copy_row, gather, gather_numbers, mark, put_end
except ImportError as error:  # there was no C compiler, or the checkout is used as it is
    copy = copy_row = copy_fields = gather = put_end = gather_numbers = mark = _leave_it
    #: Why nothing is done here.
    MISSING = str(error)
else:
    MISSING = ""

#: Whether anything is done here.
COMPILED = not MISSING
