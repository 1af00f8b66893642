"""The suite that proves the failure table: its figures are printed when it ends."""

from __future__ import annotations

import cloudpickle
import pytest

from . import support

# Workers cannot import what lies here: it travels by value, as a script's own classes do.
cloudpickle.register_pickle_by_value(support)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if support.FIGURES:
        terminalreporter.section(f"figures ({'full' if support.FULL else 'quick'} scale)")
        for line in support.summary():
            terminalreporter.write_line(line)
