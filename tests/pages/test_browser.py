"""The HTML report in a real browser: nothing is asked for or complained about, and it can be read on any screen.

`nox -s pages` runs this, with the browser that REFATTN_BROWSER names, or Playwright's own where it is empty; pictures
of what it saw go to the folder REFATTN_SHOTS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from html_pages import hostile_report
from refattn import cli
from refattn.conformance.reports.page import page_text
from refattn.testing import weights_svg

SCREENS: dict[str, dict[str, Any]] = {
    "wide": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True},
    "no scripts": {"viewport": {"width": 800, "height": 900}, "java_script_enabled": False},
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser."""
    with sync_playwright() as playwright:
        # A container's administrator has no sandbox; the pages are our own.
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        found = playwright.chromium.launch(executable_path=os.environ.get("REFATTN_BROWSER") or None, args=options)
        yield found
        found.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page about a wrong kernel, and one whose every text tries to break out."""
    folder = tmp_path_factory.mktemp("pages")
    wrong, hostile = folder / "wrong.html", folder / "hostile.html"
    fault = "planted_faults:causal_shows_the_next"
    assert cli.main(["check", fault, "--clauses", "M,P,A", "--dtype", "float32,bfloat16", "--html", str(wrong)]) == 1
    hostile.write_text(page_text(hostile_report()), encoding="utf-8")
    return {"wrong": wrong, "hostile": hostile}


@pytest.fixture(params=SCREENS)
def screen(request: pytest.FixtureRequest, browser: Any) -> Iterator[Any]:
    """A page of one screen that keeps what it asked for and complained about; named as its picture is."""
    context = browser.new_context(**SCREENS[request.param])
    page = context.new_page()
    page.asked, page.complaints, page.named = [], [], request.param
    page.on("request", lambda asked: page.asked.append(asked.url))
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("pageerror", lambda error: page.complaints.append(str(error)))
    page.on("dialog", lambda dialog: page.complaints.append(dialog.message))
    yield page
    context.close()


def shoot(page: Any, name: str) -> None:
    """A picture of what is on the screen, for people to look at."""
    if folder := os.environ.get("REFATTN_SHOTS"):
        page.screenshot(path=Path(folder) / f"{name}-{page.named.replace(' ', '-')}.png")


@pytest.mark.parametrize("name", ["wrong", "hostile"])
def test_pages_open_in_silence(name: str, reports: dict[str, Path], screen: Any) -> None:
    """The page is the only thing asked for, no script runs, and nothing lies beyond the right edge."""
    address = reports[name].as_uri()
    screen.goto(address)
    shoot(screen, name)
    assert [url for url in screen.asked if not url.startswith("data:")] == [address]
    assert screen.complaints == []
    assert screen.title().startswith("refattn check")
    if screen.named != "no scripts":
        wide = screen.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0


def test_pictures_can_be_seen(reports: dict[str, Path], screen: Any) -> None:
    """Each picture has an extent within the screen, a name for those who cannot see it, and letters of 9 px or more."""
    screen.goto(reports["wrong"].as_uri())
    pictures = screen.locator("svg[role=img]")
    assert pictures.count() > 8
    for index in range(8):
        picture = pictures.nth(index)
        picture.scroll_into_view_if_needed()
        box = picture.bounding_box()
        assert box["width"] > 60 and box["height"] > 60
        assert box["x"] >= 0 and box["x"] + box["width"] <= screen.viewport_size["width"]
        drawn = float(picture.get_attribute("width"))
        assert 11 * box["width"] / drawn >= 9
    assert screen.get_by_role("img", name="visibility: which query sees which key").count() > 1
    screen.locator("article").first.scroll_into_view_if_needed()
    shoot(screen, "case")


def test_clauses_are_a_click_away(reports: dict[str, Path], screen: Any) -> None:
    """A label in the table leads to the clause's sentence, and from there to the cases that fail it."""
    screen.goto(reports["wrong"].as_uri())
    screen.locator("table a", has_text="M4").first.click()
    sentence = screen.locator("#clause-M4")
    assert "a query sees the keys whose position is at most its own" in sentence.inner_text()
    screen.wait_for_timeout(100)
    assert 0 <= sentence.bounding_box()["y"] < screen.viewport_size["height"]
    shoot(screen, "clause")
    link = sentence.locator("a").first
    name = link.inner_text()
    link.click()
    screen.wait_for_timeout(100)
    assert 0 <= screen.get_by_role("heading", name=name, exact=True).bounding_box()["y"] < 200


def test_colours_follow_the_reader(browser: Any, reports: dict[str, Path]) -> None:
    """Text stands out from its ground by 4.5 to 1 or more, in light and in dark."""
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(reports["wrong"].as_uri())
        ground = luminance(page, "body", "backgroundColor")
        assert (ground > 0.5) == (scheme == "light")
        for selector in ("h1", "dt", "a", ".small", ".bad"):
            ink = luminance(page, selector, "color")
            assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, selector
        page.close()


def luminance(page: Any, selector: str, part: str) -> float:
    """The relative luminance of an element's colour, as the Web Content Accessibility Guidelines define it."""
    text = page.evaluate("([s, part]) => getComputedStyle(document.querySelector(s))[part]", [selector, part])
    levels = [int(level) / 255 for level in text[text.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in levels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_weights_are_a_picture_of_their_own(browser: Any, tmp_path: Path) -> None:
    """The SVG file opens alone, asks for nothing and complains of nothing."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 70, 8)) for _ in range(3))
    path = tmp_path / "weights.svg"
    path.write_text(weights_svg(q, k, v, head=1, causal=True), encoding="utf-8")
    page = browser.new_page()
    asked: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda one: asked.append(one.url))
    page.on("console", lambda message: complaints.append(message.text))
    page.goto(path.as_uri())
    page.named = "wide"
    shoot(page, "weights")
    assert asked == [path.as_uri()]
    assert complaints == []
    assert page.evaluate("document.querySelector('path').getBoundingClientRect().width") > 50
    page.close()
