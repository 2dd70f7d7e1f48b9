"""Means of ratios over several samples; use through ``analysis.stats``.

Each stratum (a task) has units of its own (its passages), which are resampled within it. Letters:
G units of a stratum, B resamples of one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
from satlens.analysis.statistics.resampling import N_RESAMPLES, bootstrap
from satlens.errors import AnalysisError

__all__ = ["stratified_interval"]


def stratified_interval(
    strata: Sequence[tuple[np.ndarray, np.ndarray]],
    *,
    covers: str = OTHER_DOCUMENTS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Unweighted mean over strata of sum of numerators / sum of denominators, with its bootstrap.

    Each stratum is a pair of sums as :func:`ratio_interval` takes them, (G, *grid) with its own G
    and one grid. Units are resampled within their stratum, independently of the other strata
    (stratified bootstrap; Davison and Hinkley 1997, section 3.2), so the strata themselves are
    taken as given. Withheld (``units<8``) where any stratum has fewer than 8 units.

    Raises:
        AnalysisError: no strata, or grids that differ.
    """
    pairs = [aligned_sums(*pair) for pair in strata]
    grids = {top.shape[1:] for top, _ in pairs}
    if len(grids) != 1:
        raise AnalysisError(f"stratified interval: {len(pairs)} strata with the grids {grids}")
    (grid,) = grids
    kept = [(top, bottom, informative(bottom)) for top, bottom in pairs]
    flat = [(by_cell(top[rows]), by_cell(bottom[rows])) for top, bottom, rows in kept]

    def statistic(*arguments: Any) -> np.ndarray:
        *counts, cells = arguments
        ratios = [
            divide(drawn @ top[:, cells], drawn @ bottom[:, cells])
            for drawn, (top, bottom) in zip(counts, flat, strict=True)
        ]
        return np.mean(ratios, axis=0)

    sizes = tuple(len(top) for top, _ in flat)
    estimate = statistic(*(np.ones((1, n)) for n in sizes), slice(None))[0]
    units = np.array([(bottom != 0).sum(axis=0) for _, bottom in flat])
    width = 2 * len(flat) * estimate.size
    return interval_on_grid(
        grid,
        estimate,
        bootstrap(statistic, sizes, estimate.size, width, n_resamples, seed),
        units=units.sum(axis=0),
        withheld={f"units<{MIN_UNITS}": units.min(axis=0) < MIN_UNITS},
        covers=covers,
        n_resamples=n_resamples,
        seed=seed,
        method="bootstrap by stratum, expanded BCa (percentile where flagged)",
    )
