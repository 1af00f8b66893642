from typing import Any

def tree_update(sum: Any, max: Any, leaves: Any, values: Any, /) -> None: ...
def tree_range(sum: Any, max: Any, first: int, values: Any, /) -> None: ...
def read_windows(
    flags: Any,
    reward: Any,
    positions: Any,
    powers: Any,
    B: int,
    at: Any,
    last: Any,
    after: Any,
    return_: Any,
    discount: Any,
    end: Any,
    eligible: Any,
    /,
) -> None: ...
def tree_draw(sum: Any, mass: Any, leaves: Any, /) -> None: ...
def pack_flags(valid: Any, terminated: Any, truncated: Any, begins: Any, out: Any) -> int: ...
