"""The site's sources: the width of code, pictures, tables. These tests need no build of the site."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs").rglob("*.svg"))
WIDTH = 80  # what a laptop shows beside the two columns of links


# Each test has a loop: a test for each page takes more time.


def test_no_line_of_python_is_cut() -> None:
    for page in PAGES:
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert [line for block in blocks for line in block.splitlines() if len(line) > WIDTH] == [], page


def test_no_page_draws_with_characters() -> None:
    """Such a drawing is cut on a phone. docs/pictures has SVG files."""
    drawn = re.compile(r"\+--|--+>|[│─┌└]|_{5}")
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            assert not drawn.search(block), f"{page.name}: {block}"


def test_every_table_has_a_header() -> None:
    for page in (*PAGES, *ROOT.glob("*.md"), ROOT / "benchmarks/README.md"):
        assert not re.findall(r"^\|[ |]*\|\n\| ---", page.read_text(encoding="utf-8"), re.MULTILINE), page


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_has_no_white_box_and_is_narrow(picture: Path) -> None:
    """Pictures follow the dark mode, or have a grey that can be read in both modes. Text is not small on a phone."""
    text = picture.read_text(encoding="utf-8")
    root = ET.fromstring(text)
    width = float(root.attrib["viewBox"].split()[2])
    if picture.name != "logo.svg":
        assert "prefers-color-scheme: dark" in text or "fill: #808080" in text
        sizes = [float(size) for size in re.findall(r"font-size[=:] ?\"?([\d.]+)", text)]
        assert min(sizes) * 343 / width >= 9.5, "pixels on a phone, whose page is 343 pixels wide"
        for shape in root.iter():
            colour = shape.get("fill", "") + shape.get("style", "")
            if not shape.tag.endswith("text"):
                assert not re.search(r"(^|fill: )(#fff(fff)?|white)\b", colour), ET.tostring(shape)


@pytest.mark.parametrize("name", ["peers", "peers_short"])
def test_no_line_of_text_lies_on_another(name: str) -> None:
    """Titles and names of bars stand at the left edge, one below the other: each needs its size."""
    text = (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8")
    lines = re.findall(r'font-size: ([\d.]+)px.*?(?:x="|translate\()([\d.]+)(?:" y="| )([\d.]+)', text)
    baselines = sorted((float(y), float(size)) for size, x, y in lines if float(x) < 4)
    assert len(baselines) > 5
    for (above, _), (below, size) in pairwise(baselines):
        assert below - above >= size, f"a line at {below} begins above the end of that at {above}"


def test_the_figures_of_peers_are_the_same_everywhere() -> None:
    """In both pictures, in README.md and in benchmarks/README.md."""
    readme, benchmarks = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "benchmarks/README.md"))
    tables = benchmarks.partition("## Peers")[2].partition("Larger networks")[0]
    rates = re.findall(r"^\| [^|]+ \| ([\d,]+) \(", tables, re.MULTILINE)
    shown = {
        name: re.findall(r">([\d,]+)</text>", (ROOT / f"docs/{name}.svg").read_text(encoding="utf-8"))
        for name in ("peers", "peers_short")
    }
    assert len(rates) > 60
    assert sorted(shown["peers"]) == sorted(rates)
    assert set(shown["peers_short"]) <= set(rates)
    quoted = re.findall(r"^\|[^|]+\| \**([\d,]{4,})\** \|", readme, re.MULTILINE)
    assert len(quoted) == 9
    assert set(quoted) <= set(rates)
    (training,) = re.findall(r"training\n? +of CartPole is ([\d.]+) times as fast as with CleanRL's loop", readme)
    (measured,) = re.findall(r"^\| `ParallelSampler` \| 5.6 \| 6.2 \| ([\d.]+) \(", benchmarks, re.MULTILINE)
    assert training == f"{float(measured):.1f}"


def test_pages_have_the_words_for_which_readers_search() -> None:
    """In the search a heading counts the most: "hang" leads to an answer, and not to the reasons of the protocol."""
    for word, page in (("jupyter", "recipes.md"), ("huggingface", "recipes/datasets.md"), ("hangs", "faq.md")):
        assert re.search(rf"\b{word}\b", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.IGNORECASE), word
    for page in (ROOT / "docs").rglob("*.md"):
        headings = re.findall(r"^#+ .*\bhang.*", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert page.name == "faq.md" or not headings, page


def test_the_page_of_benchmarks_names_the_version() -> None:
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    assert f"**State.** Version {penstock.__version__}." in text
