"""Pages in headless Chromium: ``make browser`` runs these, the default test run leaves them out.

The browser is Debian's package ``chromium``, or the one that CHROMIUM names. Without it these
tests fail. Screenshots go to the folder that SHOTS names, if it is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pages
import pytest
from screen import Screen
from viewed import Viewed

from satlens.analysis.result import Result

PHONE = {
    "viewport": {"width": 360, "height": 740},
    "device_scale_factor": 2,
    "is_mobile": True,
    "has_touch": True,
}
DESKTOP = {"viewport": {"width": 1280, "height": 900}}
DEVICES = {"desktop": DESKTOP, "phone": PHONE}


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """One Chromium for all tests."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path is None:
        pytest.fail("these tests need Chromium: apt-get install chromium, or set CHROMIUM")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=path,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        yield running
        running.close()


@pytest.fixture
def opened(browser) -> Iterator[Callable[..., Screen]]:
    """Opens a file of the disk as a page: ``opened(path, "phone", scheme="dark")``."""
    contexts = []

    def open_page(path: Path, device: str = "desktop", scheme: str = "light", **options) -> Screen:
        context = browser.new_context(
            **DEVICES[device],
            color_scheme=scheme,
            reduced_motion="reduce",  # scrolling is over when a key was pressed
            accept_downloads=True,
            **options,
        )
        context.set_default_timeout(10_000)
        contexts.append(context)
        return Screen(context.new_page(), path)

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def zoo(tmp_path_factory) -> Callable[[str], Viewed]:
    """The report of a folder of results of a zoo model, made when it is first asked for."""
    made: dict[str, Viewed] = {}

    def page_of(name: str) -> Viewed:
        if name not in made:
            folder = pages.zoo_folder(name, tmp_path_factory.mktemp("zoo") / name)
            result = Result.load(folder, "token_view")
            made[name] = Viewed(result, pages.report_page(folder))
        return made[name]

    return page_of


@pytest.fixture(scope="session")
def shots() -> Path | None:
    """Where screenshots go, if anywhere."""
    folder = os.environ.get("SHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) if folder else None
