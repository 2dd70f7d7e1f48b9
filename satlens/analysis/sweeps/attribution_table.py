"""The table of mass versus cause: intervals, ranks, and how far a screen can be trusted.

Gates and routes are ranked apart: their masses are different things.

Shapes: G document groups, U units.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.stats import rankdata

from satlens.analysis.engine.inputs import (
    documents_in,
    interval_columns,
    interval_protocol,
    interval_summary,
)
from satlens.analysis.result import flag_column, join_marks
from satlens.analysis.stats import (
    Adjustment,
    Interval,
    SignFlip,
    divide,
    function_interval,
    mean_interval,
    rank_correlation_interval,
    ratio_interval,
    sign_flip_test,
)
from satlens.analysis.sweeps.masses import measure_of
from satlens.analysis.sweeps.measure import Case
from satlens.analysis.sweeps.table import ADJUSTED
from satlens.models.sites import AccessSite

DECILE = 0.1
FAR_APART = 0.5
"""Share of the ranks that lie between mass and cost of a unit that disagrees, at least."""
_TESTS = ("p", "p_adjusted", "p_min")


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """What was added up about every unit."""

    cases: Sequence[Case]
    sites: Sequence[AccessSite]
    """The site of each unit."""
    mass: np.ndarray
    """(G, U), with its tokens."""
    mass_n: np.ndarray
    attribution: np.ndarray
    """(G, U), first order, with ``n``."""
    fisher: np.ndarray
    """(G, U), second order, with ``n``."""
    chosen: np.ndarray
    """(U,) units that were removed."""
    dnll: np.ndarray
    """(G, U), with ``n``; NaN for what was not removed, and where a removal gave no number."""
    n: np.ndarray
    """(G,) scored tokens."""

    @property
    def removed(self) -> np.ndarray:
        """(U,) units with an exact cost: removed, and every loss was finite."""
        return self.chosen & np.isfinite(self.dnll).all(axis=0)

    @property
    def kinds(self) -> np.ndarray:
        """(U,) gate or route."""
        return np.array([case.target for case in self.cases])


def outer(values: np.ndarray, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the units in the lowest and the highest decile of some, at least one each."""
    members = np.flatnonzero(among)
    size = int(np.ceil(DECILE * len(members)))
    order = members[np.argsort(values[members], kind="stable")]
    return order[:size], order[max(size, len(order) - size) :]


