"""What a pass over a corpus adds up: fp64 sums by document group, whatever the order.

Each sum keeps beside it what rounding lost (Knuth's TwoSum, TAOCP 2, section 4.2.2), so the same
batches give the same number to the last bit in any order and when split among processes. Memory
is that of the groups (at most 1024), not of the corpus.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from satlens.analysis.stats import Histogram
from satlens.errors import AnalysisError

_log = logging.getLogger(__name__)

Arrays = dict[str, np.ndarray]


class Accumulator(Protocol):
    """Something that batches are added to and that can be stored, restored and merged."""

    def arrays(self) -> Arrays:
        """Its whole state."""
        ...

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from a state that :meth:`arrays` gave."""
        ...

    def merge(self, other: Any) -> None:
        """Add what another process accumulated on other batches."""
        ...


class GroupSums:
    """Named sums over tokens, one a document group: arrays (G, *shape).

    Args:
        n_groups: G, document groups (:func:`satlens.analysis.stats.group_of`).
        shapes: the shape of each sum without its group axis.
    """

    def __init__(self, n_groups: int, shapes: Mapping[str, Sequence[int]]) -> None:
        self.n_groups = n_groups
        self._total = {name: np.zeros((n_groups, *shape)) for name, shape in shapes.items()}
        self._lost = {name: np.zeros_like(total) for name, total in self._total.items()}

    def __getitem__(self, name: str) -> np.ndarray:
        """(G, *shape) float64."""
        return self._total[name] + self._lost[name]

    def add(self, groups: np.ndarray, **rows: Tensor | np.ndarray) -> None:
        """Add rows (B, *shape) to the groups (B,) that they belong to."""
        unique, place = np.unique(groups, return_inverse=True)
        for name, values in rows.items():
            array = values.double().cpu().numpy() if isinstance(values, Tensor) else values
            part = np.zeros((len(unique), *self._total[name].shape[1:]))
            np.add.at(part, place, array)
            self._two_sum(name, unique, part)

    def _two_sum(self, name: str, index: Any, part: np.ndarray) -> None:
        before = self._total[name][index]
        total = before + part
        added = total - before
        self._lost[name][index] += (before - (total - added)) + (part - added)
        self._total[name][index] = total

    def arrays(self) -> Arrays:
        return {
            **{f"{name}.total": total for name, total in self._total.items()},
            **{f"{name}.lost": lost for name, lost in self._lost.items()},
        }

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name in self._total:
            self._total[name][...] = arrays[f"{name}.total"]
            self._lost[name][...] = arrays[f"{name}.lost"]

    def merge(self, other: GroupSums) -> None:
        for name in self._total:
            self._two_sum(name, slice(None), other._total[name])
            self._lost[name] += other._lost[name]


class Maxima:
    """The largest value seen of each cell of a grid; minus infinity before the first."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.values = np.full(tuple(shape), -np.inf)

    def add(self, values: Tensor) -> None:
        """Take account of values (N, *shape)."""
        if len(values):
            seen = values.double().amax(0).cpu().numpy()
            np.maximum(self.values, seen, out=self.values)

    def arrays(self) -> Arrays:
        return {"values": self.values}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.values[...] = arrays["values"]

    def merge(self, other: Maxima) -> None:
        np.maximum(self.values, other.values, out=self.values)


class HistogramSum:
    """A fixed histogram per cell as an accumulator; counts are whole numbers, so sums are exact."""

    _FIELDS = ("counts", "minimum", "maximum", "undefined")

    def __init__(self, grid: Sequence[int]) -> None:
        self.histogram = Histogram.empty(grid)

    def add(self, values: Tensor) -> None:
        """Count values (N, *grid)."""
        self.histogram.add(values.cpu().numpy())

    def arrays(self) -> Arrays:
        return {name: getattr(self.histogram, name) for name in self._FIELDS}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name in self._FIELDS:
            getattr(self.histogram, name)[...] = arrays[name]

    def merge(self, other: HistogramSum) -> None:
        self.histogram = self.histogram + other.histogram


# -- the state of a pass on disk -------------------------------------------------------------------


def save_state(path: Path, accumulators: Mapping[str, Accumulator], done: int) -> None:
    """Write the state after ``done`` batches; a kill leaves the old file or the new one whole.

    Raises:
        AnalysisError: the folder cannot be written.
    """
    arrays = {
        f"{name}/{key}": array
        for name, accumulator in accumulators.items()
        for key, array in accumulator.arrays().items()
    }
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(6)}.npz")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as stream:
                np.savez(stream, allow_pickle=False, done=np.array(done), **arrays)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise AnalysisError(
            f"{path}: resume_dir: cannot be written ({error.strerror or error})"
        ) from None


def load_state(path: Path, accumulators: Mapping[str, Accumulator]) -> int:
    """Restore the accumulators and return how many batches they hold; 0 without a usable file."""
    if not path.exists():
        return 0
    expected = {
        f"{name}/{key}": array.shape
        for name, accumulator in accumulators.items()
        for key, array in accumulator.arrays().items()
    }
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        done = int(arrays.pop("done"))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        _log.warning("%s: damaged resume state, starting again (%s)", path, error)
        return 0
    if {name: array.shape for name, array in arrays.items()} != expected:
        _log.warning("%s: resume state of another analysis, starting again", path)
        return 0
    for name, accumulator in accumulators.items():
        prefix = f"{name}/"
        accumulator.restore(
            {k[len(prefix) :]: a for k, a in arrays.items() if k.startswith(prefix)}
        )
    return done


def canonical(content: Any) -> str:
    """JSON with one spelling for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"))
