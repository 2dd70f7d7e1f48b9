"""Parquet and data sets of the Hub, on a local one with FineWeb-Edu's layout and schema."""

from __future__ import annotations

import builtins
import json
import pickle

import pytest

from satlens.data.corpora import read_corpus
from satlens.data.sources import open_source
from satlens.data.sources.hub import HubName
from satlens.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.string()),
        ("dump", pa.string()),
        ("url", pa.string()),
        ("file_path", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
        ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)
CARD = """\
---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: sample/10BT/*
---
"""


def row(number):
    return {
        "text": f"The text of page {number}, é 😀.",
        "id": f"<urn:uuid:{number}>",
        "dump": "CC-MAIN-2013-20",
        "url": f"http://example.org/{number}",
        "file_path": "s3://commoncrawl/segment.warc.gz",
        "language": "en",
        "language_score": 0.95,
        "token_count": 9,
        "score": 3.2,
        "int_score": 3,
    }


def write(path, numbers, group=10):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([row(k) for k in numbers], SCHEMA)
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture(scope="module")
def fineweb(tmp_path_factory):
    """A folder laid out like FineWeb-Edu; sample-10BT has pages 0 to 31 in two files."""
    folder = tmp_path_factory.mktemp("hub") / "fineweb-edu"
    write(folder / "data" / "CC-MAIN-2013-20" / "train-00000.parquet", range(100, 103))
    write(folder / "sample" / "10BT" / "000_00000.parquet", range(25))
    write(folder / "sample" / "10BT" / "001_00000.parquet", range(25, 32))
    (folder / "README.md").write_text(CARD)
    return folder


def documents_by_piece(source):
    content = pickle.dumps(source)
    return [list(pickle.loads(content).read(piece)) for piece in reversed(source.pieces)][::-1]


def fails(source, *parts, **options):
    with pytest.raises(DataError) as caught:
        list(read_corpus(source, **options))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def pages(numbers):
    return [(row(k)["id"], row(k)["text"], None, None) for k in numbers]


# -- parquet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "sizes"), [(1, [10, 10, 5, 7]), (1200, [10, 15, 7])])
def test_row_groups_are_pieces(fineweb, monkeypatch, limit, sizes):
    monkeypatch.setattr("satlens.data.sources.parquet.PIECE_BYTES", limit)
    source = open_source(fineweb / "sample")
    pieces = documents_by_piece(source)
    assert [len(piece) for piece in pieces] == sizes
    assert [d for piece in pieces for d in piece] == pages(range(32))
    assert source.info == {"name": "sample"}
    assert source.pieces[0].name == "10BT/000_00000.parquet"


def test_a_single_file_and_other_fields(fineweb):
    path = fineweb / "sample" / "10BT" / "001_00000.parquet"
    found = list(read_corpus(path, text_field="url", id_field="token_count", cluster_field="dump"))
    assert found[0] == ("9", "http://example.org/25", "CC-MAIN-2013-20", None)
    fails(path, f"{path}: field 'body': missing (there are: text, id,", text_field="body")
    fails(path, f"{path}: field 'uuid': missing", id_field="uuid")
    fails(path, f"{path}: field 'book': missing", cluster_field="book")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ("field 'text': NoneType, not a text",)),
        ("", ("field 'text': empty document",)),
        ("a\0", ("field 'text': NUL character at position 1",)),
        ("page 3", ("field 'text': repeats row 3 (from 0); give ids",)),
    ],
)
def test_bad_rows_are_named(tmp_path, text, parts):
    texts = [f"page {k}" for k in range(30)]
    texts[17] = text
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path, row_group_size=8)
    fails(path, f"{path}: row 17 (from 0): ", *parts)


def test_bytes_that_are_not_utf8(tmp_path):
    texts = pa.array([b"fine"] * 12 + [b"ab\xff"] + [b"more"] * 3, pa.binary())
    unchecked = pa.Array.from_buffers(pa.string(), len(texts), texts.buffers())
    numbers = pa.array(range(16), pa.int64())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": numbers, "text": unchecked}), path, row_group_size=10)
    fails(path, f"{path}: row 12 (from 0): field 'text': not UTF-8 (byte 0xff at 2)")


def test_ids_and_columns_of_other_types(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [b"bytes"]}), path)
    fails(path, "row 0 (from 0): field 'text': bytes, not a text")
    pq.write_table(pa.table({"text": ["fine"], "id": [1.5]}), path)
    fails(path, "row 0 (from 0): field 'id': float, not a text or an integer")
    pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).dictionary_encode()}), path)
    fails(path, "row 2 (from 0): field 'text': repeats row 0")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    assert list(read_corpus(path)) == []


def test_damaged_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [f"page {k} " + "word " * 50 for k in range(200)]
    pq.write_table(pa.table({"text": texts}), path, write_page_checksum=True)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for damaged in (whole[:-20], whole[:100], b"PAR1", b"", bytes(flipped)):
        path.write_bytes(damaged)
        fails(path, f"{path}: damaged parquet file")


