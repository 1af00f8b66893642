"""A child process that runs a few lines of code, with objects that are sent to it when it is started."""

from __future__ import annotations

import multiprocessing
from typing import Any

from penstock.workers.launch import Parcel

SECONDS = 60


def exit_code_of(start_method: str, code: str, **objects: Any) -> int | None:
    """Run `code` in a child process, with `objects` as its variables. Returns the exit code, None if it did not end."""
    sent = objects if start_method == "fork" else Parcel(objects)
    child = multiprocessing.get_context(start_method).Process(  # type: ignore[attr-defined]
        target=exec, args=(code, sent)
    )
    child.start()
    child.join(SECONDS)
    exit_code: int | None = child.exitcode
    child.kill()
    child.join()
    child.close()
    return exit_code
