"""How sparse and how concentrated a model's access to earlier depths is, site by site.

Gates: how often they are closed, how far they open, what share of the mixed value V_1 has.
Routes: how spread they are and over what. Each beside the same figure of the untrained model on
the same tokens: an untrained ReLU gate is closed half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from satlens.analysis.depth.tables import Routes, route_summary, route_table, source_table
from satlens.analysis.engine.descriptive import Descriptive, Inputs, measure
from satlens.analysis.engine.inputs import (
    documents_in,
    gate_cells,
    initial_notes,
    interval_columns,
    interval_protocol,
    interval_summary,
    sites_of,
    split_notes,
)
from satlens.analysis.engine.rectified import RectifiedRoutes
from satlens.analysis.engine.reducers import (
    GateStatistics,
    RouteStatistics,
)
from satlens.analysis.engine.stream import Progress, Reducer
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.stats import (
    N_RESAMPLES,
    VARIANCE_PARTS,
    Interval,
    divide,
    function_interval,
    hoyer,
    ratio_interval,
    variance_shares,
)
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

THRESHOLDS = (0.01, 0.05, 0.1)


class Statistics(NamedTuple):
    """What one pass over one model gave; None for a kind of site it does not have."""

    gates: GateStatistics | None
    routes: Routes | None

    @classmethod
    def of(cls, reducers: Sequence[Reducer]) -> Statistics:
        """From the reducers of a pass."""
        found = {type(reducer): reducer for reducer in reducers}
        gates, weights = found.get(GateStatistics), found.get(RouteStatistics)
        by_norm = found.get(RectifiedRoutes)
        assert gates is None or isinstance(gates, GateStatistics)
        assert weights is None or isinstance(weights, RouteStatistics)
        assert by_norm is None or isinstance(by_norm, RectifiedRoutes)
        return cls(gates, None if weights is None else Routes(weights, by_norm))


def sparsity(
    model: Decoder,
    data: Any,
    *,
    split: str = "test",
    thresholds: Sequence[float] = THRESHOLDS,
    baseline: bool = True,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Statistics of every gate (per layer and KV head) and every route (per read).

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        split: of prepared data.
        thresholds: gates of smaller magnitude are counted, beside exact zeros.
        baseline: repeat the pass on the untrained model, for the columns ``<stat>_init``.
        n_resamples, seed: of the bootstrap over documents.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``sparsity``: a row a (site, head) of gates and a row a read of routes; statistics of the
        other kind are empty. Its part ``route_weights`` has the mean weight of every source.

    Raises:
        AnalysisError: a model without access sites.
        DataError: bad data, or data of another tokenizer.
    """
    (result,) = measure(
        model,
        data,
        [Sparsity(thresholds)],
        label="sparsity",
        split=split,
        baseline=baseline,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
        n_resamples=n_resamples,
        seed=seed,
        progress=progress,
        resume_dir=resume_dir,
    )
    return result


class Sparsity(Descriptive):
    """:func:`sparsity` as a part of a pass."""

    name = "sparsity"

    def __init__(self, thresholds: Sequence[float] = THRESHOLDS) -> None:
        self.thresholds = tuple(thresholds)

    def check(self, model: Decoder) -> None:
        sites_of(model, analysis=self.name)

    def reducers(self, model: Decoder, inputs: Inputs) -> list[Reducer]:
        gates = [site for site in model.sites if site.kind == "gate"]
        routes = [site for site in model.sites if site.kind == "route"]
        signed = [site for site in routes if site.support == "signed"]
        groups = inputs.n_groups
        reducers: list[Reducer] = []
        if gates:
            reducers.append(GateStatistics(gates, groups, self.thresholds))
        if routes:
            reducers.append(RouteStatistics(routes, groups))
        if signed:
            reducers.append(RectifiedRoutes(model, signed, groups))
        return reducers

    def result(
        self, inputs: Inputs, trained: Sequence[Reducer], initial: Sequence[Reducer] | None
    ) -> Result:
        now = Statistics.of(trained)
        before = Statistics(None, None) if initial is None else Statistics.of(initial)
        sites, n_documents, options = inputs.model.sites, inputs.windows.n_documents, inputs.options
        tables, attached, source = [], [], inputs.provenance()
        summary: dict[str, Any] = {"thresholds": list(self.thresholds)}
        summary["initial_seed"] = inputs.initial_seed
        if now.gates is not None:
            tables.append(_gate_table(now.gates, before.gates, sites, n_documents, options))
            summary["gates"] = _gate_summary(
                now.gates, before.gates, tables[-1], sites, n_documents, options
            )
        if now.routes is not None:
            tables.append(route_table(now.routes, before.routes, n_documents, options))
            summary["routes"] = route_summary(now.routes, n_documents, options)
            weights = source_table(now.routes, before.routes, n_documents, options)
            attached.append(
                Result("route_weights", weights, source, notes=[_NOTES[0]], keys=("source_index",))
            )
        mixed = any(site.support == "signed" for site in sites if site.kind == "route")
        notes = [*_NOTES, *(_SIGNED_NOTES if mixed else ()), *split_notes(inputs.windows)]
        if initial is not None:
            notes += [_INIT_NOTE, *initial_notes(inputs.model)]
        table = pd.concat(tables, ignore_index=True)
        for name in ("dead", "dead_init"):
            if name in table:
                table[name] = table[name].eq(True)
        return Result(self.name, table, source, summary, notes, parts=tuple(attached))


