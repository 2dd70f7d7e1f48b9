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
    gate_cells,
    initial_model,
    interval_columns,
    interval_summary,
    open_windows,
    opened,
    provenance_of,
    route_cells,
    sites_of,
    tokenizer_of,
)
from satlens.analysis.reducers import (
    FAMILIES,
    GateStatistics,
    RouteStatistics,
    depth_distance,
    family_mass,
    membership,
)
from satlens.analysis.result import Result, flag_column
from satlens.analysis.stats import (
    N_RESAMPLES,
    VARIANCE_PARTS,
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
    routes: RouteStatistics | None


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
    source = provenance_of(
        model, windows, split=split, seed=seed, tokenizer=tokenizer_of(model, data)
    )
    attached = []
    if trained.gates is not None:
        before = None if initial is None else initial.gates
        parts.append(_gate_table(trained.gates, before, sites, options))
        summary["gates"] = _gate_summary(trained.gates, before, parts[-1], sites, options)
    if trained.routes is not None:
        before = None if initial is None else initial.routes
        parts.append(_route_table(trained.routes, before, options))
        summary["routes"] = _route_summary(trained.routes, options)
        weights = _source_table(trained.routes, before, options)
        attached.append(
            Result("route_weights", weights, source, notes=[_NOTES[0]], keys=("source_index",))
        )
    table = pd.concat(parts, ignore_index=True)
    for name in ("dead", "dead_init"):
        if name in table:
            table[name] = table[name].eq(True)
    return Result("sparsity", table, source, summary, list(_NOTES), parts=tuple(attached))


_NOTES = (
    "Special tokens are excluded; the first token of each context has no history and is in the "
    "summary only.",
    "Columns ending in _init are the untrained model on the same tokens; an untrained ReLU gate "
    "is closed half of the time.",
    "p95 comes from a fixed histogram and has no interval; a head is dead if it never opened on "
    "these tokens.",
    "norm_share is |alpha| ||V_1|| / (|alpha| ||V_1|| + |scale| ||V_n||) per token, scale being "
    "the weight of the own value (1 in SATFormer).",
    "A source's depth is the mean index of the sublayers it sums, the embedding's -1; distances "
    "are in sublayers.",
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
    found = Statistics(
        GateStatistics(gates, groups, thresholds) if gates else None,
        RouteStatistics(routes, groups) if routes else None,
    )
    reducers: list[Reducer] = [reducer for reducer in found if reducer is not None]
    run(model, windows, reducers, label=label, **passes)
    return found


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
        n_documents=(sums["n"] > 0).sum(axis=0),
        n_tokens=sums["n"].sum(axis=0),
        flags=join_marks(marks, flag_column(flags)),
    )


def join_marks(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two columns of flags as one, joined by ``;``."""
    return np.array([";".join(x for x in pair if x) for pair in zip(first, second, strict=True)])


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
    options: dict[str, Any],
) -> dict[str, Any]:
    overall = {
        name: interval_summary(ratio_interval(a.sum(axis=1), b.sum(axis=1), **options))
        for name, (a, b) in _ratios(gates).items()
    }
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
    }
    if initial is not None:
        totals = {name: (a.sum(), b.sum()) for name, (a, b) in _ratios(initial).items()}
        summary["overall_init"] = {name: float(divide(*pair)) for name, pair in totals.items()}
        summary["n_dead_init"] = int(_dead(initial).sum())
        summary["variance_shares_init"] = _variance_shares(initial)
    return summary


def _variance_shares(gates: GateStatistics) -> dict[str, float]:
    """Shares of the variance of gates between layers, heads and tokens."""
    shape = len(gates.gates), -1
    totals = (gates.sums[name].sum(axis=0).reshape(shape) for name in ("total", "squares", "n"))
    shares = variance_shares(*totals)
    return dict(zip(VARIANCE_PARTS, shares.tolist(), strict=True))


# -- routes ----------------------------------------------------------------------------------------


def _route_ratios(routes: RouteStatistics) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Each statistic of a read that is a ratio of sums, (G, S)."""
    sums, sites = routes.sums, routes.sites
    n, weight = sums["n"], sums["weight"]
    sources = np.array([len(site.sources) for site in sites])
    # A read of one source has no entropy to speak of: 0 / 0.
    possible = np.log(sources) * n
    ratios = {
        "normalised_entropy": (np.where(possible > 0, sums["entropy"], 0.0), possible),
        "effective_sources": (sums["effective"], n),
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


def _route_table(
    routes: RouteStatistics, initial: RouteStatistics | None, options: dict[str, Any]
) -> pd.DataFrame:
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
        n_documents=(sums["n"] > 0).sum(axis=0),
        n_tokens=sums["n"].sum(axis=0),
        flags=join_marks(single, interval.flags[effective]),
    )


def _route_summary(routes: RouteStatistics, options: dict[str, Any]) -> dict[str, Any]:
    several = np.array([len(site.sources) > 1 for site in routes.sites])
    overall = {
        name: interval_summary(
            ratio_interval(a[:, several].sum(axis=1), b[:, several].sum(axis=1), **options)
        )
        for name, (a, b) in _route_ratios(routes).items()
    }
    first = divide(
        np.einsum("gn,nfs->fs", routes.sums["first_weight"], family_mass(routes.sites)).sum(axis=1),
        routes.sums["first_n"].sum(),
    )
    shares = _embedding_variance(routes)
    return {
        "overall": overall,
        "n_reads": len(routes.sites),
        "n_single_source": int((~several).sum()),
        "n_undefined": int(routes.sums["undefined"].sum()),
        "variance_shares_of_embedding_weight": shares,
        "first_token": {
            "n": int(routes.sums["first_n"][:, 0].sum()),
            **{f"mass_{name}": float(value) for name, value in zip(FAMILIES, first, strict=True)},
        },
    }


def _embedding_variance(routes: RouteStatistics) -> dict[str, float]:
    """Shares of the variance of the embedding's weight between reads and between tokens."""
    columns = np.flatnonzero(np.diff(routes.site_of, prepend=-1))  # the embedding comes first
    several = np.bincount(routes.site_of) > 1
    total, squares = (routes.sums[k].sum(axis=0)[columns][several] for k in ("weight", "squares"))
    n = routes.sums["n"].sum(axis=0)[several]
    between, _, tokens = variance_shares(total[:, None], squares[:, None], n[:, None])
    return {"sites": float(between), "tokens": float(tokens)}


def _source_table(
    routes: RouteStatistics, initial: RouteStatistics | None, options: dict[str, Any]
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
        n_documents=(n > 0).sum(axis=0),
        n_tokens=n.sum(axis=0),
        flags=interval.flags,
    )
