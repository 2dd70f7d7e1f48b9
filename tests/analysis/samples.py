"""Samples of documents and what chance allows, for the tests of the statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import stats


def documents(rng: np.random.Generator, n: int, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Skewed document lengths and sums whose ratio varies between documents."""
    n_tokens = np.ceil(rng.lognormal(5, 0.5, n))
    return rng.gamma(4, 0.1, (n, cells)) * n_tokens[:, None], n_tokens


def binomial_range(share: float, n: int) -> np.ndarray:
    """Central 99.9 % range of a binomial share, for checks of coverage and of error rates."""
    return stats.binom.ppf([0.0005, 0.9995], n, share) / n


def expanded_level(without: Sequence[np.ndarray]) -> float:
    """Level of an interval for the leave-one-out values of a statistic, an array a sample.

    Hesterberg's (2015) for an effective number of units, 2 n / (kurtosis - 1) and at most n; the
    degrees of freedom of several samples are Welch's.
    """
    variances, effective = [], []
    for values in without:
        n, moved = len(values), values - values.mean()
        kurtosis = np.mean(moved**4) / np.mean(moved**2) ** 2
        variances.append((n - 1) ** 2 * np.mean(moved**2) / n)
        effective.append(min(n, max(3.0, 2 * n / (kurtosis - 1))))
    shares, n = np.array(variances) / sum(variances), np.array(effective)
    df = 1 / (shares**2 / (n - 1)).sum()
    wider = np.sqrt((shares * n / (n - 1)).sum())
    return float(1 - 2 * stats.norm.sf(wider * stats.t.ppf(0.975, df)))
