from typing import Any

LAYOUT: str

def spin_for_word(word: Any, value: int, stop: Any, seconds: float, yields: bool, /) -> bool: ...
def spin_for_arrivals(
    rows: Any, opened: Any, replied: Any, n_workers: int, seconds: float, yields: bool, /
) -> bool: ...
def spin_for_requests(
    rows: Any,
    opened: Any,
    replied: Any,
    n_workers: int,
    fingerprint: int,
    wants_all: bool,
    stop: Any,
    seconds: float,
    yields: bool,
    /,
) -> bool: ...
def must_wake(rows: Any, opened: Any, replied: Any, sleeper: Any, /) -> bool: ...
def look(
    rows: Any, opened: Any, replied: Any, n_workers: int, /
) -> tuple[list[int], list[int], list[int], list[int], int]: ...
