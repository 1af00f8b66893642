"""The built site, once for all tests of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environ.pop("COVERAGE_PROCESS_CONFIG", None)  # it runs no line of penstock, and would take minutes
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder
