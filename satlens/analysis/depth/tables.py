"""The tables and the summary of routes in :func:`satlens.analysis.sparsity.sparsity`.

Shapes: G document groups, S reads, R reads of signed weights, n sources of all reads side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.special import entr

from satlens.analysis.engine.inputs import (
    documents_in,
    interval_columns,
    interval_protocol,
    interval_summary,
    route_cells,
)
from satlens.analysis.engine.rectified import RectifiedRoutes
from satlens.analysis.engine.reducers import (
    FAMILIES,
    RouteStatistics,
    depth_distance,
    family_mass,
    membership,
)
from satlens.analysis.result import join_marks
from satlens.analysis.statistics.bootstrap import ROUNDING
from satlens.analysis.stats import divide, function_interval, ratio_interval
from satlens.models.sites import EMBEDDING

VARIANCE_PARTS = ("reads", "sources", "tokens")
"""Where weights vary: between reads, between the sources of a read, the tokens of a source."""


class Routes(NamedTuple):
    """What a pass added up about routes."""

    weights: RouteStatistics
    rectified: RectifiedRoutes | None
    """Of the reads whose weights are signed; None without any."""


def _route_ratios(routes: RouteStatistics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each statistic of a read that is a ratio of sums, (G, S)."""
    sums, sites = routes.sums, routes.sites
    n, weight = sums["n"], sums["weight"]
    sources = np.array([len(site.sources) for site in sites])
    # 0 / 0 where there is no entropy to speak of: at one source, and off the simplex.
    distributed = np.where(routes.simplex, n, 0.0)
    possible = np.log(sources) * distributed
    ratios = {
        "normalised_entropy": (np.where(possible > 0, sums["entropy"], 0.0), possible),
        "effective_sources": (np.where(distributed > 0, sums["effective"], 0.0), distributed),
    }
    mass = np.einsum("gn,nfs->fgs", weight, family_mass(sites))
    for index, name in enumerate(FAMILIES):
        has = family_mass(sites)[:, index].any(axis=0)
        ratios[f"mass_{name}"] = (mass[index], np.where(has, n, 0.0))
    distance = depth_distance(sites)
    has = np.isfinite(distance).all(axis=0)
    ratios["depth_distance"] = (weight @ np.nan_to_num(distance), np.where(has, n, 0.0))
    return ratios


_RECTIFIED = {"norm_effective_sources": "effective", "negative_norm_share": "negative"}


