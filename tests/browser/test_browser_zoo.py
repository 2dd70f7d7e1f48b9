"""Reports of the nine architectures: sound pages whose token views say what the tables say."""

from __future__ import annotations

import numpy as np
import pages
import pytest
from viewed import close, token_of

pytestmark = pytest.mark.browser

NAMES = pages.zoo_names()


def test_the_zoo_has_nine_architectures() -> None:
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_the_page_of_a_zoo_model_is_sound_on_both_devices(zoo, opened, shots, name) -> None:
    viewed = zoo(name)
    for device, scheme, other in (("desktop", "light", "dark"), ("phone", "dark", "light")):
        screen = opened(viewed.path, device, scheme)
        token_of(screen, 12).scroll_into_view_if_needed()
        screen.shoot(shots, f"zoo-{name}-{device}-{scheme}")
        assert screen.problems() == []
        screen.unfold()
        screen.look(other)
        assert screen.problems() == []
        assert screen.faults() == []
        assert screen.page.evaluate("window.ran") is None


@pytest.mark.parametrize("name", NAMES)
def test_the_panel_says_what_the_tables_say(zoo, opened, name) -> None:
    viewed = zoo(name)
    screen = opened(viewed.path)
    rows = np.random.default_rng(0).choice(len(viewed.tokens), 8, replace=False)
    for row in (0, *map(int, rows)):
        token_of(screen, row).hover()
        assert viewed.wrong(screen, row) == [], row
        panel = screen.page.evaluate("checks.panel()")
        assert panel["fields"].keys() >= {"nll", "category", "position", "token_id"}
        assert panel["channels"].keys() == set(viewed.channels["channel"])
    assert screen.faults() == []


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer"])
def test_the_controls_choose_the_channel_that_they_name(zoo, opened, name) -> None:
    """The legend has the chosen channel's end; zeros, and only they, look like zeros."""
    viewed = zoo(name)
    screen = opened(viewed.path)
    varying = viewed.channels[viewed.channels["varies"]]
    for _, channel in varying.sample(6, random_state=0).iterrows():
        choose(screen, channel)
        numbers = viewed.values[channel["channel"]].to_numpy(float)
        end = screen.page.locator(".token-legend").inner_text().split("exactly")[0].split()[-1]
        assert close(end, float(np.abs(numbers).max()), half=True), channel["channel"]
        looks = screen.page.evaluate("checks.tokenLooks()")
        zero = {look for look, number in zip(looks, numbers, strict=True) if number == 0}
        other = {look for look, number in zip(looks, numbers, strict=True) if number != 0}
        assert not zero & other and len(zero) <= 1 and len(other) > 1
    assert screen.faults() == []


def choose(screen, channel) -> None:
    """Set the controls to a row of ``token_channels``."""
    screen.page.select_option("[name=colour]", f"channel:{channel['kind']}")
    screen.page.select_option("[name=layer]", channel["site"])
    for name, value in (("head", channel["head"]), ("source", channel["source"])):
        control = screen.page.locator(f"[name={name}]")
        if control.is_visible():
            control.select_option(str(value))


@pytest.mark.parametrize("name", ["satformer", "muddformer"])
def test_every_colouring_keeps_its_contrast(zoo, opened, shots, name) -> None:
    screen = opened(zoo(name).path)
    quantities = screen.page.locator("[name=colour] option").evaluate_all(
        "(options) => options.map((option) => option.value)"
    )
    assert {"nll", "category"} < set(quantities)
    for quantity in quantities:
        screen.page.select_option("[name=colour]", quantity)
        token_of(screen, 20).hover()
        for scheme in ("light", "dark"):
            screen.look(scheme)
            assert screen.low_contrast() == [], (quantity, scheme)
            screen.shoot(shots, f"colour-{name}-{quantity.replace(':', '-')}-{scheme}")
    assert screen.faults() == []


def test_a_tap_shows_the_panel_on_the_screen_of_a_phone(zoo, opened, shots) -> None:
    viewed = zoo("satformer")
    screen = opened(viewed.path, "phone")
    token_of(screen, 30).scroll_into_view_if_needed()
    token_of(screen, 30).tap()
    assert viewed.wrong(screen, 30) == []
    assert screen.page.evaluate("checks.panelInView()")
    assert screen.problems() == []
    screen.shoot(shots, "tap-phone")


def test_the_keyboard_walks_tokens_and_controls(zoo, opened, shots) -> None:
    viewed = zoo("satformer")
    screen = opened(viewed.path)
    assert screen.walk_faults() == []
    assert sum(stop["token"] for stop in screen.walk()) == 1, "tokens are one stop of Tab"
    at = "Number(document.activeElement.dataset.token)"
    screen.page.locator("[data-token][tabindex='0']").focus()
    start = screen.page.evaluate(at)
    for steps in (1, 2, 3):
        screen.page.keyboard.press("ArrowRight")
        assert screen.page.evaluate(at) == start + steps
        assert viewed.wrong(screen, start + steps) == []
    screen.shoot(shots, "keyboard")
    screen.page.keyboard.press("ArrowLeft")
    assert screen.page.evaluate(at) == start + 2
    screen.page.keyboard.press("ArrowDown")
    assert screen.page.evaluate(at) > start + 4
    for key, row in (("End", len(viewed.tokens) - 1), ("Home", 0)):
        screen.page.keyboard.press(key)
        assert screen.page.evaluate(at) == row
        assert viewed.wrong(screen, row) == []
    screen.page.keyboard.press("Escape")
    assert screen.page.evaluate("checks.panel()")["token"] is None
    screen.page.keyboard.press("Tab")
    assert screen.page.evaluate("document.activeElement.dataset.token ?? null") is None
    assert screen.faults() == []


def test_several_runs_side_by_side_keep_their_views_apart(zoo, opened, shots, tmp_path) -> None:
    one, other = zoo("satformer"), zoo("resformer")
    path = pages.report_page([one.path.parent, other.path.parent], tmp_path / "both.html")
    screen = opened(path)
    ids = screen.page.evaluate("[...document.querySelectorAll('[id]')].map((each) => each.id)")
    assert len(ids) == len(set(ids))
    panels, views = screen.page.locator(".token-panel"), screen.page.locator(".token-view")
    assert views.count() == 2
    before = panels.nth(0).inner_text()
    views.nth(1).locator('[data-token="7"]').hover()
    assert panels.nth(0).inner_text() == before
    assert panels.nth(1).get_attribute("data-row") == "7"
    screen.shoot(shots, "both-desktop", whole=True)
    assert screen.problems() == []
    assert screen.faults() == []
