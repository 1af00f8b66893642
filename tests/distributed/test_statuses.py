"""The statuses of a worker: which command is allowed when."""

from __future__ import annotations

import contextlib

import pytest

from penstock import RequestError
from penstock.distributed.statuses import FINAL, StatusMachine

#: Each status, and the commands that lead to it.
PATHS = {
    "": [],
    "READY": ["configure"],
    "RUNNING": ["configure", "start"],
    "PAUSED": ["configure", "start", "pause"],
    "COMPLETED": ["configure", "exit"],
    "INTERRUPTED": ["interrupt"],
    "ERROR": ["configure", "start", "fail"],
}
ALLOWED = {
    ("configure", ""): "READY",
    ("start", "READY"): "RUNNING",
    ("start", "PAUSED"): "RUNNING",
    ("pause", "RUNNING"): "PAUSED",
    **{("exit", status): "COMPLETED" for status in ("", "READY", "RUNNING", "PAUSED")},
    **{("interrupt", status): "INTERRUPTED" for status in ("", "READY", "RUNNING", "PAUSED")},
    **{("fail", status): "ERROR" for status in PATHS},
}


def give(machine: StatusMachine, command: str) -> None:
    if command == "fail":
        machine.fail()
    elif command == "configure":
        machine.check_configure()
        machine.is_configured = True
    else:
        assert machine.apply(command) == ("PAUSING" if command == "pause" else machine.status.value)


@pytest.mark.parametrize("status", PATHS)
@pytest.mark.parametrize("command", ["configure", "start", "pause", "exit", "interrupt", "fail"])
def test_a_command_changes_the_status_or_is_refused_in_one_line(command: str, status: str) -> None:
    machine = StatusMachine()
    for earlier in PATHS[status]:
        give(machine, earlier)
    after = ALLOWED.get((command, status))
    refused = (
        contextlib.nullcontext() if after else pytest.raises(RequestError, match=rf"\A{command}: the worker is .*\Z")
    )
    with refused:
        give(machine, command)
    assert machine.status.value == (after or status or "READY")
    assert (machine.status in FINAL) == (machine.status.value in ("COMPLETED", "INTERRUPTED", "ERROR"))
