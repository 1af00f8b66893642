"""Tries an installed penstock in an emulator, without torch and without other programs: the compiled parts are in use,
and their tests pass."""

import platform
import sys

import pytest

import penstock
from penstock.buffers.ordering import HAS_FULL_FENCE, IS_ORDERED
from penstock.tools import doctor

assert platform.machine() == "aarch64"
assert doctor.describe_machine()["compiled parts"] == "in use", "the wheel lacks compiled code"
assert HAS_FULL_FENCE
assert not IS_ORDERED
print(f"penstock {penstock.__version__}, Python {platform.python_version()} for {platform.machine()}", flush=True)
files = ["tests/buffers/test_native.py", "tests/workers/test_native.py"]
sys.exit(pytest.main(["-q", "--noconftest", "-o", "addopts=--import-mode=importlib", "-p", "no:xdist", *files]))
