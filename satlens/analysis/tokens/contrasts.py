"""The contrast of two token categories, raw and with frequency and position held fixed.

Shapes: G document groups, 2 categories, S strata (frequency band x position band), C cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import pandas as pd

from satlens.analysis.engine.accumulators import GroupSums, HistogramSum
from satlens.analysis.engine.inputs import interval_columns, interval_protocol
from satlens.analysis.result import flag_column
from satlens.analysis.stats import (
    Adjustment,
    cliffs_delta,
    divide,
    function_interval,
    sign_flip_test,
)
from satlens.analysis.sweeps.table import ADJUSTED


class Contrasted(Protocol):
    """Sums of two categories: ``total`` (G, 2 S, C), ``n`` (G, 2 S), a histogram of each."""

    n_strata: int
    sums: GroupSums
    values: tuple[HistogramSum, HistogramSum]


def difference(total: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Mean of the first category minus the second's: (..., 2, S, C), (..., 2, S) -> (..., C)."""
    mean = divide(total.sum(axis=-2), n.sum(axis=-1)[..., None])
    return mean[..., 0, :] - mean[..., 1, :]


def controlled_difference(total: np.ndarray, n: np.ndarray) -> np.ndarray:
    """The same within strata, averaged with overlap weights n1 n2 / (n1 + n2).

    Strata with only one of the categories say nothing and weigh nothing; NaN if all are such.
    """
    mean = divide(total, n[..., None])
    within = np.nan_to_num(mean[..., 0, :, :] - mean[..., 1, :, :])
    weight = overlap(n)[..., None]
    return divide((within * weight).sum(axis=-2), weight.sum(axis=-2))


def overlap(n: np.ndarray) -> np.ndarray:
    """Overlap weights of strata, (..., 2, S) -> (..., S)."""
    first, second = n[..., 0, :], n[..., 1, :]
    return np.nan_to_num(divide(first * second, first + second))


def contrast_table(
    contrasted: Contrasted,
    cells: pd.DataFrame,
    names: tuple[str, str],
    n_with_both: int,
    n_documents: int,
    *,
    adjustment: Adjustment = "max_t",
    n_resamples: int,
    seed: int,
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a cell, and what the whole contrast rests on.

    ``n_with_both`` of the ``n_documents`` have tokens of both categories; only they have a
    difference within. ``adjustment`` is of the tests over the cells.
    """
    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    shape = (-1, 2, contrasted.n_strata)
    n = contrasted.sums["n"].reshape(shape)
    total = contrasted.sums["total"].reshape(*n.shape, -1)
    columns: dict[str, Any] = {}
    flags: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {
        "first": names[0],
        "second": names[1],
        "n_tokens": n.sum(axis=(0, 2)).astype(int),
        "n_documents_with_both": n_with_both,
        "common_support": _common_support(n),
    }
    estimators: dict[str, Callable[..., np.ndarray]] = {
        "": difference,
        "_controlled": controlled_difference,
    }
    for suffix, estimator in estimators.items():
        interval = function_interval(estimator, total, n, weights=n.sum(axis=(1, 2)), **options)
        within = estimator(total, n)
        test = sign_flip_test(within, adjustment=adjustment, **options)
        columns |= interval_columns(f"delta{suffix}", interval)
        flags[f"delta{suffix}"] = interval.flags
        flags[f"p{suffix}"] = test.flags
        columns |= {
            f"delta_document{suffix}": _mean_over_documents(within),
            f"p{suffix}": test.p,
            f"p{suffix}_adjusted": test.p_adjusted,
            f"p{suffix}_min": test.p_min,
        }
        facts |= {
            f"n_significant{suffix}": int(np.sum(test.p_adjusted < 0.05)),
            f"exact{suffix}": test.exact,
            f"n_sign_patterns{suffix}": test.n_resamples,
        }
    first, second = (side.histogram for side in contrasted.values)
    table = cells.assign(
        contrast=f"{names[0]} - {names[1]}",
        **columns,
        cliffs_delta=cliffs_delta(first, second),
        n_documents=n_with_both,
        n_tokens=int(n.sum()),
        flags=flag_column(flags),
    )
    facts["interval"] = interval_protocol(interval, n_documents)
    facts["adjustment"] = f"{ADJUSTED[adjustment]} over the cells of the table"
    return table, facts


def _mean_over_documents(within: np.ndarray) -> np.ndarray:
    """Mean over the documents that have a difference, (G, C) -> (C,)."""
    defined = np.isfinite(within)
    return divide(np.where(defined, within, 0.0).sum(axis=0), defined.sum(axis=0))


def _common_support(n: np.ndarray) -> dict[str, float]:
    """Share of each category's tokens in strata that hold both categories."""
    strata = n.sum(axis=0)
    shared = (strata > 0).all(axis=0)
    shares = divide(strata[:, shared].sum(axis=1), strata.sum(axis=1))
    return {"first": float(shares[0]), "second": float(shares[1])}
