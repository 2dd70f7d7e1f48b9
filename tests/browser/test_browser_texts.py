"""Texts that try the token view: markup, emoji, right-to-left words, characters without width."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import pages
import pytest
from viewed import Viewed, token_of

from satlens import view

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def spelled(tmp_path_factory) -> Viewed:
    """A view whose tokens are whole words, as tokenizers with large vocabularies have them."""
    result = pages.spelled_result()
    return Viewed(result, view(result).save(tmp_path_factory.mktemp("spelled") / "view.html"))


@pytest.fixture(params=["words-desktop", "words-phone", "bytes-desktop", "bytes-phone"])
def shown(zoo, spelled, opened, request):
    """A view of hostile documents in words or in pieces of bytes, on either device."""
    kind, device = request.param.split("-")
    viewed = spelled if kind == "words" else zoo("transformer")
    return viewed, opened(viewed.path, device)


def test_markup_in_documents_is_shown_and_never_run(shown) -> None:
    viewed, screen = shown
    page = screen.page
    text = page.evaluate("checks.tokenText()")
    for piece in ("<script>window.ran = 1</script>", "<img src=x onerror=", "<!-- then", "{{ 7*7"):
        assert piece in text, piece
    assert page.evaluate("window.ran ?? null") is None
    assert page.locator("img[src=x], svg[onload], [onerror]").count() == 0
    for row in range(0, len(viewed.tokens), 7):
        token_of(screen, row).dispatch_event(
            "pointerover", {"pointerType": "mouse", "bubbles": True}
        )
    assert page.evaluate("window.ran ?? null") is None
    assert screen.faults() == []


def test_every_token_has_a_width_and_stands_in_reading_order(shown) -> None:
    """Zero-width tokens are seen, and no token is drawn over another."""
    viewed, screen = shown
    boxes = screen.page.evaluate("checks.tokenBoxes()")
    token, document = viewed.tokens["token"], viewed.tokens["document"]
    assert [box["row"] for box in boxes] == list(range(len(token)))
    assert [token[box["row"]] for box in boxes if box["width"] < 2] == []
    wrong = [
        (token[k], token[k + 1])
        for k, (one, other) in enumerate(pairwise(boxes))
        if document[k] == document[k + 1] and out_of_order(token[k] + token[k + 1], one, other)
    ]
    assert wrong == []


def out_of_order(text: str, one: dict, other: dict) -> bool:
    """Neighbours are drawn over each other, or from right to left without being such words.

    Right-to-left words stand as their readers read them; a token of such a word and the space
    before it may be in two places.
    """
    pairs = [(r, s) for r in one["rects"] for s in other["rects"] if abs(r["top"] - s["top"]) < 4]
    if any(min(r["right"], s["right"]) - max(r["left"], s["left"]) > 1 for r, s in pairs):
        return True
    backwards = {"R", "AL"} & {unicodedata.bidirectional(character) for character in text}
    return not backwards and any(s["left"] < r["left"] for r, s in pairs)


def test_line_ends_of_a_document_end_lines(shown) -> None:
    viewed, screen = shown
    boxes = screen.page.evaluate("checks.tokenBoxes()")
    token, document = viewed.tokens["token"], viewed.tokens["document"]
    ends = [
        row
        for row in range(len(boxes) - 1)
        if token[row].endswith("\n") and document[row] == document[row + 1]
    ]
    assert len(ends) >= 4
    for row in ends:
        assert boxes[row + 1]["top"] > boxes[row]["top"] + 5, row


def test_plain_tokens_read_as_they_are(shown) -> None:
    viewed, screen = shown
    texts = screen.page.evaluate("checks.tokenTexts()")
    plain = [row for row, text in enumerate(viewed.tokens["token"]) if set(text) <= pages.PLAIN]
    assert len(plain) > 20
    assert [texts[row] for row in plain] == [viewed.tokens["token"][row] for row in plain]


def test_marks_for_the_invisible_stay_whole_and_the_page_sound(shown, shots, request) -> None:
    _, screen = shown
    assert screen.page.evaluate("checks.tornMarks()") == []
    for scheme in ("light", "dark"):
        screen.look(scheme)
        assert screen.problems() == []
    token_of(screen, 0).scroll_into_view_if_needed()
    screen.shoot(shots, f"texts-{request.node.callspec.id}", whole=True)
    assert screen.faults() == []


def test_a_notebook_cell_shows_the_same_view_in_a_box_of_its_own(opened, tmp_path, shots) -> None:
    result = pages.spelled_result()
    cell = view(result)._repr_html_()
    host = tmp_path / "notebook.html"
    host.write_text(f"<!doctype html><meta charset=utf-8><title>n</title><main>{cell}</main>")
    screen = opened(host)
    frame = screen.page.frame_locator("iframe")
    frame.locator('[data-token="9"]').hover()
    assert result.table["category"][9] in frame.locator(".token-panel").inner_text()
    assert screen.page.evaluate("document.querySelector('iframe').contentDocument") is None
    assert screen.page.evaluate("window.ran ?? null") is None
    assert screen.page.frames[1].evaluate("window.ran ?? null") is None
    with screen.page.expect_download() as waiting:
        frame.locator("summary").first.click()
        frame.locator("[data-download='token_view.csv']").click()
    waiting.value.save_as(tmp_path / "token_view.csv")
    assert (tmp_path / "token_view.csv").read_bytes() == result.csv()
    screen.shoot(shots, "notebook")
    assert screen.faults() == []
