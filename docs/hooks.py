"""For MkDocs: pages from files outside docs/, links to these, the version, and
what the reference needs: arguments of samplers, inherited methods."""

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


def on_config(config: Any) -> Any:
    """Show the version in the header."""
    version = re.search(
        r"version=\"(.+?)\"", (ROOT / "setup.py").read_text(encoding="utf-8")
    )
    config.site_name = f"penstock {version[1]}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file."""
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        if source.endswith(".py"):
            wide = "---\nhide: [toc]\n---\n\n"
            content = f"{wide}# {source}\n\n```python\n{content}```\n"
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages.

    Comments are for readers of the file, so they are left out.
    """
    markdown = re.sub(r"<!--.*?-->\n*", "", markdown)
    here = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(here, f"docs/{here}"))

    def of_the_site(match: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join(folder, match[1]))
        target = PAGES.get(file, file.removeprefix("docs/"))
        if not (
            file in PAGES or (here in SOURCES and file.startswith("docs/"))
        ):
            # It leads to another site, or from one page of docs/ to another.
            return match[0]
        link = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"]({link}{match[2]})"

    return re.sub(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)", of_the_site, markdown)


SIGNATURE = r'<div class="[^"]*doc-signature.*?</code></pre></div>'
BASES = r'(?:\s*<p class="doc doc-class-bases">.*?</p>)?'
SENTENCE = r"\s*<p>.*?</p>"
CLASS = re.compile(
    rf'(doc-class-name">.*?</h2>\s*)({SIGNATURE})'
    rf'(\s*<div class="doc doc-contents[^"]*">{BASES}{SENTENCE})',
    re.DOTALL,
)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """A class begins with its sentence: its signature may have 40 lines."""
    if page.file.src_uri.startswith("reference/"):
        html = CLASS.sub(r"\1\3\2", html)
    return html


@cache
def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


class Reference(griffe.Extension):
    """Documents what griffe does not see by itself.

    The arguments of `Sampler` with types and defaults, `#:` comments, and what
    a public class inherits from a private one. Packages get no docstring.
    """

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
        last = lines[(attr.endlineno or attr.lineno) - 1]
        found += filter(None, [last.partition("#: ")[2]])
        if found:
            attr.docstring = griffe.Docstring(" ".join(found), parent=attr)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        arguments = pkg["samplers.sampler.Sampler.__init__"].parameters
        del arguments["options"]  # **options: Unpack[SamplerOptions]
        config = pkg["samplers.config.SamplerConfig"]
        own, table = (
            pkg["samplers.sampler.Sampler"].docstring,
            config.docstring.value,
        )
        first, raises = own.value.split("\n\n", 1)
        listed = table.partition("Args:\n")[2]
        own.value = f"{first}\n\nArgs:\n{listed}\n\n{raises}"
        options = pkg["samplers.config.SamplerOptions"].attributes
        for field in config.attributes.values():
            if field.name in options:
                annotation = options[field.name].annotation
                if str(annotation).startswith("Required["):
                    annotation = annotation.slice
                parameter = griffe.Parameter(
                    field.name,
                    annotation=annotation,
                    kind=griffe.ParameterKind.keyword_only,
                    default=field.value,
                )
                arguments.add(parameter)
        public = {}
        for module in pkg.modules.values():
            for name in map(str, module.exports or ()):
                if name in module.members and module[name].is_class:
                    cls = module[name]
                    cls = cls.final_target if cls.is_alias else cls
                    public[cls.path] = cls
        for cls in public.values():
            inherit(cls, public)
        for package in pkg.modules.values():
            package.docstring = None  # it is for readers of the code


def inherit(cls: griffe.Class, public: dict[str, griffe.Class]) -> None:
    """Add the members that `cls` has from private bases, in their order.

    A method that overrides a documented one has its docstring.
    """
    for base in cls.mro():
        for name, member in base.members.items():
            if name.startswith("_"):
                continue
            if name in cls.members:
                own = cls.members[name]
                if not own.is_alias and not own.docstring:
                    own.docstring = member.docstring
            elif base.path not in public:
                # After the members of `cls`, which are sorted by their lines.
                line = 100_000 + (member.lineno or 0)
                cls.members[name] = griffe.Alias(
                    name, member, lineno=line, parent=cls, inherited=True
                )
