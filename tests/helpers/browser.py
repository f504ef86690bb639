"""Open pages in headless Chromium, for tests that need a browser; without one they are skipped."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest


def chromium() -> str | None:
    """Return the browser: the one named by VITKIT_CHROMIUM, one of the system, or playwright's."""
    names = (os.environ.get("VITKIT_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        playwright = pytest.importorskip("playwright.sync_api")
        with playwright.sync_playwright() as started:
            found = started.chromium.executable_path
    return found if Path(found).exists() else None


@contextlib.contextmanager
def open_page(path: Path, *, width: int = 1200, height: int = 900):
    """Yield the page of a file, and a list that receives its console messages."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if (executable := chromium()) is None:
        pytest.skip("no Chromium: set VITKIT_CHROMIUM")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        page, issues = browser.new_page(viewport={"width": width, "height": height}), []
        page.on("console", lambda message: issues.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: issues.append(str(error)))
        page.goto(path.resolve().as_uri())
        page.wait_for_timeout(300)
        yield page, issues
        browser.close()
