"""The face: what `import penstock` offers, and what it costs."""

import subprocess
import sys

import pytest

import penstock
from penstock import errors


def test_all_names_exist_and_are_sorted() -> None:
    assert list(penstock.__all__) == sorted(penstock.__all__)
    for name in penstock.__all__:
        assert getattr(penstock, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        _ = penstock.NoSuchName


def test_every_error_is_one_of_the_tree() -> None:
    tree = {name: getattr(errors, name) for name in errors.__all__}
    assert all(issubclass(cls, errors.PenstockError) for cls in tree.values())
    assert all(name in penstock.__all__ for name in tree)
    for name in ("WorkerError", "WorkerDiedError", "WorkerTimeoutError"):
        assert issubclass(tree[name], errors.SamplerBrokenError)


def test_importing_penstock_does_not_import_torch() -> None:
    code = "import sys, penstock, penstock.workers.process; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_the_command_line_describes_the_machine() -> None:
    done = subprocess.run([sys.executable, "-m", "penstock"], capture_output=True, text=True, timeout=60)
    assert f"penstock {penstock.__version__}" in done.stdout
    for fact in ("usable CPUs", "shared memory", "wake-ups"):
        assert fact in done.stdout
    assert done.stderr == ""
