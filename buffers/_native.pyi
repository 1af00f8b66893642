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
    is_watched: bool,
    observations: Any,
    rewards: Any,
    on_end: Any,
    /,
) -> tuple[int, Any] | None: ...
def flat_methods(step: Any, inside: Any, layers: Any, finish: Any, /) -> tuple[Any, Any]: ...
def sum_episodes(
    reward: Any, done: Any, running: Any, records: Any, first_t: int, first_env_rank: int, discount: float, /
) -> int: ...
def fence() -> None: ...
def end_group_with_parent() -> bool: ...
