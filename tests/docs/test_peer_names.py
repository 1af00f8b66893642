"""Every name of another library in the tables of docs/migration is in that library. `make peers-docs` installs each."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PAGES = Path(__file__).parent.parent.parent / "docs" / "migration"

#: Where a page's names are defined: packages, or folders in them.
PEERS = {
    "gymnasium": ("gymnasium",),
    "pufferlib": ("pufferlib",),
    "rllib": ("ray/rllib", "ray/tune"),
    "sample_factory": ("sample_factory",),
    "sb3": ("stable_baselines3",),
    "skrl": ("skrl", "gymnasium"),
    "supersuit": ("supersuit", "gymnasium"),
    "tianshou": ("tianshou",),
    "torchrl": ("torchrl", "tensordict"),
}
#: Nothing can be looked up: CleanRL and SRL are no libraries, and rlpyt does not install.
WITHOUT = {"cleanrl", "srl", "rlpyt"}
#: Keys that stand for any name, or that a library joins from two parts.
PLACEHOLDERS = {"NAME", "_name"}


@cache
def vocabulary(place: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a package or folder defines, and its strings that are identifiers. Imports nothing but parents."""
    package, _, folder = place.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {package}")
    names, strings = set[str](), set[str]()
    for path in (Path(spec.submodule_search_locations[0]) / folder).rglob("*.py"):
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.alias) and node.asname:
                names.add(node.asname)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.keyword):
                strings.add(node.arg or "")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.add(node.value.removeprefix("--"))  # an option of a command line
    return frozenset(names), frozenset(strings | names)


def snippets(page: str) -> Iterator[str]:
    """The code in the first cells of all tables, without their headers."""
    for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        for row in table.splitlines()[2:]:
            yield from re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[1])


def alone(node: ast.AST) -> list[ast.expr]:
    """What stands for itself in `node`: an expression, the target of an assignment, operands, keys."""
    match node:
        case ast.Expr(value=part) | ast.Subscript(value=ast.Name() as part, slice=ast.Name()):
            return [part]
        case ast.Assign(targets=parts) | ast.Subscript(slice=ast.Tuple(elts=parts)):
            return parts
        case ast.BinOp(left=left, right=right):
            return [left, right]
        case ast.Subscript(slice=part):
            return [part]
    return []


def names(snippet: str) -> Iterator[tuple[str, bool]]:
    """Names of the library in `snippet`, and whether each may be a key of its data, which strings define.

    Variables are left out: lower-case names before a dot or a key, and arguments.
    """
    for node in ast.walk(ast.parse(snippet.lstrip("."))):
        if isinstance(node, ast.Attribute):
            yield node.attr, False
        elif isinstance(node, ast.keyword):
            yield node.arg or "", False
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, False
        elif isinstance(node, ast.Name) and node.id[0].isupper():
            yield node.id, False
        for part in alone(node):
            if isinstance(part, ast.Name):
                yield part.id, True
            elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.value, True


def unknown(page: str, places: tuple[str, ...]) -> set[str]:
    """The names in the tables of `page` that none of the packages has."""
    found = [vocabulary(place) for place in places]
    wanted = {name for snippet in snippets(page) for name in names(snippet)}
    return {
        name
        for name, is_key in wanted
        if len(name) > 1 and name not in PLACEHOLDERS and not any(name in each[is_key] for each in found)
    }


def test_every_page_is_looked_up_or_says_why_not() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == PEERS.keys() | WITHOUT


@pytest.mark.parametrize("page", sorted(PEERS.keys() | WITHOUT))
def test_every_page_leads_to_evaluations(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert "penstock.evaluate" in text
    assert "start_evaluation" in text


@pytest.mark.parametrize("page", PEERS)
def test_the_names_on_a_page_are_in_its_library(page: str) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    assert re.search(r"`[\w-]+==\d[\d.]+`", text), "it says which version was looked at"
    assert unknown(text, PEERS[page]) == set()
