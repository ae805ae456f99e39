"""A real headless Chromium for the tests of pages: Debian's package, driven by playwright.

`browser_page()` gives a page that fails the test on any console error, uncaught exception or request to the outside.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
)  # fmt: skip
INSTALL = "type `make browser` (it needs root and apt), or name a Chromium with CHROMIUM=/path/to/chromium"


def chromium_path() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="package")
def chromium() -> Iterator[Any]:
    """The browser, for the tests of one folder: its driver keeps an event loop running, and others need their own."""
    path = chromium_path()
    if path is None:
        warnings.warn(f"NO CHROMIUM, so no page is tested: {INSTALL}", stacklevel=1)
        pytest.skip(f"no Chromium on this machine; {INSTALL}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page with all that went wrong on it."""

    page: Any
    trouble: list[str] = field(default_factory=list)

    def drawn(self) -> Any:
        """Waits until the plots are there."""
        self.page.wait_for_selector("body[data-drawn=yes]", timeout=60_000)
        return self.page


@contextlib.contextmanager
def watched_page(browser: Any, own_server: str = "", **options: Any) -> Iterator[Watched]:
    """A fresh page; at the end nothing may have gone wrong on it, and nothing may have been asked of any other server."""
    options = {"viewport": {"width": 1440, "height": 1000}, "locale": "en-US", **options}
    context = browser.new_context(**options)
    page = context.new_page()
    watched = Watched(page)
    page.set_default_timeout(60_000)
    page.on("console", lambda message: message.type in ("error", "warning") and watched.trouble.append(message.text))
    page.on("pageerror", lambda error: watched.trouble.append(str(error)))
    page.on("dialog", lambda dialog: (watched.trouble.append(f"dialog: {dialog.message}"), dialog.dismiss()))

    def look(request: Any) -> None:
        parts = urlsplit(request.url)
        inside = parts.scheme in ("file", "data", "blob") or (own_server and request.url.startswith(own_server))
        if not inside:
            watched.trouble.append(f"request to {request.url[:200]}")

    page.on("request", look)
    try:
        yield watched
        assert watched.trouble == []
    finally:
        context.close()


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What axe-core finds wrong for who does not see or has no mouse: its rule, and the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in found]


def cut_texts(page: Any) -> list[str]:
    """Words and numbers of the plots that do not lie wholly inside of theirs, or of what clips them."""
    return list(
        page.evaluate(
            """() => [...document.querySelectorAll(".figure svg text")].filter((text) => {
              const own = text.getBoundingClientRect(), around = text.closest(".figure").getBoundingClientRect();
              const clip = text.closest("[clip-path]")?.getAttribute("clip-path").match(/#([^'")]+)/);
              const shape = clip && document.getElementById(clip[1])?.firstElementChild;
              const inside = shape ? text.ownerSVGElement.getBoundingClientRect().left + shape.x.baseVal.value : -Infinity;
              return own.width && (own.left < Math.max(around.left, inside) - 1 || own.right > around.right + 1);
            }).map((text) => text.textContent)"""
        )
    )


def broken_numbers(page: Any) -> list[str]:
    """Numbers that begin in one line and end in the next."""
    return list(
        page.evaluate(
            r"""() => { const walk = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT), out = [];
              while (walk.nextNode()) for (const found of walk.currentNode.data.matchAll(/\d[\d.,]*(e[-+]?\d+| %)?/g)) {
                const range = document.createRange();
                range.setStart(walk.currentNode, found.index);
                range.setEnd(walk.currentNode, found.index + found[0].length);
                const place = walk.currentNode.parentElement.closest("code, pre, .site, .path");
                if (!place && new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) out.push(found[0]);
              }
              return out; }"""
        )
    )
