"""Examples run in forks of a process that has imported torch."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _starter(starter_if_slow: None) -> None:
    """Most slow tests run an example."""
