"""What tokens spell: joined the document's text, in bytes that add up."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from satlens.data.dataset import DocumentTokens
from satlens.data.token_text import Spelling, shown, shown_tokens
from satlens.data.tokenizers import encode, train_bpe

TEXT = "the cat — “sat” on café 日本 😀 the  mat\n\nand don't"
BYTE_LEVEL = train_bpe([TEXT] * 5, 320)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


def document(text: str, tokenizer: Tokenizer) -> DocumentTokens:
    (ids,) = encode(tokenizer, [text])
    return DocumentTokens("d", None, ids, text)


def sentencepiece() -> Tokenizer:
    """Words after a metaspace, single bytes for everything else, as Llama's tokenizers."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "a", "t"]
    vocabulary = {name: k for k, name in enumerate(names)}
    merges = [("▁", "t")] if "▁t" in vocabulary else []
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def wordpiece() -> Tokenizer:
    vocabulary = {name: k for k, name in enumerate(["[UNK]", "the", "cat", "##s", "mat", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


TOKENIZERS = {"byte level": BYTE_LEVEL, "bytes": sentencepiece(), "words": wordpiece()}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
@settings(deadline=None, max_examples=60)
def test_tokens_together_spell_the_text(name, text):
    tokenizer = TOKENIZERS[name]
    whole = document(text, tokenizer)
    spelling = Spelling(tokenizer)
    pieces = spelling.pieces(whole)
    assert pieces is not None
    joined = b"".join(pieces)
    assert text.encode().startswith(joined)
    rest = text.encode()[len(joined) :].decode()
    assert not rest or (name == "words" and rest.isspace()), "words end before white space"
    lengths = spelling.lengths(whole)
    assert lengths is not None and lengths.tolist() == [len(piece) for piece in pieces]
    cut = whole._replace(tokens=whole.tokens[:2])
    assert spelling.pieces(cut) == pieces[:2]


def test_characters_that_tokens_share_are_shown_as_bytes():
    text = "ok 😺\r\n"
    own = Spelling(BYTE_LEVEL)
    found = own.pieces(document(text, BYTE_LEVEL))
    assert found is not None
    assert "".join(map(shown, found)).replace("‹", " ").replace("›", " ").split() == [
        *("ok", "F0", "9F", "98", "BA"),
    ]
    assert shown("😺".encode()) == "😺" and shown(b"a\xe2\x80") == "a‹E2›‹80›"
    pieces = Spelling(sentencepiece()).pieces(document("the é", sentencepiece()))
    assert pieces is not None and b"".join(pieces) == "the é".encode()
    assert shown_tokens(pieces, np.arange(len(pieces)))[-2:] == ["‹C3›", "‹A9›"]


def test_special_and_added_tokens_are_spelt_out():
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.add_tokens([AddedToken("Ġ!", normalized=False)])
    ids = np.array([0, tokenizer.token_to_id("Ġ!")])
    spelling = Spelling(tokenizer)
    given_ids = DocumentTokens("d", None, ids, "<|endoftext|>Ġ!")
    assert spelling.pieces(given_ids) == [b"<|endoftext|>", "Ġ!".encode()]
    assert shown_tokens(spelling.pieces(given_ids._replace(tokens=np.array([9999]))), ids[:1]) == [
        "‹#0›"
    ]


def test_a_space_that_the_tokenizer_puts_first_is_not_the_documents():
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    whole = document("the mat", tokenizer)
    spelling = Spelling(tokenizer)
    pieces, lengths = spelling.pieces(whole), spelling.lengths(whole)
    assert pieces is not None and b"".join(pieces) == b"the mat"
    assert lengths is not None and lengths.sum() == 7


def test_tokens_that_do_not_encode_their_text_are_not_known():
    spelling = Spelling(wordpiece())
    assert spelling.pieces(DocumentTokens("d", None, np.array([1, 2]), "")) is None
    other = DocumentTokens("d", None, np.array([2, 1]), "the cat")
    assert spelling.pieces(other) is None and spelling.lengths(other) is None
    assert shown_tokens(None, other.tokens) == ["‹#2›", "‹#1›"]
