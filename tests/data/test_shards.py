from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satlens.data.shards import ShardWriter, file_sha256, read_shard
from satlens.errors import DataError

MADE_BY = "ab" * 32
VOCABULARY = 1000


def write(path, documents, vocab_size=VOCABULARY):
    with ShardWriter(path, vocab_size=vocab_size, fingerprint=MADE_BY) as writer:
        for k, tokens in enumerate(documents):
            writer.add(np.array(tokens, dtype=np.int64), str(k))
    return writer.info


def read(path, **changes):
    return read_shard(path, **{"vocab_size": VOCABULARY, "fingerprint": MADE_BY, **changes})


@pytest.fixture
def shard(tmp_path):
    path = tmp_path / "s.bin"
    info = write(path, [[1, 2, 3], [4], [5, 999]])
    return path, info


@given(
    documents=st.lists(st.lists(st.integers(0, 69_999), min_size=1, max_size=9), min_size=1),
    wide=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_round_trip(tmp_path_factory, documents, wide):
    path = tmp_path_factory.mktemp("shard") / "s.bin"
    vocab_size = 70_000 if wide else 65_536
    documents = documents if wide else [[t % 65_536 for t in d] for d in documents]
    info = write(path, documents, vocab_size)
    assert info == (file_sha256(path), len(documents), sum(map(len, documents)))
    tokens, ends = read(path, vocab_size=vocab_size, sha256=info.sha256)
    assert tokens.dtype.itemsize == (4 if wide else 2)
    assert [part.tolist() for part in np.split(tokens, ends[:-1])] == documents


def test_same_documents_same_bytes(tmp_path):
    digests = {write(tmp_path / name, [[1], [2, 3]]).sha256 for name in "ab"}
    assert len(digests) == 1


def test_every_flipped_bit_is_noticed(shard):
    path, info = shard
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"s\.bin"):
            read(path, sha256=info.sha256)


def test_every_truncation_and_every_tail_is_noticed(shard):
    path, _ = shard
    whole = path.read_bytes()
    for damaged in [*(whole[:n] for n in range(len(whole))), whole + b"\0", whole + whole]:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"s\.bin: (header|size)"):
            read(path)


@pytest.mark.parametrize(
    ("offset", "layout", "value", "part"),
    [
        (0, "<8s", b"NOTSHARD", "magic"),
        (8, "<I", 2, "version: 2.*newer"),
        (8, "<I", 0, "version: 0"),
        (12, "<I", 3, "dtype"),
        (16, "<Q", 0, "document count"),
        (16, "<Q", 7, "document count"),
        (16, "<Q", 2, "trailing"),
        (24, "<Q", 5, "trailing"),
        (24, "<Q", 2**60, "truncated"),
        (32, "<8s", b"x" * 8, "tokenizer"),
        (64, "<H", 1000, "token id 1000 outside the vocabulary"),
        (76, "<Q", 0, "document index"),
        (92, "<Q", 7, "document index"),
    ],
)
def test_each_field_is_checked_without_a_digest(shard, offset, layout, value, part):
    path, _ = shard
    content = bytearray(path.read_bytes())
    struct.pack_into(layout, content, offset, value)
    path.write_bytes(content)
    with pytest.raises(DataError, match=part):
        read(path)


def test_reader_and_writer_refuse_foreign_ids(shard, tmp_path):
    path, _ = shard
    with pytest.raises(DataError, match="token id 999 outside the vocabulary of 999"):
        read(path, vocab_size=999)
    for tokens, part in (([1000], "token id 1000"), ([-1], "token id -1"), ([], "no tokens")):
        with pytest.raises(DataError, match=f"'0'.*{part}"):
            write(tmp_path / "t.bin", [tokens])


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match=r"none\.bin: cannot be read"):
        read(tmp_path / "none.bin")
