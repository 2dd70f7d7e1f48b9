"""How much each weight of each site carries: what its cost is compared with.

Of a gate, the share of V_1 in the norm of a token's values; of a distribution over sources, the
mean weight; of other weights, the share of |w_j| ||X_j|| in a read, since weights alone are none.

Shapes: G document groups, C columns (weights of all sites side by side).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from satlens.analysis.engine.rectified import RectifiedRoutes
from satlens.analysis.engine.reducers import GateStatistics, RouteStatistics
from satlens.analysis.engine.stream import Reducer, n_groups, run
from satlens.analysis.sweeps.gradients import width_of
from satlens.data.windows import Windows
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


class Masses(NamedTuple):
    """Sums over the tokens of each group: mass is ``total`` by ``n``."""

    total: np.ndarray
    """(G, C)."""
    n: np.ndarray
    """(G, C) tokens that it is defined for."""


def measure_of(site: AccessSite) -> str:
    """What the mass of a site's weights is: norm_share, weight or rectified_share."""
    if site.kind == "gate":
        return "norm_share"
    return "weight" if site.support == "simplex" else "rectified_share"


def masses(
    model: Decoder, windows: Windows, sites: Sequence[AccessSite], passes: dict[str, Any]
) -> Masses:
    """Masses of all weights, by one pass.

    Args:
        passes: ``progress`` and ``resume_dir``.
    """
    groups = n_groups(windows)
    by_measure = {
        measure: [site for site in sites if measure_of(site) == measure]
        for measure in dict.fromkeys(map(measure_of, sites))
    }
    reducers: dict[str, Reducer] = {
        measure: _reducer(measure, model, some, groups) for measure, some in by_measure.items()
    }
    run(model, windows, list(reducers.values()), label="mass", **passes)
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for measure, some in by_measure.items():
        cuts = np.cumsum([width_of(site) for site in some])[:-1]
        total, n = _sums(measure, reducers[measure], some)
        parts = zip(np.split(total, cuts, axis=1), np.split(n, cuts, axis=1), strict=True)
        found |= dict(zip((site.hook for site in some), parts, strict=True))
    totals, ns = zip(*(found[site.hook] for site in sites), strict=True)
    return Masses(np.concatenate(totals, axis=1), np.concatenate(ns, axis=1))


def _reducer(measure: str, model: Decoder, sites: Sequence[AccessSite], groups: int) -> Reducer:
    if measure == "norm_share":
        return GateStatistics(sites, groups, ())
    if measure == "weight":
        return RouteStatistics(sites, groups)
    return RectifiedRoutes(model, sites, groups)


def _sums(measure: str, reducer: Any, sites: Sequence[AccessSite]) -> tuple[np.ndarray, np.ndarray]:
    """Totals and tokens of each weight, (G, C) each."""
    sums = reducer.sums
    if measure == "norm_share":
        return sums["share"], sums["share_n"]
    widths = [len(site.sources) for site in sites]
    total = sums["weight" if measure == "weight" else "share"]
    return total, np.repeat(sums["n"], widths, axis=1)
