"""A corpus in memory that is read in pieces; workers import it from here."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

from satlens.data.corpora import Document
from satlens.data.sources import Piece

WORDS = "gate route value stream head layer river cold letter Senate 1848 café 日本 😀".split()


def documents(n: int, seed: int = 0) -> list[Document]:
    """Documents of 1 to 60 words with ids of their own."""
    draw = random.Random(seed)
    return [
        Document(f"doc-{k:05d}", " ".join(draw.choices(WORDS, k=draw.randint(1, 60))), f"w{k % 7}")
        for k in range(n)
    ]


class Listed:
    """The documents, so many a piece."""

    def __init__(self, documents: list[Document], per_piece: int) -> None:
        self.info = {"name": "listed"}
        self.documents = documents
        self.pieces = [
            Piece(index, f"part{index}", start, min(start + per_piece, len(documents)))
            for index, start in enumerate(range(0, len(documents), per_piece))
        ]
        stamp = repr([(d.id, d.text, d.cluster) for d in documents]) + str(per_piece)
        self.identity = hashlib.sha256(stamp.encode()).hexdigest()

    def read(self, piece: Piece) -> Iterator[Document]:
        yield from self.documents[piece.start : piece.stop]


class Failing(Listed):
    """A corpus that cannot be read from some pieces on; ``fault`` says how it ends."""

    def __init__(self, documents: list[Document], per_piece: int, bad: set[int], fault) -> None:
        super().__init__(documents, per_piece)
        self.bad, self.fault = bad, fault

    def read(self, piece: Piece) -> Iterator[Document]:
        yield from self.documents[piece.start : piece.stop - 1]
        if piece.index in self.bad:
            if self.fault == "die":
                os._exit(9)
            raise type(self.fault)(*self.fault.args[:-1], f"{self.fault.args[-1]} {piece.index}")
        yield self.documents[piece.stop - 1]


def contents(folder: Path) -> dict[str, bytes]:
    """Name and bytes of every file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
