"""Records with a text field (a line of JSON, a row of a table) as documents."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from satlens.data.corpora import ID_PREFIX, Document, check_text
from satlens.errors import DataError


class Fields(NamedTuple):
    """Which fields of a record hold what."""

    text: str = "text"
    id: str = "id"
    cluster: str = "cluster"
    """A field, or ``"id-prefix"``: the id up to its last ``-``."""

    def columns(self, known: list[str], where: str) -> list[str]:
        """The columns to read of a table that has the columns ``known``.

        Raises:
            DataError: no column of the text, or none of an id or cluster that was asked for by
                another name than the usual one.
        """
        wanted = [self.text]
        if self.text not in known:
            raise DataError(f"{where}: field {self.text!r}: missing ({_list(known)})")
        for name in (self.id, self.cluster):
            if name in known:
                wanted.append(name)
            elif name in self.asked_for:
                raise DataError(f"{where}: field {name!r}: missing ({_list(known)})")
        return list(dict.fromkeys(wanted))

    @property
    def asked_for(self) -> tuple[str, ...]:
        """Fields of id and cluster whose name is not the usual one: every record has them."""
        pairs = ((self.id, "id"), (self.cluster, "cluster"))
        return tuple(name for name, usual in pairs if name not in (usual, ID_PREFIX))


class RecordReader:
    """Turns the records of one piece into documents.

    Args:
        fields: names of the fields.
        where: file or shard, for errors.
        place: name of a record's place (``"line 3"``) from the number that it is read under;
            asked for errors only, so that it may be costly.
    """

    def __init__(self, fields: Fields, where: str, place: Callable[[int], str]) -> None:
        self._fields = fields
        self._where = where
        self._place = place
        self._unnamed: dict[str, int] = {}

    def document(self, record: Mapping[str, Any], at: int) -> Document:
        """The document of the record that is read under the number ``at``.

        Raises:
            DataError: a field is missing or of another type, the text is empty or not legal, or
                a record without an id repeats the text of another in this piece.
        """
        try:
            return self._document(record, at)
        except DataError as error:
            raise self.error(error, at) from None

    def error(self, reason: DataError | str, at: int) -> DataError:
        """A reason with the place of the record in front."""
        return DataError(f"{self._where}: {self._place(at)}: {reason}")

    def _document(self, record: Mapping[str, Any], at: int) -> Document:
        fields = self._fields
        text = record.get(fields.text)
        if not isinstance(text, str):
            found = "missing" if fields.text not in record else f"{type(text).__name__}, not a text"
            raise DataError(f"field {fields.text!r}: {found}")
        text = check_text(text, f"field {fields.text!r}")
        for name in fields.asked_for:
            if name not in record:  # a misspelt id would silently give another split
                raise DataError(f"field {name!r}: missing")
        doc_id = _label(record.get(fields.id), fields.id)
        if doc_id is None:
            doc_id = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
            first = self._unnamed.setdefault(doc_id, at)
            if first != at:
                repeated = self._place(first)
                raise DataError(f"field {fields.text!r}: repeats {repeated}; give ids")
        if fields.cluster == ID_PREFIX:
            return Document(doc_id, text, doc_id.rpartition("-")[0] or None)
        return Document(doc_id, text, _label(record.get(fields.cluster), fields.cluster))


def _label(value: object, field: str) -> str | None:
    """An id or cluster as text: strings and integers are legal, null means absent."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise DataError(f"field {field!r}: {type(value).__name__}, not a text or an integer")
    return check_text(str(value), f"field {field!r}")


def _list(names: list[str]) -> str:
    return f"there are: {', '.join(names)}" if names else "there are none"
