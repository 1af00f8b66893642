"""The suite that proves the failure table: its figures are printed when it ends."""

from __future__ import annotations

from typing import Any

import cloudpickle
import pytest

from . import support

# Workers cannot import what lies here: it travels by value, as a script's own classes do.
cloudpickle.register_pickle_by_value(support)


@pytest.fixture(scope="module", autouse=True)
def _starter(starter_if_slow: None) -> None:
    """Many slow tests run scripts."""


# Where several processes share the tests, each has figures, and only the one that began them can print.


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: Any = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["figures"] = dict(support.FIGURES), dict(support.LIMITS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    figures, limits = getattr(node, "workeroutput", {}).get("figures", ({}, {}))
    support.LIMITS.update(limits)
    for name, values in figures.items():
        support.FIGURES[name] += values


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if support.FIGURES:
        terminalreporter.section(f"figures ({'full' if support.FULL else 'quick'} scale)")
        for line in support.summary():
            terminalreporter.write_line(line)
