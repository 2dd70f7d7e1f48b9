"""Mass versus cause: what each weight carries beside what removing it costs, for every site.

A unit is one weight of one site: a head of a gate, a source of a route. Its mass is what the model
puts there; its cost is the change in loss when it is removed. The two need not agree
(arXiv 2606.13168). One backward pass screens all units, to first and to second order; how far that
can be trusted is measured by exact removals.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from satlens.analysis.engine.inputs import (
    open_windows,
    opened,
    provenance_of,
    require_finite,
    sites_of,
    split_notes,
    tokenizer_of,
)
from satlens.analysis.engine.stream import Progress, n_groups
from satlens.analysis.interventions.gates import ZeroGate
from satlens.analysis.interventions.routes import MaskRoute
from satlens.analysis.result import Result
from satlens.analysis.statistics.resampling import check_draws
from satlens.analysis.stats import N_RESAMPLES, Adjustment
from satlens.analysis.sweeps.attribution_table import Measured, attribution_table, outer
from satlens.analysis.sweeps.cases import checked, place_of
from satlens.analysis.sweeps.gradients import attributions, width_of
from satlens.analysis.sweeps.masses import masses
from satlens.analysis.sweeps.measure import Case, measure
from satlens.analysis.sweeps.table import ADJUSTED
from satlens.data.windows import Windows
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

Exact = Literal["all", "deciles", "none"]


def attribute(
    model: Decoder,
    data: Any,
    *,
    exact: Exact = "all",
    split: str = "test",
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    adjustment: Adjustment = "max_t",
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Mass, screened and exact cost of every weight of every access site.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        exact: which units are removed one by one: ``all``; ``deciles``, the tenth with the highest
            and the tenth with the lowest second-order estimate; ``none``.
        split: of prepared data.
        adjustment: of the tests, ``max_t`` or ``benjamini_hochberg``.
        n_resamples, seed: of the bootstrap over documents and of the sign flips.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``attribution``: a row a unit with ``mass`` (what it is stands in ``measure``),
        ``attribution`` (first order), ``fisher`` (second order) and ``dnll`` (exact) in nats a
        token, p of a sign-flip test of the last, adjusted over gates and over routes, and
        ``rank_difference``: its rank by mass minus its rank by dnll, as a share of the ranks there
        are. The flag ``disagrees`` marks units at least half of the ranks apart that are heavier
        than the median unit and cost less, or the other way round, both by 95 % intervals. The
        summary has the rank correlations.

    Raises:
        AnalysisError: no access sites, or none with a weight that can be removed alone; an unknown
            ``exact``; losses of the model that are not finite.
    """
    check_draws(n_resamples, seed)
    checked("exact", exact, get_args(Exact))
    checked("adjustment", adjustment, tuple(ADJUSTED))
    sites = sites_of(model, analysis="attribute")
    cases, columns = removals(sites)
    if not cases:
        raise AnalysisError("attribute: every route of this model has a single source")
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
    carried = masses(model, windows, sites, passes)
    screened = attributions(model, windows, sites, passes)
    require_finite("attribute", screened["nll"], windows)
    fisher = screened["fisher"][:, columns]
    chosen = _chosen(exact, cases, fisher)
    measured = Measured(
        cases=cases,
        sites=_owners(sites, columns),
        mass=carried.total[:, columns],
        mass_n=carried.n[:, columns],
        attribution=screened["attribution"][:, columns],
        fisher=fisher,
        chosen=np.isin(np.arange(len(cases)), chosen),
        dnll=_exact(model, windows, cases, chosen, passes),
        n=screened["n"],
    )
    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    table, summary = attribution_table(measured, windows.n_documents, adjustment, options)
    notes = [*_NOTES, *_left_out(sites, columns), *_screened_only(exact), *split_notes(windows)]
    source = provenance_of(model, windows, seed=seed, tokenizer=tokenizer_of(model, data))
    return Result("attribution", table, source, {"exact": exact, **summary}, notes)


_NOTES = (
    "mass: norm_share is ||alpha V_1|| / (||alpha V_1|| + ||V_n||) of a gate's head, weight the "
    "mean weight of a distribution, rectified_share the share of |w| ||X|| in a read of signed "
    "weights. The first token of each context has no mass, but its loss counts.",
    "Removing closes a gate's head, or leaves one source out: of a distribution the others then "
    "share its weight, elsewhere its weight is zero.",
    "attribution is the gradient times the change of the weights, the change in loss to first "
    "order; fisher adds half of its square, window by window, which stands for the second order: "
    "it ranks well and overshoots where weights are large; "
    "dnll is the change in loss when the unit is removed.",
    "Cost is not usefulness: the rest of the model was trained with what is removed.",
)


def _screened_only(exact: Exact) -> list[str]:
    if exact == "all":
        return []
    which = "none" if exact == "none" else "those in the outer deciles by fisher"
    return [f"Of all units {which} were removed exactly; the others have no dnll."]


def _left_out(sites: Sequence[AccessSite], columns: np.ndarray) -> list[str]:
    n = sum(width_of(site) for site in sites) - len(columns)
    return [f"{n} reads of a single source were left out: nothing would be left."] if n else []


# -- units -----------------------------------------------------------------------------------------


def removals(sites: Sequence[AccessSite]) -> tuple[list[Case], np.ndarray]:
    """The removal of every weight that can be removed, and its column among the weights of all."""
    cases, columns, start = [], [], 0
    for site in sites:
        width = width_of(site)
        if site.kind == "gate" or width > 1:
            cases += [_removal(site, column) for column in range(width)]
            columns += range(start, start + width)
        start += width
    return cases, np.array(columns, dtype=np.int64)


def _removal(site: AccessSite, column: int) -> Case:
    where, gate = place_of(site), site.kind == "gate"
    removed = ZeroGate(head=column, **where) if gate else MaskRoute(source=column, **where)
    return Case(
        intervention=removed,
        kind=removed.name,
        target=site.kind,
        scope="unit",
        first_layer=site.layer,
        weights=(site.hook,),
        site=site.name,
        head=column if gate else None,
        source="" if gate else site.sources[column].label,
        static=not site.per_token,
        **where,
    )


def _owners(sites: Sequence[AccessSite], columns: np.ndarray) -> list[AccessSite]:
    every = [site for site in sites for _ in range(width_of(site))]
    return [every[column] for column in columns]


def _chosen(exact: Exact, cases: Sequence[Case], screened: np.ndarray) -> np.ndarray:
    """Numbers of the units that are removed."""
    if exact == "none":
        return np.zeros(0, dtype=np.int64)
    if exact == "all":
        return np.arange(len(cases))
    targets, total = np.array([case.target for case in cases]), screened.sum(axis=0)
    return np.sort(
        np.concatenate([np.concatenate(outer(total, targets == t)) for t in np.unique(targets)])
    )


def _exact(
    model: Decoder,
    windows: Windows,
    cases: Sequence[Case],
    chosen: np.ndarray,
    passes: dict[str, Any],
) -> np.ndarray:
    """(G, units) summed change in loss of each document group; NaN for what was not removed."""
    found = np.full((n_groups(windows), len(cases)), np.nan)
    if len(chosen):
        some = [cases[unit] for unit in chosen]
        found[:, chosen] = measure(model, windows, some, passes, label="removal")["dnll"]
    return found
