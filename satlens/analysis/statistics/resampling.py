"""Bootstrap resamples and the ends of intervals taken from them; use through ``analysis.stats``.

A resample is how often each unit was drawn. Letters: G units, B resamples of one batch.

The level of an interval is expanded for few units (Hesterberg 2015, expanded percentile interval).
Percentiles of a bootstrap of n units are too narrow by sqrt((n - 1) / n), and normal where
Student's t is due; ends are therefore taken where a normal variable passes sqrt(n / (n - 1)) t,
with t of n - 1 degrees of freedom. That n is an effective number of units: the variance of the
statistic is estimated from the influences of the units, about as well as from
2 n / (kurtosis - 1) normal ones (Satterthwaite 1946). That is n when influences are normal and
less when a few long documents, or a few in which a gate opens at all, carry the statistic.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import special, stats

from satlens.errors import AnalysisError

LEVEL = 0.95
N_RESAMPLES = 9999

ROUNDING = 1e-12
"""Rounding of a sum relative to its terms: a spread below it counts as none."""

LEAST_EFFECTIVE = 3.0
"""Effective units below which expanding the level further would change nothing but the extremes."""

# Numbers held at a time by one batch of resamples, and by one chunk of a bootstrap distribution.
_BATCH_ELEMENTS = 2**22
_CHUNK_ELEMENTS = 2**23

Method = Literal["BCa", "percentile"]
Statistic = Callable[..., np.ndarray]
"""``statistic(*counts, cells)``: how often each unit was drawn, (B, size) for each of the sizes,
gives (B, cells) values."""


class Ends(NamedTuple):
    """Ends of a bootstrap interval, arrays (cells,)."""

    low: np.ndarray
    high: np.ndarray
    percentile: np.ndarray
    """Where they are percentiles for want of BCa."""
    constant: np.ndarray
    """Where every resample gave the same, up to rounding."""


def check_draws(n_resamples: int, seed: int) -> None:
    """Refuse settings of resampling that mean nothing.

    Raises:
        AnalysisError: no resamples, or a seed below 0.
    """
    if n_resamples < 1:
        raise AnalysisError(f"n_resamples: must be at least 1, got {n_resamples}")
    if seed < 0:
        raise AnalysisError(f"seed: must not be negative, got {seed}")


def bootstrap(
    statistic: Statistic,
    sizes: tuple[int, ...],
    n_cells: int,
    width: int,
    n_resamples: int,
    seed: int,
    method: Method = "BCa",
    expand: bool = True,
    chunked: bool = False,
) -> Ends:
    """Interval of each of ``n_cells`` statistics.

    Units of each of ``sizes`` are resampled independently of the others. ``statistic`` holds about
    B x ``width`` numbers, per cell if ``chunked``: then cells go through in chunks, all with the
    same resamples since the seed is the same, so that memory is bounded. ``expand`` is explained at
    the top of the module; without it the level is 95 %.
    """
    check_draws(n_resamples, seed)
    every = Ends(*np.full((2, n_cells), np.nan), *np.zeros((2, n_cells), dtype=bool))
    chunk = max(1, _CHUNK_ELEMENTS // n_resamples if chunked else n_cells)
    if chunked:
        width *= min(chunk, n_cells)
    batch = batch_of(width, sizes, n_resamples)
    for start in range(0, n_cells if min(sizes) > 1 else 0, chunk):
        cells = slice(start, start + chunk)
        drawn = distribution(statistic, sizes, cells, n_resamples, seed, batch)
        influences = _influences(statistic, sizes, cells, batch)
        lowest, highest = np.fmin.reduce(drawn, axis=-1), np.fmax.reduce(drawn, axis=-1)
        still = highest - lowest <= ROUNDING * np.maximum(np.abs(lowest), np.abs(highest))
        z = _half_width(influences) if expand else stats.norm.isf((1 - LEVEL) / 2)
        estimate = statistic(*(np.ones((1, n)) for n in sizes), cells)[0]
        low, high, lost = _ends(drawn, estimate, influences, z, method)
        for whole, part in zip(every, (low, high, lost, still), strict=True):
            whole[cells] = part
    return every


def batch_of(width: int, sizes: tuple[int, ...], n_resamples: int) -> int:
    """Resamples that are held at a time when each takes ``width`` numbers."""
    return max(1, min(n_resamples, _BATCH_ELEMENTS // max(width, *sizes, 1)))


def distribution(
    statistic: Statistic,
    sizes: tuple[int, ...],
    cells: slice,
    n_resamples: int,
    seed: int,
    batch: int,
) -> np.ndarray:
    """(cells, resamples) values of the statistic, through ``scipy.stats.bootstrap``."""
    check_draws(n_resamples, seed)

    def of_indices(*indices: np.ndarray, axis: int) -> np.ndarray:
        counts = (_counts(drawn, n) for drawn, n in zip(indices, sizes, strict=True))
        values = statistic(*counts, cells)
        return np.moveaxis(values.reshape(*indices[0].shape[:-1], -1), -1, 0)

    # Cells that are undefined or constant are found and flagged by the callers.
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)
        done = stats.bootstrap(
            tuple(np.arange(n) for n in sizes),
            of_indices,
            vectorized=True,
            method="percentile",
            n_resamples=n_resamples,
            batch=batch,
            rng=np.random.default_rng(seed),
        )
    return done.bootstrap_distribution


def _counts(drawn: np.ndarray, n: int) -> np.ndarray:
    """How often each of ``n`` units occurs in each row of (..., draws) indices: (rows, n)."""
    drawn = drawn.reshape(-1, drawn.shape[-1])
    cell = drawn + np.arange(len(drawn))[:, None] * n
    return np.bincount(cell.ravel(), minlength=len(drawn) * n).reshape(-1, n).astype(np.float64)


def _influences(
    statistic: Statistic, sizes: tuple[int, ...], cells: slice, batch: int
) -> list[np.ndarray]:
    """Jackknife influences of the units of each sample, (size, cells) each; 0 where undefined.

    They are relative to the largest of a cell, since only ratios of their moments are of use.
    """
    found: list[np.ndarray] = []
    for which, n in enumerate(sizes):
        parts = []
        for start in range(0, n, batch):
            rows = np.arange(start, min(n, start + batch))
            counts = [np.ones((len(rows), size)) for size in sizes]
            counts[which][np.arange(len(rows)), rows] = 0
            parts.append(statistic(*counts, cells))
        without = np.concatenate(parts)
        defined = np.isfinite(without)
        without = np.where(defined, without, 0.0)
        mean = without.sum(axis=0) / np.maximum(defined.sum(axis=0), 1)
        found.append((n - 1) * np.where(defined, mean - without, 0.0))
    largest = np.max([np.abs(values).max(axis=0) for values in found], axis=0)
    return [values / np.where(largest > 0, largest, 1.0) for values in found]


# -- the ends --------------------------------------------------------------------------------------


def expanded_z(n: np.ndarray | float) -> np.ndarray:
    """Standard normal quantile of the expanded level for ``n`` units; NaN below two."""
    n = np.asarray(n, dtype=np.float64)
    df = np.where(n > 1, n - 1, np.nan)
    return np.sqrt(n / df) * stats.t.isf((1 - LEVEL) / 2, df)


def _half_width(influences: Sequence[np.ndarray]) -> np.ndarray:
    """Standard normal quantile, (cells,), of the expanded level; several samples after Welch."""
    n = np.array([float(len(values)) for values in influences])[:, None]
    squares = np.array([(values**2).sum(axis=0) for values in influences])
    fourths = np.array([(values**4).sum(axis=0) for values in influences])
    with np.errstate(invalid="ignore", divide="ignore"):
        effective = 2 * n / (n * fourths / squares**2 - 1)
    effective = np.where(squares > 0, np.clip(effective, np.minimum(LEAST_EFFECTIVE, n), n), n)
    variances = squares / n**2
    total = variances.sum(axis=0)
    moved = total > 0
    shares = np.where(moved, variances / np.where(moved, total, 1), 1 / len(n))
    df = 1 / (shares**2 / (effective - 1)).sum(axis=0)
    wider = np.sqrt((shares * effective / (effective - 1)).sum(axis=0))
    return wider * stats.t.isf((1 - LEVEL) / 2, df)


def _ends(
    drawn: np.ndarray,
    estimate: np.ndarray,
    influences: Sequence[np.ndarray],
    z: np.ndarray | float,
    method: Method,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Low and high ends from (cells, B) values, and where they are percentiles instead of BCa.

    BCa does not exist where all resamples fall on one side of the estimate or no unit moves it, and
    is not used where some resamples, without a token of the cell, have no value.
    """
    ordered = np.sort(np.where(np.isfinite(drawn), drawn, np.nan), axis=-1)  # NaN last
    n_values = np.isfinite(ordered).sum(axis=-1)
    tails = np.array([[-1.0], [1.0]]) * np.broadcast_to(z, len(drawn))
    lost = np.zeros(len(drawn), dtype=bool)
    if method == "BCa":
        bias, acceleration = _bias(ordered, estimate), _acceleration(influences)
        with np.errstate(invalid="ignore", divide="ignore"):
            # Beyond the pole of the formula lies the extreme of the resamples.
            scale = np.maximum(1 - acceleration * (bias + tails), ROUNDING)
            moved = bias + (bias + tails) / scale
        lost = (n_values < drawn.shape[-1]) | ~np.isfinite(moved).all(axis=0)
        tails = np.where(lost, tails, moved)
    low, high = (_quantile(ordered, n_values, special.ndtr(tail)) for tail in tails)
    return low, high, lost & (n_values > 0)


def _bias(ordered: np.ndarray, estimate: np.ndarray) -> np.ndarray:
    """z0 of Efron (1987): where the estimate lies among the resamples, ties by one half."""
    below = (ordered < estimate[:, None]).mean(axis=-1)
    up_to = (ordered <= estimate[:, None]).mean(axis=-1)
    return special.ndtri((below + up_to) / 2)


def _acceleration(influences: Sequence[np.ndarray]) -> np.ndarray:
    """a of Efron (1987) from the influences, sums over several samples added up."""
    cubes = sum((values**3).sum(axis=0) / len(values) ** 3 for values in influences)
    squares = sum((values**2).sum(axis=0) / len(values) ** 2 for values in influences)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(cubes / squares**1.5 / 6)


def _quantile(ordered: np.ndarray, n_values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Quantile ``at``, (cells,), of the first ``n_values`` of each sorted row, linear between."""
    place = at * np.maximum(n_values - 1, 0)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, np.maximum(n_values - 1, 0))
    low, high = (np.take_along_axis(ordered, i[:, None], axis=-1)[:, 0] for i in (below, above))
    return low + (place - below) * (high - low)
