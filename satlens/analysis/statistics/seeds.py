"""Intervals and tests over paired seeds; use through ``analysis.stats``.

Letters: S seeds, G groups of documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from satlens.analysis.statistics.bootstrap import (
    MIN_UNITS,
    Interval,
    aligned_sums,
    divide,
    informative,
    interval_on_grid,
)
from satlens.analysis.statistics.resampling import (
    LEVEL,
    N_RESAMPLES,
    ROUNDING,
    Ends,
    Method,
    bootstrap,
)
from satlens.errors import AnalysisError

MIN_SEEDS = 5
OTHER_SEEDS = "other seeds"
OTHER_SEEDS_AND_DOCUMENTS = "other seeds, other documents"


def hierarchical_interval(
    numerator: np.ndarray,
    denominator: np.ndarray,
    *,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Mean over seeds of a token-weighted ratio, with its bootstrap over seeds and documents.

    ``numerator`` (S, G, *grid), ``denominator`` the same or fewer trailing axes. Every seed is
    evaluated on the same documents, so seeds and groups are crossed and resampled independently
    of each other (the pigeonhole bootstrap, Owen 2007); nesting documents in seeds would average
    away what the seeds share. Needs 5 seeds and 8 groups; ``units`` are the groups. Expanded as
    :func:`satlens.analysis.stats.ratio_interval`; coverage in simulation with 5 and 8 seeds and 50
    documents is 0.92 to 0.96, and above where seeds and documents only differ in combination.
    """
    numerator, denominator = aligned_sums(numerator, denominator)
    n_seeds = len(numerator)
    top, bottom = (
        np.moveaxis(v, 1, 0).reshape(v.shape[1], n_seeds, -1) for v in (numerator, denominator)
    )
    rows = informative(bottom)
    top, bottom = top[rows], bottom[rows]
    estimate = divide(top.sum(axis=0), bottom.sum(axis=0)).mean(axis=0)

    def statistic(seed_counts: np.ndarray, counts: np.ndarray, cells: slice) -> np.ndarray:
        totals = (np.tensordot(counts, v[..., cells], axes=1) for v in (top, bottom))
        shares = seed_counts / seed_counts.sum(axis=1, keepdims=True)
        # A seed that was not drawn weighs nothing, even where it has no ratio.
        return (np.where(shares[..., None] > 0, divide(*totals), 0) * shares[..., None]).sum(axis=1)

    sizes = (n_seeds, len(top))
    units = (bottom != 0).any(axis=1).sum(axis=0)
    return interval_on_grid(
        numerator.shape[2:],
        estimate,
        bootstrap(statistic, sizes, estimate.size, 2 * n_seeds, n_resamples, seed, chunked=True),
        units=units,
        withheld={
            f"seeds<{MIN_SEEDS}": np.full(estimate.shape, n_seeds < MIN_SEEDS),
            f"units<{MIN_UNITS}": units < MIN_UNITS,
        },
        covers=OTHER_SEEDS_AND_DOCUMENTS,
        n_resamples=n_resamples,
        seed=seed,
    )


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

    Each interval names its ``method``: published error bars are often percentile bootstraps. Those
    here are at the plain level, to be like them, and too narrow for few seeds; Student's is not.
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
        t=student_interval(differences),
        percentile=_seed_bootstrap(flat, grid, "percentile", n_resamples, seed),
        bca=_seed_bootstrap(flat, grid, "BCa", n_resamples, seed),
        sign_p=sign_p.reshape(grid),
        sign_p_min=2.0 ** (1 - n_seeds),
    )


def student_interval(differences: np.ndarray) -> Interval:
    """Student's interval of the mean over seeds of differences (S, *grid), from two seeds on."""
    differences = np.asarray(differences, dtype=np.float64)
    n_seeds, *grid = differences.shape
    flat = differences.reshape(n_seeds, int(np.prod(grid)))
    mean, half = flat.mean(axis=0), np.full(flat.shape[1], np.nan)
    if n_seeds > 1:
        quantile = stats.t.ppf((1 + LEVEL) / 2, n_seeds - 1)
        half = quantile * flat.std(axis=0, ddof=1) / math.sqrt(n_seeds)
    with np.errstate(invalid="ignore"):
        constant = np.ptp(flat, axis=0) <= ROUNDING * np.abs(flat).max(axis=0)
    ends = Ends(mean - half, mean + half, np.zeros(len(mean), dtype=bool), constant)
    return _over_seeds(flat, grid, ends, 2, "Student t", None, None)


def _seed_bootstrap(
    flat: np.ndarray, grid: Sequence[int], method: Method, n_resamples: int, seed: int
) -> Interval:
    """Bootstrap over seeds of the mean of (S, cells) differences."""
    n_seeds, n_cells = flat.shape

    def mean(counts: np.ndarray, cells: slice) -> np.ndarray:
        return counts @ flat[:, cells] / counts.sum(axis=1, keepdims=True)

    ends = bootstrap(mean, (n_seeds,), n_cells, n_cells, n_resamples, seed, method, expand=False)
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
