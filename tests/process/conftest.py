"""The suite that proves the failure table: its figures are printed when it ends."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from . import support

# Workers cannot import what lies here: it travels by value, as a script's own classes do.
cloudpickle.register_pickle_by_value(support)


@pytest.fixture(autouse=True)
def _starter(starter: None) -> None:
    """Many tests run scripts."""


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files of the test's programs. Its path is short enough for a socket, as `tmp_path` may
    not be."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


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
