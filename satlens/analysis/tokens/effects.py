"""Effects of the levels of factors on a value, shrunk for want of tokens. Imports no torch.

A factor divides tokens into levels (a token id, a position band). The effect of a level is how far
the mean of its tokens lies from the mean of all. Levels with few tokens are noisy, and most token
ids are rare, so effects are those of a random-effects model: pulled to zero as far as the variance
within levels, against that between them, says (Robinson 1991, "That BLUP is a good thing"; Searle,
Casella and McCulloch 1992, ch. 3 for the variances).

Letters: L levels, C cells (each a value of its own).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import LinearOperator, cg

from satlens.analysis.stats import ROUNDING, divide
from satlens.errors import AnalysisError

_LEAST_WITHIN = 1e-6
"""Variance within levels is taken as at least this share of all, so that its inverse exists."""
_TOLERANCE = 1e-9
_MAX_STEPS = 10_000


def variance_ratio(total: np.ndarray, n: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Variance between levels over variance within, by the method of moments (ANOVA), (C,).

    Args:
        total: sums of the centred values of each level, (L, C).
        n: tokens of each level, (L,).
        squares: sums of the squared centred values, (C,).

    Zero where levels differ no more than chance makes them, and where no level has two tokens.
    """
    used = n > 0
    n, total = n[used], total[used]
    size, levels = n.sum(), len(n)
    if levels < 2 or size == levels:
        return np.zeros(squares.shape)
    between = (total**2 / n[:, None]).sum(axis=0)
    within = np.maximum(squares - between, 0.0) / (size - levels)
    n_effective = size - (n**2).sum() / size
    spread = np.maximum(between - (levels - 1) * within, 0.0) / n_effective
    least = _LEAST_WITHIN * squares / size
    return np.nan_to_num(divide(spread, np.maximum(within, least)))


def shrunk_effects(total: np.ndarray, n: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Effects of one factor's levels, (L, C): the mean of the level times n r / (n r + 1)."""
    return total * ratio / (n[:, None] * ratio + 1.0)


def joint_effects(counts: sparse.csr_array, total: np.ndarray, ratio: np.ndarray) -> np.ndarray:
    """Effects of the levels of several factors that add up, (L, C), L of all factors together.

    Henderson's mixed-model equations (X'X + 1 / ratio) b = X'y of one-hot X, solved by conjugate
    gradients scaled so that a ratio of zero is no effect.

    Args:
        counts: X'X (L, L), tokens that have both levels.
        total: X'y, sums of the centred values of each level, (L, C).
        ratio: variance ratio of each level's factor, (L, C).

    Raises:
        AnalysisError: the equations are not solved to 1e-9.
    """
    n = counts.diagonal()
    effects = np.zeros(total.shape)
    for cell in range(total.shape[1]):
        root = np.sqrt(ratio[:, cell])
        right = root * total[:, cell]
        if not right.any():
            continue

        def times(u: np.ndarray, root: np.ndarray = root) -> np.ndarray:
            return root * (counts @ (root * u)) + u

        shape = (len(n), len(n))
        scaled, failed = cg(
            LinearOperator(shape, matvec=times, dtype=np.float64),  # pyright: ignore[reportCallIssue]
            right,
            rtol=_TOLERANCE,
            maxiter=_MAX_STEPS,
            M=sparse.diags_array(1.0 / (n * ratio[:, cell] + 1.0)),
        )
        if failed:
            raise AnalysisError("categories: drivers: the joint effects do not converge")
        effects[:, cell] = root * scaled
    return effects


def level_counts(levels: Iterable[np.ndarray], n_levels: int) -> sparse.csr_array:
    """X'X of tokens (N, factors) given chunk by chunk; levels of all factors count together."""
    counts = sparse.csr_array((n_levels, n_levels))
    for codes in levels:
        n, factors = codes.shape
        rows = np.arange(0, (n + 1) * factors, factors)
        hot = sparse.csr_array((np.ones(n * factors), codes.ravel(), rows), shape=(n, n_levels))
        counts = counts + hot.T @ hot
    return sparse.csr_array(counts)


def without_rounding(residual: np.ndarray, squares: np.ndarray) -> np.ndarray:
    """Sums of squares about a mean (G, C) as zero where they are rounding of ``squares`` (G, C)."""
    constant = residual.sum(axis=0) <= ROUNDING * squares.sum(axis=0)
    return np.where(constant, 0.0, residual)