def attribution_table(
    found: Measured, n_documents: int, adjustment: Adjustment, options: dict[str, Any]
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """A row a unit, and the agreement of mass, screens and cost."""
    intervals = {"mass": ratio_interval(found.mass, found.mass_n, **options)}
    for name in ("attribution", "fisher", "dnll"):
        values = getattr(found, name)
        if name == "dnll":  # one loss that is no number makes the mean none
            values = np.where(found.removed, values, np.nan)
        intervals[name] = mean_interval(values, found.n, **options)
    columns = _labels(found)
    for name, interval in intervals.items():
        columns |= interval_columns(name, interval)
    ranked: dict[str, Any] = {
        name: np.full(len(found.cases), np.nan) for name in (*_TESTS, "rank_difference")
    }
    ranked["disagrees"] = np.zeros(len(found.cases), dtype=bool)
    by_kind = {}
    for kind in dict.fromkeys(found.kinds):
        of_kind = found.kinds == kind
        units = np.flatnonzero(of_kind & found.removed)
        if len(units):
            test = _tests(found, units, adjustment, options)
            for name in _TESTS:
                ranked[name][units] = getattr(test, name)
        complete = len(units) == of_kind.sum()
        if complete:
            _rank(found, units, ranked, options)
        by_kind[kind] = _agreement(found, np.flatnonzero(of_kind), units, options)
        if complete:
            by_kind[kind]["n_disagree"] = int(ranked["disagrees"][units].sum())
    disagrees = ranked.pop("disagrees")
    table = pd.DataFrame(
        {
            **columns,
            **ranked,
            "n_documents": int(documents_in(found.n, n_documents)),
            "n_tokens": int(found.n.sum()),
            "flags": _flags(found, disagrees, intervals),
        }
    )
    summary = {
        "n_units": len(found.cases),
        "n_removed": int(found.removed.sum()),
        "by_kind": by_kind,
        "far_apart": FAR_APART,
        "adjustment": f"{ADJUSTED[adjustment]} within gates and within routes",
        "interval": interval_protocol(intervals["attribution"], n_documents),
    }
    return table, summary


def _flags(found: Measured, disagrees: np.ndarray, intervals: Mapping[str, Interval]) -> np.ndarray:
    static = np.array(["static" if case.static else "" for case in found.cases])
    kept = np.where(found.chosen, "", "not_removed")
    kept[found.chosen & ~found.removed] = "undefined"
    marks = join_marks(join_marks(static, kept), np.where(disagrees, "disagrees", ""))
    shown = {name: interval.flags for name, interval in intervals.items()}
    # What was not removed is no failure of an interval.
    shown["dnll"] = np.where(found.removed, shown["dnll"], shown["attribution"])
    return join_marks(marks, flag_column(shown))


def _labels(found: Measured) -> dict[str, Any]:
    """What each row is about."""
    cases = found.cases
    whole = {
        name: pd.array([getattr(case, name) for case in cases], dtype="Int64")
        for name in ("layer", "head")
    }
    text = {name: [getattr(c, name) for c in cases] for name in ("site", "sublayer", "role")}
    return {
        **text,
        **whole,
        "kind": found.kinds,
        "source": [case.source for case in cases],
        "measure": [measure_of(site) for site in found.sites],
    }


# -- agreement -------------------------------------------------------------------------------------


def _tests(
    found: Measured, units: np.ndarray, adjustment: Adjustment, options: dict[str, Any]
) -> SignFlip:
    """Sign-flip tests of the mean change per document."""
    within = divide(found.dnll[:, units], np.broadcast_to(found.n[:, None], (len(found.n), 1)))
    return sign_flip_test(within, adjustment=adjustment, **options)


def _rank(
    found: Measured, units: np.ndarray, ranked: dict[str, Any], options: dict[str, Any]
) -> None:
    """Fill in rank differences and which units disagree."""
    units = units[found.mass_n[:, units].any(axis=0)]
    if not len(units):
        return
    mass = divide(found.mass[:, units].sum(axis=0), found.mass_n[:, units].sum(axis=0))
    cost = found.dnll[:, units].sum(axis=0)
    apart = (rankdata(mass) - rankdata(cost)) / max(1, len(units) - 1)
    ranked["rank_difference"][units] = apart
    # A rank of noise is some rank: both sides of the median have to be established.
    heavier, dearer = _sides(found, units, options)
    crossed = heavier * dearer < 0
    ranked["disagrees"][units] = (np.abs(apart) >= FAR_APART) & crossed


def _sides(
    found: Measured, units: np.ndarray, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """Whether mass, and cost, are above (1) or below (-1) the median unit's; 0 if not known."""

    def from_median(values: np.ndarray) -> np.ndarray:
        return values - np.median(values, axis=-1, keepdims=True)

    def of_mass(total: np.ndarray, n: np.ndarray) -> np.ndarray:
        return from_median(divide(total, n))

    def of_cost(total: np.ndarray, n: np.ndarray) -> np.ndarray:
        return from_median(total / n[:, None])

    weights = {"weights": found.n, **options}
    mass = function_interval(of_mass, found.mass[:, units], found.mass_n[:, units], **weights)
    cost = function_interval(of_cost, found.dnll[:, units], found.n, **weights)
    return tuple(  # type: ignore[return-value]
        (side.low > 0).astype(int) - (side.high < 0).astype(int) for side in (mass, cost)
    )


def _agreement(
    found: Measured, of_kind: np.ndarray, units: np.ndarray, options: dict[str, Any]
) -> dict[str, Any]:
    """Rank correlations, and screened beside exact cost in the deciles that the screen picks.

    Args:
        of_kind: numbers of all gates' units, or of all routes'.
        units: of those that were removed.
    """

    def correlation(which: np.ndarray, first: str, second: str) -> dict[str, Any]:
        sides = []
        for name in (first, second):
            n = found.mass_n[:, which] if name == "mass" else found.n
            sides.append((getattr(found, name)[:, which], n))
        return interval_summary(rank_correlation_interval(*sides, **options), ())

    agreement: dict[str, Any] = {
        "n_units": len(of_kind),
        "n_removed": len(units),
        "mass_fisher": correlation(of_kind, "mass", "fisher"),
    }
    if len(units):
        agreement["attribution_dnll"] = correlation(units, "attribution", "dnll")
        agreement["fisher_dnll"] = correlation(units, "fisher", "dnll")
        agreement["deciles"] = _deciles(found, units)
    if len(units) == len(of_kind):
        # The outer deciles alone would be a choice of units by their cost.
        agreement["mass_dnll"] = correlation(units, "mass", "dnll")
    return agreement


def _deciles(found: Measured, units: np.ndarray) -> dict[str, Any]:
    """Screened and exact cost of the units that the second order puts at the ends."""
    tokens = found.n.sum()
    screened = found.fisher.sum(axis=0) / tokens
    first = found.attribution.sum(axis=0) / tokens
    cost = found.dnll.sum(axis=0) / tokens
    among = found.kinds == found.kinds[units[0]]
    facts: dict[str, Any] = {}
    complete = bool(found.removed[among].all())
    ends = zip(("lowest", "highest"), outer(screened, among), outer(cost, among), strict=True)
    for name, picked, costly in ends:
        picked = picked[found.removed[picked]]
        facts[name] = {
            "n": len(picked),
            "attribution": float(first[picked].mean()) if len(picked) else None,
            "fisher": float(screened[picked].mean()) if len(picked) else None,
            "dnll": float(cost[picked].mean()) if len(picked) else None,
            "same_sign": int((np.sign(screened[picked]) == np.sign(cost[picked])).sum()),
            "shared": len(np.intersect1d(picked, costly)) if complete else None,
        }
    return facts
