"""Preparing a corpus and opening it again."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from satlens.data import prepare as prepare_module
from satlens.data.corpora import SPLITS, read_corpus, split_of
from satlens.data.dataset import PreparedDataset, checksum_of
from satlens.data.prepare import prepare
from satlens.data.tokenizers import decode, fingerprint, train_bpe
from satlens.errors import DataError


@pytest.fixture
def copy(prepared, tmp_path):
    """A copy of the prepared folder to damage."""
    return shutil.copytree(prepared.path, tmp_path / "copy")


def edit_manifest(folder, sound=True, **changes):
    """Change the manifest; ``sound`` recomputes its checksum, as an attacker would."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text()) | changes
    if sound:
        manifest["checksum"] = checksum_of(manifest)
    file.write_text(json.dumps(manifest))


# -- content -------------------------------------------------------------------------------------


def test_documents_come_back_in_their_splits(jsonl, prepared):
    corpus = list(read_corpus(jsonl))
    for name in SPLITS:
        split = prepared.split(name)
        expected = [d for d in corpus if split_of(d.id, len(corpus)) == name]
        assert [(d.id, d.text, d.cluster) for d in split.documents] == expected
        assert all(decode(prepared.tokenizer, d.tokens) == d.text for d in split.documents)
        assert np.array_equal(np.concatenate([d.tokens for d in split.documents]), split.tokens)
        assert split.n_tokens == prepared.manifest["splits"][name]["n_tokens"]
        assert split.end_id == 0
        assert 0 not in split.tokens


def test_tokenizer_is_trained_on_the_train_split_alone(jsonl, prepared):
    texts = [d.text for d in prepared.split("train").documents]
    assert prepared.fingerprint == fingerprint(train_bpe(texts, 400))


def test_cluster_by_id_prefix(jsonl, tmp_path):
    data = prepare(jsonl, tmp_path / "out", vocab_size=300, cluster_field="id-prefix")
    assert all(d.cluster == d.id.split("-")[0] for d in data.split("train").documents)