_INIT_NOTE = (
    "Columns ending in _init are the untrained model on the same tokens; an untrained ReLU gate is "
    "closed half of the time."
)
_NOTES = (
    "Special tokens are excluded; the first token of each context has no history and is in the "
    "summary only.",
    "p95 comes from a fixed histogram and has no interval; a head is dead if it never opened on "
    "these tokens.",
    "norm_share is |alpha| ||V_1|| / (|alpha| ||V_1|| + |scale| ||V_n||) per token, scale being "
    "the weight of the own value (1 in SATFormer).",
    "normalised_entropy of a read is its mean entropy over log n of its n sources; that of the "
    "summary weights the reads of several sources by log n.",
    "content_dependence of a read is I(token; source) / log n, the entropy of its mean weights "
    "above its mean entropy: 0 where every token weighs alike; that of the summary is weighted as "
    "normalised_entropy is.",
    "A source's depth is the mean index of the sublayers it sums, the embedding's -1; distances "
    "are in sublayers.",
)
_SIGNED_NOTES = (
    "Signed weights (flag signed) are no distribution and have no entropy. Norm shares are those "
    "of |w| ||X|| over a read's sources X, per token; signed_norm_share has the sign of w.",
    "States after layers and parallel streams are mixtures of what earlier sublayers added: what a "
    "read has of each sublayer is in the analysis routes.",
)


# -- gates -----------------------------------------------------------------------------------------


