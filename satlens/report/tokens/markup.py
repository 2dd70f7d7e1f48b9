"""The text of a token as markup in which nothing is invisible.

Line breaks, tabs, spaces that are no plain space, characters without width and those that turn
the direction of a line are each shown as a small label. The last kind is not passed on: it would
reorder whatever follows it on the page.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from markupsafe import Markup, escape

LABELS = {
    "\t": "\u2192",
    "\n": "\u21b5",
    "\r": "CR",
    "\u00a0": "NBSP",
    "\u00ad": "SHY",
    "\u034f": "CGJ",
    "\u061c": "ALM",
    "\u200b": "ZWSP",
    "\u200c": "ZWNJ",
    "\u200d": "ZWJ",
    "\u200e": "LRM",
    "\u200f": "RLM",
    "\u2028": "LS",
    "\u2029": "PS",
    "\u202a": "LRE",
    "\u202b": "RLE",
    "\u202c": "PDF",
    "\u202d": "LRO",
    "\u202e": "RLO",
    "\u202f": "NNBSP",
    "\u2060": "WJ",
    "\u2066": "LRI",
    "\u2067": "RLI",
    "\u2068": "FSI",
    "\u2069": "PDI",
    "\ufe0e": "VS15",
    "\ufe0f": "VS16",
    "\ufeff": "BOM",
}
"""Arrows and Unicode's own abbreviations; other characters are shown by their number."""
BREAKS = {"\n": "\n", "\t": "\t", "\u2028": "\n", "\u2029": "\n"}
"""Characters that also move the text on, and what does that in the page."""
_JOINER = "\u200d"
# Shown by every font although format characters: signs that stand before a number in Arabic.
_SHOWN = re.compile("[\u0600-\u0605\u06dd\u070f\u0890\u0891\u08e2]")
# Default_Ignorable_Code_Point of Unicode's DerivedCoreProperties, without the format characters.
_IGNORED = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180d\u180f\u3164\ufe00-\ufe0f\uffa0"
    "\U000e0100-\U000e01ef]"
)
_VARIANT = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")
_BYTES = re.compile("(?:\u2039[0-9A-F]{2}\u203a)+")
_MARK = Markup('<i class="tv-mark" title="{}">{}</i>')


@lru_cache(maxsize=65536)
def token_markup(text: str) -> Markup:
    """Markup of one token: its characters escaped, the invisible ones as labelled marks.

    A joiner between two pictures of one token stays, so that an emoji of several parts is whole.
    """
    if not text:
        return _MARK.format("a token without text", "\u2205")
    if _BYTES.fullmatch(text):
        return _MARK.format("bytes of a character that several tokens share", text)
    return Markup("").join(_character(text, k) for k in range(len(text)))


def _character(text: str, k: int) -> Markup:
    """Markup of the k-th character."""
    char = text[k]
    kind = unicodedata.category(char)
    if kind in ("Mn", "Mc", "Me") and k == 0 and not _IGNORED.match(char):
        return escape("\u25cc" + char)
    hidden = kind in ("Cc", "Cf", "Cs", "Zl", "Zp") or (kind == "Zs" and char not in " \u3000")
    if not (hidden or _IGNORED.match(char)) or _SHOWN.match(char) or _joins(text, k):
        return escape(char)
    number = f"U+{ord(char):04X}"
    name = unicodedata.name(char, number).lower()
    return _MARK.format(name, LABELS.get(char, number)) + BREAKS.get(char, "")


def _joins(text: str, k: int) -> bool:
    """Whether an invisible character does its work between visible ones of the same token."""
    if _VARIANT.match(text[k]):
        return k > 0
    around = text[k - 1 : k + 2] if k else ""
    return text[k] == _JOINER and len(around) == 3 and _picture(around[0]) and _picture(around[2])


def _picture(char: str) -> bool:
    """Part of an emoji: a symbol, a skin tone or the selector of its coloured form."""
    return unicodedata.category(char) in ("So", "Sk") or bool(_VARIANT.match(char))
