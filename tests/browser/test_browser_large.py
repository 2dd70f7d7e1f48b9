"""A view of 2,000 tokens of a model with 8 layers of 32 heads stays small and quick."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pages
import pytest
from viewed import Viewed, token_of

from satlens import view

pytestmark = pytest.mark.browser

MOST_BYTES = 5_000_000
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint').length"


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[str, Viewed]:
    """The same result as a view of its own and as the report of its folder."""
    folder = tmp_path_factory.mktemp("large")
    result = pages.large_result()
    result.save(folder / "results", figures=False)
    report = pages.report_page(folder / "results")
    return {
        "view": Viewed(result, view(result).save(folder / "view.html")),
        "report": Viewed(result, report),
    }


@pytest.mark.parametrize("kind", ["view", "report"])
def test_a_large_page_is_small_and_painted_within_a_second(large, opened, shots, kind) -> None:
    viewed: Viewed = large[kind]
    assert len(viewed.tokens) == 2000 and len(viewed.channels) == 7 * 32
    size = viewed.path.stat().st_size
    paints = []
    for _ in range(3):  # the machine may be busy with something else
        screen = opened(viewed.path)
        screen.page.wait_for_function(FIRST_PAINT)
        paints.append(max(screen.page.evaluate("[checks.firstPaint(), checks.ready()]")))
        screen.page.close()
    print(f"\nlarge {kind}: {size / 1e6:.2f} MB, painted and ready after {np.round(paints)} ms")
    assert size < MOST_BYTES
    assert min(paints) < 1000


def test_a_large_view_recolours_within_a_tenth_of_a_second(large, opened) -> None:
    screen = opened(large["view"].path)
    took = screen.page.evaluate("checks.recolour()")
    print(f"\nrecolouring: median {np.median(took):.0f} ms, most {max(took):.0f} ms")
    assert len(took) >= 5
    assert float(np.median(took)) < 100
    assert screen.faults() == []


@pytest.mark.parametrize("device", ["desktop", "phone"])
def test_a_large_view_is_sound_and_says_what_its_tables_say(large, opened, shots, device) -> None:
    viewed: Viewed = large["view"]
    screen = opened(viewed.path, device, "dark")
    screen.shoot(shots, f"large-{device}-dark")
    assert screen.problems() == []
    screen.look("light")
    assert screen.problems() == []
    for row in (0, 3, 777, 1500, 1999):
        token_of(screen, row).scroll_into_view_if_needed()
        (token_of(screen, row).hover if device == "desktop" else token_of(screen, row).tap)()
        assert viewed.wrong(screen, row) == [], row
    screen.shoot(shots, f"large-{device}-light")
    assert screen.faults() == []


def test_every_table_of_a_large_view_downloads(large, opened, tmp_path: Path) -> None:
    viewed: Viewed = large["report"]
    screen = opened(viewed.path)
    screen.unfold()
    found = screen.downloads(tmp_path)
    for csv in sorted(viewed.path.parent.glob("*.csv")):
        assert csv.read_bytes() in found.values(), csv.name
