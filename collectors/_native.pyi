from typing import Any

def step_ordinary(
    words: Any,
    bound: Any,
    actions: Any,
    first: int,
    is_watched: bool,
    observations: Any,
    rewards: Any,
    /,
) -> tuple[int, Any] | None: ...
def reset_timed(words: Any, phase: int, env_rank: int, env: Any, seed: int | None, /) -> Any: ...
def sum_episodes(
    reward: Any, done: Any, running: Any, records: Any, first_t: int, first_env_rank: int, discount: float, /
) -> int: ...
