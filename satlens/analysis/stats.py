"""The statistics of every analysis: intervals, tests and effect sizes. Imports no torch.

Axis 0 of every array of sums is the group: documents fall into at most 1024 groups
(:func:`group_of`) and groups are resampled, so memory does not grow with the corpus. The axes
after it are the grid (site or layer, head, ...). Bootstrap intervals live in ``bootstrap``, the
fixed histograms in ``histogram``; both are offered here.

Letters: G groups, S seeds, B resamples of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special, stats

from satlens.analysis.bootstrap import (
    FEW_UNITS,
    LEVEL,
    MIN_SEEDS,
    MIN_UNITS,
    N_RESAMPLES,
    OTHER_DOCUMENTS,
    OTHER_SEEDS,
    OTHER_SEEDS_AND_DOCUMENTS,
    ROUNDING,
    Ends,
    Interval,
    Method,
    bootstrap,
    divide,
    function_interval,
    hierarchical_interval,
    interval_on_grid,
    join_flags,
    mean_interval,
    ratio_interval,
)
from satlens.analysis.histogram import Histogram, require_same_edges
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
    "ratio_interval",
    "seed_comparison",
    "sign_flip_test",
    "variance_shares",
]

MAX_GROUPS = 1024
VARIANCE_PARTS = ("layers", "heads", "tokens")
_SIGN_ELEMENTS = 2**22  # numbers held by one batch of sign patterns


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


# -- tests on grids --------------------------------------------------------------------------------


class SignFlip(NamedTuple):
    """Sign-flip tests of a grid, arrays (*grid).

    Flags: ``undefined`` (no unit: NaN), ``zero`` (every difference is zero: p = 1).
    """

    t: np.ndarray
    """Mean difference by its standard error."""
    p: np.ndarray
    """Two-sided, of the cell alone."""
    p_adjusted: np.ndarray
    p_min: np.ndarray
    """Smallest p that the cell could have reached with its units and these sign patterns."""
    flags: np.ndarray
    units: np.ndarray
    adjustment: str
    exact: bool
    n_resamples: int
    """Sign patterns used; when exact, all of them up to a global change of sign."""
    seed: int


def sign_flip_test(
    differences: np.ndarray,
    *,
    adjustment: Literal["max_t", "benjamini_hochberg"] = "max_t",
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> SignFlip:
    """Two-sided tests that per-document differences are symmetric about zero, over a grid.

    ``differences`` (G, *grid), NaN where a document has no difference for a cell. One sign per
    document flips all its cells, so the adjustment keeps their dependence: ``max_t`` (Westfall
    and Young 1993, single step) bounds the chance of any false positive in the grid,
    ``benjamini_hochberg`` the share of false ones among the positives. All patterns are enumerated
    when 2^G <= ``n_resamples``, else drawn, with p = (k + 1) / (n_resamples + 1).
    """
    differences = np.asarray(differences, dtype=np.float64)
    grid = differences.shape[1:]
    flat = differences.reshape(len(differences), int(np.prod(grid)))
    finite = np.isfinite(flat)
    units, flat = finite.sum(axis=0), np.where(finite, flat, 0.0)
    # A document whose differences are all zero is the same under both signs.
    moving = flat[(flat != 0).any(axis=1)]
    squares = (flat**2).sum(axis=0)
    t = _studentised(flat.sum(axis=0), squares, units)
    # Patterns that tie with the observed one in exact arithmetic have to count.
    bar = np.abs(t) * (1 - 1e-9)

    exact = 2 ** len(moving) <= n_resamples
    own, any_cell, n_patterns = np.zeros(t.shape), np.zeros(t.shape), 0
    for signs in _sign_patterns(len(moving), flat.shape[1], exact, n_resamples, seed):
        drawn = np.abs(_studentised(signs @ moving, squares, units))
        own += (drawn >= bar).sum(axis=0)
        any_cell += (drawn.max(axis=1, keepdims=True, initial=0) >= bar).sum(axis=0)
        n_patterns += len(signs)

    observed = 0 if exact else 1  # the enumeration contains the observed pattern
    p, p_max_t = ((k + observed) / (n_patterns + observed) for k in (own, any_cell))
    p_adjusted = p_max_t
    if adjustment == "benjamini_hochberg":
        p_adjusted = np.ones(p.shape)
        p_adjusted[units > 0] = stats.false_discovery_control(p[units > 0], method="bh")
    n_moving = (flat != 0).sum(axis=0)
    p_min = np.maximum(np.minimum(1.0, 2.0 ** (1 - n_moving)), observed / (n_patterns + observed))
    flags = join_flags({"undefined": units == 0, "zero": (n_moving == 0) & (units > 0)}, t.shape)
    t, p, p_adjusted, p_min = (np.where(units > 0, v, np.nan) for v in (t, p, p_adjusted, p_min))
    return SignFlip(
        t=t.reshape(grid),
        p=p.reshape(grid),
        p_adjusted=p_adjusted.reshape(grid),
        p_min=p_min.reshape(grid),
        flags=flags.reshape(grid),
        units=units.reshape(grid),
        adjustment=adjustment,
        exact=exact,
        n_resamples=n_patterns,
        seed=seed,
    )


def _studentised(total: np.ndarray, squares: np.ndarray, units: np.ndarray) -> np.ndarray:
    """t of a mean from the sum and the sum of squares of ``units`` values; finite, 0 for zeros."""
    scale = np.broadcast_to(np.sqrt(units * squares), total.shape)
    cosine = np.divide(total, scale, out=np.zeros(total.shape), where=scale > 0)
    return cosine * np.sqrt(np.maximum(units - 1, 0) / np.maximum(1 - cosine**2, ROUNDING))


def _sign_patterns(
    n: int, n_cells: int, exact: bool, n_resamples: int, seed: int
) -> Iterator[np.ndarray]:
    """Batches (B, n) of +1 and -1; exact: half of all, since |t| ignores a global sign."""
    batch = max(1, _SIGN_ELEMENTS // max(n, n_cells, 1))
    rng = np.random.default_rng(seed)
    total = 2 ** max(n - 1, 0) if exact else n_resamples
    for start in range(0, total, batch):
        rows = min(batch, total - start)
        if exact:
            bits = (np.arange(start, start + rows)[:, None] >> np.arange(n)) & 1
        else:
            bits = rng.integers(0, 2, (rows, n), dtype=np.int8)
        yield 1.0 - 2.0 * bits


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


# -- seeds -----------------------------------------------------------------------------------------


class SeedComparison(NamedTuple):
    """Paired seeds, first minus second. Intervals are (*grid) and cover other seeds."""

    differences: np.ndarray
    """(S, *grid)"""
    t: Interval
    """Student's interval, from two seeds on."""
    percentile: Interval
    bca: Interval
    """Bootstrap intervals, from five seeds on."""
    sign_p: np.ndarray
    """Two-sided sign test, zero differences left out; 1 when all are zero."""
    sign_p_min: float
    """Smallest p that this number of seeds can reach."""


