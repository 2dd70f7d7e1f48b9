"""Local files: the same rows in every format, and faults named by file, line and field."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest

from satlens.errors import DataError
from satlens.tasks.sources import local_rows
from satlens.tasks.suite import GROUPS, task_spec

NQ = task_spec("nq")


@pytest.mark.parametrize("name", [name for group in GROUPS.values() for name in group])
def test_every_task_reads_its_sample(name, samples, sample_rows):
    spec = task_spec(name)
    rows, path = local_rows(samples, spec, spec.split)
    given = sample_rows(spec.data)
    assert path == samples / f"{spec.data}.jsonl"
    assert [{field: row[field] for field in spec.fields} for row in given] == [
        {field: row[field] for field in spec.fields} for row in rows
    ]


def test_formats_and_places_hold_the_same_rows(samples, sample_rows, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    expected, _ = local_rows(samples, NQ, "validation")
    text = (samples / "nq.jsonl").read_text(encoding="utf-8")
    marked = "\ufeff" + text.replace("\n", "\r\n\r\n")  # a mark, empty lines, other line ends
    table = pyarrow.Table.from_pylist(sample_rows("nq"))
    writers = {
        "nq.jsonl": lambda path: path.write_bytes(marked.encode()),
        "nq.jsonl.gz": lambda path: path.write_bytes(gzip.compress(text.encode())),
        "nq.parquet": lambda path: parquet.write_table(table, path),
        "nq/validation.jsonl": lambda path: path.write_text(text, encoding="utf-8"),
    }
    for number, (name, write) in enumerate(writers.items()):
        path = tmp_path / str(number) / name
        path.parent.mkdir(parents=True)
        write(path)
        assert local_rows(tmp_path / str(number), NQ, "validation") == (expected, path)
    assert len(local_rows(tmp_path / "2", NQ, "validation", limit=2)[0]) == 2


def test_a_limit_reads_no_further(tmp_path):
    good = {"context": "c.", "question": "q", "answers": ["a"]}
    (tmp_path / "nq.jsonl").write_text(f"{json.dumps(good)}\nnot JSON\n")
    assert local_rows(tmp_path, NQ, "validation", limit=1)[0] == [good]


GOOD = {
    "nq": {"context": "c.", "question": "q", "answers": ["a"]},
    "hellaswag": {
        "activity_label": "a",
        "ctx_a": "b",
        "ctx_b": "",
        "endings": ["1", "2", "3", "4"],
        "label": "0",
    },
    "winogrande": {"sentence": "a _ b", "option1": "x", "option2": "y", "answer": "1"},
    "arc-easy": {
        "question": "q",
        "choices": {"text": ["x", "y"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "boolq": {"passage": "p", "question": "q", "label": 1},
    "lambada": {"text": "a b"},
}
FAULTS = [
    ("nq", {"answers": None}, "field 'answers': input should be a valid list"),
    ("nq", {"answers": []}, "field 'answers': list should have at least 1 item"),
    ("nq", {"answers": [" "]}, "field 'answers': all are empty"),
    ("nq", {"answers": [3]}, "field 'answers.0': input should be a valid string"),
    ("nq", {"question": ""}, "field 'question': empty text"),
    ("nq", {"context": 7}, "field 'context': input should be a valid string"),
    ("hellaswag", {"endings": ["1"]}, "field 'endings': list should have at least 4"),
    ("hellaswag", {"label": 0}, "field 'label': input should be '0', '1', '2' or '3'"),
    ("winogrande", {"sentence": "a b"}, "field 'sentence': has no blank"),
    ("arc-easy", {"answerKey": "C"}, "field 'answerKey': 'C' is none of the labels"),
    ("arc-easy", {"choices": ["x", "y"]}, "field 'choices': "),
    ("boolq", {"label": 2}, "field 'label': input should be 0 or 1"),
    ("lambada", {"text": "alone"}, "field 'text': one word alone"),
    ("lambada", {"text": " alone"}, "field 'text': one word alone"),
    ("nq", {"question": "a\ud800"}, "field 'question': lone surrogate U+D800 at 1"),
    ("hellaswag", {"ctx_b": "\udfff"}, "field 'ctx_b': lone surrogate U+DFFF at 0"),
]


@pytest.mark.parametrize(("name", "change", "says"), FAULTS)
def test_a_fault_names_file_line_and_field(name, change, says, tmp_path):
    path = tmp_path / f"{name}.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in (GOOD[name], GOOD[name] | change)))
    with pytest.raises(DataError) as caught:
        local_rows(tmp_path, task_spec(name), task_spec(name).split)
    assert str(caught.value).startswith(f"{path}: line 2: {says}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_is_named(name, tmp_path):
    spec = task_spec(name)
    for field in spec.fields:
        row = {key: value for key, value in GOOD[name].items() if key != field}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        with pytest.raises(DataError, match=rf"line 1: field '{field}': field required"):
            local_rows(tmp_path, spec, spec.split)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("nq.jsonl", b"{\n", r"nq\.jsonl: line 1: not JSON"),
        ("nq.jsonl", b'{"context": "\xff"}\n', r"nq\.jsonl: line 1: not JSON"),
        ("nq.jsonl", b"[1]\n", r"nq\.jsonl: line 1: list, not an object"),
        ("nq.jsonl", b"\n\n", r"nq\.jsonl: no rows"),
        ("nq.jsonl.gz", gzip.compress(b"\n" * 9, mtime=0)[:-9], r"nq\.jsonl\.gz: damaged gzip"),
        ("nq.jsonl.gz", b"plain", r"nq\.jsonl\.gz: damaged gzip"),
        ("nq.parquet", b"plain", r"nq\.parquet: not readable as parquet"),
        ("nq.txt", b"", r"no nq or nq/validation \(\.jsonl or .*answers"),
    ],
)
def test_unreadable_files_are_one_line(file, content, says, tmp_path):
    if file.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match=says) as caught:
        local_rows(tmp_path, NQ, "validation")
    assert "\n" not in str(caught.value)


def test_parquet_faults_name_the_row(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist([{"context": "c"}]), tmp_path / "nq.parquet")
    with pytest.raises(DataError, match=r"nq\.parquet: row 1: field 'question': field required"):
        local_rows(tmp_path, NQ, "validation")


def test_two_files_of_one_split_are_refused(samples, tmp_path):
    (tmp_path / "nq").mkdir()
    for name in ("nq.jsonl", "nq/validation.jsonl"):
        shutil.copy(samples / "nq.jsonl", tmp_path / name)
    with pytest.raises(DataError, match=r"nq\.jsonl: .*validation\.jsonl has the same split"):
        local_rows(tmp_path, NQ, "validation")


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(DataError, match="not a folder"):
        local_rows(tmp_path / "absent", NQ, "validation")
