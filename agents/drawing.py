"""How the actions of one time step are drawn from logits: in C where it was compiled.

Elsewhere, and for unusual arrays, these functions return None. Then the caller draws with numpy, with the same results
(`distributions.choose`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.buffers.native import load

#: `shift_rows(logits)`: `logits` `[N, n]` minus the largest of each row. None if it cannot handle the array, or if the
#: largest of a row is not finite.
shift_rows: Callable[[Any], Any]
#: `draw_rows(weights, uniform, shifted)`: for each row of `weights` `[N, n]` an index, and the entry of `shifted`
#: `[N, n]` there; both `[N]`. The probability of an index is in proportion to its weight; `uniform` `[N]`, from 0 to 1,
#: decides. Afterwards `weights` holds the cumulative sums of each row. None if it cannot handle the arguments.
draw_rows: Callable[[Any, Any, Any], tuple[Any, Any] | None]

#: The functions that are used if nothing is compiled.
PYTHON: dict[str, Callable[..., Any]] = {"shift_rows": lambda *_: None, "draw_rows": lambda *_: None}
#: Why the compiled functions are not in use; empty if they are.
_functions, WHY_NOT_COMPILED = load("penstock.agents._drawing", PYTHON)
shift_rows, draw_rows = _functions.values()
