"""Token categories: which universal part-of-speech tags are content, function or structure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from satlens.errors import ConfigError

NONE = "none"
"""Tag and category of a token without a word."""

CONTENT = "CONTENT"
"""What the word list says of an open-class word: it knows no finer class."""

UPOS: tuple[str, ...] = (
    NONE,
    *("ADJ", "ADP", "ADV", "AUX", "CCONJ", "DET", "INTJ", "NOUN", "NUM", "PART", "PRON"),
    *("PROPN", "PUNCT", "SCONJ", "SPACE", "SYM", "VERB", "X"),
    CONTENT,
)
"""Names of the codes in ``DocumentTags.upos``: universal tags, spaCy's SPACE, and our two."""

DEFAULT_CATEGORIES: dict[str, tuple[str, ...]] = {
    "semantic": ("NOUN", "PROPN", "VERB", "ADJ", "ADV", "NUM", "INTJ"),
    "functional": ("DET", "ADP", "AUX", "PRON", "CCONJ", "SCONJ", "PART"),
    "structural": ("PUNCT", "SYM", "SPACE", "X"),
}


@dataclass(frozen=True, kw_only=True)
class Categories:
    """A division of the tags. CONTENT goes with NOUN, special tokens with PUNCT."""

    names: tuple[str, ...]
    """Names of the category codes; the last is ``none``."""
    of_upos: np.ndarray
    """Category code of each tag in UPOS, int8."""

    @property
    def special(self) -> int:
        """Code of special tokens."""
        return int(self.of_upos[UPOS.index("PUNCT")])


def make_categories(
    groups: dict[str, tuple[str, ...]] | None = None, where: str = "categories"
) -> Categories:
    """Categories of a mapping from names to tags (the default: semantic, functional, structural).

    Raises:
        ConfigError: a tag that is unknown, missing or in two categories, or the name ``none``.
    """
    groups = DEFAULT_CATEGORIES if groups is None else groups
    if NONE in groups:
        raise ConfigError(f"{where}: {NONE}: reserved for tokens without a word")
    names = (*groups, NONE)
    codes = {NONE: len(names) - 1}
    for code, (name, tags) in enumerate(groups.items()):
        for tag in tags:
            if tag not in UPOS[1:-1]:
                known = ", ".join(UPOS[1:-1])
                raise ConfigError(f"{where}: {name}: unknown tag {tag!r} (known: {known})")
            if tag in codes:
                raise ConfigError(f"{where}: {name}: {tag} is in {names[codes[tag]]} already")
            codes[tag] = code
    missing = [tag for tag in UPOS[1:-1] if tag not in codes]
    if missing:
        raise ConfigError(f"{where}: no category has {', '.join(missing)}")
    codes[CONTENT] = codes["NOUN"]
    return Categories(names=names, of_upos=np.array([codes[tag] for tag in UPOS], dtype=np.int8))


def load_categories(path: str | Path) -> Categories:
    """Read a YAML file: each key a category, its value a list of universal tags.

    Raises:
        ConfigError: unreadable or not such a mapping, naming file and field.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{path}: a mapping from category names to lists of tags was expected")
    for name, tags in content.items():
        if not isinstance(name, str):
            raise ConfigError(f"{path}: {name!r}: a category name must be a text")
        if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
            raise ConfigError(f"{path}: {name}: a list of tags was expected")
    return make_categories({name: tuple(tags) for name, tags in content.items()}, str(path))
