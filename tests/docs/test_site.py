"""The site is built without a warning, which includes its links, and the reference has every public name."""

import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import penstock

ROOT = Path(__file__).parent.parent.parent
PACKAGES = [*(module.name for module in pkgutil.iter_modules(penstock.__path__) if module.ispkg), "errors"]
PAGES = {"buffers": "samples"}  # of the reference, where page and package have different names

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
        reason="needs the extra `docs`",
    ),
    pytest.mark.xdist_group("site"),  # it is built once
    pytest.mark.timeout(400),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    environ.pop("COVERAGE_PROCESS_CONFIG", None)  # it runs no line of penstock, and would take minutes
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(site: Path, package: str) -> None:
    page = (site / "reference" / f"{PAGES.get(package, package)}.html").read_text(encoding="utf-8")
    ids = set(re.findall(rf'id="penstock\.{package}\.(\w+)"', page))
    assert ids >= set(importlib.import_module(f"penstock.{package}").__all__)


def test_the_reference_has_every_documented_method(site: Path) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (site / "reference").glob("*.html")]
    ids = {tuple(found.split(".")[-2:]) for page in pages for found in re.findall(r'id="penstock\.([\w.]+)"', page)}
    missing = []
    for package in PACKAGES:
        module = importlib.import_module(f"penstock.{package}")
        for name in module.__all__:
            try:
                cls = getattr(module, name)
            except ImportError:  # of an extra that is not installed
                continue
            missing += [f"{package}.{name}.{method}" for method in documented(cls) if not is_shown(cls, method, ids)]
    assert not missing


def documented(cls: Any) -> list[str]:
    """The public methods and properties of a class that this package documents, inherited ones too."""
    found = []
    for owner in inspect.getmro(cls) if inspect.isclass(cls) else ():
        if owner.__module__.startswith("penstock."):
            own = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
            is_method = (property, classmethod, staticmethod, FunctionType)
            found += [name for name, value in own.items() if isinstance(value, is_method) and value.__doc__]
    return found


def is_shown(cls: type, method: str, ids: set[tuple[str, ...]]) -> bool:
    return any((owner.__name__, method) in ids for owner in cls.__mro__)


def test_search_needs_no_web_server(site: Path) -> None:
    assert (site / "search" / "search_index.js").exists(), "the index as a script, which a page may load from a file"


def test_files_outside_docs_are_pages(site: Path) -> None:
    page = (site / "benchmarks.html").read_text(encoding="utf-8")
    assert 'href="vector_env.html' in page, "a link between files of the repository is one between pages"
    assert 'href="examples/ppo.html"' in (site / "examples.html").read_text(encoding="utf-8")
    assert "def train" in re.sub("<[^>]*>", "", (site / "examples" / "ppo.html").read_text(encoding="utf-8"))
    assert not list(site.rglob("hooks.py"))
