"""A real Chromium for the tests of pages, and a visit to a page that records all it said.

Without Chromium tests are skipped, or fail where SEKISHO_REQUIRE_CHROMIUM=1 says that they must
run.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

Scheme = Literal["light", "dark"]
SCHEMES: list[Scheme] = ["light", "dark"]
WIDTHS = [1280, 400]
HOSTILE = (
    "</blockquote></script><script>alert(1)</script><img src=x onerror=alert(2)>"
    "<svg onload=alert(3)> &lt;b&gt; \u202e" + "W" * 300
)
"""A text that acts on a page which does not escape it, and is wider than any."""


@contextlib.contextmanager
def launched() -> Iterator[Browser]:
    """The system's Chromium; nothing is downloaded."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        text = "no chromium here; on Debian: apt-get install -y chromium"
        if os.environ.get("SEKISHO_REQUIRE_CHROMIUM") == "1":
            pytest.fail(text)
        pytest.skip(text)
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=found)
        yield made
        made.close()


class Visit:
    """A page that was opened, and everything that it said or asked for."""

    def __init__(self, browser: Browser, file: Path, scheme: Scheme, width: int) -> None:
        size: Any = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=scheme)
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda line: self.said.append(f"{line.type}: {line.text}"))
        self.page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def texts(self, selector: str) -> list[str]:
        """The text of every element that matches."""
        return [str(text) for text in self.page.locator(selector).all_text_contents()]

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)
