"""Progress where there is no terminal: a line now and then, with the time left."""

from __future__ import annotations

import pytest

from satlens import display


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set, and a stderr that is no terminal."""
    now = [1000.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    return now


def test_lines_estimate_the_time_left(clock, capsys):
    with display.progress_bar() as show:
        for second in range(0, 101, 10):
            clock[0] = 1000.0 + second
            show("tokenise", 200 + second, 500)
    # One unit a second from 200 on, which an interrupted run had done.
    assert capsys.readouterr().err.splitlines() == [
        "tokenise: 230 of 500, about 4 min 30 s left",
        "tokenise: 260 of 500, about 4 min 00 s left",
        "tokenise: 290 of 500, about 3 min 30 s left",
    ]


def test_no_estimate_before_anything_is_done_or_after_the_end(clock, capsys):
    with display.progress_bar() as show:
        for second, done in ((0, 0), (31, 0), (62, 5), (93, 10)):
            clock[0] = 1000.0 + second
            show("read", done, 10)
    assert capsys.readouterr().err.splitlines() == [
        "read: 0 of 10",
        "read: 5 of 10, about 1 min 02 s left",
        "read: 10 of 10",
    ]


def test_quiet_shows_nothing():
    with display.progress_bar(quiet=True) as show:
        assert show is None
