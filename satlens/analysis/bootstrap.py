"""Bootstrap intervals over groups of documents and over seeds; use through ``analysis.stats``.

Axis 0 of every array of sums is the group, the axes after it are the grid (site or layer, head,
...). The estimand is the token-weighted ratio, sum over tokens by number of tokens. All cells of a
grid share their resamples, which are made as counts: a resampled sum is counts @ sums.

Letters: G groups, S seeds, B resamples of one batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import stats

from satlens.errors import AnalysisError

LEVEL = 0.95
N_RESAMPLES = 9999
MIN_UNITS = 8
FEW_UNITS = 30
MIN_SEEDS = 5
OTHER_DOCUMENTS = "this checkpoint, other documents"
OTHER_SEEDS = "other seeds"
OTHER_SEEDS_AND_DOCUMENTS = "other seeds, other documents"

ROUNDING = 1e-12
"""Rounding of a sum relative to its terms: a spread below it counts as none."""

# Numbers held at a time by one batch of resamples, and by one chunk of a bootstrap distribution.
_BATCH_ELEMENTS = 2**22
_CHUNK_ELEMENTS = 2**23

Method = Literal["BCa", "percentile"]


class Interval(NamedTuple):
    """An estimate with its 95 % interval, arrays (*grid).

    Flags are joined by ``;``: ``undefined`` (zero denominator or a value that is not finite: NaN),
    ``units<8`` or ``seeds<n`` (too few for an interval: NaN ends), ``few`` (fewer than 30 units),
    ``constant`` (no spread: both ends are the estimate), ``percentile`` (BCa does not exist).
    """

    estimate: np.ndarray
    low: np.ndarray
    high: np.ndarray
    flags: np.ndarray
    units: np.ndarray
    """Groups or seeds that carry information on the cell."""
    covers: str
    """What the interval speaks about beyond this sample: other documents, other seeds."""
    method: str
    n_resamples: int | None
    seed: int | None

    @property
    def n_undefined(self) -> int:
        """Cells without an estimate."""
        return int(np.isnan(self.estimate).sum())

    def protocol(self) -> dict[str, Any]:
        """How the interval was made, for the summary of a result."""
        return {
            "level": LEVEL,
            "method": self.method,
            "covers": self.covers,
            "n_resamples": self.n_resamples,
            "seed": self.seed,
            "n_undefined": self.n_undefined,
        }


class Ends(NamedTuple):
    """Ends of a bootstrap interval, arrays (cells,)."""

    low: np.ndarray
    high: np.ndarray
    percentile: np.ndarray
    """Where they are percentiles for want of BCa."""
    constant: np.ndarray
    """Where every resample gave the same, up to rounding."""


# -- intervals over groups -------------------------------------------------------------------------


def ratio_interval(
    numerator: np.ndarray,
    denominator: np.ndarray,
    *,
    covers: str = OTHER_DOCUMENTS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Sum over groups of ``numerator`` / sum of ``denominator``, with its bootstrap over groups.

    ``numerator`` is (G, *grid); ``denominator`` has its shape or fewer trailing axes, such as the
    tokens of each group, (G,). Both are resampled together. BCa (Efron 1987) through
    ``scipy.stats.bootstrap``, percentile where BCa does not exist.

    Coverage in simulation, 50 groups: 0.94 for lengths that vary by a quarter, 0.91 when they vary
    nearly as much as their mean, since few long documents then carry the ratio.
    """
    numerator, denominator = _aligned(numerator, denominator)
    rows = _informative(denominator)
    top, bottom = (_flat(values[rows]) for values in (numerator, denominator))
    estimate = divide(top.sum(axis=0), bottom.sum(axis=0))

    def statistic(counts: np.ndarray, cells: slice) -> np.ndarray:
        return divide(counts @ top[:, cells], counts @ bottom[:, cells])

    chunk = max(1, _CHUNK_ELEMENTS // n_resamples)
    width = 2 * min(chunk, estimate.size)
    units = (bottom != 0).sum(axis=0)
    return interval_on_grid(
        numerator.shape[1:],
        estimate,
        bootstrap(statistic, (len(top),), estimate.size, width, n_resamples, seed, chunk=chunk),
        units=units,
        withheld={f"units<{MIN_UNITS}": units < MIN_UNITS},
        covers=covers,
        n_resamples=n_resamples,
        seed=seed,
    )


def mean_interval(differences: np.ndarray, n_tokens: np.ndarray, **options: Any) -> Interval:
    """Token-weighted mean of paired differences, with its bootstrap over groups.

    ``differences`` (G, *grid) are the sums over each group's tokens of one condition minus the
    other, ``n_tokens`` (G,) or (G, *grid) its tokens; options as :func:`ratio_interval`. Pairing
    is what resampling the differences, instead of the two conditions, does.
    """
    return ratio_interval(differences, n_tokens, **options)


def function_interval(
    function: Callable[..., np.ndarray],
    *sums: np.ndarray,
    weights: np.ndarray,
    covers: str = OTHER_DOCUMENTS,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """A function of sums over groups, such as the divergence of two token-averaged routes.

    Each of ``sums`` is (G, ...); ``function`` receives them summed over resampled groups, (B, ...)
    each, and returns (B, *grid). ``weights`` (G, ...), the tokens of each group, say which groups
    carry information; its axes after the first lead those of the grid. Intervals as
    :func:`ratio_interval`.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if any(len(values) != len(weights) for values in sums):
        raise AnalysisError("function_interval: sums and weights differ in their number of groups")
    rows = _informative(weights)
    arrays = [np.asarray(values, dtype=np.float64)[rows] for values in sums]
    flat = [_flat(values) for values in arrays]

    def of_counts(counts: np.ndarray) -> np.ndarray:
        totals = ((counts @ f).reshape(-1, *a.shape[1:]) for f, a in zip(flat, arrays, strict=True))
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(function(*totals), dtype=np.float64)

    def statistic(counts: np.ndarray, cells: slice) -> np.ndarray:
        return of_counts(counts).reshape(len(counts), -1)[:, cells]

    n_groups = len(arrays[0])
    estimate = of_counts(np.ones((1, n_groups)))[0]
    grid = estimate.shape
    units = (weights != 0).sum(axis=0)
    units = np.broadcast_to(units.reshape(units.shape + (1,) * (len(grid) - units.ndim)), grid)
    width = max(estimate.size, *(values.shape[1] for values in flat))
    return interval_on_grid(
        grid,
        estimate.ravel(),
        bootstrap(statistic, (n_groups,), estimate.size, width, n_resamples, seed),
        units=units.ravel(),
        withheld={f"units<{MIN_UNITS}": units.ravel() < MIN_UNITS},
        covers=covers,
        n_resamples=n_resamples,
        seed=seed,
    )


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
    away what the seeds share. Needs 5 seeds and 8 groups; ``units`` are the groups.
    """
    numerator, denominator = _aligned(numerator, denominator)
    n_seeds = len(numerator)
    top, bottom = (
        np.moveaxis(v, 1, 0).reshape(v.shape[1], n_seeds, -1) for v in (numerator, denominator)
    )
    rows = _informative(bottom)
    top, bottom = top[rows], bottom[rows]
    estimate = divide(top.sum(axis=0), bottom.sum(axis=0)).mean(axis=0)

    def statistic(seed_counts: np.ndarray, counts: np.ndarray, cells: slice) -> np.ndarray:
        totals = (np.tensordot(counts, v[..., cells], axes=1) for v in (top, bottom))
        shares = seed_counts / seed_counts.sum(axis=1, keepdims=True)
        # A seed that was not drawn weighs nothing, even where it has no ratio.
        return (np.where(shares[..., None] > 0, divide(*totals), 0) * shares[..., None]).sum(axis=1)

    chunk = max(1, _CHUNK_ELEMENTS // n_resamples)
    width = 2 * n_seeds * min(chunk, estimate.size)
    sizes = (n_seeds, len(top))
    units = (bottom != 0).any(axis=1).sum(axis=0)
    return interval_on_grid(
        numerator.shape[2:],
        estimate,
        bootstrap(statistic, sizes, estimate.size, width, n_resamples, seed, chunk=chunk),
        units=units,
        withheld={
            f"seeds<{MIN_SEEDS}": np.full(estimate.shape, n_seeds < MIN_SEEDS),
            f"units<{MIN_UNITS}": units < MIN_UNITS,
        },
        covers=OTHER_SEEDS_AND_DOCUMENTS,
        n_resamples=n_resamples,
        seed=seed,
    )


# -- resampling ------------------------------------------------------------------------------------


def bootstrap(
    statistic: Callable[..., np.ndarray],
    sizes: tuple[int, ...],
    n_cells: int,
    width: int,
    n_resamples: int,
    seed: int,
    method: Method = "BCa",
    chunk: int | None = None,
) -> Ends:
    """Interval of each of ``n_cells`` statistics.

    ``statistic(*counts, cells)`` takes how often each unit was drawn, (B, size) for each of
    ``sizes``, which are resampled independently, and returns (B, cells); it holds about B x
    ``width`` numbers. Cells go through ``chunk`` at a time, all with the same resamples since the
    seed is the same, so that memory is bounded.
    """
    every = Ends(*np.full((2, n_cells), np.nan), *np.zeros((2, n_cells), dtype=bool))
    chunk = chunk or max(n_cells, 1)
    batch = max(1, min(n_resamples, _BATCH_ELEMENTS // max(width, *sizes, 1)))
    for start in range(0, n_cells if min(sizes) > 1 else 0, chunk):
        cells = slice(start, start + chunk)

        def of_indices(*indices: np.ndarray, axis: int, cells: slice = cells) -> np.ndarray:
            counts = (_counts(drawn, n) for drawn, n in zip(indices, sizes, strict=True))
            values = statistic(*counts, cells)
            return np.moveaxis(values.reshape(*indices[0].shape[:-1], -1), -1, 0)

        # Cells without a BCa interval are found and flagged below; no warning is needed.
        with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
            warnings.simplefilter("ignore", stats.DegenerateDataWarning)
            done = stats.bootstrap(
                tuple(np.arange(n) for n in sizes),
                of_indices,
                vectorized=True,
                method=method,
                confidence_level=LEVEL,
                n_resamples=n_resamples,
                batch=batch,
                rng=np.random.default_rng(seed),
            )
        ends = np.array(done.confidence_interval)
        drawn = done.bootstrap_distribution
        # Also where some resamples, without a token of the cell, have no value.
        lost = ~(ends[0] <= ends[1]) & ~np.isnan(drawn).all(axis=-1)
        if lost.any():
            tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
            ends[:, lost] = np.nanquantile(drawn[lost], tails, axis=-1)
        lowest, highest = np.fmin.reduce(drawn, axis=-1), np.fmax.reduce(drawn, axis=-1)
        still = highest - lowest <= ROUNDING * np.maximum(np.abs(lowest), np.abs(highest))
        for whole, part in zip(every, (*ends, lost, still), strict=True):
            whole[cells] = part
    return every


def _counts(drawn: np.ndarray, n: int) -> np.ndarray:
    """How often each of ``n`` units occurs in each row of (..., draws) indices: (rows, n)."""
    drawn = drawn.reshape(-1, drawn.shape[-1])
    cell = drawn + np.arange(len(drawn))[:, None] * n
    return np.bincount(cell.ravel(), minlength=len(drawn) * n).reshape(-1, n).astype(np.float64)


def interval_on_grid(
    grid: Sequence[int],
    estimate: np.ndarray,
    ends: Ends,
    *,
    units: np.ndarray,
    withheld: Mapping[str, np.ndarray],
    covers: str,
    n_resamples: int | None,
    seed: int | None,
    few_below: int = FEW_UNITS,
    method: str = "bootstrap, BCa (percentile where flagged)",
) -> Interval:
    """Put flat cells on the grid, with the ends that may be shown and the reasons for the rest."""
    defined = np.isfinite(estimate)
    shown = defined & ~np.any(list(withheld.values()), axis=0)
    constant = shown & ends.constant
    flags = {
        "undefined": ~defined,
        **{reason: mask & defined for reason, mask in withheld.items()},
        "few": shown & (units < few_below),
        "constant": constant,
        "percentile": shown & ~constant & ends.percentile,
    }
    return Interval(
        estimate=np.where(defined, estimate, np.nan).reshape(grid),
        low=np.where(constant, estimate, np.where(shown, ends.low, np.nan)).reshape(grid),
        high=np.where(constant, estimate, np.where(shown, ends.high, np.nan)).reshape(grid),
        flags=join_flags(flags, estimate.shape).reshape(grid),
        units=units.reshape(grid),
        covers=covers,
        method=method,
        n_resamples=n_resamples,
        seed=seed,
    )


def join_flags(flags: Mapping[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Names of the masks that hold in each cell, joined by ``;``, as an array of str."""
    text = np.full(shape, "", dtype=object)
    for name, mask in flags.items():
        text[mask & (text != "")] += ";"
        text[mask] += name
    return text


def divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """The quotient, NaN where the denominator is zero or either is not finite."""
    defined = (denominator != 0) & np.isfinite(numerator) & np.isfinite(denominator)
    return np.divide(numerator, denominator, out=np.full(defined.shape, np.nan), where=defined)


def _aligned(numerator: np.ndarray, denominator: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as float64 of the numerator's shape, trailing axes added to the denominator."""
    numerator = np.asarray(numerator, dtype=np.float64)
    denominator = np.asarray(denominator, dtype=np.float64)
    lead = denominator.shape
    if numerator.shape[: len(lead)] != lead:
        raise AnalysisError(f"ratio: a numerator of shape {numerator.shape} over one of {lead}")
    padded = denominator.reshape(lead + (1,) * (numerator.ndim - len(lead)))
    return numerator, np.broadcast_to(padded, numerator.shape)


def _flat(values: np.ndarray) -> np.ndarray:
    """(rows, *grid) as (rows, cells), also without rows."""
    return values.reshape(len(values), int(np.prod(values.shape[1:])))


def _informative(weights: np.ndarray) -> np.ndarray:
    """(G,) groups with a weight in any cell; the others are empty and no unit."""
    return (_flat(weights) != 0).any(axis=1)
