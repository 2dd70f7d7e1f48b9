"""Which source a name stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from satlens.data.corpora import EMBEDDED, JSONL_SUFFIXES, TEXT_SUFFIXES, content_suffix
from satlens.data.sources.base import Source
from satlens.data.sources.embedded import EmbeddedSource
from satlens.data.sources.hub import PREFIX, HubSource
from satlens.data.sources.jsonl import JsonLinesSource
from satlens.data.sources.parquet import ParquetSource
from satlens.data.sources.records import Fields
from satlens.data.sources.text import TextSource
from satlens.data.sources.token_files import TokenSource
from satlens.errors import DataError

FOREIGN_SUFFIXES = (".parquet", ".bin", ".arrow", ".json", ".csv", ".tsv", ".zip", ".pdf")
_PARQUET, _TOKENS = ".parquet", ".bin"
_KINDS = {
    "text": TEXT_SUFFIXES,
    "JSON Lines": JSONL_SUFFIXES,
    "parquet": (_PARQUET,),
    "tokens": (_TOKENS,),
}

Files = list[tuple[str, Path]]
Opener = Callable[[str, Files], Source]


def open_source(
    source: str | Path,
    *,
    text_field: str = "text",
    id_field: str = "id",
    cluster_field: str = "cluster",
    separator: str | None = None,
    tokenizer: Tokenizer | None = None,
) -> Source:
    """Open a corpus, to be read piece by piece.

    Args:
        source: one of

            * ``"sotu"``: the embedded corpus (cluster = president);
            * a text file (``.txt .text .md``), JSON Lines (``.jsonl .ndjson``), each also packed
              (``.gz``), a parquet file, or a token file of nanoGPT or llm.c (``.bin``);
            * a folder of such files of one kind, searched recursively and sorted by path
              (hidden files do not count, nor a README beside data);
            * ``"hf:NAME[@REVISION][:CONFIG][:SPLIT]"``: a data set of the Hugging Face Hub,
              streamed (see :mod:`satlens.data.sources.hub`).
        text_field: field (column) of the text.
        id_field: field of the id. A record without ``id`` gets a hash of its text as id; a field
            of another name has to be there (null counts as absent), as for the cluster.
        cluster_field: field of the cluster (``cluster`` is optional in each record), or
            ``"id-prefix"``: the id up to its last ``-``.
        separator: in text files, a line that separates documents (else one document a file).
        tokenizer: of token files, which it decodes and checks.

    Raises:
        DataError: no such corpus, not in a format that is known, a field that a table does not
            have, or an extra that is not installed.
    """
    if isinstance(source, str) and source == EMBEDDED:
        return EmbeddedSource()
    fields = Fields(text_field, id_field, cluster_field)
    if str(source).startswith(PREFIX):
        return HubSource(str(source), fields)
    path = Path(source)
    openers: dict[str, Opener] = {
        "text": lambda name, files: TextSource(name, files, separator),
        "JSON Lines": lambda name, files: JsonLinesSource(name, files, fields),
        "parquet": lambda name, files: ParquetSource(name, files, fields),
        "tokens": lambda name, files: TokenSource(name, files, tokenizer),
    }
    kind, files = _files_in(path) if path.is_dir() else _single(path)
    if separator is not None and kind != "text":
        raise DataError(f"separator: {path} is {kind}; only text files are cut by lines")
    return openers[kind](path.name or path.resolve().name, files)


def _single(path: Path) -> tuple[str, Files]:
    if not path.exists():
        raise DataError(f"{path}: no such file or folder (the embedded corpus is {EMBEDDED!r})")
    suffix = content_suffix(path)
    kind = _kind_of(path)
    if kind is None and suffix in FOREIGN_SUFFIXES:
        suffix = "".join(path.suffixes[-2:]) if path.suffix.lower() == ".gz" else path.suffix
        raise DataError(f"{path}: suffix {suffix!r} is not a corpus format (known: {_known()})")
    return kind or "text", [(path.name, path)]


def _files_in(folder: Path) -> tuple[str, Files]:
    """The corpus files of a folder, searched recursively and sorted by path: all of one kind."""
    found: dict[str, Files] = {}
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        kind = _kind_of(path)
        if kind is None or any(part.startswith(".") for part in inside.parts):
            continue
        if path.is_file():
            found.setdefault(kind, []).append((_checked_name(inside), path))
    if len(found) > 1 and "text" in found:
        # A data set's own description is not a document of it.
        found["text"] = [file for file in found["text"] if file[1].stem.lower() != "readme"]
        found = {kind: files for kind, files in found.items() if files}
    if not found:
        raise DataError(f"{folder}: no corpus files ({_known()}) in this folder")
    if len(found) > 1:
        examples = " and ".join(f"{kind} ({files[0][0]})" for kind, files in found.items())
        raise DataError(f"{folder}: holds {examples}; name the files of one kind or their folder")
    return next(iter(found.items()))


def _kind_of(path: Path) -> str | None:
    suffix = content_suffix(path)
    if suffix in (_PARQUET, _TOKENS) and path.suffix.lower() != suffix:
        return None  # packed: these are read in place, which gzip does not allow
    return next((kind for kind, suffixes in _KINDS.items() if suffix in suffixes), None)


def _known() -> str:
    return ", ".join(suffix for suffixes in _KINDS.values() for suffix in suffixes) + ", .gz"


def _checked_name(inside: Path) -> str:
    """A path in a corpus as text: ids are made of it."""
    name = inside.as_posix()
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{name!a}: the file's name is not UTF-8") from None
    return name
