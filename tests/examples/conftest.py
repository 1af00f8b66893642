"""Examples run in forks of a process that has imported torch."""

import pytest


@pytest.fixture(autouse=True)
def _starter(starter: None) -> None:
    """Most tests run an example."""
