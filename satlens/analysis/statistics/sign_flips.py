"""Sign-flip tests of paired differences over a grid; use through ``analysis.stats``.

Axis 0 is the document group, the axes after it are the grid. Letters: G groups, B patterns of one
batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from satlens.analysis.statistics.bootstrap import join_flags
from satlens.analysis.statistics.resampling import N_RESAMPLES, ROUNDING, check_draws

Adjustment = Literal["max_t", "benjamini_hochberg"]

_SIGN_ELEMENTS = 2**22  # numbers held by one batch of sign patterns


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
    adjustment: Adjustment = "max_t",
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
    check_draws(n_resamples, seed)
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
