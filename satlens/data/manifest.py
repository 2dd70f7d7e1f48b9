"""The manifest of a prepared corpus: what it promises of every file, and the data's identity.

Format 2 holds any number of shards a split (``train-00000.bin``, texts ``train-00000.jsonl.gz``);
format 1 had one (``train.bin``, ``train.jsonl.gz``) and is still read.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from satlens.data.corpora import SPLITS
from satlens.data.tokenizers import TOKENIZER_FILE
from satlens.errors import DataError

FORMAT = "satlens-data"
VERSION = 2
_VERSIONS = (1, 2)
MANIFEST_FILE = "manifest.json"

_FIELDS: dict[str, type] = {
    "format": str,
    "version": int,
    "source": dict,
    "tokenizer": str,
    "vocab_size": int,
    "splits": dict,
    "files": dict,
    "sha256": str,
    "checksum": str,
}
_NEW_FIELDS: dict[str, type] = {"ids_sha256": str, "options": dict}
_COUNTS = {"n_documents", "n_tokens", "text_sha256"}
_NEW_COUNTS = {"tokens_sha256", "shards"}


class ShardFiles(NamedTuple):
    """One shard of a split as its manifest describes it."""

    tokens: str
    """Name of the file of tokens."""
    texts: str | None
    """Name of the file of texts; None where they are not kept."""
    n_documents: int
    n_tokens: int


def shard_name(split: str, number: int) -> str:
    """Name of a shard's files without their endings."""
    return f"{split}-{number:05d}"


def shard_files(manifest: dict[str, Any], split: str) -> list[ShardFiles]:
    """The shards of a split, in order."""
    counts = manifest["splits"][split]
    if manifest["version"] == 1:
        sizes = counts["n_documents"], counts["n_tokens"]
        return [ShardFiles(f"{split}.bin", f"{split}.jsonl.gz", *sizes)]
    has_texts = counts["text_sha256"] is not None
    names = [shard_name(split, number) for number in range(len(counts["shards"]))]
    return [
        ShardFiles(
            f"{name}.bin",
            f"{name}.jsonl.gz" if has_texts else None,
            shard["n_documents"],
            shard["n_tokens"],
        )
        for name, shard in zip(names, counts["shards"], strict=True)
    ]


def data_sha256(
    made_by: str, tokens: dict[str, str], texts: dict[str, str | None], ids: str
) -> str:
    """The identity of prepared data: its tokenizer, the tokens and the texts of every split.

    It depends neither on the sizes of the shards nor on the compression library.

    Args:
        made_by: fingerprint of the tokenizer.
        tokens: by split, the digest of :func:`satlens.data.shards.shard_sha256`.
        texts: by split, the digest of the uncompressed lines; None where texts are not kept.
        ids: digest of the ids in the order of the corpus. It counts where texts are missing, which
            hold the ids otherwise.
    """
    content: dict[str, Any] = {"tokenizer": made_by, "tokens": tokens, "texts": texts}
    if None in texts.values():
        content["ids"] = ids
    return _digest(content)


def checksum_of(manifest: dict[str, Any]) -> str:
    """Digest of everything in a manifest but the digest itself."""
    return _digest({key: value for key, value in manifest.items() if key != "checksum"})


