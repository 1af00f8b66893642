"""The statuses of a worker: which command is allowed when, against a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock import RequestError
from penstock.distributed.statuses import FINAL, StatusMachine

from ..scale import scaled

pytestmark = pytest.mark.timeout(scaled(1800, 120))

ALLOWED = {
    ("start", "READY"): "RUNNING",
    ("start", "PAUSED"): "RUNNING",
    ("pause", "RUNNING"): "PAUSED",
    **{("exit", status): "COMPLETED" for status in ("READY", "RUNNING", "PAUSED")},
    **{("interrupt", status): "INTERRUPTED" for status in ("READY", "RUNNING", "PAUSED")},
}


class StatusModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = StatusMachine()
        self.status, self.configured = "READY", False

    @rule()
    def configure(self) -> None:
        if self.status == "READY" and not self.configured:
            self.machine.check_configure()
            self.machine.is_configured = self.configured = True
        else:
            with pytest.raises(RequestError) as error:
                self.machine.check_configure()
            assert "\n" not in str(error.value)

    @rule(command=st.sampled_from(("start", "pause", "exit", "interrupt")))
    def command(self, command: str) -> None:
        target = ALLOWED.get((command, self.status))
        if target is None or (command == "start" and not self.configured):
            with pytest.raises(RequestError, match=f"^{command}: the worker is ") as error:
                self.machine.apply(command)
            assert "\n" not in str(error.value)
        else:
            assert self.machine.apply(command) == ("PAUSING" if command == "pause" else target)
            self.status = target

    @rule()
    def fail(self) -> None:
        self.machine.fail()
        self.status = "ERROR"

    @invariant()
    def the_status_is_the_models(self) -> None:
        assert self.machine.status.value == self.status
        assert (self.machine.status in FINAL) == (self.status in ("COMPLETED", "INTERRUPTED", "ERROR"))


# 100,000 operations, or 600. Some examples have fewer steps than 20.
StatusModel.TestCase.settings = settings(max_examples=scaled(5500, 30), stateful_step_count=20, deadline=None)
TestStatuses = StatusModel.TestCase
