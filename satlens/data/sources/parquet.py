"""Parquet files with a column of texts; a piece is a run of row groups.

Only the columns of text, id and cluster are read. Rows are numbered from 0 in errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from satlens.data.corpora import Document
from satlens.data.sources.base import (
    PIECE_BYTES,
    Piece,
    file_stamp,
    first_line,
    group_by_size,
    identity_of,
    number_pieces,
    unreadable,
)
from satlens.data.sources.records import Fields, RecordReader
from satlens.errors import DataError

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

_ROWS = 1024


class ParquetSource:
    """Parquet files, one after another. Opening reads the footer of each."""

    def __init__(self, name: str, files: Sequence[tuple[str, Path]], fields: Fields) -> None:
        self.info = {"name": name}
        self._files = dict(files)
        self._fields = fields
        stamps = [file_stamp(path, file_name) for file_name, path in files]
        parts: list[tuple[str, int, int]] = []
        for file_name, path in files:
            runs = group_by_size(_group_sizes(path, fields), PIECE_BYTES)
            parts += [(file_name, start, stop) for start, stop in runs]
        self.pieces = number_pieces(parts)
        self.identity = identity_of("parquet", stamps, self.pieces)

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents of row groups [start, stop) of a file."""
        import pyarrow

        path = self._files[piece.name]
        reader = RecordReader(self._fields, str(path), lambda row: f"row {row} (from 0)")
        try:
            with _open(path) as file:
                groups = file.metadata.num_row_groups
                if groups < piece.stop:
                    raise DataError(f"{path}: changed while it was read ({groups} row groups)")
                row = sum(file.metadata.row_group(k).num_rows for k in range(piece.start))
                for batch in file.iter_batches(
                    _ROWS,
                    row_groups=range(piece.start, piece.stop),
                    columns=self._fields.columns(file.schema_arrow.names, str(path)),
                    use_threads=False,
                ):
                    for record in _records(batch, row, reader):
                        yield reader.document(record, row)
                        row += 1
        except pyarrow.ArrowException as error:
            raise _damaged(path, error) from None
        except OSError as error:
            raise _refused(path, error) from None


def _open(path: Path) -> ParquetFile:
    """An open file whose footer is whole."""
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: parquet needs pyarrow: pip install 'satlens[data]'") from None
    try:
        # Not all writers add checksums; where there are some, a flipped bit does not pass.
        return ParquetFile(path, page_checksum_verification=True)
    except pyarrow.ArrowException as error:
        raise _damaged(path, error) from None
    except OSError as error:
        raise _refused(path, error) from None


def _group_sizes(path: Path, fields: Fields) -> list[int]:
    """Bytes of the wanted columns in each row group, uncompressed."""
    with _open(path) as file:
        wanted = fields.columns(file.schema_arrow.names, str(path))
        metadata = file.metadata
        paths = [metadata.schema.column(k).path for k in range(metadata.num_columns)]
        columns = [k for k, column in enumerate(paths) if column in wanted]
        groups = (metadata.row_group(k) for k in range(metadata.num_row_groups))
        return [sum(group.column(k).total_uncompressed_size for k in columns) for group in groups]


def _records(batch: RecordBatch, row: int, reader: RecordReader) -> list[dict[str, Any]]:
    """The rows of a batch whose first is number ``row`` of the file."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        for number in range(batch.num_rows):
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                try:
                    column[number].as_py()
                except UnicodeDecodeError as error:
                    byte = f"byte {error.object[error.start]:#04x} at {error.start}"
                    reason = f"field {name!r}: not UTF-8 ({byte})"
                    raise reader.error(reason, row + number) from None
        raise


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path}: damaged parquet file ({first_line(error)})")


def _refused(path: Path, error: OSError) -> DataError:
    # pyarrow reports damage in pages as an OSError that has no number.
    return unreadable(path, error) if error.errno else _damaged(path, error)