def complete(
    *,
    source: dict[str, str],
    options: dict[str, Any],
    made_by: str,
    vocab_size: int,
    splits: dict[str, dict[str, Any]],
    files: dict[str, str],
    ids: str,
) -> dict[str, Any]:
    """The manifest of a corpus; see :func:`data_sha256` for ``made_by`` and ``ids``.

    Args:
        source: name and, where known, version, licence and citation of the corpus.
        options: what it was prepared with.
        vocab_size: one more than the largest token id.
        splits: by name, counts and digests.
        files: SHA-256 of every other file of the folder.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "source": source,
        "options": options,
        "tokenizer": made_by,
        "vocab_size": vocab_size,
        "splits": splits,
        "ids_sha256": ids,
        "files": files,
    }
    manifest["sha256"] = _identity(manifest)
    manifest["checksum"] = checksum_of(manifest)
    return manifest


def says_prepared(folder: Path) -> bool:
    """Whether a folder has a manifest that calls it prepared data, sound or not."""
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def read_manifest(file: Path) -> dict[str, Any]:
    """Read and check a manifest; the files that it names are not opened.

    Raises:
        DataError: missing, damaged, unsafe or newer content, naming the field.
    """
    manifest = _read_json(file)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{file}: format: not a manifest of prepared data ({FORMAT!r} expected)")
    version = manifest.get("version")
    if version not in _VERSIONS:
        newer = isinstance(version, int) and version > VERSION
        advice = "; a newer satlens wrote it" if newer else ""
        raise DataError(f"{file}: version: {version!r}, this satlens reads 1 and 2{advice}")
    for field, kind in (_FIELDS | (_NEW_FIELDS if version > 1 else {})).items():
        if not isinstance(manifest.get(field), kind):
            raise DataError(f"{file}: {field}: missing or not of type {kind.__name__}")
    for name, digest in manifest["files"].items():
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
            raise DataError(f"{file}: files: unsafe path {name!r}, a plain file name is expected")
        if not isinstance(digest, str):
            raise DataError(f"{file}: files.{name}: not a digest")
    if manifest["checksum"] != checksum_of(manifest):
        raise DataError(f"{file}: checksum: the manifest was changed or damaged")
    for name in SPLITS:
        _check_counts(f"{file}: splits.{name}", manifest["splits"].get(name), version)
    _check_files(file, manifest)
    if manifest["sha256"] != _identity(manifest):
        raise DataError(f"{file}: sha256: does not follow from splits and files")
    return manifest


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error})") from None


def _check_counts(where: str, counts: Any, version: int) -> None:
    wanted = _COUNTS | (_NEW_COUNTS if version > 1 else set())
    if not isinstance(counts, dict) or not counts.keys() >= wanted:
        raise DataError(f"{where}: missing or without {', '.join(sorted(wanted))}")
    if version == 1:
        return
    shards = counts["shards"]
    sizes = ("n_documents", "n_tokens")
    sound = isinstance(shards, list) and all(
        isinstance(shard, dict) and all(isinstance(shard.get(size), int) for size in sizes)
        for shard in shards or [None]
    )
    if not sound or any(sum(shard[size] for shard in shards) != counts[size] for size in sizes):
        raise DataError(f"{where}.shards: do not sum to n_documents and n_tokens")


def _check_files(file: Path, manifest: dict[str, Any]) -> None:
    """No file that the splits need may be missing; the only shard of a split is that split."""
    files = manifest["files"]
    shards = [shard_files(manifest, name) for name in SPLITS]
    needed = [name for each in shards for shard in each for name in (shard.tokens, shard.texts)]
    for name in (TOKENIZER_FILE, *needed):
        if name is not None and name not in files:
            raise DataError(f"{file}: files: {name} is missing")
    if manifest["version"] == 1:
        return
    for split, each in zip(SPLITS, shards, strict=True):
        said = manifest["splits"][split]["tokens_sha256"]
        if len(each) == 1 and files[each[0].tokens] != said:
            raise DataError(f"{file}: splits.{split}.tokens_sha256: differs from its only shard")


def _identity(manifest: dict[str, Any]) -> str:
    splits, files = manifest["splits"], manifest["files"]
    if manifest["version"] == 1:
        tokens = {name: files[f"{name}.bin"] for name in SPLITS}
    else:
        tokens = {name: splits[name]["tokens_sha256"] for name in SPLITS}
    texts = {name: splits[name]["text_sha256"] for name in SPLITS}
    return data_sha256(manifest["tokenizer"], tokens, texts, manifest.get("ids_sha256", ""))


def _digest(content: dict[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()