def _ratios(gates: GateStatistics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each statistic that is a ratio of sums: numerator and denominator, (G, C)."""
    sums = gates.sums
    n, n_open = sums["n"], sums["n"] - sums["zero"]
    ratios = {
        "zero_fraction": (sums["zero"], n),
        "open_fraction": (n_open, n),
        "mean": (sums["total"], n),
        "mean_open": (sums["total"], n_open),
        "norm_share": (sums["share"], sums["share_n"]),
    }
    below = sums["below"]
    for index, limit in enumerate(gates.thresholds):
        ratios[f"below_{limit:g}"] = (below[:, index], n)
    return ratios


def _hoyer_of(absolute: np.ndarray, squares: np.ndarray, n: np.ndarray) -> np.ndarray:
    return hoyer(absolute, squares, n)


def _gate_table(
    gates: GateStatistics,
    initial: GateStatistics | None,
    sites: Sequence[AccessSite],
    n_documents: int,
    options: dict[str, Any],
) -> pd.DataFrame:
    ratios = _ratios(gates)
    pairs = [np.stack(side, axis=1) for side in zip(*ratios.values(), strict=True)]
    interval = ratio_interval(*pairs, **options)
    sums = gates.sums
    spread = function_interval(
        _hoyer_of, sums["absolute"], sums["squares"], sums["n"], weights=sums["n"], **options
    )
    dead = _dead(gates)
    columns: dict[str, Any] = {}
    flags = {}
    for index, name in enumerate(ratios):
        columns |= interval_columns(name, interval, index)
        flags[name] = interval.flags[index]
    columns |= interval_columns("hoyer", spread)
    flags["hoyer"] = spread.flags
    columns |= {"p95": gates.values.histogram.quantile(0.95), "dead": dead}
    if initial is not None:
        columns |= {f"{name}_init": value for name, value in _points(initial).items()}
    n_undefined = sums["undefined"].sum(axis=0)
    marks = np.where(dead, "dead", "").astype(object)
    static = np.repeat([not s.per_token for s in sites if s.kind == "gate"], gates.n_heads)
    marks[static] += np.where(marks[static] == "", "static", ";static")
    return gate_cells([site for site in sites if site.kind == "gate"]).assign(
        **columns,
        n_undefined=n_undefined,
        n_documents=documents_in(sums["n"], n_documents),
        n_tokens=sums["n"].sum(axis=0),
        flags=join_marks(marks, flag_column(flags)),
    )


def _dead(gates: GateStatistics) -> np.ndarray:
    """(C,) never open on these tokens."""
    n, zero = gates.sums["n"].sum(axis=0), gates.sums["zero"].sum(axis=0)
    return (n > 0) & (n == zero)


def _points(gates: GateStatistics) -> dict[str, np.ndarray]:
    """Every statistic without its interval, (C,) each."""
    totals = {name: (a.sum(0), b.sum(0)) for name, (a, b) in _ratios(gates).items()}
    points = {name: divide(*pair) for name, pair in totals.items()}
    sums = (gates.sums[name].sum(axis=0) for name in ("absolute", "squares", "n"))
    return {
        **points,
        "hoyer": hoyer(*sums),
        "p95": gates.values.histogram.quantile(0.95),
        "dead": _dead(gates),
    }


def _gate_summary(
    gates: GateStatistics,
    initial: GateStatistics | None,
    table: pd.DataFrame,
    sites: Sequence[AccessSite],
    n_documents: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    intervals = {
        name: ratio_interval(a.sum(axis=1), b.sum(axis=1), **options)
        for name, (a, b) in _ratios(gates).items()
    }
    overall = {name: interval_summary(interval) for name, interval in intervals.items()}
    zeros, dead = gates.sums["zero"].sum(axis=0), _dead(gates)
    first = {name: gates.sums[f"first_{name}"].sum() for name in ("n", "zero", "total")}
    summary: dict[str, Any] = {
        "overall": overall,
        "n_heads": len(dead),
        "n_dead": int(dead.sum()),
        "dead_heads": table.loc[dead, ["layer", "head"]].astype(int).to_numpy().tolist(),
        "share_of_zeros_in_dead_heads": float(divide(zeros[dead].sum(), zeros.sum())),
        "variance_shares": _variance_shares(gates),
        "variance_share_intervals": _variance_intervals(gates, options),
        "first_token": {
            "n": int(first["n"]),
            "zero_fraction": float(divide(first["zero"], first["n"])),
            "mean": float(divide(first["total"], first["n"])),
        },
        "signed": any(s.support == "signed" for s in sites if s.kind == "gate"),
        "static": not any(s.per_token for s in sites if s.kind == "gate"),
        "interval": interval_protocol(intervals["zero_fraction"], n_documents),
    }
    if initial is not None:
        totals = {name: (a.sum(), b.sum()) for name, (a, b) in _ratios(initial).items()}
        summary["overall_init"] = {name: float(divide(*pair)) for name, pair in totals.items()}
        summary["zero_fraction_change"] = interval_summary(_zero_change(gates, initial, options))
        summary["n_dead_init"] = int(_dead(initial).sum())
        summary["variance_shares_init"] = _variance_shares(initial)
    return summary


def _zero_change(
    gates: GateStatistics, initial: GateStatistics, options: dict[str, Any]
) -> Interval:
    """Zero fraction minus the untrained model's, paired: both resample the same documents."""
    trained, untrained = (
        [reducer.sums[name].sum(axis=1) for name in ("zero", "n")] for reducer in (gates, initial)
    )

    def change(zero: np.ndarray, n: np.ndarray, zero_0: np.ndarray, n_0: np.ndarray) -> np.ndarray:
        return divide(zero, n) - divide(zero_0, n_0)

    return function_interval(change, *trained, *untrained, weights=trained[1], **options)


def _variance_shares(gates: GateStatistics) -> dict[str, float]:
    """Shares of the variance of gates between layers, heads and tokens."""
    shape = len(gates.gates), -1
    totals = (gates.sums[name].sum(axis=0).reshape(shape) for name in ("total", "squares", "n"))
    shares = variance_shares(*totals)
    return dict(zip(VARIANCE_PARTS, shares.tolist(), strict=True))


def _variance_intervals(gates: GateStatistics, options: dict[str, Any]) -> dict[str, Any]:
    """The same with their intervals."""
    arrays = [gates.sums[name] for name in ("total", "squares", "n")]

    def shares(*totals: np.ndarray) -> np.ndarray:
        return variance_shares(
            *(total.reshape(len(total), len(gates.gates), -1) for total in totals)
        )

    interval = function_interval(shares, *arrays, weights=arrays[-1].sum(axis=1), **options)
    return {part: interval_summary(interval, index) for index, part in enumerate(VARIANCE_PARTS)}
