"""Token files of nanoGPT and llm.c, against files written by their own rules."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from satlens.data.corpora import read_corpus
from satlens.data.sources import open_source
from satlens.data.tokenizers import encode, train_bpe
from satlens.errors import DataError

END = 50256


@pytest.fixture(scope="module")
def words():
    """A tokenizer with GPT-2's ids: 50,256 words, then the end of text; no word has id 7."""
    vocabulary = {f"w{k}": k for k in range(END) if k != 7}
    return Tokenizer(WordLevel({**vocabulary, "<|endoftext|>": END}, unk_token="w0"))


@pytest.fixture(scope="module")
def few():
    """A small tokenizer: words 0 to 20, then the end of text."""
    return Tokenizer(WordLevel({**{f"w{k}": k for k in range(21)}, "<|endoftext|>": 21}))


def llmc(tokens, magic=20240520, version=1, count=None, dtype="<u2"):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.asarray(tokens, dtype=dtype).tobytes()


def fails(path, tokenizer, *parts):
    with pytest.raises(DataError) as caught:
        list(read_corpus(path, tokenizer=tokenizer))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@settings(deadline=None, max_examples=50)
@given(
    documents=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=12), max_size=20),
    gaps=st.lists(st.integers(1, 3), min_size=21, max_size=21),
    before=st.booleans(),
    after=st.booleans(),
    limit=st.integers(1, 60),
    packed=st.booleans(),
)
def test_pieces_have_every_document_once(few, documents, gaps, before, after, limit, packed):
    """Separators before, after and between documents, alone or repeated; pieces of any size."""
    stream, expected = [21] * before, []
    for number, (document, gap) in enumerate(zip(documents, gaps, strict=False)):
        expected.append((f"a.bin#{len(stream)}", document))
        stream += document
        if after or number + 1 < len(documents):
            stream += [21] * gap
    if not stream:
        return
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("satlens.data.sources.token_files.PIECE_TOKENS", limit)
        patch.setattr("satlens.data.sources.token_files._BLOCK", 5)
        path = Path(folder) / "a.bin"
        path.write_bytes(llmc(stream) if packed else np.array(stream, "<u2").tobytes())
        source = open_source(path, tokenizer=few)
        assert len(source.pieces) == -(-len(stream) // limit)
        found = {p.index: list(source.read(p)) for p in reversed(source.pieces)}
    read = [d for index in range(len(found)) for d in found[index]]
    assert [(d.id, d.tokens.tolist()) for d in read] == expected
    assert [d.text for d in read] == [" ".join(f"w{t}" for t in ids) for _, ids in expected]


def test_documents_are_those_that_were_encoded(tmp_path):
    """nanoGPT's preparation: each text encoded, then the end-of-text token."""
    texts = ["One text.", "Another: 😀 é", "  spaces\n\nand lines ", "\ufeffmarked"]
    tokenizer = train_bpe(texts, 300)
    tokens = encode(tokenizer, texts)
    stream = np.concatenate([part for ids in tokens for part in (ids, [0])])
    (tmp_path / "train.bin").write_bytes(stream.astype("<u2").tobytes())
    source = open_source(tmp_path / "train.bin", tokenizer=tokenizer)
    documents = list(pickle.loads(pickle.dumps(source)).read(source.pieces[0]))
    assert [d.text for d in documents] == texts
    for document, ids in zip(documents, tokens, strict=True):
        assert document.tokens.tolist() == ids.tolist()


def test_llmc_with_32_bits_separates_by_the_begin_token(tmp_path):
    """llm.c's Llama-3 shards begin documents with <|begin_of_text|>."""
    vocabulary = {"a": 70_000, "b": 1, "<|begin_of_text|>": 70_001, "<|end_of_text|>": 70_002}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="b"))
    stream = [70_001, 70_000, 1, 70_001, 1]
    path = tmp_path / "train_000001.bin"
    path.write_bytes(llmc(stream, 20240801, 7, dtype="<u4"))
    found = [(d.id, d.text) for d in read_corpus(path, tokenizer=tokenizer)]
    assert found == [("train_000001.bin#1", "a b"), ("train_000001.bin#4", "b")]


def test_a_folder_of_shards(tmp_path, words):
    (tmp_path / "b.bin").write_bytes(llmc([END, 10, 11]))
    (tmp_path / "a.bin").write_bytes(np.array([12, 13, END], "<u2").tobytes())
    found = [(d.id, d.tokens.tolist()) for d in read_corpus(tmp_path, tokenizer=words)]
    assert found == [("a.bin#0", [12, 13]), ("b.bin#1", [10, 11])]


def test_ids_outside_of_the_vocabulary(tmp_path, words):
    path = tmp_path / "a.bin"
    for bad in (7, END + 1, 65_535):
        path.write_bytes(np.array([9, END, 10, bad, END], "<u2").tobytes())
        fails(path, words, f"{path}: token 3: id {bad} is not in the tokenizer's vocabulary")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "no tokens"),
        (b"\x09\x00\x09", "size: 3 bytes are no whole number of uint16 tokens"),
        (llmc([]), "no tokens"),
        (llmc([9] * 10)[:-2], "size: truncated (1042 bytes, 1044 by its header)"),
        (llmc([9] * 10) + b"\0", "size: has trailing bytes"),
        (llmc([9] * 10)[:100], "header: truncated (100 of 1024 bytes)"),
        (llmc([9], version=2), "version: 2, llm.c's magic 20240520 goes with 1"),
        (llmc([9], count=-1), "number of tokens: -1"),
        (llmc([9], magic=20240522), "multiple-choice questions"),
        (b"SATLENSD" + bytes(56), "a shard of prepared data"),
    ],
)
def test_bad_files(tmp_path, words, content, part):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    fails(path, words, str(path), part)


def test_texts_are_checked(tmp_path):
    tokenizer = train_bpe(["words"], 300)
    path = tmp_path / "a.bin"
    for text, fault in (("a\0b", "NUL character at position 1"), (" \n ", "empty document")):
        ids = encode(tokenizer, ["fine", text])
        path.write_bytes(np.concatenate([ids[0], [0], ids[1]]).astype("<u2").tobytes())
        fails(path, tokenizer, f"{path}: document at token {len(ids[0]) + 1}: {fault}")


def test_a_tokenizer_is_needed_and_must_have_an_end(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(20))
    fails(path, None, f"{path}: a token file needs the tokenizer")
    fails(path, Tokenizer(WordLevel({"a": 0}, unk_token="a")), "no end-of-document token")


def test_a_file_that_became_shorter_is_noticed(tmp_path, words):
    path = tmp_path / "a.bin"
    path.write_bytes(np.array([9, END, 10, 11], "<u2").tobytes())
    source = open_source(path, tokenizer=words)
    path.write_bytes(np.array([9, END], "<u2").tobytes())
    with pytest.raises(DataError, match="became shorter"):
        list(source.read(source.pieces[0]))
