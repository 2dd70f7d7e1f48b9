"""What single tokens spell: their bytes of the document's UTF-8, as text and as counts.

Tokens cut text between bytes, not between characters: an emoji can be three tokens. So a token's
share of a document is counted in bytes, and bytes that are no character by themselves are shown as
their number, ``‹E2›``. White space that a tokenizer drops belongs to no token and is not counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from satlens.data.alignment import byte_alphabet
from satlens.data.dataset import DocumentTokens
from satlens.data.tokenizers import backend, encode_with_offsets

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece vocabularies write a byte."""
_ESCAPED = range(0xDC80, 0xDD00)
"""Where Python's ``surrogateescape`` puts bytes that are no text."""


class Spelling:
    """What the tokens of a tokenizer spell.

    Byte-level tokens are known from the vocabulary alone; those of other tokenizers from where
    they lie in their document's text, white space counting to the token that follows it.

    Raises:
        DataError: a slow tokenizer, which does not say where tokens lie.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        inner = backend(tokenizer)
        content = json.loads(inner.to_str())
        self._names = {k: name for name, k in inner.get_vocab(with_added_tokens=True).items()}
        added = inner.get_added_tokens_decoder()
        self._table: list[bytes] | None = None
        if _has_type(content["decoder"], "ByteLevel"):
            size = max(self._names, default=-1) + 1
            self._table = [self._byte_level(k, literal=k in added) for k in range(size)]
            self._lengths = np.array([len(piece) for piece in self._table], dtype=np.int64)

    def pieces(self, document: DocumentTokens) -> list[bytes] | None:
        """Bytes of each token; None where the tokens are not known to encode the text.

        They are joined the beginning of the document's text (special tokens are spelt out).
        """
        if self._table is None:
            return self._located(document)
        table = self._table
        found = [table[k] if k < len(table) else b"" for k in document.tokens.tolist()]
        if found[:1] and found[0].startswith(b" ") and not document.text.startswith(" "):
            found[0] = found[0][1:]  # put there by the tokenizer
        return found

    def lengths(self, document: DocumentTokens) -> np.ndarray | None:
        """Number of bytes of each token (n,) int64; None as of :meth:`pieces`."""
        tokens = document.tokens
        if self._table is not None and tokens.max(initial=0) < len(self._table):
            lengths = self._lengths[tokens]
            if len(lengths) and lengths[0]:
                (first,) = self.pieces(document._replace(tokens=tokens[:1])) or [b""]
                lengths[0] = len(first)
            return lengths
        pieces = self.pieces(document)
        return None if pieces is None else np.array([len(p) for p in pieces], dtype=np.int64)

    def _byte_level(self, token: int, literal: bool) -> bytes:
        name = self._names.get(token, "")
        alphabet = byte_alphabet()
        if literal or not all(c in alphabet for c in name):
            return name.encode("utf-8")
        return bytes(alphabet[c] for c in name)

    def _located(self, document: DocumentTokens) -> list[bytes] | None:
        text, n = document.text, len(document.tokens)
        if not text:
            return None
        ((ids, offsets),) = encode_with_offsets(self._tokenizer, [text])
        if not np.array_equal(ids[:n], document.tokens):
            return None
        # A space that the tokenizer puts first claims the character of the token after it.
        following = np.append(offsets[1:, 0], len(text))
        found, done = [], 0
        for k, (start, end) in enumerate(offsets[:n].tolist()):
            byte = _BYTE_NAME.fullmatch(self._names.get(int(ids[k]), ""))
            if byte:
                own = text[done:start].encode("utf-8") + bytes([int(byte[1], 16)])
            else:
                end = min(end, int(following[k]))
                own = text[done:end].encode("utf-8")
            found.append(own)
            done = max(done, end)
        return found


def shown(piece: bytes) -> str:
    """Bytes of a token as text; those that are no character by themselves as ``‹E2›``."""
    text = piece.decode("utf-8", "surrogateescape")
    return "".join(f"‹{ord(c) - 0xDC00:02X}›" if ord(c) in _ESCAPED else c for c in text)


def shown_tokens(pieces: Sequence[bytes] | None, tokens: np.ndarray) -> list[str]:
    """Each token as text; as its number, ``‹#17›``, where it spells nothing or nobody knows."""
    known = [b""] * len(tokens) if pieces is None else pieces
    return [
        shown(piece) if piece else f"‹#{token}›"
        for piece, token in zip(known, tokens.tolist(), strict=True)
    ]


def _has_type(part: Any, name: str) -> bool:
    """Whether a component of a tokenizer's JSON is, or contains, one of a type."""
    if isinstance(part, dict):
        return part.get("type") == name or any(_has_type(p, name) for p in part.values())
    return isinstance(part, list) and any(_has_type(p, name) for p in part)
