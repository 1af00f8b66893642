from typing import Any

RECORD_LAYOUT: str

def put_row(arrays: Any, t: int, values: Any, /) -> bool: ...
def put_cell(arrays: Any, t: int, b: int, value: Any, /) -> bool: ...
def step_ordinary(
    env_rank_word: Any,
    bound: Any,
    actions: Any,
    first: int,
    is_watched: bool,
    observations: Any,
    rewards: Any,
    /,
) -> tuple[int, Any] | None: ...
def sum_episodes(
    reward: Any, done: Any, running: Any, records: Any, first_t: int, first_env_rank: int, discount: float, /
) -> int: ...
def fence() -> None: ...
