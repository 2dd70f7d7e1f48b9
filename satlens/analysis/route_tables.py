"""The tables and the summary of routes in :func:`satlens.analysis.sparsity.sparsity`.

Shapes: G document groups, S reads, n sources of all reads side by side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from satlens.analysis.inputs import (
    documents_in,
    interval_columns,
    interval_protocol,
    interval_summary,
    route_cells,
)
from satlens.analysis.reducers import (
    FAMILIES,
    RouteStatistics,
    depth_distance,
    family_mass,
    membership,
)
from satlens.analysis.result import join_marks
from satlens.analysis.stats import divide, function_interval, ratio_interval


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
    ratios["depth_distance"] = (weight @ depth_distance(sites), n)
    return ratios


def _token_variance(routes: RouteStatistics, weight: Any, squares: Any, n: Any) -> np.ndarray:
    """Variance over tokens of each weight, added up over a read's sources, (..., S)."""
    member = membership(routes.site_of)
    per_source = n[..., routes.site_of]
    mean = divide(weight, per_source)
    variance = np.maximum(divide(squares, per_source) - mean**2, 0.0)
    return np.nan_to_num(variance) @ member + np.where(n > 0, 0.0, np.nan)


def _route_points(routes: RouteStatistics) -> dict[str, np.ndarray]:
    points = {name: divide(a.sum(0), b.sum(0)) for name, (a, b) in _route_ratios(routes).items()}
    sums = (routes.sums[name].sum(axis=0) for name in ("weight", "squares", "n"))
    return {**points, "token_variance": _token_variance(routes, *sums)}


def route_table(
    routes: RouteStatistics,
    initial: RouteStatistics | None,
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    """A row a read; statistics of the untrained model beside them if ``initial`` is given."""
    ratios, sums = _route_ratios(routes), routes.sums
    pairs = [np.stack(side, axis=1) for side in zip(*ratios.values(), strict=True)]
    interval = ratio_interval(*pairs, **options)
    spread = function_interval(
        lambda weight, squares, n: _token_variance(routes, weight, squares, n),
        *(sums[name] for name in ("weight", "squares", "n")),
        weights=sums["n"],
        **options,
    )
    columns: dict[str, Any] = {"n_sources": [len(site.sources) for site in routes.sites]}
    for index, name in enumerate(ratios):
        columns |= interval_columns(name, interval, index)
    columns |= interval_columns("token_variance", spread)
    if initial is not None:
        columns |= {f"{name}_init": value for name, value in _route_points(initial).items()}
    single = np.array(["single_source" if len(s.sources) == 1 else "" for s in routes.sites])
    effective = list(ratios).index("effective_sources")
    return route_cells(routes.sites).assign(
        **columns,
        n_undefined=sums["undefined"].sum(axis=0),
        n_documents=documents_in(sums["n"], n_documents),
        n_tokens=sums["n"].sum(axis=0),
        flags=join_marks(single, interval.flags[effective]),
    )


def route_summary(
    routes: RouteStatistics, n_documents: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Statistics over all reads of several sources."""
    several = np.array([len(site.sources) > 1 for site in routes.sites])
    intervals = {
        name: ratio_interval(a[:, several].sum(axis=1), b[:, several].sum(axis=1), **options)
        for name, (a, b) in _route_ratios(routes).items()
    }
    return {
        "overall": {name: interval_summary(interval) for name, interval in intervals.items()},
        "n_reads": len(routes.sites),
        "n_single_source": int((~several).sum()),
        "n_undefined": int(routes.sums["undefined"].sum()),
        "embedding_weight": _embedding_weight(routes),
        "first_token": _first_token(routes, several),
        "interval": interval_protocol(intervals["mass_embedding"], n_documents),
    }


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
    columns = np.flatnonzero(np.diff(routes.site_of, prepend=-1))  # the embedding comes first
    several = np.bincount(routes.site_of) > 1
    total, squares = (routes.sums[k].sum(axis=0)[columns][several] for k in ("weight", "squares"))
    n = routes.sums["n"].sum(axis=0)[several]
    within = np.maximum(squares - np.nan_to_num(divide(total**2, n)), 0.0)
    return {
        "mean": float(divide(total.sum(), n.sum())),
        "sd_within_read": float(np.sqrt(divide(within.sum(), n.sum()))),
    }


def source_table(
    routes: RouteStatistics,
    initial: RouteStatistics | None,
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    """A row a (read, source): its mean weight."""
    place = routes.site_of
    n = routes.sums["n"][:, place]
    interval = ratio_interval(routes.sums["weight"], n, **options)
    sources = [(index, source) for s in routes.sites for index, source in enumerate(s.sources)]
    table = route_cells(routes.sites).iloc[place].reset_index(drop=True)
    columns: dict[str, Any] = interval_columns("weight", interval)
    if initial is not None:
        before = initial.sums
        totals = before["weight"].sum(axis=0), before["n"].sum(axis=0)[place]
        columns["weight_init"] = divide(*totals)
    return table.drop(columns=["kind", "head"]).assign(
        source=[source.label for _, source in sources],
        source_kind=[source.kind for _, source in sources],
        source_index=[index for index, _ in sources],
        **columns,
        n_documents=documents_in(n, n_documents),
        n_tokens=n.sum(axis=0),
        flags=interval.flags,
    )
