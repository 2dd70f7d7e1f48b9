from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satlens.data.shards import (
    JoinedTokens,
    ShardWriter,
    file_sha256,
    join_shards,
    read_shard,
    shard_sha256,
)
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


# -- several shards --------------------------------------------------------------------------------


@given(
    parts=st.lists(st.lists(st.integers(0, 999), min_size=1, max_size=6), min_size=1, max_size=6),
    data=st.data(),
)
@settings(deadline=None, max_examples=200)
def test_joined_tokens_are_one_array(parts, data):
    joined = JoinedTokens([np.array(part, dtype=np.uint16) for part in parts])
    whole = np.concatenate([np.array(part, dtype=np.uint16) for part in parts])
    assert len(joined) == len(whole) and joined.dtype == whole.dtype
    assert np.array_equal(np.asarray(joined), whole)
    bound = st.none() | st.integers(-len(whole) - 2, len(whole) + 2)
    start, stop = data.draw(bound), data.draw(bound)
    step = data.draw(st.sampled_from([None, 1, 2, -1]))
    found = joined[start:stop:step]
    assert found.dtype == whole.dtype and found.tolist() == whole[start:stop:step].tolist()
    place = data.draw(st.integers(-len(whole), len(whole) - 1))
    assert joined[place] == whole[place]
    for outside in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError):
            _ = joined[outside]
    assert list(joined) == whole.tolist()


def test_slice_within_a_shard_is_no_copy():
    parts = [np.arange(4, dtype=np.uint16), np.arange(9, dtype=np.uint16)]
    joined = JoinedTokens(parts)
    assert np.shares_memory(joined[5:8], parts[1]) and np.shares_memory(joined[1:4], parts[0])


def test_digest_of_several_shards_is_that_of_one(tmp_path):
    documents = [np.array(d) for d in ([1, 2, 3], [4], [5, 999], [6, 7])]
    one = write(tmp_path / "one.bin", documents)
    write(tmp_path / "a.bin", documents[:3])
    write(tmp_path / "b.bin", documents[3:])
    joined = join_shards([read(tmp_path / name) for name in ("a.bin", "b.bin")])
    assert joined.ends.tolist() == [3, 4, 6, 8]
    lengths = np.diff(joined.ends, prepend=0)
    made = {"vocab_size": VOCABULARY, "fingerprint": MADE_BY}
    assert shard_sha256([np.asarray(joined.tokens)], lengths, **made) == one.sha256
    assert shard_sha256([joined.tokens[:3], joined.tokens[3:]], lengths, **made) == one.sha256


def test_blocks_and_lengths_must_agree(tmp_path):
    with (
        pytest.raises(DataError, match=r"s\.bin: tokens and lengths of documents disagree"),
        ShardWriter(tmp_path / "s.bin", vocab_size=VOCABULARY, fingerprint=MADE_BY) as writer,
    ):
        writer.extend([np.array([1, 2])], np.array([3]))


def test_unverified_reading_skips_the_token_ids_alone(shard):
    path, _ = shard
    assert read(path, vocab_size=999, verify=False).tokens.tolist() == [1, 2, 3, 4, 5, 999]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="truncated"):
        read(path, verify=False)
