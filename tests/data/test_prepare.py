"""Preparing a corpus: what it holds, and what is refused."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from listed import Listed, contents, documents

from satlens.cli import main
from satlens.data import stages
from satlens.data.batches import TrainBatches
from satlens.data.corpora import SPLITS, Document, read_corpus, split_of
from satlens.data.dataset import PreparedDataset
from satlens.data.manifest import data_sha256
from satlens.data.merging import plan
from satlens.data.prepare import prepare
from satlens.data.tokenizers import decode, fingerprint, train_bpe
from satlens.errors import DataError

pytestmark = pytest.mark.usefixtures("without_fsync")


# -- content -------------------------------------------------------------------------------------


def test_documents_come_back_in_their_splits(jsonl, prepared):
    corpus = list(read_corpus(jsonl))
    for name in SPLITS:
        split = prepared.split(name)
        expected = [d[:3] for d in corpus if split_of(d.id, len(corpus)) == name]
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


def test_bytes_do_not_depend_on_workers_threads_or_hash_seed(jsonl, prepared, tmp_path):
    code = (
        "from satlens.data.prepare import prepare\n"
        f"prepare({str(jsonl)!r}, {str(tmp_path / 'other')!r}, vocab_size=400)"
    )
    environment = {**os.environ, "RAYON_NUM_THREADS": "8", "PYTHONHASHSEED": "8"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert contents(tmp_path / "other") == contents(prepared.path)
    source, options = Listed(documents(100), 7), {"vocab_size": 300, "shard_tokens": 900}
    prepare(source, tmp_path / "one", **options)
    prepare(source, tmp_path / "two", workers=2, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [3, 5])
def test_bytes_do_not_depend_on_many_workers(tmp_path, workers):
    source = Listed(documents(3000), 100)
    prepare(source, tmp_path / "one", shard_tokens=5000)
    prepare(source, tmp_path / "many", workers=workers, shard_tokens=5000)
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_bytes_do_not_depend_on_the_pieces(tmp_path):
    found = []
    for per_piece in (3, 17, 100):
        out = tmp_path / str(per_piece)
        prepare(Listed(documents(100), per_piece), out, vocab_size=300, shard_tokens=900)
        found.append(contents(out))
    assert found[0] == found[1] == found[2]


def test_given_tokenizer_is_used(jsonl, prepared, tmp_path):
    for k, tokenizer in enumerate((prepared.tokenizer, prepared.path, str(prepared.path))):
        data = prepare(jsonl, tmp_path / str(k), tokenizer=tokenizer)
        assert data.sha256 == prepared.sha256


def test_progress_reaches_the_total(jsonl, tmp_path):
    calls = []
    prepare(jsonl, tmp_path / "o", vocab_size=300, progress=lambda *call: calls.append(call))
    stages = ("read", "tokenizer", "tokenise", "write")
    assert tuple(dict.fromkeys(stage for stage, _, _ in calls)) == stages
    n_train = sum(split_of(d.id, 60) == "train" for d in read_corpus(jsonl))
    last = {stage: (done, total) for stage, done, total in calls}
    assert last == {
        "read": (1, 1),
        "tokenizer": (n_train, n_train),
        "tokenise": (60, 60),
        "write": (4, 4),
    }


def test_documents_of_tokens_are_used_as_they_are(prepared, tmp_path):
    given = [Document(f"{k}", f"text {k}", None, np.array([k % 250 + 1, 7])) for k in range(60)]
    data = prepare(Listed(given, 9), tmp_path / "out", tokenizer=prepared.tokenizer)
    found = {d.id: d.tokens.tolist() for name in SPLITS for d in data.split(name).documents}
    assert found == {d.id: d.tokens.tolist() for d in given}
    given[31] = given[31]._replace(tokens=np.array([prepared.vocab_size]))
    with pytest.raises(DataError, match=r"part3: document '31': token id \d+ outside the vocab"):
        prepare(Listed(given, 9), tmp_path / "bad", tokenizer=prepared.tokenizer)


# -- the tokenizer's sample ------------------------------------------------------------------------


def test_tokenizer_is_trained_on_a_share_chosen_by_a_hash_of_the_id(tmp_path):
    corpus = documents(900)
    train = [d for d in corpus if split_of(d.id, len(corpus)) == "train"]

    def u(doc_id):
        return int(hashlib.sha256(f"tokenizer:{doc_id}".encode()).hexdigest()[:16], 16) / 2**64

    chosen = [d.text for d in train if u(d.id) < 0.05]
    assert 10 < len(chosen) < 45
    data = prepare(Listed(corpus, 50), tmp_path / "o", vocab_size=300, tokenizer_sample=0.05)
    assert data.fingerprint == fingerprint(train_bpe(chosen, 300))
    assert data.manifest["options"]["tokenizer_sample"] == 0.05
    with pytest.raises(DataError, match="tokenizer_sample: none of 570 documents falls into 1e-06"):
        prepare(Listed(corpus, 50), tmp_path / "p", vocab_size=300, tokenizer_sample=1e-6)


# -- several shards --------------------------------------------------------------------------------


def test_shards_are_cut_between_documents_and_say_the_same(tmp_path):
    corpus = documents(200)
    corpus[50] = corpus[50]._replace(text=corpus[50].text * 30)  # longer than a shard
    whole = prepare(Listed(corpus, 23), tmp_path / "whole", vocab_size=300)
    many = prepare(Listed(corpus, 23), tmp_path / "many", vocab_size=300, shard_tokens=700)
    assert many.sha256 == whole.sha256
    for name in SPLITS:
        split, other = whole.split(name), many.split(name)
        shards = many.manifest["splits"][name]["shards"]
        assert len(shards) > 1
        assert all(s["n_tokens"] <= 700 or s["n_documents"] == 1 for s in shards)
        ends = np.cumsum([s["n_documents"] for s in shards])[:-1]
        first = [len(split.documents[end].tokens) for end in ends]
        full = [s["n_tokens"] + n > 700 for s, n in zip(shards[:-1], first, strict=True)]
        assert all(full)  # no shard is closed before it must be
        assert np.array_equal(other.ends, split.ends)
        assert np.array_equal(other.tokens, split.tokens)
        for a, b in zip(split.documents, other.documents, strict=True):
            assert (a.id, a.cluster, a.text) == (b.id, b.cluster, b.text)
            assert a.tokens.tolist() == b.tokens.tolist()
    batches = [TrainBatches(d.split("train"), 33, 4, seed=1) for d in (whole, many)]
    for step in range(40):
        one, other = (b.batch(step) for b in batches)
        assert all(map(torch.equal, one, other))


@given(
    pieces=st.lists(st.lists(st.integers(1, 9), max_size=7), min_size=1, max_size=5).filter(any),
    limit=st.integers(1, 20),
)
@settings(deadline=None, max_examples=200)
def test_plan_fills_shards_one_document_after_another(tmp_path_factory, pieces, limit):
    folder = tmp_path_factory.mktemp("plan")
    for number, lengths in enumerate(pieces):
        np.array(lengths, dtype="<u8").tofile(folder / f"{number:05d}.val.lengths")
    expected, size = [[]], 0
    for number, lengths in enumerate(pieces):
        for k, length in enumerate(lengths):
            if expected[-1] and size + length > limit:
                expected.append([])
                size = 0
            expected[-1].append((number, k))
            size += length
    found = plan(folder, len(pieces), "val", limit)
    assert [
        [(run.piece, k) for run in runs for k in range(*run.documents)] for runs in found
    ] == expected
    for run in (run for runs in found for run in runs):
        first, last = run.documents
        lengths = pieces[run.piece]
        assert run.tokens == (sum(lengths[:first]), sum(lengths[:last]))


def test_texts_of_the_train_split_are_not_kept_of_a_large_corpus(prepared, tmp_path):
    few = documents(60)
    corpus = [few[k % 60]._replace(id=str(k), text=f"letter {k}") for k in range(50_001)]
    data = prepare(Listed(corpus, 20_000), tmp_path / "out", tokenizer=prepared.tokenizer)
    train = data.split("train")
    assert {p.name for p in data.path.iterdir()} >= {"train-00000.bin", "val-00000.jsonl.gz"}
    assert not (data.path / "train-00000.jsonl.gz").exists()
    expected = [d for d in corpus if split_of(d.id, 50_001) == "train"]
    assert train.n_documents == len(expected) > 49_000
    assert decode(data.tokenizer, train.tokens[: train.ends[0]]) == expected[0].text
    with pytest.raises(DataError, match=r"'train': its texts are not kept .* than 50,000 doc"):
        _ = train.documents
    val = [d for d in corpus if split_of(d.id, 50_001) == "val"]
    assert [d.text for d in data.split("val").documents] == [d.text for d in val]
    assert PreparedDataset.open(data.path).sha256 == data.sha256
    splits = data.manifest["splits"]
    tokens, texts = (
        {n: splits[n][key] for n in SPLITS} for key in ("tokens_sha256", "text_sha256")
    )
    ids = hashlib.sha256(b"".join(hashlib.sha256(d.id.encode()).digest()[:16] for d in corpus))
    for digest, same in ((ids.hexdigest(), True), ("0" * 64, False)):  # no text holds the ids
        assert (data_sha256(data.fingerprint, tokens, texts, digest) == data.sha256) == same


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


def test_repeated_id_in_another_piece(tmp_path):
    corpus = documents(60)
    corpus[41] = corpus[41]._replace(id="doc-00003")
    corpus[55] = corpus[55]._replace(id="doc-00044")
    with pytest.raises(DataError, match="listed: field 'id': 'doc-00003' occurs twice"):
        prepare(Listed(corpus, 10), tmp_path / "out", vocab_size=300)
    assert list(tmp_path.iterdir()) == []


def test_corpus_that_changes_while_it_is_read(jsonl, tmp_path, monkeypatch):
    corpus = documents(60)

    class Changing(Listed):
        def read(self, piece):
            found = list(super().read(piece))
            self.documents = self.changed
            return iter(found)

    for change, part in (
        (corpus[:59], "60, then 59"),
        ([corpus[0]._replace(id="new"), *corpus[1:]], "other ids"),
    ):
        source = Changing(corpus, 60)
        source.changed = change
        with pytest.raises(DataError, match=rf"part0: changed while it was read .*: {part}\)"):
            prepare(source, tmp_path / "out", vocab_size=300)
    path = tmp_path / "a.jsonl"
    shutil.copy(jsonl, path)
    write = stages.write_shard

    def touched(*arguments):
        os.utime(path, (1, 1))
        return write(*arguments)

    monkeypatch.setattr(stages, "write_shard", touched)
    with pytest.raises(DataError, match=r"a\.jsonl: changed while it was read$"):
        prepare(path, tmp_path / "out", vocab_size=300)
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 256}, "vocab_size: must exceed 256"),
        ({"workers": 0}, "workers: must be positive, got 0"),
        ({"shard_tokens": 0}, "shard_tokens: must be positive, got 0"),
        ({"tokenizer_sample": 0.0}, r"tokenizer_sample: must lie in \(0, 1\], got 0"),
        ({"tokenizer_sample": 1.5}, r"tokenizer_sample: must lie in \(0, 1\], got 1.5"),
        ({"tokenizer": 1, "tokenizer_sample": 0.5}, "tokenizer_sample: given with a tokenizer"),
    ],
)
def test_options_out_of_range(jsonl, prepared, tmp_path, options, message):
    if "tokenizer" in options:
        options = options | {"tokenizer": prepared.tokenizer}
    with pytest.raises(DataError, match=message):
        prepare(jsonl, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_way(jsonl, tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(DataError, match="file"):
            prepare(jsonl, out, vocab_size=300, overwrite=True)
    assert (tmp_path / "file").read_text() == "x"


# -- from the shell --------------------------------------------------------------------------------


def status():
    """Exit status of the command in ``sys.argv``."""
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code


def test_command(jsonl, tmp_path, monkeypatch, capsys):
    options = ["--vocab-size", "300", "--tokenizer-sample", "0.5", "--shard-tokens", "4000"]
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["satlens", "prepare", str(jsonl), str(out), *options])
    assert status() == 0
    printed = capsys.readouterr().out.splitlines()
    data = prepare(
        jsonl, tmp_path / "same", vocab_size=300, tokenizer_sample=0.5, shard_tokens=4000
    )
    assert contents(out) == contents(data.path)
    assert [line.split()[::2][:2] for line in printed] == [[name, "documents"] for name in SPLITS]
    assert status() == 1
    assert "exists already" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*sys.argv, "--overwrite"])
    assert status() == 0
    assert contents(out) == contents(data.path)


def test_only_prepared_data_is_overwritten(jsonl, tmp_path):
    """``--overwrite`` replaces what satlens made, never somebody's folder or the source itself."""
    thesis = tmp_path / "home" / "thesis.txt"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(DataError, match="not prepared data, so it is not replaced"):
        prepare(jsonl, thesis.parent, vocab_size=300, overwrite=True)
    (thesis.parent / "manifest.json").write_text('{"format": "satlens-checkpoint"}')
    with pytest.raises(DataError, match="not prepared data, so it is not replaced"):
        prepare(jsonl, thesis.parent, vocab_size=300, overwrite=True)
    source = thesis.parent / "docs.jsonl"
    source.write_bytes(jsonl.read_bytes())
    with pytest.raises(DataError, match="holds the source"):
        prepare(source, thesis.parent, vocab_size=300, overwrite=True)
    assert thesis.read_text() == "years of work"
    assert source.read_bytes() == jsonl.read_bytes()
