"""The checks themselves, on pages that are wrong in one known way each."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.browser

GOOD = (
    "<style>body{background:#fff;color:#222}</style><main id=main><p>Text</p>"
    "<button>Press</button><a href='#main'>There</a></main>"
)
GREY = "<p style='color:#999'>too light</p>"
FAINT = "<p style='opacity:.4'>see through</p>"
STRIPES = (
    "<p style='background:repeating-linear-gradient(45deg,#222 0 4px,#fff 4px 8px)'>on dark</p>"
)
WIDE = "<div style='width:3000px'>wide</div>"
SCROLLED = "<div style='overflow-x:auto'><div style='width:3000px'>wide, and scrolls</div></div>"


@pytest.fixture
def made(opened, tmp_path):
    def make(body: str):
        path = tmp_path / "page.html"
        path.write_text(f"<!doctype html><meta charset=utf-8><title>t</title>{GOOD}{body}")
        return opened(path)

    return make


def test_a_good_page_has_no_faults(made) -> None:
    screen = made(SCROLLED)
    assert [screen.problems(), screen.faults(), screen.walk_faults()] == [[], [], []]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (GREY, "contrast 2.8"),
        (FAINT, "contrast 2."),
        (STRIPES, "contrast 1.0"),
        (WIDE, "wider than the window"),
        ("<button></button>", "no name: button"),
        ("<select><option>one</option></select>", "no name: select"),
    ],
)
def test_what_is_wrong_with_the_look_is_found(made, body, said) -> None:
    problems = made(body).problems()
    assert problems and problems[0].startswith(said)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<script>console.error('no')</script>", "error: no"),
        ("<script>throw new Error('thrown')</script>", "thrown"),
        ("<script>alert('hello')</script>", "dialog: hello"),
        ("<img src='http://192.0.2.1/x.png' alt=''>", "http://192.0.2.1/x.png"),
        ("<script>fetch('other.json').catch(() => 0)</script>", "other.json"),
    ],
)
def test_what_a_page_does_wrong_is_found(made, body, said) -> None:
    screen = made(body)
    screen.page.wait_for_timeout(50)
    assert any(said in fault for fault in screen.faults())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<button style='outline:none'>Plain</button>", "focus does not show"),
        (
            "<button id=b>One</button><button id=c onfocus='b.focus()'>Two</button>",
            "catches the focus",
        ),
        (
            "<b tabindex=0 onfocus='this.blur()'>Two</b><u tabindex=0>Three</u>",
            "not reached",
        ),
        ("<a href='#main' style='position:absolute;left:-999em'>Far</a>", "focus out of view"),
    ],
)
def test_what_the_keyboard_cannot_do_is_found(made, body, said) -> None:
    assert any(fault.startswith(said) for fault in made(body).walk_faults())
