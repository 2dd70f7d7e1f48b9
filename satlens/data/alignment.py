"""Alignment of subwords with words by character offsets.

The rule, for each subword with the characters [start, end):

1. Leading white space belongs to what follows it: the white characters in front of a subword's
   visible ones do not count.
2. The word with the largest overlap wins, the first on ties.
3. A subword of white space that no word covers belongs to the word that follows.
4. Without any overlap there is no word (-1).

Bytes of one character that fall into several tokens carry equal offsets, hence equal words. Every
subword gets exactly one answer, so counts conserve.
"""

from __future__ import annotations

import codecs
from functools import cache
from typing import Any

import numpy as np

from satlens.data.tokenizers import backend, encode_with_offsets, special_ids
from satlens.errors import DataError


def align(text: str, subwords: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Index of the word of each subword, or -1.

    Args:
        text: what all offsets refer to.
        subwords: (n, 2) character offsets [start, end) of the subwords.
        starts: (m,) first characters of the words, which are in order and disjoint.
        ends: (m,) ends of the words.

    Returns:
        (n,) int32.
    """
    length = len(text)
    word_at = np.full(length + 1, -1, dtype=np.int32)
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        word_at[start:end] = index
    white = np.fromiter((c.isspace() for c in text), dtype=bool, count=length)
    visible = _next_true(~white)
    covered = _next_true(word_at[:length] >= 0)

    begin, stop = subwords[:, 0].astype(np.int64), subwords[:, 1].astype(np.int64)
    seen = visible[begin]
    begin = np.where(seen < stop, seen, begin)
    empty = stop <= begin
    last = np.maximum(stop - 1, begin)
    first_word, last_word = word_at[begin], word_at[last]
    word = np.where(empty, -1, first_word).astype(np.int32)
    # Words are contiguous: equal ends that are in a word leave nothing to compare.
    for k in np.flatnonzero(~empty & ((first_word != last_word) | (first_word < 0))):
        word[k] = _largest_overlap(word_at[begin[k] : stop[k]])
    # Rule 3: only white space, none of it in a word.
    blank = ~empty & (word < 0) & (seen >= stop)
    word[blank] = word_at[covered[stop[blank]]]
    return word


def token_offsets(doc_id: str, text: str, tokens: np.ndarray, tokenizer: Any) -> np.ndarray:
    """Character offsets (n, 2) of tokens in the text that they encode.

    The tokens are the beginning of the text's own encoding, or (byte-level tokenizers) any tokens
    whose bytes spell the text.

    Raises:
        DataError: there is no text, or the tokens do not spell it.
    """
    if not text:
        raise DataError(f"document {doc_id!r}: text: none to tag (tokens without a tokenizer)")
    ((ids, offsets),) = encode_with_offsets(tokenizer, [text])
    if len(ids) >= len(tokens) and np.array_equal(ids[: len(tokens)], tokens):
        return offsets[: len(tokens)]
    spelt = _byte_offsets(tokens, tokenizer)
    if spelt is None or not text.startswith(spelt[0]):
        raise DataError(f"document {doc_id!r}: tokens: do not spell the document's text")
    return spelt[1]


def _largest_overlap(words: np.ndarray) -> int:
    """Most frequent word index of a few characters, the first on ties; -1 does not count."""
    best, best_size = -1, 0
    found, first, sizes = np.unique(words[words >= 0], return_index=True, return_counts=True)
    for k in np.argsort(first):
        if sizes[k] > best_size:
            best, best_size = int(found[k]), int(sizes[k])
    return best


def _next_true(flags: np.ndarray) -> np.ndarray:
    """(n + 1,): the first position >= i where flags holds, n if there is none."""
    n = len(flags)
    positions = np.where(flags, np.arange(n), n)
    return np.append(np.minimum.accumulate(positions[::-1])[::-1], n)


# -- tokens that are not the encoding of their text ----------------------------------------------


def _byte_offsets(tokens: np.ndarray, tokenizer: Any) -> tuple[str, np.ndarray] | None:
    """(text, offsets (n, 2)) spelt by byte-level tokens; None for other tokenizers."""
    inner = backend(tokenizer)
    special = special_ids(tokenizer)
    alphabet = byte_alphabet()
    pieces: list[bytes] = []
    for token in tokens.tolist():
        name = inner.id_to_token(token)
        if name is None:
            return None
        if token in special:
            pieces.append(name.encode("utf-8"))
        elif all(c in alphabet for c in name):
            pieces.append(bytes(alphabet[c] for c in name))
        else:
            return None
    text, first, last = _characters_of(b"".join(pieces))
    ends = np.cumsum([len(piece) for piece in pieces])
    starts = ends - [len(piece) for piece in pieces]
    offsets = [
        (first[a], last[b - 1] + 1) if a < b else (0, 0) for a, b in zip(starts, ends, strict=True)
    ]
    return text, np.array(offsets, dtype=np.int64).reshape(-1, 2)


def _characters_of(raw: bytes) -> tuple[str, list[int], list[int]]:
    """Text of bytes (faults become U+FFFD) and the first and last character of each byte."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    characters: list[str] = []
    first: list[int] = []
    last: list[int] = []
    pending = 0
    for position in range(len(raw) + 1):
        at_end = position == len(raw)
        out = decoder.decode(raw[position : position + 1], final=at_end)
        pending += 0 if at_end else 1
        if not out:
            continue
        # More than one character: faulty bytes were given up before the last one.
        low, high = len(characters), len(characters) + len(out) - 1
        alone = 1 if len(out) > 1 and not at_end else 0
        first += [low] * (pending - alone) + [high] * alone
        last += [high - alone] * (pending - alone) + [high] * alone
        characters += out
        pending = 0
    return "".join(characters), first, last


@cache
def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte.

    Printable Latin-1 bytes are written as themselves, the others as the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + k): byte for k, byte in enumerate(hidden)
    }
