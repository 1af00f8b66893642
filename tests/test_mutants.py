"""`make mutants`: a fault that a test notices dies, another one lives, and what stands in no line is refused."""

import re
import subprocess
from pathlib import Path

import pytest

from . import mutants

pytestmark = pytest.mark.slow

FILES = {
    "setup.py": """
from setuptools import Extension, setup
part = Extension("toy._part", ["src/toy/_part.c"], optional=True)
setup(name="toy", package_dir={"": "src"}, packages=["toy"], ext_modules=[part])
""",
    "src/toy/__init__.py": """
from toy._part import seven
def double(number):
    return 2 * number
""",
    "src/toy/_part.c": """
#include <Python.h>
static PyObject *seven(PyObject *module, PyObject *none) {
    return PyLong_FromLong(7);
}
static PyMethodDef functions[] = {{"seven", seven, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_part", NULL, -1, functions};
PyMODINIT_FUNC PyInit__part(void) { return PyModule_Create(&definition); }
""",
    "tests/test_toy.py": """
import toy
def test_double():
    assert toy.double(2) == 4
def test_seven():
    assert toy.seven() == 7
""",
}
ENTRY = "{}\nsrc/toy/{}\n- {}\n+ {}\ntests/test_toy.py{}\n\n"
DOUBLE = "return 2 * number"
SEVEN = "return PyLong_FromLong(7);"
FAULTS = {
    "a sum": (("__init__.py", DOUBLE, "return number + 2", "::test_double"), "LIVES"),
    "no end": (("__init__.py", DOUBLE, "import time; time.sleep(999)", "::test_double"), "died"),
    "C: eight": (("_part.c", SEVEN, "return PyLong_FromLong(8);", ""), "died"),
    "C: no C": (("_part.c", SEVEN, "return PyLong_FromLong(7;", ""), "REFUSED"),
    "a known one": (("__init__.py", DOUBLE, "return number + number", "\nsurvives: it is the same"), "lives"),
}


@pytest.fixture(autouse=True)
def _few_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the toy need pytest-xdist alone. To import the other plugins takes as much CPU time as pytest
    itself."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")


def try_all(folder: Path, faults: str, *arguments: str) -> int:
    for name, text in {**FILES, "tests/mutants.txt": f"# The faults.\n\n{faults}"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    return mutants.main(arguments, folder)


def test_faults_die_or_live(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = FILES["src/toy/__init__.py"]
    entries = "".join(ENTRY.format(what, *fault) for what, (fault, _) in FAULTS.items())
    assert try_all(tmp_path, entries, "--limit", "10") == 1
    printed = capsys.readouterr().out
    for what, (_, kind) in FAULTS.items():
        assert re.search(rf"^{kind} .*: {what}$", printed, re.MULTILINE), printed
    assert "2 of 5 faults live" in printed
    assert (tmp_path / "src/toy/__init__.py").read_text() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [".git", "setup.py", "src", "tests"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (ENTRY.format("a fault", "__init__.py", "return 3 * number", "return 4", ""), "stands 0 times in the file"),
        (ENTRY.format("a fault", "missing.py", "return 3 * number", "return 4", ""), "stands 0 times in the file"),
        (ENTRY.format("a fault", "_part.c", "#include <Python.h>", "", ""), "wrong form"),
        (ENTRY.format("a fault", "__init__.py", DOUBLE, "return (", ""), "was never closed"),
        (ENTRY.format("a fault", "__init__.py", DOUBLE, "return 4", "::test_missing"), "fails without a fault"),
    ],
)
def test_what_says_nothing_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], entry: str, message: str
) -> None:
    assert try_all(tmp_path, entry, "--jobs", "1") == 1
    printed = capsys.readouterr().out
    assert printed.startswith("REFUSED")
    assert message in printed
