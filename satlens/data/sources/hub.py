"""Data sets of the Hugging Face Hub, streamed through ``datasets``: nothing is stored.

``hf:NAME[@REVISION][:CONFIG][:SPLIT]``, for example ``hf:HuggingFaceFW/fineweb-edu:sample-10BT``.
The split is ``train`` unless named. NAME may be a local folder laid out like a data set. The
revision is resolved to a commit once, and every piece is read from that commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from satlens.data.corpora import Document
from satlens.data.sources.base import Piece, file_stamp, first_line, identity_of, number_pieces
from satlens.data.sources.records import Fields, RecordReader
from satlens.errors import DataError

if TYPE_CHECKING:
    from datasets import IterableDataset

PREFIX = "hf:"
_MOST_PIECES = 1024


class HubName(NamedTuple):
    """What ``hf:NAME[@REVISION][:CONFIG][:SPLIT]`` names."""

    name: str
    revision: str | None
    config: str | None
    split: str

    @classmethod
    def parse(cls, source: str) -> HubName:
        """Read such a name.

        Raises:
            DataError: no name, or too many parts.
        """
        name, *rest = source.removeprefix(PREFIX).split(":")
        name, _, revision = name.partition("@")
        if not name or len(rest) > 2:
            raise DataError(f"{source}: {PREFIX}NAME[@REVISION][:CONFIG][:SPLIT] is expected")
        config, split = [*rest, "", ""][:2]
        return cls(name, revision or None, config or None, split or "train")


class HubSource:
    """One split of a data set. A piece is a run of its shards (of parquet, of its row groups)."""

    def __init__(self, source: str, fields: Fields) -> None:
        self._source = source
        self._fields = fields
        named = HubName.parse(source)
        self._local = Path(named.name).is_dir()
        try:
            from datasets import load_dataset
        except ImportError:
            raise DataError(
                f"{source}: streaming needs datasets: pip install 'satlens[data]'"
            ) from None
        try:
            stamps, facts = _pinned(named)
            dataset = load_dataset(
                named.name,
                named.config,
                split=named.split,
                revision=facts.get("revision"),
                streaming=True,
            ).reshard()
        except DataError:
            raise
        except Exception as error:  # of the network, the Hub, the builder: no common class
            raise DataError(f"{source}: cannot be opened ({first_line(error)})") from None
        self._dataset: IterableDataset = dataset
        if dataset.column_names is not None:
            wanted = fields.columns(dataset.column_names, source)
            self._dataset = dataset.select_columns(wanted)
        n_pieces = min(dataset.num_shards, _MOST_PIECES)
        # Of a local data set the folder's name, as of other files: a path says nothing elsewhere.
        name = Path(named.name).resolve().name if self._local else named.name
        self.info = {"name": name, "config": dataset.config_name, "split": named.split}
        self.info |= facts
        parts = [(f"part {k} of {n_pieces}", k, k + 1) for k in range(n_pieces)]
        self.pieces = number_pieces(parts)
        chosen = [self.info["config"], named.split, dataset.num_shards]
        self.identity = identity_of("hub", [*chosen, *stamps], self.pieces)

    def read(self, piece: Piece) -> Iterator[Document]:
        """The documents of one part; rows are numbered from 0 within it.

        Raises:
            DataError: a row that is no document, or damaged files.
            ConnectionError: the network or the Hub failed, and the same call may succeed later.
        """
        where = f"{self._source}: {piece.name}"
        reader = RecordReader(self._fields, where, lambda row: f"row {row} (from 0)")
        part = self._dataset.shard(len(self.pieces), piece.index)
        rows = enumerate(iter(part))
        while True:
            try:
                row, record = next(rows)
            except StopIteration:
                return
            except Exception as error:  # of the network, the Hub, the builder: no common class
                reason = f"{where}: cannot be read ({first_line(error)})"
                raise (DataError if self._blames_data(error) else ConnectionError)(reason) from None
            yield reader.document(record, row)

    def _blames_data(self, error: Exception) -> bool:
        """Whether trying again is in vain: local files, or content that cannot be parsed."""
        from datasets.exceptions import DatasetsError
        from pyarrow import ArrowException

        faults = (ArrowException, DatasetsError, ValueError, TypeError, LookupError)
        return self._local or isinstance(error, faults)


def _pinned(named: HubName) -> tuple[list[object], dict[str, str]]:
    """What stands for the content of a data set, and what provenance records of it."""
    folder = Path(named.name)
    if folder.is_dir():
        if named.revision is not None:
            raise DataError(f"{folder}: a local folder has no revision ({named.revision!r})")
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return [file_stamp(path, path.relative_to(folder).as_posix()) for path in files], {}
    from huggingface_hub import HfApi

    about = HfApi().dataset_info(named.name, revision=named.revision)
    commit = str(about.sha)
    facts = {"revision": commit}
    licence = getattr(about.card_data, "license", None)
    if licence:
        facts["licence"] = licence if isinstance(licence, str) else ", ".join(licence)
    return [commit], facts
