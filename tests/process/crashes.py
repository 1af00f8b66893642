"""The crash matrix: where a worker fails, how, and what the error says of both."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    at: int  #: the call that fails
    doing: str  #: what the error says that the worker was doing


# Batches of 8 steps, episodes of 5, no decorrelation: in the first batch, every episode ends at t=4 and no other.
PLACES = {
    "init": Place(1, r"building env_rank 3 \(start-up\)"),
    "first reset": Place(1, r"resetting env_rank 3 \(start-up\)"),
    "reset": Place(2, r"resetting env_rank 3, t=4 \(itr=0\)"),
    "step": Place(3, r"stepping env_rank 3, t=2 \(itr=0\)"),
    "agent": Place(7, r"acting, t=6 \(itr=0\)"),
    "collector": Place(2, r"\w[^()]* \(itr=1\)"),
    "parked": Place(2, r"waiting for the next command \(itr=[01]\)"),
    "evaluation": Place(4, r"stepping env_rank [01], t=3 \(evaluation, itr=1\)"),
    "sending": Place(3, r"sending results \(itr=1\)"),
}

HOWS = {
    "raise": r"raised (\w+\.)*InjectedFault",
    "unpicklable": r"raised (\w+\.)*UnpicklableFault",
    "system exit": r"raised SystemExit",
    "kill": r"was killed by SIGKILL \(out of memory\?\)",
    "segfault": r"was killed by SIGSEGV",
    "exit": r"exited with code 0",
}
