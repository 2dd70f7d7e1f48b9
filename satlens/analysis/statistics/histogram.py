"""Fixed histograms with an exact-zero bin: quantiles and rank effects without keeping values.

Gates are exactly zero on many tokens, bounded or not, and under tanh or identity also negative;
so the bins are spaced by logarithm on both sides of a bin that holds zeros only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from satlens.errors import AnalysisError

EDGES = np.geomspace(1e-4, 1e2, 601)
"""Default magnitudes at which bins meet: 100 bins a decade, 2.3 % wide."""


@dataclass(eq=False)
class Histogram:
    """Counts of values per cell of a grid, in bins that never change, so that parts add up.

    With m edges there are 2m + 3 bins, from the most negative to the most positive: m + 1
    negative, one for exact zeros, m + 1 positive; the outermost two are open and the two next to
    the zero bin reach from zero to the smallest edge.
    """

    edges: np.ndarray
    """(m,) ascending positive magnitudes."""
    counts: np.ndarray
    """(*grid, 2m + 3) int64 values seen in each bin."""
    minimum: np.ndarray
    """(*grid) smallest value seen, +inf before the first."""
    maximum: np.ndarray
    """(*grid) largest value seen, -inf before the first."""
    undefined: np.ndarray
    """(*grid) int64 values that were not finite; they are in no bin."""

    @classmethod
    def empty(cls, grid: Sequence[int] = (), edges: np.ndarray = EDGES) -> Histogram:
        """A histogram without values for each cell of ``grid``."""
        edges = np.asarray(edges, dtype=np.float64)
        if edges.ndim != 1 or not edges.size or edges[0] <= 0 or (np.diff(edges) <= 0).any():
            raise AnalysisError("histogram edges: need ascending positive magnitudes")
        grid = tuple(grid)
        return cls(
            edges=edges,
            counts=np.zeros((*grid, 2 * edges.size + 3), dtype=np.int64),
            minimum=np.full(grid, np.inf),
            maximum=np.full(grid, -np.inf),
            undefined=np.zeros(grid, dtype=np.int64),
        )

    @property
    def n_values(self) -> np.ndarray:
        """(*grid) finite values seen."""
        return self.counts.sum(axis=-1)

    def bin_of(self, values: np.ndarray) -> np.ndarray:
        """Bin numbers of finite ``values``, same shape; a magnitude on an edge goes outwards."""
        steps = np.searchsorted(self.edges, np.abs(values), side="right") + 1
        return self.edges.size + 1 + np.sign(values).astype(np.int64) * steps

    def add(self, values: np.ndarray) -> None:
        """Count ``values`` (N, *grid); those that are not finite go to ``undefined``."""
        grid = self.minimum.shape
        values = np.asarray(values, dtype=np.float64)
        if values.shape[1:] != grid:
            raise AnalysisError(f"histogram: values of shape {values.shape} for the grid {grid}")
        finite = np.isfinite(values)
        n_bins = self.counts.shape[-1]
        cells = np.arange(self.minimum.size).reshape(grid) * n_bins
        flat = (self.bin_of(np.where(finite, values, 0.0)) + cells)[finite]
        self.counts += np.bincount(flat, minlength=self.counts.size).reshape(self.counts.shape)
        self.undefined += (~finite).sum(axis=0)
        low = np.where(finite, values, np.inf).min(axis=0, initial=np.inf)
        high = np.where(finite, values, -np.inf).max(axis=0, initial=-np.inf)
        self.minimum = np.minimum(self.minimum, low)
        self.maximum = np.maximum(self.maximum, high)

    def __add__(self, other: Histogram) -> Histogram:
        """The histogram of both sets of values; edges and grids have to be equal."""
        require_same_edges(self, other)
        if self.counts.shape != other.counts.shape:
            raise AnalysisError("histograms of different grids cannot be added")
        return Histogram(
            edges=self.edges,
            counts=self.counts + other.counts,
            minimum=np.minimum(self.minimum, other.minimum),
            maximum=np.maximum(self.maximum, other.maximum),
            undefined=self.undefined + other.undefined,
        )

    def quantile(self, q: float) -> np.ndarray:
        """(*grid) the value below which a share ``q`` lies; NaN for a cell without values.

        Exact for zeros and at both ends; elsewhere linear within the bin that holds the quantile
        of the inverted distribution function, so the error is below that bin's width.
        """
        if not 0 <= q <= 1:
            raise AnalysisError(f"histogram: quantile {q} is outside [0, 1]")
        total = self.n_values
        reached = self.counts.cumsum(axis=-1)
        # At least one value, so that q = 0 does not stop in an empty bin; at most all of them.
        target = np.clip(q * total, 1, np.maximum(total, 1))[..., None]
        at = (reached >= target).argmax(axis=-1)[..., None]
        count = np.take_along_axis(self.counts, at, axis=-1)
        share = (target - (np.take_along_axis(reached, at, axis=-1) - count)) / np.maximum(count, 1)
        low, high = self._bounds()
        ends = self.minimum[..., None], self.maximum[..., None]
        low, high = np.maximum(low[at], ends[0]), np.minimum(high[at], ends[1])
        with np.errstate(invalid="ignore"):  # an empty cell has infinite ends
            value = np.clip(low + share * (high - low), *ends)[..., 0]
        value = np.where(q == 0, self.minimum, value)
        return np.where(total > 0, value, np.nan)

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper end of every bin; the outermost are infinite."""
        steps = np.concatenate([[0.0], self.edges, [np.inf]])
        low = np.concatenate([-steps[:0:-1], [0.0], steps[:-1]])
        high = np.concatenate([-steps[-2::-1], [0.0], steps[1:]])
        return low, high


def require_same_edges(first: Histogram, second: Histogram) -> None:
    """Raise unless both histograms have the same bins."""
    if not np.array_equal(first.edges, second.edges):
        raise AnalysisError("histograms with different edges cannot be combined")