def seed_comparison(
    first: np.ndarray, second: np.ndarray, *, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> SeedComparison:
    """Compare two arms over the seeds they share; ``first`` and ``second`` are (S, *grid).

    Each interval names its ``method``: published error bars are often percentile bootstraps.
    """
    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if first.shape != second.shape or not first.ndim or not len(first):
        raise AnalysisError(f"paired seeds: arms of shapes {first.shape} and {second.shape}")
    differences = first - second
    n_seeds, *grid = differences.shape
    flat = differences.reshape(n_seeds, int(np.prod(grid)))
    up, down = (flat > 0).sum(axis=0), (flat < 0).sum(axis=0)
    # Twice one tail is the exact two-sided binomial p, since one half is symmetric.
    sign_p = np.minimum(1.0, 2 * stats.binom.cdf(np.minimum(up, down), up + down, 0.5))
    sign_p = np.where(np.isfinite(flat).all(axis=0), sign_p, np.nan)
    return SeedComparison(
        differences=differences,
        t=_t_interval(flat, grid),
        percentile=_seed_bootstrap(flat, grid, "percentile", n_resamples, seed),
        bca=_seed_bootstrap(flat, grid, "BCa", n_resamples, seed),
        sign_p=sign_p.reshape(grid),
        sign_p_min=2.0 ** (1 - n_seeds),
    )


def _t_interval(flat: np.ndarray, grid: Sequence[int]) -> Interval:
    """Student's interval of the mean of (S, cells) differences."""
    n_seeds, n_cells = flat.shape
    mean, half = flat.mean(axis=0), np.full(n_cells, np.nan)
    if n_seeds > 1:
        quantile = stats.t.ppf((1 + LEVEL) / 2, n_seeds - 1)
        half = quantile * flat.std(axis=0, ddof=1) / math.sqrt(n_seeds)
    with np.errstate(invalid="ignore"):
        constant = np.ptp(flat, axis=0) <= ROUNDING * np.abs(flat).max(axis=0)
    ends = Ends(mean - half, mean + half, np.zeros(n_cells, dtype=bool), constant)
    return _over_seeds(flat, grid, ends, 2, "Student t", None, None)


def _seed_bootstrap(
    flat: np.ndarray, grid: Sequence[int], method: Method, n_resamples: int, seed: int
) -> Interval:
    """Bootstrap over seeds of the mean of (S, cells) differences."""
    n_seeds, n_cells = flat.shape

    def mean(counts: np.ndarray, cells: slice) -> np.ndarray:
        return counts @ flat[:, cells] / counts.sum(axis=1, keepdims=True)

    ends = bootstrap(mean, (n_seeds,), n_cells, n_cells, n_resamples, seed, method)
    name = f"bootstrap, {method}" + (" (percentile where flagged)" if method == "BCa" else "")
    return _over_seeds(flat, grid, ends, MIN_SEEDS, name, n_resamples, seed)


def _over_seeds(
    flat: np.ndarray,
    grid: Sequence[int],
    ends: Ends,
    least: int,
    method: str,
    n_resamples: int | None,
    seed: int | None,
) -> Interval:
    """The interval of a mean of (S, cells) differences, from ``least`` seeds on."""
    n_seeds, n_cells = flat.shape
    return interval_on_grid(
        grid,
        flat.mean(axis=0),
        ends,
        units=np.full(n_cells, n_seeds),
        withheld={f"seeds<{least}": np.full(n_cells, n_seeds < least)},
        covers=OTHER_SEEDS,
        n_resamples=n_resamples,
        seed=seed,
        few_below=0,
        method=method,
    )
