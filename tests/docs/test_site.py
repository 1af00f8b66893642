"""The site is built without a warning, which includes its links, and the reference has every public name. `make
docs-test` runs these."""

import contextlib
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent.parent
PACKAGES = [*(module.name for module in pkgutil.iter_modules(penstock.__path__) if module.ispkg), "errors"]

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")),
        reason="needs the extra `docs`",
    ),
    pytest.mark.xdist_group("site"),  # it is built once
    pytest.mark.timeout(400),
    pytest.mark.slow,
    pytest.mark.site,
]


@pytest.fixture(scope="module")
def ids(site: Path) -> set[str]:
    """What the reference describes, such as `penstock.samplers.Sampler.call`."""
    pages = (page.read_text(encoding="utf-8") for page in (site / "reference").glob("*.html"))
    return {name for page in pages for name in re.findall(r'id="(penstock\.[\w.]+)"', page)}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(ids: set[str], package: str) -> None:
    assert ids >= {f"penstock.{package}.{name}" for name in importlib.import_module(f"penstock.{package}").__all__}


def public_classes() -> dict[type, str]:
    """With their names in the reference. Without those that need an extra that is not installed."""
    found = {}
    for package in PACKAGES:
        module = importlib.import_module(f"penstock.{package}")
        for name in module.__all__:
            with contextlib.suppress(ImportError):
                if inspect.isclass(cls := getattr(module, name)):
                    found.setdefault(cls, f"penstock.{package}.{name}")  # the second name of a class is an alias
    return found


def is_ours(cls: type) -> bool:
    return cls.__module__.startswith("penstock")


def own_methods(cls: type) -> Iterator[str]:
    """Methods and properties of `cls` and its bases. Gymnasium and torch describe those that override theirs."""
    for name in dir(cls):
        owner = next((base for base in cls.__mro__ if name in vars(base)), object)
        if name.startswith("_") or not is_ours(owner):
            continue
        is_method = callable(getattr(cls, name)) or isinstance(vars(owner)[name], (property, cached_property))
        if is_method and not any(hasattr(base, name) for base in cls.__mro__ if not is_ours(base)):
            yield name


def test_the_reference_has_every_public_method_and_no_internal_one(ids: set[str]) -> None:
    classes = public_classes()
    internal = {"runtime", "runtime_cls"}  # the samplers' side of an agent
    missing = [
        f"{names}.{method}"
        for cls, names in classes.items()
        for method in own_methods(cls)
        if method not in internal and not any(f"{classes.get(base)}.{method}" in ids for base in cls.__mro__)
    ]
    assert missing == []
    for inherited in ("vector.ShmVectorEnv.broadcast", "agents.ObservationNorm.merge", "samplers.Sampler.call"):
        assert f"penstock.{inherited}" in ids
    last_parts = {name.rpartition(".")[2] for name in ids}
    assert not last_parts & (internal | {"AgentRuntime", "reset_listed"})


def test_samplers_stand_in_the_order_of_use(site: Path) -> None:
    page = (site / "reference/samplers.html").read_text(encoding="utf-8")
    order = ["", "Serial", "Parallel", "Alternating", "Gpu", "Async", "Ray"]
    assert re.findall(r'<h2 id="penstock\.\w+\.(\w*)Sampler"', page) == order


def test_what_users_call_comes_first(site: Path) -> None:
    page = (site / "reference/samplers.html").read_text(encoding="utf-8")
    found = list(dict.fromkeys(re.findall(r'id="penstock\.samplers\.Sampler\.(\w+)"', page)))
    assert found[:4] == ["initialize", "obtain_samples", "start_samples", "wait_samples"]
    public = {name for name in vars(penstock.Sampler) if not name.startswith("_")}
    assert set(found) == public | {"seed", "generation"}


def test_parameters_are_lists(site: Path) -> None:
    """A table leaves the screen of a phone."""
    for page in (site / "reference").glob("*.html"):
        assert "<table" not in page.read_text(encoding="utf-8"), page.name


def test_a_class_begins_with_its_sentence(site: Path) -> None:
    page = (site / "reference/samplers.html").read_text(encoding="utf-8")
    one = page.partition('id="penstock.samplers.Sampler"')[2].partition("</h2>")[2]
    assert one.index("Samples batches") < one.index("doc-signature") < one.index("environment id of either")
    assert "<p>Args:</p>" not in page, "parameters are not shown as text"


def test_search_finds_words_in_brackets(site: Path) -> None:
    config = json.loads((site / "search/search_index.json").read_text(encoding="utf-8"))["config"]
    assert "offline" in re.split(config["separator"], "you learn from a fixed data set (offline)")


def test_files_outside_docs_are_pages(site: Path) -> None:
    page = (site / "benchmarks.html").read_text(encoding="utf-8")
    assert 'href="vector_env.html' in page, "a link between files of the repository is one between pages"
    assert 'href="examples/ppo.html"' in (site / "examples.html").read_text(encoding="utf-8")
    assert "def train" in re.sub("<[^>]*>", "", (site / "examples" / "ppo.html").read_text(encoding="utf-8"))
    assert not list(site.rglob("hooks.py"))
