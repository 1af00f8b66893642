from typing import Any

RECORD_LAYOUT: str

def put_row(arrays: Any, t: int, values: Any, /) -> bool: ...
def put_cell(arrays: Any, t: int, b: int, value: Any, /) -> bool: ...
def step_ordinary(
    words: Any,
    bound: Any,
    actions: Any,
    outs: Any,
    first: int,
    watch: int,
    observations: Any,
    rewards: Any,
    on_end: Any,
    /,
) -> tuple[int, Any] | None: ...
def sum_episodes(
    reward: Any,
    done: Any,
    valid: Any,
    running: Any,
    records: Any,
    first_t: int,
    env_ranks: Any,
    discount: float,
    /,
) -> int: ...
def shift_rows(logits: Any, /) -> Any: ...
def draw_rows(weights: Any, uniform: Any, shifted: Any, /) -> tuple[Any, Any] | None: ...
def fence() -> None: ...
def end_group_with_parent() -> bool: ...
