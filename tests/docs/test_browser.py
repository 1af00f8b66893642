"""The built site in Chromium, opened as files: search, dark mode, the width of a phone. `make docs-test` runs these."""

import importlib.util
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PHONE, DESKTOP = {"width": 375, "height": 800}, {"width": 1400, "height": 900}

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="needs playwright, of the extra `dev`"),
    pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium"),
    pytest.mark.xdist_group("site"),  # it is built once
    pytest.mark.timeout(400),
    pytest.mark.slow,
    pytest.mark.site,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Visit:
    """A page of the site, and what went wrong on it."""

    def __init__(self, browser: Any, site: Path, viewport: dict[str, int], scheme: str = "light") -> None:
        self.site = site
        self.faults: list[str] = []
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("requestfailed", self._failed)
        self.page.on("request", lambda request: self._local(request.url))

    def _failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the next page was opened first
            self.faults.append(f"{request.failure}: {request.url}")

    def _local(self, url: str) -> None:
        if not url.startswith(("file:", "data:", "about:")):
            self.faults.append(f"another server: {url}")

    def open(self, name: str) -> Any:
        self.page.goto((self.site / name).as_uri(), wait_until="load")
        return self.page


@pytest.fixture
def visit(browser: Any, site: Path) -> Iterator[Any]:
    visits: list[Visit] = []

    def begin(*how: Any) -> Visit:
        visits.append(Visit(browser, site, *how))
        return visits[-1]

    yield begin
    for each in visits:
        each.context.close()
        assert each.faults == []


def names(site: Path) -> list[str]:
    """All pages. That for wrong addresses works on a web server only."""
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.name != "404.html")


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_search_finds_a_method_in_files(visit: Any, viewport: dict[str, int]) -> None:
    page = visit(viewport).open("index.html")
    if viewport is PHONE:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator(".md-search__input").click()
    page.keyboard.type("get_attr")
    found = page.locator(".md-search-result__item a").first
    found.wait_for()
    with page.expect_navigation():
        found.click()
    assert "get_attr" in page.content()


def test_the_header_has_logo_version_and_groups(visit: Any, site: Path) -> None:
    import penstock

    page = visit(DESKTOP).open("install.html")
    assert penstock.__version__ in page.locator(".md-header__topic").first.inner_text()
    assert page.locator(".md-header .md-logo img").evaluate("image => image.complete && image.naturalWidth > 0")
    groups = page.locator(".md-tabs__item")
    assert groups.count() >= 6
    assert page.locator(".md-tabs__item--active").inner_text().strip() == "First steps"


def brightness(visit: Any, name: str, scheme: str, toggle: bool) -> list[tuple[str, float]]:
    """The share of pixels of each picture of the page that are as bright or dark as the page's opposite."""
    from PIL import Image

    page = visit(DESKTOP, "light" if toggle else scheme).open(name)
    if toggle:
        page.locator("form[data-md-component=palette] label:visible").click()
        page.locator("body[data-md-color-scheme=slate]").wait_for()
    found = []
    for picture in page.locator(".md-content img").all():
        picture.scroll_into_view_if_needed()
        grey = Image.open(io.BytesIO(picture.screenshot())).convert("L")
        counts = grey.histogram()
        background = sum(counts[:70]) if scheme == "dark" else sum(counts[200:])
        found.append((picture.get_attribute("src"), background / sum(counts)))
    return found


def with_pictures(site: Path) -> list[str]:
    return [name for name in names(site) if 'img alt="' in (site / name).read_text(encoding="utf-8")]


@pytest.mark.parametrize(("scheme", "toggle"), [("light", False), ("dark", False), ("dark", True)])
def test_pictures_follow_the_scheme(visit: Any, site: Path, scheme: str, toggle: bool) -> None:
    pages = with_pictures(site)
    assert len(pages) >= 6
    for name in pages:
        for picture, background in brightness(visit, name, scheme, toggle):
            assert background > 0.2, f"{name}: {picture} has {background:.0%} of the page's background"


def test_no_page_scrolls_sideways_on_a_phone(visit: Any, site: Path) -> None:
    phone = visit(PHONE)
    wide = {name: phone.open(name).evaluate("document.documentElement.scrollWidth") for name in names(site)}
    assert {name: width for name, width in wide.items() if width > PHONE["width"]} == {}
