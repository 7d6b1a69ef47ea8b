"""The built book in a real browser, from a server on this machine: it fits the screen, and the search finds.

`nox -s docs` builds it and names the folder in REFATTN_BOOK; REFATTN_BROWSER names the browser, or is empty for
Playwright's own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright, which drives a browser, is not installed")

CHAPTERS = sorted(path.stem for path in (Path(__file__).parents[2] / "docs" / "spec").glob("*.md"))
PAGES = [*(f"spec/{name}" for name in CHAPTERS), "index", "guide/attention", "guide/exercises", "guide/questions"]
WIDTHS = {"wide": 1280, "phone": 390}

# Per kind, what a reader would miss: formulas and pictures without extent.
UNSEEN = """() => {
  document.querySelectorAll('details').forEach(one => one.open = true);
  const extent = one => one.getBoundingClientRect();
  const formulas = [...document.querySelectorAll('.katex-html')];
  const pictures = [...document.querySelectorAll('main img, article img')].filter(one => one.offsetParent);
  return {
    formulas: formulas.length,
    flat: formulas.filter(one => extent(one).width < 2 || extent(one).height < 2).map(one => one.textContent),
    fonts: !formulas.length || [...document.fonts].some(f => /KaTeX/.test(f.family) && f.status === 'loaded'),
    empty: pictures.filter(one => !one.naturalWidth || extent(one).width < 60).map(one => one.src),
  };
}"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and keeps no log; a browser asks for an icon that no page names."""

    def do_GET(self) -> None:
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the book is served."""
    folder = os.environ.get("REFATTN_BOOK")
    if not folder or "REFATTN_BROWSER" not in os.environ:
        pytest.skip("REFATTN_BOOK names no built book, or REFATTN_BROWSER no browser to open it in")
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Any]:
    """A headless browser."""
    with playwright.sync_playwright() as started:
        # A container's administrator has no sandbox; the pages are our own.
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        found = started.chromium.launch(executable_path=os.environ["REFATTN_BROWSER"] or None, args=options)
        yield found
        found.close()


@pytest.fixture(scope="module", params=WIDTHS)
def screen(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    """A page as wide as a screen that keeps what it asked others for, what failed, and what it complained about."""
    page = browser.new_page(viewport={"width": WIDTHS[request.param], "height": 900})
    page.named, page.faults = request.param, []
    page.on("request", lambda one: page.faults.extend([one.url] * (not one.url.startswith((address, "data:")))))
    page.on("response", lambda one: page.faults.extend([f"{one.status} {one.url}"] * (one.status >= 400)))
    page.on("console", lambda one: page.faults.extend([one.text] * (one.type in ("error", "warning"))))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    yield page
    page.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_can_be_read(name: str, screen: Any, address: str) -> None:
    """It asks nobody else and complains of nothing, does not scroll sideways, and shows formulas and pictures."""
    screen.faults.clear()
    screen.goto(f"{address}/{name}.html")
    screen.evaluate("document.fonts.ready")
    if folder := os.environ.get("REFATTN_SHOTS"):
        path = Path(folder) / f"book-{name.replace('/', '-')}-{screen.named}.png"
        screen.screenshot(path=path, full_page=True)
    unseen = screen.evaluate(UNSEEN)
    assert screen.faults == []
    assert unseen["flat"] == [] and unseen["empty"] == []
    assert unseen["fonts"]
    assert screen.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0


def test_there_are_formulas_to_see(screen: Any, address: str) -> None:
    """The pages on attention and on scores have formulas, so that the test above is about something."""
    for name in ("guide/attention", "spec/scores"):
        screen.goto(f"{address}/{name}.html")
        assert screen.evaluate(UNSEEN)["formulas"] > 3, name


@pytest.mark.parametrize(("words", "page"), [("empty row", "spec/softmax.html"), ("M4", "spec/visibility.html")])
def test_the_search_finds(words: str, page: str, screen: Any, address: str) -> None:
    """The search page lists the chapter that answers, and the link leads there."""
    screen.faults.clear()
    screen.goto(f"{address}/search.html?q={words.replace(' ', '+')}")
    link = screen.locator(f"#search-results a[href*='{page}']").first
    link.wait_for(timeout=20_000)
    assert screen.faults == []
    link.click()
    screen.wait_for_url(f"**/{page}*")
    assert words.split()[0].lower() in screen.locator("article").inner_text().lower()
