"""The statistics of every analysis: intervals, tests and effect sizes. Imports no torch.

Axis 0 of every array of sums is the group: documents fall into at most 1024 groups
(:func:`group_of`) and groups are resampled, so memory does not grow with the corpus. The axes
after it are the grid (site or layer, head, ...). Everything is offered here; bootstrap intervals
live in ``bootstrap`` (their resamples in ``resampling``), means over several samples in
``strata``, rank correlation in ``correlation``, tests in ``sign_flips``, paired seeds in
``seeds``, the fixed histograms in ``histogram``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import special

from satlens.analysis.statistics.bootstrap import (
    FEW_UNITS,
    MIN_UNITS,
    OTHER_DOCUMENTS,
    Interval,
    divide,
    function_interval,
    mean_interval,
    ratio_interval,
)
from satlens.analysis.statistics.correlation import rank_correlation_interval
from satlens.analysis.statistics.histogram import Histogram, require_same_edges
from satlens.analysis.statistics.resampling import LEVEL, N_RESAMPLES, ROUNDING
from satlens.analysis.statistics.seeds import (
    MIN_SEEDS,
    OTHER_SEEDS,
    OTHER_SEEDS_AND_DOCUMENTS,
    SeedComparison,
    hierarchical_interval,
    seed_comparison,
    student_interval,
)
from satlens.analysis.statistics.sign_flips import Adjustment, SignFlip, sign_flip_test
from satlens.analysis.statistics.strata import stratified_interval
from satlens.errors import AnalysisError

__all__ = [
    "FEW_UNITS",
    "LEVEL",
    "MAX_GROUPS",
    "MIN_SEEDS",
    "MIN_UNITS",
    "N_RESAMPLES",
    "OTHER_DOCUMENTS",
    "OTHER_SEEDS",
    "OTHER_SEEDS_AND_DOCUMENTS",
    "VARIANCE_PARTS",
    "Adjustment",
    "Histogram",
    "Interval",
    "SeedComparison",
    "SignFlip",
    "cliffs_delta",
    "divide",
    "function_interval",
    "group_of",
    "hierarchical_interval",
    "hoyer",
    "jensen_shannon",
    "mean_interval",
    "pool_clusters",
    "rank_correlation_interval",
    "ratio_interval",
    "seed_comparison",
    "sign_flip_test",
    "stratified_interval",
    "student_interval",
    "variance_shares",
]

MAX_GROUPS = 1024
VARIANCE_PARTS = ("layers", "heads", "tokens")


# -- units -----------------------------------------------------------------------------------------


def group_of(document: int | np.ndarray, n_documents: int) -> np.ndarray:
    """Group, below min(n_documents, 1024), of document numbers below ``n_documents``.

    Up to 1024 documents each is its own group. Beyond, multiplicative hashing with the golden
    ratio (Knuth, TAOCP 3, section 6.4) spreads consecutive numbers evenly.
    """
    document = np.asarray(document)
    if (document < 0).any() or (document >= n_documents).any():
        raise AnalysisError(f"document number outside [0, {n_documents})")
    if n_documents <= MAX_GROUPS:
        return document.astype(np.int64)
    with np.errstate(over="ignore"):  # modulo 2^64 is the point
        hashed = document.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (hashed >> np.uint64(64 - MAX_GROUPS.bit_length() + 1)).astype(np.int64)


def pool_clusters(labels: Sequence[Any], *sums: np.ndarray) -> tuple[np.ndarray, ...]:
    """Group sums (G, ...) added up by label: (number of labels, ...), labels sorted.

    The sensitivity check beside an interval over documents is the same interval of the pooled
    sums, whose units are then works or authors instead of their pieces.
    """
    names, cluster = np.unique(np.asarray(labels, dtype=str), return_inverse=True)
    pooled = []
    for values in sums:
        if len(values) != len(cluster):
            raise AnalysisError(f"{len(cluster)} cluster labels for {len(values)} groups")
        total = np.zeros((len(names), *np.shape(values)[1:]))
        np.add.at(total, cluster, values)
        pooled.append(total)
    return tuple(pooled)


# -- effect sizes and descriptive statistics -------------------------------------------------------


def cliffs_delta(first: Histogram, second: Histogram) -> np.ndarray:
    """P(first > second) - P(first < second) per cell (Cliff 1993), in [-1, 1].

    Values in one bin are ties, which count one half to each side; zeros tie exactly. NaN where
    either histogram is empty.
    """
    require_same_edges(first, second)
    # In floating point: the number of pairs overflows integers on large corpora.
    ours, theirs = first.counts.astype(np.float64), second.counts.astype(np.float64)
    below = theirs.cumsum(axis=-1) - theirs
    above = theirs.sum(axis=-1, keepdims=True) - below - theirs
    return divide((ours * (below - above)).sum(axis=-1), ours.sum(axis=-1) * theirs.sum(axis=-1))


def jensen_shannon(p: np.ndarray, q: np.ndarray, base: float | None = None) -> np.ndarray:
    """Jensen-Shannon divergence (not its square root) along the last axis (Lin 1991).

    In nats, at most ln 2, unless ``base`` is given. Rows are normalised first. Exactly 0 for equal
    rows; NaN where a row has negative, missing or no mass, for the caller to count.
    """
    p, q = np.broadcast_arrays(np.asarray(p, dtype=np.float64), np.asarray(q, dtype=np.float64))
    p, q = _normalised(p), _normalised(q)
    middle = (p + q) / 2
    parts = special.rel_entr(p, middle) + special.rel_entr(q, middle)
    nats = np.clip(parts.sum(axis=-1) / 2, 0.0, math.log(2))
    return nats if base is None else nats / math.log(base)


def _normalised(rows: np.ndarray) -> np.ndarray:
    """Rows by their sums, NaN for those that are no distribution."""
    valid = (np.isfinite(rows) & (rows >= 0)).all(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        total = np.where(valid, rows, 0.0).sum(axis=-1, keepdims=True)
    valid &= (total > 0) & np.isfinite(total)
    return np.divide(rows, total, out=np.full(rows.shape, np.nan), where=valid)


def hoyer(absolute: np.ndarray, squares: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Hoyer sparsity (Hoyer 2004) from sum |x|, sum x^2 and the number of values.

    (sqrt(n) - l1 / l2) / (sqrt(n) - 1): 0 when all values are equal, 1 when one alone is not
    zero; NaN when all are zero or n < 2.
    """
    root = np.sqrt(np.asarray(n, dtype=np.float64))
    spread = divide(np.asarray(absolute, float), np.sqrt(np.asarray(squares, float)))
    return np.where(root > 1, np.clip(divide(root - spread, root - 1), 0.0, 1.0), np.nan)


