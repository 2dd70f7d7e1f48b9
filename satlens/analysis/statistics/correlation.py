"""Rank correlation of two quantities over the cells of a grid; use through ``analysis.stats``.

Letters: G groups, C cells, B resamples of one batch.
"""

from __future__ import annotations

import numpy as np
from scipy import stats

from satlens.analysis.statistics.bootstrap import (
    MIN_UNITS,
    OTHER_DOCUMENTS,
    Interval,
    aligned_sums,
    by_cell,
    divide,
    informative,
    interval_on_grid,
)
from satlens.analysis.statistics.resampling import (
    N_RESAMPLES,
    ROUNDING,
    Ends,
    batch_of,
    distribution,
    expanded_z,
)
from satlens.errors import AnalysisError

MIN_CELLS = 3
"""Two cells are always in perfect order; below three there is no interval."""

ATTENUATED = 0.5
"""Share of the standard error by which resampling may pull a correlation toward zero."""

Ratio = tuple[np.ndarray, np.ndarray]


def rank_correlation_interval(
    x: Ratio,
    y: Ratio,
    *,
    covers: str = OTHER_DOCUMENTS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Spearman's correlation over cells of two token-weighted ratios, with its interval.

    ``x`` and ``y`` are (numerator, denominator): sums (G, *cells) over the tokens of each group,
    the denominator with fewer trailing axes where cells share it, such as (G,) tokens. Cells are
    ranked after the groups are summed, ties by their mean rank, so the estimate is that of
    ``scipy.stats.spearmanr`` on the two ratios. Cells without a ratio are left out.

    The interval is Student's on Fisher's z scale with the standard error of a bootstrap over
    groups; the percentiles of that bootstrap are of no use, since resampling adds noise to the
    cells and noise pulls a rank correlation toward zero. It covers what as many other documents
    would give (in simulation at 50 groups 0.92 to 0.97), noise of the cells included: their order
    without that noise agrees better. Flag ``attenuated`` says that this matters.

    Returns:
        A scalar (grid ``()``). Further flags: ``undefined`` where one side is constant, ``cells<3``
        (no interval) where fewer cells are left.

    Raises:
        AnalysisError: sides with other groups or cells.
    """
    sides = [[by_cell(sums) for sums in aligned_sums(*ratio)] for ratio in (x, y)]
    if sides[0][0].shape != sides[1][0].shape:
        raise AnalysisError(
            f"rank correlation: groups and cells {np.shape(x[0])} on one side, {np.shape(y[0])} on "
            "the other"
        )
    whole = [divide(top.sum(axis=0), bottom.sum(axis=0)) for top, bottom in sides]
    kept = np.isfinite(whole).all(axis=0)
    sums = [values[:, kept] for side in sides for values in side]
    rows = informative(np.abs(sums[1]) + np.abs(sums[3]))
    sums = [values[rows] for values in sums]
    n_units, n_cells = sums[0].shape

    def of_counts(counts: np.ndarray, cells: slice) -> np.ndarray:
        top_x, bottom_x, top_y, bottom_y = (counts @ values for values in sums)
        return spearman(divide(top_x, bottom_x), divide(top_y, bottom_y))[:, None]

    estimate = of_counts(np.ones((1, n_units)), slice(None))[0]
    drawn = np.full((1, 1), np.nan)
    if n_units > 1 and n_cells >= MIN_CELLS:
        batch = batch_of(4 * n_cells, (n_units,), n_resamples)
        drawn = distribution(of_counts, (n_units,), slice(None), n_resamples, seed, batch)
    ends, attenuated = _fisher_ends(estimate, drawn[drawn == drawn], n_units, n_cells)
    found = interval_on_grid(
        (1,),
        estimate,
        ends,
        units=np.array([n_units]),
        withheld={
            f"cells<{MIN_CELLS}": np.array([n_cells < MIN_CELLS]),
            f"units<{MIN_UNITS}": np.array([n_units < MIN_UNITS]),
        },
        covers=covers,
        n_resamples=n_resamples,
        seed=seed,
        method="Student t on Fisher's z, standard error by bootstrap",
    )
    if attenuated and found.low[0] < found.high[0]:
        found.flags[0] = ";".join(word for word in (found.flags[0], "attenuated") if word)
    scalars = {name: getattr(found, name)[0:1].reshape(()) for name in _ARRAYS}
    return found._replace(**scalars)


_ARRAYS = ("estimate", "low", "high", "flags", "units")


def _fisher_ends(
    estimate: np.ndarray, drawn: np.ndarray, n_units: int, n_cells: int
) -> tuple[Ends, bool]:
    """Ends (1,) from the (B,) correlations of resamples, and whether these are attenuated."""
    nothing, no = np.full(1, np.nan), np.zeros(1, dtype=bool)
    if not drawn.size or not np.isfinite(estimate[0]):
        return Ends(nothing, nothing, no, no), False
    # Perfect order has no z; it counts as half of the smallest step away from it.
    most = 1 - 6 / (n_cells**3 - n_cells)
    z, zs = (np.arctanh(np.clip(values, -most, most)) for values in (estimate, drawn))
    error = zs.std(ddof=1)
    half = expanded_z(n_units) * error
    low, high = (np.tanh(z + side) for side in (-half, half))
    constant = np.array([np.ptp(drawn) <= ROUNDING])
    attenuated = bool(abs(zs.mean()) < abs(z[0]) - ATTENUATED * error)
    return Ends(np.minimum(low, estimate), np.maximum(high, estimate), no, constant), attenuated


def spearman(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Spearman's rank correlation along the last axis; NaN where a side is constant or has NaN."""
    if not np.shape(x)[-1]:
        return np.full(np.shape(x)[:-1], np.nan)
    ranks = [stats.rankdata(side, axis=-1, nan_policy="propagate") for side in (x, y)]
    a, b = (rank - rank.mean(axis=-1, keepdims=True) for rank in ranks)
    scale = np.sqrt((a**2).sum(axis=-1) * (b**2).sum(axis=-1))
    return np.clip(divide((a * b).sum(axis=-1), scale), -1.0, 1.0)
