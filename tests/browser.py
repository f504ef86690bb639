"""Pages in headless Chromium, for tests that want to see them; they skip without."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest


def chromium() -> str | None:
    """The browser: what VITKIT_CHROMIUM names, one of the system's, or playwright's own."""
    names = (os.environ.get("VITKIT_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        playwright = pytest.importorskip("playwright.sync_api")
        with playwright.sync_playwright() as started:
            found = started.chromium.executable_path
    return found if Path(found).exists() else None


@contextlib.contextmanager
def open_page(path: Path, *, width: int = 1200, height: int = 900):
    """The page of a file, and a list that takes what its console says."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if (executable := chromium()) is None:
        pytest.skip("no Chromium: set VITKIT_CHROMIUM")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-gpu"])
        page, problems = browser.new_page(viewport={"width": width, "height": height}), []
        page.on("console", lambda message: problems.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(path.resolve().as_uri())
        page.wait_for_timeout(300)
        yield page, problems
        browser.close()
