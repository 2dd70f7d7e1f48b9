"""The page of a study: sound on both devices in light and dark, sortable, downloadable by hand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pages
import pytest

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    return pages.report_page(pages.study_folder(tmp_path_factory.mktemp("study") / "run"))


@pytest.fixture(scope="module")
def sortable(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("table") / "sortable.html"
    return pages.table_page(pages.hard_to_sort(), path)


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_a_report_is_sound_in_light_and_dark_folded_and_unfolded(study, opened, device, shots):
    screen = opened(study, device)
    for scheme in ("light", "dark"):
        screen.look(scheme)
        screen.shoot(shots, f"study-{device}-{scheme}")
        assert screen.problems() == []
    screen.unfold()
    for scheme in ("dark", "light"):
        screen.look(scheme)
        assert screen.problems() == []
    screen.shoot(shots, f"study-{device}-unfolded", whole=True)
    assert screen.faults() == []


def test_names_with_markup_are_text(study, opened) -> None:
    screen = opened(study)
    screen.unfold()
    assert pages.SCRIPT in screen.page.inner_text("h1")
    assert pages.SCRIPT in screen.page.inner_text("main")
    assert screen.page.evaluate("window.ran") is None
    assert screen.faults() == []


@pytest.mark.parametrize("system", ["light", "dark"])
def test_the_switch_overrules_the_system_and_keeps_the_contrast(study, opened, system) -> None:
    screen = opened(study, scheme=system)
    dark = "checks.isDark()"
    assert screen.page.evaluate(dark) == (system == "dark")
    screen.page.locator("#theme").press("Enter")
    assert screen.page.evaluate(dark) == (system != "dark")
    assert screen.problems() == []
    screen.page.locator("#theme").press("Space")
    assert screen.page.evaluate(dark) == (system == "dark")


# -- the keyboard ----------------------------------------------------------------------------------


def test_tab_reaches_everything_visibly_and_leaves_the_page(study, opened) -> None:
    screen = opened(study)
    assert screen.walk_faults() == []


def test_the_skip_link_comes_first_and_skips(study, opened) -> None:
    screen = opened(study)
    screen.page.keyboard.press("Tab")
    assert "Skip" in screen.page.evaluate("document.activeElement.textContent")
    screen.page.keyboard.press("Enter")
    screen.page.keyboard.press("Tab")
    assert screen.page.evaluate("document.getElementById('main').contains(document.activeElement)")


# -- sorting ---------------------------------------------------------------------------------------


def column(screen, name: str) -> list[str]:
    return screen.page.evaluate("(name) => checks.column(name)", name)


def sort_by(screen, name: str, key: str = "Enter") -> str:
    """Press the header of a column; the order that it then says it has."""
    header = screen.page.locator("th").filter(has_text=re.compile(f"^{name}$"))
    before = header.get_attribute("aria-sort")
    header.get_by_role("button").press(key)
    screen.page.wait_for_function(
        "([th, before]) => th.getAttribute('aria-sort') !== before",
        arg=[header.element_handle(), before],
    )
    assert screen.page.locator('th[aria-sort$="scending"]').count() == 1
    return header.get_attribute("aria-sort")


def orders(values: np.ndarray) -> dict[str, list[int]]:
    """Rows in either order of a column, as its full numbers say; what is missing comes last."""
    present = [k for k in range(len(values)) if not np.isnan(values[k])]
    missing = [k for k in range(len(values)) if np.isnan(values[k])]
    rising = sorted(present, key=lambda k: values[k])
    return {"ascending": rising + missing, "descending": rising[::-1] + missing}


@pytest.mark.parametrize("name", ["value", "share", "count"])
def test_numbers_sort_by_their_full_value_with_gaps_last(sortable, opened, name) -> None:
    frame = pages.hard_to_sort().table
    screen = opened(sortable)
    screen.unfold()
    before = column(screen, "name")
    assert before == list(frame["name"])
    expected = orders(frame[name].to_numpy(float))
    seen = set()
    for key in ("Enter", "Space"):
        order = sort_by(screen, name, key)
        seen.add(order)
        assert column(screen, "name") == [before[k] for k in expected[order]]
    assert seen == {"ascending", "descending"}
    assert screen.faults() == []


def test_text_sorts_both_ways_and_rows_stay_whole(sortable, opened) -> None:
    frame = pages.hard_to_sort().table
    screen = opened(sortable)
    screen.unfold()
    counts = dict(zip(frame["name"], frame["count"], strict=True))
    lists = {}
    for _ in range(2):
        order = sort_by(screen, "name")
        lists[order] = column(screen, "name")
        assert [counts[name] for name in lists[order]] == list(map(int, column(screen, "count")))
    assert lists["ascending"] == lists["descending"][::-1]
    assert lists["ascending"].index("a") < lists["ascending"].index("b")


# -- downloads -------------------------------------------------------------------------------------


def test_every_table_of_a_report_downloads_byte_for_byte(study, opened, tmp_path) -> None:
    screen = opened(study)
    screen.unfold()
    found = screen.downloads(tmp_path)
    tables = {path.read_bytes(): path.name for path in study.parent.glob("results/**/*.csv")}
    missing = {name for csv, name in tables.items() if csv not in found.values()}
    assert missing == set()
    assert screen.faults() == []


def test_hostile_cells_download_as_they_are_saved(sortable, opened, tmp_path) -> None:
    screen = opened(sortable)
    screen.unfold()
    assert screen.downloads(tmp_path) == {"sortable.csv": pages.hard_to_sort().csv()}


def test_without_scripts_the_page_still_reads(study, opened) -> None:
    screen = opened(study, java_script_enabled=False)
    text = screen.page.inner_text("main")
    assert "In short" in text
    assert screen.page.locator("table").count() > 0


def test_on_paper_the_page_is_light_and_has_no_controls(study, opened, shots) -> None:
    screen = opened(study, scheme="dark")
    screen.page.emulate_media(media="print", color_scheme="dark")
    assert not screen.page.evaluate("checks.isDark()")
    assert screen.page.locator("nav").is_hidden() and screen.page.locator("#theme").is_hidden()
    assert screen.low_contrast() == []
    screen.shoot(shots, "study-print", whole=True)
