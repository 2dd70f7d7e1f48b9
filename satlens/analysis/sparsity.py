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

from satlens.analysis.inputs import (
    documents_in,
    gate_cells,
    initial_model,
    initial_notes,
    interval_columns,
    interval_protocol,
    interval_summary,
    open_windows,
    opened,
    provenance_of,
    sites_of,
    split_notes,
    tokenizer_of,
)
from satlens.analysis.rectified import RectifiedRoutes
from satlens.analysis.reducers import (
    GateStatistics,
    RouteStatistics,
)
from satlens.analysis.result import Result, flag_column, join_marks
from satlens.analysis.route_tables import Routes, route_summary, route_table, source_table
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
from satlens.analysis.stream import Progress, Reducer, n_groups, run
from satlens.data.windows import Windows
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

THRESHOLDS = (0.01, 0.05, 0.1)


class Statistics(NamedTuple):
    """What one pass over one model gave; None for a kind of site it does not have."""

    gates: GateStatistics | None
    routes: Routes | None


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
    sites = sites_of(model, analysis="sparsity")
    data = opened(data)
    windows = open_windows(
        model,
        data,
        split=split,
        batch_size=batch_size,
        max_documents=max_documents,
        max_tokens_per_document=max_tokens_per_document,
    )
    passes: dict[str, Any] = {"progress": progress, "resume_dir": resume_dir}
    trained = _pass(model, windows, sites, thresholds, "sparsity", passes)
    initial, initial_seed = None, None
    if baseline:
        fresh, initial_seed = initial_model(model)
        initial = _pass(fresh, windows, sites, thresholds, "sparsity-init", passes)
        del fresh
    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    parts, summary = [], {"thresholds": list(thresholds), "initial_seed": initial_seed}
    source = provenance_of(model, windows, seed=seed, tokenizer=tokenizer_of(model, data))
    attached, n_documents = [], windows.n_documents
    if trained.gates is not None:
        before = None if initial is None else initial.gates
        parts.append(_gate_table(trained.gates, before, sites, n_documents, options))
        summary["gates"] = _gate_summary(
            trained.gates, before, parts[-1], sites, n_documents, options
        )
    if trained.routes is not None:
        before = None if initial is None else initial.routes
        parts.append(route_table(trained.routes, before, n_documents, options))
        summary["routes"] = route_summary(trained.routes, n_documents, options)
        weights = source_table(trained.routes, before, n_documents, options)
        attached.append(
            Result("route_weights", weights, source, notes=[_NOTES[0]], keys=("source_index",))
        )
    mixed = any(site.support == "signed" for site in sites if site.kind == "route")
    notes = [*_NOTES, *(_SIGNED_NOTES if mixed else ()), *split_notes(windows)]
    notes += initial_notes(model) if baseline else []
    table = pd.concat(parts, ignore_index=True)
    for name in ("dead", "dead_init"):
        if name in table:
            table[name] = table[name].eq(True)
    return Result("sparsity", table, source, summary, notes, parts=tuple(attached))


_NOTES = (
    "Special tokens are excluded; the first token of each context has no history and is in the "
    "summary only.",
    "Columns ending in _init are the untrained model on the same tokens; an untrained ReLU gate "
    "is closed half of the time.",
    "p95 comes from a fixed histogram and has no interval; a head is dead if it never opened on "
    "these tokens.",
    "norm_share is |alpha| ||V_1|| / (|alpha| ||V_1|| + |scale| ||V_n||) per token, scale being "
    "the weight of the own value (1 in SATFormer).",
    "normalised_entropy of a read is its mean entropy over log n of its n sources; that of the "
    "summary weights the reads of several sources by log n.",
    "A source's depth is the mean index of the sublayers it sums, the embedding's -1; distances "
    "are in sublayers.",
)
_SIGNED_NOTES = (
    "Signed weights (flag signed) are no distribution and have no entropy. Norm shares are those "
    "of |w| ||X|| over a read's sources X, per token; signed_norm_share has the sign of w.",
    "States after layers and parallel streams are mixtures of what earlier sublayers added: what a "
    "read has of each sublayer is in the analysis routes.",
)


def _pass(
    model: Decoder,
    windows: Windows,
    sites: Sequence[AccessSite],
    thresholds: Sequence[float],
    label: str,
    passes: dict[str, Any],
) -> Statistics:
    groups = n_groups(windows)
    gates = [site for site in sites if site.kind == "gate"]
    routes = [site for site in sites if site.kind == "route"]
    signed = [site for site in routes if site.support == "signed"]
    gate = GateStatistics(gates, groups, thresholds) if gates else None
    weights = RouteStatistics(routes, groups) if routes else None
    by_norm = RectifiedRoutes(model, signed, groups) if signed else None
    found: list[Reducer | None] = [gate, weights, by_norm]
    reducers = [reducer for reducer in found if reducer is not None]
    run(model, windows, reducers, label=label, **passes)
    return Statistics(gate, None if weights is None else Routes(weights, by_norm))


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