def variance_shares(sums: np.ndarray, squares: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Shares of the variance of x[layer, head, token]: (..., 3) in the order VARIANCE_PARTS.

    From sum x, sum x^2 and the number of tokens, each (..., layers, heads). Between layers,
    between the heads of a layer, between the tokens of a head; they add up to 1. NaN when nothing
    varies.
    """
    sums, squares, n = np.broadcast_arrays(*(np.asarray(a, float) for a in (sums, squares, n)))

    def explained(axes: tuple[int, ...]) -> np.ndarray:
        """Sum of n mean^2 with means over ``axes``; what has no tokens adds nothing."""
        count = n.sum(axis=axes, keepdims=True)
        total = sums.sum(axis=axes, keepdims=True)
        return np.nan_to_num(divide(total**2, count)).sum(axis=(-2, -1))

    everything = squares.sum(axis=(-2, -1))
    levels = [explained((-2, -1)), explained((-1,)), explained(()), everything]
    parts = np.stack([b - a for a, b in pairwise(levels)], axis=-1)
    # Differences of large sums: what rounding leaves of a zero is a zero.
    parts[parts <= ROUNDING * everything[..., None]] = 0.0
    return divide(parts, np.broadcast_to(parts.sum(axis=-1, keepdims=True), parts.shape))
