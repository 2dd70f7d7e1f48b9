"""Opening a prepared corpus: every damage is noticed, and what format 1 wrote is still read."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil

import numpy as np
import pytest

from satlens.data.corpora import SPLITS
from satlens.data.dataset import PreparedDataset
from satlens.data.manifest import checksum_of
from satlens.data.prepare import prepare
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
        ({"version": 3}, True, "version: 3.*newer"),
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
    splits = json.loads((copy / "manifest.json").read_text())["splits"]
    splits["val"]["n_tokens"] += 1
    edit_manifest(copy, splits=splits)
    with pytest.raises(
        DataError, match=r"json: splits\.val\.shards: do not sum to n_documents and"
    ):
        PreparedDataset.open(copy)
    splits["val"]["shards"][0]["n_tokens"] += 1
    edit_manifest(copy, splits=splits)
    with pytest.raises(DataError, match=r"val-00000\.bin: n_tokens: \d+, manifest\.json says"):
        PreparedDataset.open(copy).split("val")


@pytest.mark.parametrize("shards", [None, [], {}, [None], [{"n_documents": 1}]])
def test_shards_must_be_sizes(copy, shards):
    splits = json.loads((copy / "manifest.json").read_text())["splits"]
    splits["val"]["shards"] = shards
    edit_manifest(copy, splits=splits)
    with pytest.raises(DataError, match=r"splits\.val\.shards: do not sum"):
        PreparedDataset.open(copy)


def test_only_shard_is_the_split(copy):
    splits = json.loads((copy / "manifest.json").read_text())["splits"]
    splits["val"]["tokens_sha256"] = "0" * 64
    edit_manifest(copy, splits=splits)
    with pytest.raises(DataError, match=r"splits\.val\.tokens_sha256: differs from its only shard"):
        PreparedDataset.open(copy)


def test_without_verifying_everything_else_is_checked(copy):
    file = copy / "val-00000.bin"
    content = bytearray(file.read_bytes())
    content[70] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"val-00000\.bin: sha256"):
        PreparedDataset.open(copy)
    assert PreparedDataset.open(copy, verify=False).split("val").n_documents > 0
    file.write_bytes(content[:-8])
    with pytest.raises(DataError, match=r"val-00000\.bin: size: truncated"):
        PreparedDataset.open(copy, verify=False).split("val")


def test_texts_must_match_the_shard(copy):
    data = PreparedDataset.open(copy)
    split = data.split("val")
    file = copy / "val-00000.jsonl.gz"
    lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
    file.write_bytes(gzip.compress(b"".join(lines[:-1])))
    with pytest.raises(DataError, match=r"val-00000\.jsonl\.gz: \d+ documents"):
        _ = split.documents
    file.write_bytes(gzip.compress(b"".join(lines))[:-9])
    with pytest.raises(DataError, match=r"val-00000\.jsonl\.gz: damaged"):
        _ = split.documents


def test_unknown_split_and_missing_folder(prepared, tmp_path):
    with pytest.raises(DataError, match=r"no split 'dev' \(known: train, val, pool, test\)"):
        prepared.split("dev")
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read"):
        PreparedDataset.open(tmp_path)


# -- format 1 --------------------------------------------------------------------------------------


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def canonical(content):
    return sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii"))


@pytest.fixture
def old(prepared, tmp_path):
    """The folder as format 1 held it."""
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(prepared.path / "tokenizer.json", folder)
    for name in SPLITS:
        for ending in ("bin", "jsonl.gz"):
            shutil.copy(prepared.path / f"{name}-00000.{ending}", folder / f"{name}.{ending}")
    files = {path.name: sha256(path.read_bytes()) for path in sorted(folder.iterdir())}
    splits = {
        name: {
            **{k: prepared.manifest["splits"][name][k] for k in ("n_documents", "n_tokens")},
            "n_characters": sum(len(d.text) for d in prepared.split(name).documents),
            "text_sha256": sha256(gzip.decompress((folder / f"{name}.jsonl.gz").read_bytes())),
        }
        for name in SPLITS
    }
    manifest = {
        "format": "satlens-data",
        "version": 1,
        "source": {"name": "small.jsonl"},
        "tokenizer": prepared.fingerprint,
        "vocab_size": prepared.vocab_size,
        "splits": splits,
        "files": files,
    }
    tokens = {name: files[f"{name}.bin"] for name in SPLITS}
    texts = {name: splits[name]["text_sha256"] for name in SPLITS}
    identity = {"tokenizer": prepared.fingerprint, "tokens": tokens, "texts": texts}
    manifest["sha256"] = canonical(identity)
    manifest["checksum"] = canonical(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return folder


def test_identity_is_that_of_format_1(old, prepared):
    assert json.loads((old / "manifest.json").read_text())["sha256"] == prepared.sha256
    # Written by the release that knew format 1 alone, from the same corpus.
    first = "d09d607587e52c3b49e69458bc190cbfef6c2077b775b8d5203e9c489947be9c"
    assert prepared.sha256 == first


def test_format_1_is_read(old, prepared):
    data = PreparedDataset.open(old)
    assert data.sha256 == prepared.sha256
    for name in SPLITS:
        split, same = data.split(name), prepared.split(name)
        assert np.array_equal(split.tokens, same.tokens)
        assert [d.text for d in split.documents] == [d.text for d in same.documents]


@pytest.mark.parametrize("name", ["train.bin", "val.jsonl.gz", "tokenizer.json"])
def test_format_1_is_checked(old, name):
    content = bytearray((old / name).read_bytes())
    content[len(content) // 2] ^= 4
    (old / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: sha256"):
        PreparedDataset.open(old)
    (old / name).unlink()
    with pytest.raises(DataError, match=f"{name}: cannot be read"):
        PreparedDataset.open(old)
