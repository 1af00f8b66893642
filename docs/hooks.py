"""For MkDocs: pages from files outside docs/, links that lead to these files, and the arguments of samplers."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
    **{
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in sorted((ROOT / "examples").glob("*.py"))
    },
}
SOURCES = {page: source for source, page in PAGES.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file."""
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            content = f"# {source}\n\n```python\n{content}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def of_the_site(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, match[1]))
        target = PAGES.get(file, file.removeprefix("docs/"))
        if not (
            file in PAGES or (here in SOURCES and file.startswith("docs/"))
        ):
            return match[
                0
            ]  # a link to another site, or between two pages of docs/
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[2]})"

    return re.sub(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)", of_the_site, markdown)


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


class Reference(griffe.Extension):
    """The arguments of `Sampler` with types and defaults, `#:` comments, and no docstrings of packages."""

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if (
            attr.docstring
            or not attr.lineno
            or not isinstance(attr.filepath, Path)
        ):
            return
        lines, found = _lines(attr.filepath), []
        for line in reversed(lines[: attr.lineno - 1]):
            if not line.lstrip().startswith("#: "):
                break
            found.insert(0, line.lstrip()[3:])
        found += filter(
            None,
            [lines[(attr.endlineno or attr.lineno) - 1].partition("#: ")[2]],
        )
        if found:
            attr.docstring = griffe.Docstring(" ".join(found), parent=attr)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        arguments = pkg["samplers.sampler.Sampler.__init__"].parameters
        del arguments["options"]  # **options: Unpack[SamplerOptions]
        for field in pkg["samplers.config.SamplerConfig"].attributes.values():
            if field.name in pkg["samplers.config.SamplerOptions"].attributes:
                kind = griffe.ParameterKind.keyword_only
                arguments.add(
                    griffe.Parameter(
                        field.name,
                        annotation=field.annotation,
                        kind=kind,
                        default=field.value,
                    )
                )
        for package in pkg.modules.values():
            package.docstring = None  # it is for readers of the code