def test_parquet_without_the_extra(fineweb, monkeypatch):
    real = builtins.__import__

    def missing(name, *args):
        if name.split(".")[0] in ("pyarrow", "datasets"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", missing)
    fails(fineweb / "sample", "parquet needs pyarrow: pip install 'satlens[data]'")
    fails(f"hf:{fineweb}:sample-10BT", "streaming needs datasets: pip install 'satlens[data]'")


# -- the Hub ---------------------------------------------------------------------------------------


def test_streamed_parts_have_every_row_once(fineweb, monkeypatch):
    source = open_source(f"hf:{fineweb}:sample-10BT")
    assert source.info == {"name": "fineweb-edu", "config": "sample-10BT", "split": "train"}
    pieces = documents_by_piece(source)
    assert [len(piece) for piece in pieces] == [10, 10, 5, 7]
    assert [d for piece in pieces for d in piece] == pages(range(32))
    monkeypatch.setattr("satlens.data.sources.hub._MOST_PIECES", 3)
    fewer = open_source(f"hf:{fineweb}:sample-10BT")
    assert len(fewer.pieces) == 3
    assert [d for piece in documents_by_piece(fewer) for d in piece] == pages(range(32))
    assert fewer.identity != source.identity


def test_streaming_gives_what_the_files_give(fineweb):
    files = list(read_corpus(fineweb / "sample" / "10BT", cluster_field="dump"))
    assert list(read_corpus(f"hf:{fineweb}:sample-10BT", cluster_field="dump")) == files
    assert [d.id for d in read_corpus(f"hf:{fineweb}")] == [row(k)["id"] for k in range(100, 103)]


def test_streaming_json_lines(tmp_path):
    lines = [json.dumps({"text": f"line {k}", "id": k}) for k in range(5)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    assert [d.id for d in read_corpus(f"hf:{tmp_path}")] == list("01234")
    (tmp_path / "train.jsonl").write_text('{"text": ""}\n')
    fails(f"hf:{tmp_path}", "part 0 of 1: row 0 (from 0): field 'text': empty document")


def test_hub_errors_are_one_line(fineweb, monkeypatch):
    fails(f"hf:{fineweb}:sample-9BT", "sample-9BT", "sample-10BT")
    fails(f"hf:{fineweb}:sample-10BT:test", "Bad split: test")
    fails(f"hf:{fineweb}:sample-10BT", "field 'body': missing", text_field="body")
    fails(f"hf:{fineweb}@main", "a local folder has no revision ('main')")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    fails("hf:nobody/nothing", "hf:nobody/nothing: cannot be opened", "offline")


def test_a_network_fault_while_streaming_can_be_tried_again(fineweb, monkeypatch):
    source = open_source(f"hf:{fineweb}:sample-10BT")

    class Broken:
        def shard(self, n, index):
            return self

        def __iter__(self):
            yield row(1)
            raise RuntimeError("connection reset\nby peer")

    monkeypatch.setattr(source, "_local", False)
    monkeypatch.setattr(source, "_dataset", Broken())
    documents = source.read(source.pieces[1])
    assert next(documents).id == row(1)["id"]
    with pytest.raises(ConnectionError, match=r"part 1 of 4: cannot be read \(connection reset\)$"):
        next(documents)


def test_a_published_data_set_is_pinned_to_its_commit(fineweb, monkeypatch):
    """The revision is resolved once; the same commit is streamed, recorded and identified."""
    import datasets
    import huggingface_hub

    asked = []
    real = datasets.load_dataset

    class About:
        sha = "87f0914"
        card_data = type("Card", (), {"license": "odc-by"})()

    def dataset_info(self, name, revision):
        asked.append((name, revision))
        return About()

    def load(name, config, *, split, revision, streaming):
        asked.append((name, revision))
        return real(str(fineweb), config, split=split, streaming=streaming)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = open_source("hf:HuggingFaceFW/fineweb-edu@v1.0.0:sample-10BT")
    name = "HuggingFaceFW/fineweb-edu"
    assert asked == [(name, "v1.0.0"), (name, "87f0914")]
    assert source.info == {
        "name": name,
        "config": "sample-10BT",
        "split": "train",
        "revision": "87f0914",
        "licence": "odc-by",
    }
    About.sha = "1427d0d"
    assert open_source("hf:HuggingFaceFW/fineweb-edu:sample-10BT").identity != source.identity


def test_names_of_data_sets():
    parse = HubName.parse
    assert parse("hf:a/b") == ("a/b", None, None, "train")
    assert parse("hf:a/b@c:d:e") == ("a/b", "c", "d", "e")
    assert parse("hf:a/b::val") == ("a/b", None, None, "val")
    for bad in ("hf:", "hf::x", "hf:a:b:c:d"):
        with pytest.raises(DataError, match="is expected"):
            parse(bad)
