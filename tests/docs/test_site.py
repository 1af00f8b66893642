"""The site is built without a warning, which includes its links, and the reference has every public name."""

import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

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


def test_files_outside_docs_are_pages(site: Path) -> None:
    page = (site / "benchmarks.html").read_text(encoding="utf-8")
    assert 'href="vector_env.html' in page, "a link between files of the repository is one between pages"
    assert 'href="examples/ppo.html"' in (site / "examples.html").read_text(encoding="utf-8")
    assert "def train" in re.sub("<[^>]*>", "", (site / "examples" / "ppo.html").read_text(encoding="utf-8"))
    assert not list(site.rglob("hooks.py"))
