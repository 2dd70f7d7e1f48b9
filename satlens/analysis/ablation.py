"""What it costs to replace gates, routes or reads: interventions swept over model, layers, heads,
families of sources and components.

The clean pass is shared. For each batch the state at every block border is computed once, and each
intervention runs only from the first layer that it touches, with the same attention implementation
(:mod:`satlens.analysis.sweeps.measure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from satlens.analysis.engine.coding import BREAKDOWNS, coding, require_tags_of
from satlens.analysis.engine.inputs import (
    open_windows,
    opened,
    provenance_of,
    require_finite,
    sites_of,
    split_notes,
    tokenizer_of,
)
from satlens.analysis.engine.stream import Progress
from satlens.analysis.interventions.means import per_of
from satlens.analysis.result import Result
from satlens.analysis.statistics.resampling import check_draws
from satlens.analysis.stats import N_RESAMPLES, Adjustment
from satlens.analysis.sweeps.cases import SCOPES, checked, sweep
from satlens.analysis.sweeps.fits import OF_POOL, Pool, Tagging
from satlens.analysis.sweeps.kinds import DEFAULT_KINDS, KINDS, available_kinds, kinds_of, needs_of
from satlens.analysis.sweeps.measure import Case, measure, of_targets
from satlens.analysis.sweeps.table import ADJUSTED, ablation_table, category_table
from satlens.data.categories import Categories
from satlens.data.tags import Tags
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder

DEFAULT_SCOPES = ("model", "layer", "head", "source")


def ablate(
    model: Decoder,
    data: Any,
    *,
    kinds: Sequence[str] | str | None = None,
    scope: Sequence[str] | str = DEFAULT_SCOPES,
    by: str | None = None,
    split: str = "test",
    pool: Any = None,
    means: Mapping[str, np.ndarray] | None = None,
    tags: Tags | None = None,
    tagger: str = "auto",
    groups: Categories | None = None,
    cache_dir: str | Path | None = None,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    adjustment: Adjustment = "max_t",
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """What interventions on gates, routes and reads change about the next-token distribution.

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        kinds: which interventions, of :data:`satlens.analysis.sweeps.kinds.KINDS`. None is zero,
            mean, shuffle, uniform, mask and tie_v, as far as the model has sites for them, and
            remove where the scope has component.
        scope: ``model``: all gates (or routes) at once; ``layer``: those of one layer; ``head``:
            one KV head of one gate; ``role``: routes of one role; ``site``: one gate or route;
            ``source``: the sources of one family in one layer (each by itself where all are of one
            family), for mask and onehot; ``component``: one sublayer's contribution to one read.
        by: also add dNLL up by this property of the target token, as
            :func:`satlens.categories` divides them; None with ``tags`` is category.
        split: of prepared data.
        pool: data that means, donors and constants are fitted on, taken whole; None is the split
            ``pool`` of prepared data, or ``data`` itself where it has no splits (then the result
            says so).
        means: means already fitted, for the kind that takes them, instead of a pool.
        tags: tags already made for the same slice of documents, instead of a tagger.
        tagger, groups, cache_dir: as of :func:`satlens.categories`.
        max_documents, max_tokens_per_document: of the evaluated data and of its pool split; a
            ``pool`` given explicitly is taken whole.
        adjustment: of the tests within each kind and scope, ``max_t`` or ``benjamini_hochberg``.
        n_resamples, seed: of the bootstrap over documents, the sign flips, the shuffles and the
            draws of donors.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``ablation``: a row an intervention with ``nll_clean, nll, dnll`` (nats a token, paired by
        document), ``ppl_ratio``, ``kl`` (of the edited from the clean next-token distribution, in
        nats), ``top1_change`` (share of tokens whose most likely successor changes), and p of a
        sign-flip test of dnll, adjusted within each kind and scope. With ``by`` or
        ``tags`` its part ``ablation_categories``: dnll by category of the target.

    Raises:
        AnalysisError: no access sites; a kind, scope or adjustment that is unknown or has nothing
            here; tags of other documents; means or a pool that nothing needs; resample with a
            single document to draw from; losses of the model that are not finite.
        DataError: no tagger model, documents without text.
    """
    check_draws(n_resamples, seed)
    scopes = checked("scope", scope, SCOPES)
    if by is not None:
        checked("by", by, BREAKDOWNS)
    checked("adjustment", adjustment, tuple(ADJUSTED))
    if "component" not in scopes:
        sites_of(model, analysis="ablate")
    wanted = _wanted(model, kinds, scopes)
    data = opened(data)
    limits: dict[str, Any] = {
        "max_documents": max_documents,
        "max_tokens_per_document": max_tokens_per_document,
    }
    windows = open_windows(model, data, split=split, batch_size=batch_size, **limits)
    passes: dict[str, Any] = {"progress": progress, "resume_dir": resume_dir}
    by = "category" if by is None and tags is not None else by
    tagging = Tagging(
        tagger=tagger,
        groups=groups,
        entities=by == "entity",
        cache_dir=cache_dir,
        progress=progress,
    )
    needs = needs_of(model, wanted)
    given = _given(means)
    for need in set(given) - needs:
        raise AnalysisError(f"ablate: means: no kind swept here takes {need}")
    if pool is not None and not needs.intersection(OF_POOL) - set(given):
        raise AnalysisError("ablate: pool: no kind swept here is fitted on one")
    if tags is None and ("tags" in needs or by not in (None, "frequency", "position")):
        tags = tagging.of(model, data, windows)
    if tags is not None:
        require_tags_of(tags, windows, "ablate")
    source = Pool(
        model=model,
        data=data if pool is None else opened(pool),
        batch_size=batch_size,
        limits=limits if pool is None else {},
        passes=passes,
    )
    if "donors" in needs and source.windows().n_documents < 2:
        raise AnalysisError("ablate: kinds: resample needs at least two documents to draw from")
    fitted = source.fit(needs - set(given), tags, tagging, windows)
    recorded: dict[str, Tensor] = {}
    ingredients = {"seed": seed, "tags": tags, "recorded": recorded, **given, **fitted}
    cases = sweep(model, kinds_of(model, wanted, ingredients), scopes)
    if not cases:
        raise AnalysisError(f"ablate: this model has nothing for kinds {wanted}, scope {scopes}")
    codes = None if by is None else of_targets(coding(by, windows, tags))
    sums = measure(model, windows, cases, passes, by=codes, recorded=recorded)

    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    require_finite("ablate", sums["nll"], windows)
    table, summary = ablation_table(cases, sums, windows.n_documents, adjustment, options)
    summary |= {
        "kinds": [kind for kind in wanted if any(case.kind == kind for case in cases)],
        "scopes": [one for one in scopes if any(case.scope == one for case in cases)],
        "by": by,
        "fitted_on": source.facts(windows) if fitted else None,
        **({"optimal": fitted["static"].facts} if "static" in fitted else {}),
    }
    tagged = {} if tags is None else {"tagger": tags.tagger}
    origin = provenance_of(model, windows, seed=seed, tokenizer=tokenizer_of(model, data), **tagged)
    parts = ()
    if codes is not None:
        rows = category_table(cases, sums, codes.names, windows.n_documents, options)
        parts = (Result("ablation_categories", rows, origin, {"by": by}, [_CATEGORY_NOTE]),)
    asked = {
        "kinds": () if kinds is None else wanted,
        "scopes": () if scopes == DEFAULT_SCOPES else scopes,
    }
    nothing = [
        f"{name} without a row here: {', '.join(missing)}."
        for name, values in asked.items()
        if (missing := [value for value in values if value not in summary[name]])
    ]
    notes = [*_notes(cases, summary["fitted_on"]), *nothing, *split_notes(windows)]
    return Result("ablation", table, origin, summary, notes, parts=parts)


def _given(means: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
    """Means that need not be fitted, by the need that they fill."""
    if means is None:
        return {}
    return {"means" if per_of(means) == "head" else f"means_{per_of(means)}": means}


def _wanted(
    model: Decoder, kinds: Sequence[str] | str | None, scopes: Sequence[str]
) -> tuple[str, ...]:
    """The kinds to sweep: the given ones, or the usual ones that the model has."""
    if kinds is not None:
        return checked("kinds", kinds, KINDS)
    there = available_kinds(model)
    usual = tuple(kind for kind in DEFAULT_KINDS if kind in there)
    return (*usual, "remove") if "component" in scopes else usual


# -- notes -----------------------------------------------------------------------------------------

_GENERAL = (
    "Ablation damage is not usefulness: the rest of the model was trained with what is removed. "
    "Compare with a trained baseline.",
    "Clean and intervened passes use the same attention implementation and the same windows.",
    "kl is that of the intervened from the clean next-token distribution, top1_change the share of "
    "scored tokens whose most likely successor changes.",
)
_OF_KIND = {
    "mean": "Means of gates and routes are over all tokens of the pool but special ones, the first "
    "token of each context included.",
    "shuffle": "shuffle permutes gates among the tokens of a context and is not causal: a token "
    "receives a later token's gate.",
    "mean_category": "mean_category is not causal: a tagger reads whole sentences.",
    "resample": "resample takes the weights of a token at the same position of another document of "
    "the pool, all sites from the same one.",
    "optimal": "optimal gives every head the constant that, with all others at theirs, minimises "
    "the loss on the pool; at narrower scopes the other heads keep their gates.",
    "mask": "mask takes a family of sources away: of a distribution the other weights are "
    "renormalised, signed weights become zero. Reads without other sources stay as they are.",
    "remove": "remove subtracts one component's contribution from one read, by the effective "
    "route; other reads keep it.",
}
_SAME_DOCUMENTS = (
    "The data has no pool split: what is fitted was fitted on the evaluated documents."
)
_CATEGORY_NOTE = "A token's loss counts to the category of the token that is predicted."


def _notes(cases: Sequence[Case], fitted_on: Mapping[str, Any] | None) -> list[str]:
    present = {case.kind for case in cases}
    notes = [*_GENERAL, *(text for kind, text in _OF_KIND.items() if kind in present)]
    if fitted_on is not None and fitted_on["same_documents"]:
        notes.append(_SAME_DOCUMENTS)
    return notes