def test_bytes_do_not_depend_on_workers_or_process(jsonl, prepared, tmp_path):
    code = (
        "from satlens.data.prepare import prepare\n"
        f"prepare({str(jsonl)!r}, {str(tmp_path / 'other')!r}, vocab_size=400)"
    )
    for threads in ("1", "8"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        for file in prepared.path.iterdir():
            assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes(), file.name
        shutil.rmtree(tmp_path / "other")


def test_given_tokenizer_is_used(jsonl, prepared, tmp_path):
    for k, tokenizer in enumerate((prepared.tokenizer, prepared.path, str(prepared.path))):
        data = prepare(jsonl, tmp_path / str(k), tokenizer=tokenizer)
        assert data.sha256 == prepared.sha256


def test_progress_reaches_the_total(jsonl, tmp_path):
    calls = []
    prepare(jsonl, tmp_path / "o", vocab_size=300, progress=lambda *call: calls.append(call))
    assert {stage for stage, _, _ in calls} == {"read", "tokenizer", "tokenise"}
    assert calls[-1] == ("tokenise", 60, 60)


# -- refusals leave nothing behind -----------------------------------------------------------------


def test_existing_folder_is_kept_unless_told(jsonl, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare(jsonl, out, vocab_size=300)  # an empty folder is no obstacle
    with pytest.raises(DataError, match="exists already"):
        prepare(jsonl, out, vocab_size=310)
    assert prepare(jsonl, out, vocab_size=310, overwrite=True).vocab_size == 310
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_tiny_corpus_and_repeated_id(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "text": "one"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: split '\w+' is empty: 1 documents"):
        prepare(path, tmp_path / "out")
    path.write_text('{"id": "x", "text": "one"}\n{"id": "x", "text": "two"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl: field 'id': 'x' occurs twice"):
        prepare(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_interruption_leaves_nothing(jsonl, tmp_path, monkeypatch, fault):
    def broken(*_):
        raise fault

    monkeypatch.setattr(prepare_module, "_manifest", broken)
    expected = KeyboardInterrupt if fault is KeyboardInterrupt else DataError
    with pytest.raises(expected):
        prepare(jsonl, tmp_path / "out", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_second_of_two_writers_is_refused(jsonl, tmp_path, monkeypatch):
    make = prepare_module._manifest

    def slow(*arguments):
        monkeypatch.setattr(prepare_module, "_manifest", make)
        prepare(jsonl, tmp_path / "out", vocab_size=310)
        return make(*arguments)

    monkeypatch.setattr(prepare_module, "_manifest", slow)
    with pytest.raises(DataError, match="cannot be written"):
        prepare(jsonl, tmp_path / "out", vocab_size=300)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert PreparedDataset.open(tmp_path / "out").vocab_size == 310


def test_file_in_the_way(jsonl, tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(DataError, match="file"):
            prepare(jsonl, out, vocab_size=300, overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


# -- damage ----------------------------------------------------------------------------------------


def test_identity_changes_with_the_data(jsonl, prepared, tmp_path):
    lines = jsonl.read_text().splitlines(keepends=True)
    record = json.loads(lines[0])
    (tmp_path / "b.jsonl").write_text(json.dumps(record | {"cluster": "z"}) + "\n")
    with (tmp_path / "b.jsonl").open("a") as stream:
        stream.writelines(lines[1:])
    other = prepare(tmp_path / "b.jsonl", tmp_path / "o", tokenizer=prepared.tokenizer)
    assert other.sha256 != prepared.sha256


def test_damage_to_any_file_is_noticed(copy):
    for file in copy.iterdir():
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 4
        for damaged in (bytes(flipped), whole[:-3], whole + b"\0", b""):
            file.write_bytes(damaged)
            with pytest.raises(DataError) as caught:
                PreparedDataset.open(copy)
            assert file.name in str(caught.value)
            assert "\n" not in str(caught.value)
        file.write_bytes(whole)
    PreparedDataset.open(copy)


@pytest.mark.parametrize("name", ["/etc/passwd", "../train.bin", "a/b", "..", "a\\b", ""])
def test_unsafe_paths_are_refused(copy, name):
    files = json.loads((copy / "manifest.json").read_text())["files"]
    edit_manifest(copy, files=files | {name: "0" * 64})
    with pytest.raises(DataError, match=r"manifest\.json: files: unsafe path"):
        PreparedDataset.open(copy)


@pytest.mark.parametrize(
    ("changes", "sound", "part"),
    [
        ({"format": "other"}, True, "format"),
        ({"version": 2}, True, "version: 2.*newer"),
        ({"version": "1"}, True, "version: '1'"),
        ({"files": []}, True, "files: missing or not of type dict"),
        ({"files": {}}, True, "files: tokenizer.json is missing"),
        ({"splits": {}}, True, "splits.train"),
        ({"sha256": "0" * 64}, True, "sha256"),
        ({"vocab_size": 401}, False, "checksum"),
        ({"tokenizer": "0" * 64}, True, "sha256"),
    ],
)
def test_manifest_fields(copy, changes, sound, part):
    edit_manifest(copy, sound, **changes)
    with pytest.raises(DataError, match=f"manifest.json: {part}"):
        PreparedDataset.open(copy)


def test_counts_must_agree(copy):
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["splits"]["val"]["n_tokens"] += 1
    edit_manifest(copy, splits=manifest["splits"])
    with pytest.raises(DataError, match=r"val\.bin: n_tokens"):
        PreparedDataset.open(copy).split("val")


def test_texts_must_match_the_shard(copy):
    data = PreparedDataset.open(copy)
    split = data.split("val")
    file = copy / "val.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    file.write_bytes(gzip.compress(b"".join(lines[:-1])))
    with pytest.raises(DataError, match=r"val\.jsonl\.gz: \d+ documents"):
        _ = split.documents
    file.write_bytes(gzip.compress(b"".join(lines))[:-9])
    with pytest.raises(DataError, match=r"val\.jsonl\.gz: damaged"):
        _ = split.documents


def test_unknown_split_and_missing_folder(prepared, tmp_path):
    with pytest.raises(DataError, match=r"no split 'dev' \(known: train, val, pool, test\)"):
        prepared.split("dev")
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        PreparedDataset.open(tmp_path)