def _rectified_ratios(routes: Routes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The same of |w_j| ||X_j||, (G, S); 0 / 0 at reads whose weights are not signed."""
    n_groups, n_sites = routes.weights.sums["n"].shape
    ratios = {name: np.zeros((2, n_groups, n_sites)) for name in _RECTIFIED}
    if routes.rectified is not None:
        sums = routes.rectified.sums
        for name, key in _RECTIFIED.items():
            ratios[name][:, :, routes.weights.signed] = sums[key], sums["n"]
    return {name: (pair[0], pair[1]) for name, pair in ratios.items()}


def _ratios(routes: Routes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {**_route_ratios(routes.weights), **_rectified_ratios(routes)}


def _token_variance(routes: RouteStatistics, weight: Any, squares: Any, n: Any) -> np.ndarray:
    """Variance over tokens of each weight, added up over a read's sources, (..., S)."""
    member = membership(routes.site_of)
    per_source = n[..., routes.site_of]
    mean = divide(weight, per_source)
    variance = np.maximum(divide(squares, per_source) - mean**2, 0.0)
    return np.nan_to_num(variance) @ member + np.where(n > 0, 0.0, np.nan)


def _dependence(
    routes: RouteStatistics, weight: Any, entropy: Any, n: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Mutual information of token and source times tokens, and log n times tokens, (..., S) each.

    Drawing a source of a token by its weights, I(token; source) = H(mean w) - mean H(w), at most
    log n of the n sources. 0 and 0 where there is none: at one source, and off the simplex.
    """
    several = np.array([len(site.sources) > 1 for site in routes.sites]) & routes.simplex
    mean = np.nan_to_num(divide(weight, n[..., routes.site_of]))
    of_mean = entr(mean) @ membership(routes.site_of)
    gained = np.where(several, of_mean - np.nan_to_num(divide(entropy, n)), 0.0)
    # It is never negative: what rounding leaves of a zero is a zero.
    gained[gained <= ROUNDING] = 0.0
    possible = np.log(np.bincount(routes.site_of)) * several
    return gained * n, possible * n


_DEPENDENCE = ("weight", "entropy", "n")


def _content_dependence(routes: RouteStatistics, *sums: Any) -> np.ndarray:
    """I(token; source) / log n of each read, (..., S), from sums over tokens."""
    return divide(*_dependence(routes, *sums))


def _weight_variance(routes: RouteStatistics, weight: Any, squares: Any, n: Any) -> np.ndarray:
    """Shares of the variance of weights (..., 3): between reads, between the sources of a read, and
    between the tokens of a source; of the reads of several sources. NaN when nothing varies."""
    several = (np.bincount(routes.site_of) > 1)[routes.site_of]
    if not several.any():
        return np.full((*n.shape[:-1], len(VARIANCE_PARTS)), np.nan)
    weight, squares = weight[..., several], squares[..., several]
    n, site_of = n[..., routes.site_of][..., several], routes.site_of[several]

    def explained(total: Any, count: Any) -> np.ndarray:
        return np.nan_to_num(divide(total**2, count)).sum(axis=-1)

    member = membership(site_of)
    everything = squares.sum(axis=-1)
    levels = [
        explained(weight.sum(axis=-1, keepdims=True), n.sum(axis=-1, keepdims=True)),
        explained(weight @ member, n @ member),
        explained(weight, n),
        everything,
    ]
    parts = np.stack([above - below for below, above in pairwise(levels)], axis=-1)
    parts[parts <= ROUNDING * everything[..., None]] = 0.0
    return divide(parts, np.broadcast_to(parts.sum(axis=-1, keepdims=True), parts.shape))


def _route_points(routes: Routes) -> dict[str, np.ndarray]:
    points = {name: divide(a.sum(0), b.sum(0)) for name, (a, b) in _ratios(routes).items()}
    totals = {name: routes.weights.sums[name].sum(axis=0) for name in _SUMMED}
    for name, (function, keys) in _FUNCTIONS.items():
        points[name] = function(routes.weights, *(totals[key] for key in keys))
    return points


_SUMMED = ("weight", "squares", "entropy", "n")
_FUNCTIONS: dict[str, tuple[Callable[..., np.ndarray], tuple[str, ...]]] = {
    "token_variance": (_token_variance, ("weight", "squares", "n")),
    "content_dependence": (_content_dependence, _DEPENDENCE),
}
"""Statistics of a read that are functions of sums, and of which."""


def route_table(
    routes: Routes, initial: Routes | None, n_documents: int, options: dict[str, Any]
) -> pd.DataFrame:
    """A row a read; statistics of the untrained model beside them if ``initial`` is given."""
    ratios, weights = _ratios(routes), routes.weights
    sums, sites = weights.sums, weights.sites
    pairs = [np.stack(side, axis=1) for side in zip(*ratios.values(), strict=True)]
    interval = ratio_interval(*pairs, **options)
    columns: dict[str, Any] = {"n_sources": [len(site.sources) for site in sites]}
    for index, name in enumerate(ratios):
        columns |= interval_columns(name, interval, index)
    for name, (function, keys) in _FUNCTIONS.items():
        arrays = (sums[key] for key in keys)
        found = function_interval(partial(function, weights), *arrays, weights=sums["n"], **options)
        columns |= interval_columns(name, found)
    if initial is not None:
        columns |= {f"{name}_init": value for name, value in _route_points(initial).items()}
    # What flags an interval has where it exists: by entropy, or by norms where weights are signed.
    by_norm, by_weight = (
        interval.flags[list(ratios).index(name)]
        for name in ("norm_effective_sources", "effective_sources")
    )
    flags = np.where(weights.signed, by_norm, by_weight)
    return route_cells(sites).assign(
        **columns,
        n_undefined=sums["undefined"].sum(axis=0),
        n_norm_undefined=_norm_undefined(routes),
        n_documents=documents_in(sums["n"], n_documents),
        n_tokens=sums["n"].sum(axis=0),
        flags=join_marks(_marks(weights), flags),
    )


def _norm_undefined(routes: Routes) -> np.ndarray:
    """(S,) tokens without norm shares where weights are signed, as when all weights are zero."""
    counts = np.zeros(len(routes.weights.sites))
    if routes.rectified is not None:
        counts[routes.weights.signed] = routes.rectified.sums["undefined"].sum(axis=0)
    return counts


def _marks(routes: RouteStatistics) -> np.ndarray:
    """(S,) what to know about a read's weights."""
    sites = routes.sites
    alone = np.where([len(site.sources) == 1 for site in sites], "single_source", "")
    signed = np.where(routes.signed, "signed", "")
    static = np.where([not site.per_token for site in sites], "static", "")
    return join_marks(join_marks(alone, signed), static)


def route_summary(routes: Routes, n_documents: int, options: dict[str, Any]) -> dict[str, Any]:
    """Statistics over all reads of several sources."""
    weights = routes.weights
    several = np.array([len(site.sources) > 1 for site in weights.sites])
    intervals = {
        name: ratio_interval(a[:, several].sum(axis=1), b[:, several].sum(axis=1), **options)
        for name, (a, b) in _ratios(routes).items()
    }
    overall = {name: interval_summary(interval) for name, interval in intervals.items()}
    return {
        "overall": overall | {"content_dependence": _overall_dependence(weights, options)},
        "weight_variance": _variance_summary(weights, options),
        "n_reads": len(weights.sites),
        "n_single_source": int((~several).sum()),
        "n_signed": int(weights.signed.sum()),
        "n_static": sum(not site.per_token for site in weights.sites),
        "n_undefined": int(weights.sums["undefined"].sum()),
        "n_norm_undefined": int(_norm_undefined(routes).sum()),
        "embedding_weight": _embedding_weight(weights),
        "first_token": _first_token(weights, several),
        "interval": interval_protocol(intervals["mass_embedding"], n_documents),
    }


def _overall_dependence(routes: RouteStatistics, options: dict[str, Any]) -> dict[str, Any]:
    """I(token; source) over log n, both added up over reads."""

    def overall(*sums: np.ndarray) -> np.ndarray:
        gained, possible = _dependence(routes, *sums)
        return divide(gained.sum(axis=-1), possible.sum(axis=-1))

    arrays = [routes.sums[key] for key in _DEPENDENCE]
    n = np.where(routes.simplex, routes.sums["n"], 0.0).sum(axis=1)
    return interval_summary(function_interval(overall, *arrays, weights=n, **options))


def _variance_summary(routes: RouteStatistics, options: dict[str, Any]) -> dict[str, Any]:
    """Shares of the variance of weights, in the order of VARIANCE_PARTS."""
    arrays = [routes.sums[key] for key in ("weight", "squares", "n")]
    n = routes.sums["n"].sum(axis=1)
    shares = function_interval(partial(_weight_variance, routes), *arrays, weights=n, **options)
    return {name: interval_summary(shares, index) for index, name in enumerate(VARIANCE_PARTS)}


def _first_token(routes: RouteStatistics, several: np.ndarray) -> dict[str, Any]:
    """Mass of each family at the first token of a context, over the reads that ``overall`` has."""
    n = routes.sums["first_n"].sum(axis=0)
    families = family_mass(routes.sites)[..., several]
    mass = np.einsum("gn,nfs->f", routes.sums["first_weight"], families)
    shares = divide(mass, families.any(axis=0) @ n[several])
    return {
        "n": int(n.max()),
        **{f"mass_{name}": float(value) for name, value in zip(FAMILIES, shares, strict=True)},
    }


def _embedding_weight(routes: RouteStatistics) -> dict[str, float]:
    """Weight of the embedding in reads of several sources: mean, deviation over a read's tokens."""
    sources = [source for site in routes.sites for source in site.sources]
    several = np.bincount(routes.site_of)[routes.site_of] > 1
    columns = np.flatnonzero([source == EMBEDDING for source in sources] & several)
    total, squares = (routes.sums[k].sum(axis=0)[columns] for k in ("weight", "squares"))
    n = routes.sums["n"].sum(axis=0)[routes.site_of[columns]]
    within = squares - np.nan_to_num(divide(total**2, n))
    within[within <= ROUNDING * squares] = 0.0
    return {
        "mean": float(divide(total.sum(), n.sum())),
        "sd_within_read": float(np.sqrt(divide(within.sum(), n.sum()))),
    }


def source_table(
    routes: Routes, initial: Routes | None, n_documents: int, options: dict[str, Any]
) -> pd.DataFrame:
    """A row a (read, source): its mean weight, and its norm share where weights are signed."""
    weights = routes.weights
    place = weights.site_of
    n = weights.sums["n"][:, place]
    interval = ratio_interval(weights.sums["weight"], n, **options)
    sources = [(index, source) for s in weights.sites for index, source in enumerate(s.sources)]
    table = route_cells(weights.sites).iloc[place].reset_index(drop=True)
    columns: dict[str, Any] = interval_columns("weight", interval)
    if initial is not None:
        before = initial.weights.sums
        totals = before["weight"].sum(axis=0), before["n"].sum(axis=0)[place]
        columns["weight_init"] = divide(*totals)
    columns |= _norm_shares(routes, initial, options)
    return table.drop(columns=["kind", "head"]).assign(
        source=[source.label for _, source in sources],
        source_kind=[source.kind for _, source in sources],
        source_index=[index for index, _ in sources],
        **columns,
        n_documents=documents_in(n, n_documents),
        n_tokens=n.sum(axis=0),
        flags=interval.flags,
    )


def _norm_shares(
    routes: Routes, initial: Routes | None, options: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Columns (n,) of each source's share of |w_j| ||X_j||, NaN where weights are not signed."""
    if routes.rectified is None:
        return {}
    signed = routes.weights.signed[routes.weights.site_of]
    columns: dict[str, np.ndarray] = {}
    for key in ("share", "signed_share"):
        found = routes.rectified
        name = key.replace("share", "norm_share")
        n = found.sums["n"][:, found.site_of]
        parts = interval_columns(name, ratio_interval(found.sums[key], n, **options))
        if initial is not None and initial.rectified is not None:
            sums = initial.rectified.sums
            counts = sums["n"].sum(axis=0)[found.site_of]
            parts[f"{name}_init"] = divide(sums[key].sum(axis=0), counts)
        for column, values in parts.items():
            columns[column] = np.full(len(signed), np.nan)
            columns[column][signed] = values
    return columns
