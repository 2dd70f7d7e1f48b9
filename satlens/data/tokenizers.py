"""Tokenizers: byte-level BPE of our own, any ``tokenizers`` JSON, and their fingerprints.

Policy: a document is encoded without BOS or EOS, and a special token spelt out in a text is
ordinary text (a document cannot forge a separator). The one end-of-document token is added by
the packed training stream (:mod:`satlens.data.batches`) and by nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from satlens.errors import DataError

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
_END_NAMES = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[SEP]")
_N_BYTES = 256
_LARGEST = 10_000_000


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's split rule, no normalisation) on texts.

    ``<|endoftext|>`` has id 0, the 256 bytes follow, so that every text can be encoded. Training is
    deterministic. Offsets are in characters and include a word's leading space.

    Raises:
        DataError: a vocabulary too small for the bytes, or absurdly large.
    """
    if vocab_size <= _N_BYTES:
        raise DataError(f"vocab_size: must exceed {_N_BYTES} (one token a byte), got {vocab_size}")
    if vocab_size > _LARGEST:  # the trainer sets aside memory for all of it
        raise DataError(f"vocab_size: must not exceed {_LARGEST:,}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read ``tokenizer.json``, or the one in a folder; truncation and padding are switched off.

    Raises:
        DataError: no such file, or not a tokenizer.
    """
    path = Path(path)
    file = path / TOKENIZER_FILE if path.is_dir() else path
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from None
    try:
        tokenizer = Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file}: not a tokenizer ({str(error).splitlines()[0]})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def backend(tokenizer: Any) -> Tokenizer:
    """The ``tokenizers.Tokenizer`` of a tokenizer: itself, or inside a Hugging Face fast one.

    Raises:
        DataError: a slow tokenizer (no character offsets) or another object.
    """
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(inner, Tokenizer):
        raise DataError(f"tokenizer: {type(tokenizer).__name__} is not a fast tokenizer")
    return inner


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 (hex) of the tokenizer's canonical JSON.

    Run-time settings (padding, truncation) and the two spellings of merges do not count.
    """
    content = json.loads(backend(tokenizer).to_str())
    content.pop("padding", None)
    content.pop("truncation", None)
    merges = content["model"].get("merges")
    if merges is not None:
        content["model"]["merges"] = [m.split(" ") if isinstance(m, str) else m for m in merges]
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def vocab_size(tokenizer: Any) -> int:
    """One more than the largest token id (added tokens included)."""
    return max(backend(tokenizer).get_vocab(with_added_tokens=True).values(), default=-1) + 1


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of the special tokens: excluded from statistics and scores, and counted apart."""
    added = backend(tokenizer).get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)


def end_id(tokenizer: Any) -> int:
    """Id of the end-of-document token.

    Raises:
        DataError: the tokenizer has none under a usual name.
    """
    inner = backend(tokenizer)
    for name in _END_NAMES:
        index = inner.token_to_id(name)
        if index is not None:
            return index
    raise DataError(f"tokenizer: no end-of-document token (looked for {', '.join(_END_NAMES)})")


def encode(tokenizer: Any, texts: Sequence[str]) -> list[np.ndarray]:
    """Token ids (int64) of each text, without special tokens."""
    return [ids for ids, _ in _encode(tokenizer, texts)]


def encode_with_offsets(
    tokenizer: Any, texts: Sequence[str]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids (n,), offsets (n, 2)) of each text; offsets are character positions [start, end).

    Bytes of one character that fall into several tokens all carry that character's offsets.
    """
    return [
        (ids, np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2))
        for ids, encoding in _encode(tokenizer, texts)
    ]


def decode(tokenizer: Any, tokens: Iterable[int]) -> str:
    """Text of tokens; special tokens are spelt out."""
    return backend(tokenizer).decode([int(t) for t in tokens], skip_special_tokens=False)


def _encode(tokenizer: Any, texts: Sequence[str]) -> Iterator[tuple[np.ndarray, Any]]:
    inner = backend(tokenizer)
    before = inner.encode_special_tokens
    inner.encode_special_tokens = True  # "<|endoftext|>" in a text is text
    try:
        encodings = inner.encode_batch(list(texts), add_special_tokens=False)
    finally:
        inner.encode_special_tokens = before
    for encoding in encodings:
        yield np.array(encoding.ids, dtype=np.int64), encoding
