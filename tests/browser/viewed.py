"""A token view on disk beside the tables that it shows, and what they disagree about."""

from __future__ import annotations

import math
from pathlib import Path

from screen import Screen

from satlens.analysis.result import Result

LOSSES = ("nll", "nll_intervened", "dnll")


class Viewed:
    """A page with a token view and its result."""

    def __init__(self, result: Result, path: Path) -> None:
        self.path = path
        self.tokens = result.table
        self.channels = result.part("token_channels").table
        self.values = result.part("token_values").table

    def wrong(self, screen: Screen, row: int) -> list[str]:
        """What the panel says of a token and the tables do not."""
        panel = screen.page.evaluate("checks.panel()")
        found = [] if panel["token"] == str(row) else [f"the panel is about {panel['token']}"]
        token, values = self.tokens.iloc[row], self.values.iloc[row]
        for name, text in panel["fields"].items():
            if name in LOSSES and not close(text, float(token[name])):
                found.append(f"{name} is {text!r}, in the table {token[name]}")
            if name in ("category", "position", "token_id", "document") and text != str(
                token[name]
            ):
                found.append(f"{name} is {text!r}, in the table {token[name]}")
        for channel, text in panel["channels"].items():
            if not close(text, float(values[channel]), half=True):
                found.append(f"{channel} is {text!r}, in the table {values[channel]}")
        return found


def close(shown: str, value: float, half: bool = False) -> bool:
    """Whether a shown number is the value, as far as its digits (and float16) can say.

    Only zero is shown as zero.
    """
    text = shown.strip().replace("\N{MINUS SIGN}", "-")
    if math.isnan(value):
        return text == "\N{EN DASH}"
    if value == 0:
        return text == "0"
    if text == "\N{ALMOST EQUAL TO}0":
        return half and abs(value) < 1.1e-6  # where float16 has no digits left
    number, _, power = text.partition("e")
    unit = 10.0 ** (int(power or 0) - len(number.partition(".")[2]))
    room = 0.501 * unit + half * (2**-11 * abs(value) + 2**-25)
    return float(text) != 0 and abs(float(text) - value) <= room


def token_of(screen: Screen, row: int):
    """The token of that row of the table."""
    return screen.page.locator(f'[data-token="{row}"]')
