"""Closed-class English words: the offline stand-in for a tagger.

It separates function words from the rest by spelling alone. A word form with several uses has the
commonest of them; which function class matters little, since all of them are functional.
"""

from __future__ import annotations

import re
import unicodedata

from satlens.data.categories import CONTENT

WORDLIST_NAME = "wordlist"
WORDLIST_VERSION = "1"

_CLOSED: dict[str, str] = {
    "DET": """a all an another any both each either every half its many my neither no our some such
        that the their these this those what whatever which whichever whose your""",
    "ADP": """about above across after against along alongside amid amidst among amongst around as
        at before behind below beneath beside besides between betwixt beyond by concerning despite
        down during except for from in inside into like near notwithstanding of off on onto
        opposite out outside over per regarding respecting round save since through throughout
        till toward towards under underneath until unto up upon versus via with within without""",
    "AUX": """am are ar be been being ca can cannot could dare did do does had has hath have having
        is may might must ought shall shalt should was were will wilt wo would doth art hast""",
    "PRON": """anybody anyone anything everybody everyone everything he her hers herself him himself
        his i it itself me mine myself nobody none nothing oneself ours ourselves she somebody
        someone something thee theirs them themselves there they thine thou thy thyself us we who
        whoever whom whomever whomsoever whosoever ye you yours yourself yourselves""",
    "CCONJ": "and but nor or plus",
    "SCONJ": """albeit although because how if lest than though unless when whenever where
        whereas whereby wherein whereof whereupon wherever whether while whilst why""",
    "PART": "not to",
}
_CLITICS = {"s": "PART", "re": "AUX", "ve": "AUX", "ll": "AUX", "d": "AUX", "m": "AUX"}
_CLASS_OF = {word: tag for tag, words in _CLOSED.items() for word in words.split()}

# A lone blank between words is no word, as in spaCy; any other white space is one.
_LETTERS = r"(?:[^\W\d_]|[\u0300-\u036f])+"
_WORD = re.compile(
    rf"""(?P<space>[^\S\ ]\s*|\ \s+)
    | (?P<negation>n['’]t\b)
    | (?P<clitic>['’](?:s|re|ve|ll|d|m)\b)
    | (?P<word>{_LETTERS}?(?=n['’]t\b)|{_LETTERS})
    | (?P<number>\d+(?:[.,]\d+)*)
    | (?P<other>\S)""",
    re.IGNORECASE | re.VERBOSE,
)


def tag_words(text: str) -> tuple[list[int], list[int], list[str]]:
    """(starts, ends, universal tags) of the words of a text; open-class words are CONTENT."""
    starts: list[int] = []
    ends: list[int] = []
    tags: list[str] = []
    for match in _WORD.finditer(text):
        starts.append(match.start())
        ends.append(match.end())
        tags.append(_class_of(match))
    return starts, ends, tags


def _class_of(match: re.Match[str]) -> str:
    word = match.group().lower()
    kind = match.lastgroup
    if kind == "space":
        return "SPACE"
    if kind == "negation":
        return "PART"
    if kind == "clitic":
        return _CLITICS[word[1:]]
    if kind == "word":
        return _CLASS_OF.get(word, CONTENT)
    if kind == "number":
        return "NUM"
    major = unicodedata.category(word[0])[0]
    return {"P": "PUNCT", "S": "SYM"}.get(major, "X")
