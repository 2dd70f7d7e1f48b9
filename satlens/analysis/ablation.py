"""What it costs to replace gates or routes: interventions swept over model, layers and heads.

The clean pass is shared. For each batch the state at every block border is computed once, and each
intervention runs only from the first layer that it touches, with the same attention implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from satlens.analysis.accumulators import GroupSums
from satlens.analysis.inputs import (
    documents_in,
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
from satlens.analysis.interventions import Intervention, MeanGate, ShuffleGate, ZeroGate, intervene
from satlens.analysis.means import Means, fit_means
from satlens.analysis.result import Result, join_marks
from satlens.analysis.route_interventions import (
    MeanRoute,
    TieValueRoute,
    UniformRoute,
    ZeroRoute,
    tied_sites,
)
from satlens.analysis.stats import N_RESAMPLES, mean_interval, sign_flip_test
from satlens.analysis.stream import Progress, fold, n_groups
from satlens.data.windows import IGNORE, Batch, Windows
from satlens.errors import AnalysisError
from satlens.models.block import Snapshot
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite

KINDS = ("zero", "mean", "shuffle", "uniform", "tie_v")
SCOPES = ("model", "layer", "head", "role", "site")
DEFAULT_SCOPES = ("model", "layer", "head")
_OF_GATES = ("zero", "mean", "shuffle")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: an intervention and where it applies."""

    intervention: Intervention
    scope: str
    first_layer: int
    """The clean state below it is reused."""
    site: str = ""
    layer: int | None = None
    sublayer: str = ""
    role: str = ""
    head: int | None = None
    static: bool = False
    """All of its weights are the same for every token."""


def ablate(
    model: Decoder,
    data: Any,
    *,
    kinds: Sequence[str] | str | None = None,
    scope: Sequence[str] | str = DEFAULT_SCOPES,
    split: str = "test",
    pool: Any = None,
    means: Means | None = None,
    batch_size: int = 8,
    max_documents: int | None = None,
    max_tokens_per_document: int | None = None,
    n_resamples: int = N_RESAMPLES,
    seed: int = 0,
    progress: Progress | None = None,
    resume_dir: str | Path | None = None,
) -> Result:
    """Change in loss under interventions on gates (zero, mean, shuffle) and routes (zero, uniform,
    mean, tie_v).

    Args:
        data: a token tensor, a text, documents, a path or a prepared dataset.
        kinds: which interventions; None is all that the model has sites for.
        scope: ``model``: all gates (or routes) at once; ``layer``: those of one layer; ``head``:
            one KV head of one gate; ``role``: routes of one role; ``site``: one gate or route.
            zero is for routes whose mixture is added to a residual stream, mean for weights that
            depend on the token.
        split: of prepared data.
        pool: data that means are fitted on; None is the split ``pool`` of prepared data, or
            ``data`` itself where it has no splits (then the result says so).
        means: means already fitted, instead of a pool.
        max_documents, max_tokens_per_document: of the evaluated data and of its pool split; a
            ``pool`` given explicitly is taken whole.
        n_resamples, seed: of the bootstrap over documents, the sign flips and the shuffles.
        resume_dir: where a killed analysis continues from.

    Returns:
        ``ablation``: a row an intervention with ``nll_clean, nll, dnll`` (nats a token, paired by
        document), ``ppl_ratio``, and p of a sign-flip test, adjusted by max-T within each kind and
        scope.

    Raises:
        AnalysisError: no access sites; a kind or scope that is unknown or has no sites here.
    """
    sites = sites_of(model, analysis="ablate")
    scopes = _checked("scope", scope, SCOPES)
    wanted = available_kinds(model) if kinds is None else _checked("kinds", kinds, KINDS)
    data = opened(data)
    limits: dict[str, Any] = {
        "max_documents": max_documents,
        "max_tokens_per_document": max_tokens_per_document,
    }
    windows = open_windows(model, data, split=split, batch_size=batch_size, **limits)
    passes: dict[str, Any] = {"progress": progress, "resume_dir": resume_dir}
    fitted_on = None
    if "mean" in wanted and means is None:
        pool, limits = (data, limits) if pool is None else (opened(pool), {})
        means = fit_means(model, pool, split="pool", batch_size=batch_size, **limits, **passes)
        fitted_on = _fitted_on(model, pool, windows, batch_size, limits)
    makers = _makers(wanted, means or {}, seed)
    cases = sweep(model, sites, makers, scopes)
    if not cases:
        raise AnalysisError(f"ablate: this model has nothing for kinds {wanted}, scope {scopes}")
    sums = _measure(model, windows, cases, passes)
    table, summary = _table(cases, sums, windows.n_documents, n_resamples=n_resamples, seed=seed)
    summary |= {"kinds": list(wanted), "scopes": list(scopes), "means_fitted_on": fitted_on}
    notes: list[str] = [*_NOTES, *split_notes(windows)]
    if fitted_on is not None and fitted_on["same_documents"]:
        notes.append("The data has no pool split: means were fitted on the evaluated documents.")
    source = provenance_of(model, windows, seed=seed, tokenizer=tokenizer_of(model, data))
    return Result("ablation", table, source, summary, notes)


_NOTES = (
    "Ablation damage is not usefulness: the rest of the model was trained with what is removed. "
    "Compare with a trained baseline.",
    "Means of gates and routes are over all tokens of the pool but special ones, the first token "
    "of each context included.",
    "Clean and intervened passes use the same attention implementation and the same windows.",
    "shuffle permutes gates among the tokens of a context and is not causal: a token receives a "
    "later token's gate.",
)


# -- the sweep -------------------------------------------------------------------------------------

Maker = Callable[..., Intervention]


def available_kinds(model: Decoder) -> tuple[str, ...]:
    """The kinds of interventions that a model has sites for."""
    found = [*_OF_GATES] if any(site.kind == "gate" for site in model.sites) else []
    of_routes = [kind for kind in ("zero", "uniform", "mean") if _routes_for(kind, model.sites)]
    found += [kind for kind in of_routes if kind not in found]
    return (*found, "tie_v") if tied_sites(model) else tuple(found)


def _routes_for(kind: str, sites: Sequence[AccessSite]) -> list[AccessSite]:
    """The routes where a kind of intervention says something: a static weight is its own mean."""
    maker = {"zero": ZeroRoute, "uniform": UniformRoute, "mean": MeanRoute}[kind]
    return [site for site in sites if maker.fits(site) and (kind != "mean" or site.per_token)]


def _checked(name: str, given: Sequence[str] | str, known: Sequence[str]) -> tuple[str, ...]:
    values = (given,) if isinstance(given, str) else tuple(given)
    for value in values:
        if value not in known:
            raise AnalysisError(f"{name}: {value!r} is not one of {', '.join(known)}")
    if not values:
        raise AnalysisError(f"{name}: empty; choose from {', '.join(known)}")
    return values


def _makers(kinds: Sequence[str], means: Means, seed: int) -> dict[tuple[str, str], Maker]:
    """(kind of site, kind of intervention) -> a function of its scope."""
    every: dict[tuple[str, str], Maker] = {
        ("gate", "zero"): ZeroGate,
        ("gate", "mean"): lambda **where: MeanGate(means=means, **where),
        ("gate", "shuffle"): lambda **where: ShuffleGate(seed=seed, **where),
        ("route", "zero"): ZeroRoute,
        ("route", "uniform"): UniformRoute,
        ("route", "mean"): lambda **where: MeanRoute(means=means, **where),
        ("route", "tie_v"): TieValueRoute,
    }
    return {key: maker for key, maker in every.items() if key[1] in kinds}


def sweep(
    model: Decoder,
    sites: Sequence[AccessSite],
    makers: Mapping[tuple[str, str], Maker],
    scopes: Sequence[str],
) -> list[Case]:
    """Every intervention of a sweep, kind by kind and scope by scope."""
    cases = []
    for (target, kind), make in makers.items():
        if kind == "tie_v":
            of_kind = tied_sites(model)
        elif target == "route":
            of_kind = _routes_for(kind, sites)
        else:
            of_kind = [site for site in sites if site.kind == target]
        if of_kind:
            for scope in scopes:
                cases += _of_scope(scope, target, make, of_kind)
    return cases


def _of_scope(scope: str, target: str, make: Maker, sites: Sequence[AccessSite]) -> list[Case]:
    def case(where: dict[str, Any], chosen: Sequence[AccessSite], **labels: Any) -> Case:
        first = min(site.layer for site in chosen)
        static = not any(site.per_token for site in chosen)
        make_of = make(**where)
        return Case(intervention=make_of, scope=scope, first_layer=first, static=static, **labels)

    def group(name: str) -> dict[Any, list[AccessSite]]:
        values = dict.fromkeys(getattr(site, name) for site in sites)
        return {v: [site for site in sites if getattr(site, name) == v] for v in values}

    match scope:
        case "model":
            return [case({}, sites)]
        case "layer":
            return [
                case({"layer": v}, s, layer=v, sublayer="out" if _is_output(s) else "")
                for v, s in group("layer").items()
            ]
        case "role":
            return [case({"role": v}, s, role=v) for v, s in group("role").items()]
    cases = []
    for site in sites:
        where = {"layer": site.layer, "sublayer": site.sublayer, "role": site.role}
        labels = {"site": site.name, **where}
        if scope == "site":
            cases.append(case(where, [site], **labels))
        elif target == "gate":
            cases += [
                case({**where, "head": head}, [site], head=head, **labels)
                for head in range(site.n_heads)
            ]
    return cases


def _is_output(sites: Sequence[AccessSite]) -> bool:
    """Whether a "layer" is the read after the last layer."""
    return all(site.sublayer == "out" for site in sites)


# -- the pass --------------------------------------------------------------------------------------


def _measure(
    model: Decoder, windows: Windows, cases: Sequence[Case], passes: dict[str, Any]
) -> GroupSums:
    """Summed losses by document group: ``nll`` (G, 1 + cases), the clean one first; ``n`` (G,)."""
    sums = GroupSums(n_groups(windows), {"nll": (1 + len(cases),), "n": ()})
    deepest = max(case.first_layer for case in cases)

    def step_over(batch: Batch, groups: np.ndarray) -> None:
        borders = list(_borders(model, batch, deepest))
        losses = [_loss(model, batch, borders[-1])]
        for case in cases:
            with intervene(model, case.intervention):
                losses.append(_loss(model, batch, borders[case.first_layer]))
        rows = np.stack(losses, axis=1)
        sums.add(groups, nll=rows, n=(batch.targets != IGNORE).sum(1))

    fold(
        model,
        windows,
        {"sums": sums},
        step_over,
        identity=[case.intervention.identity for case in cases],
        label="ablation",
        **passes,
    )
    return sums


def _borders(model: Decoder, batch: Batch, deepest: int) -> Iterator[Snapshot | None]:
    """The clean state before each layer up to ``deepest``; None before layer 0."""
    snapshot: Snapshot | None = None
    yield snapshot
    for layer in range(deepest):
        snapshot = model(batch.tokens, start_at=snapshot, stop_at_layer=layer + 1)
        yield snapshot


def _loss(model: Decoder, batch: Batch, start_at: Snapshot | None) -> np.ndarray:
    """Summed loss of each row, (B,) float64, from a block border on."""
    nll: Tensor = model(
        batch.tokens,
        return_type="loss",
        targets=batch.targets,
        loss_per_token=True,
        start_at=start_at,
    )
    return nll.double().sum(1).cpu().numpy()


def _fitted_on(
    model: Decoder, pool: Any, windows: Windows, batch_size: int, limits: dict[str, Any]
) -> dict[str, Any]:
    fitted = open_windows(model, pool, split="pool", batch_size=batch_size, **limits)
    return {
        "sha256": fitted.sha256,
        "n_documents": fitted.n_documents,
        "n_tokens": fitted.n_tokens,
        "same_documents": fitted.sha256 == windows.sha256,
    }


# -- the table -------------------------------------------------------------------------------------


def _table(
    cases: Sequence[Case], sums: GroupSums, n_documents: int, *, n_resamples: int, seed: int
) -> tuple[pd.DataFrame, dict[str, Any]]:
    options: dict[str, Any] = {"n_resamples": n_resamples, "seed": seed}
    nll, n = sums["nll"], sums["n"]
    change = nll[:, 1:] - nll[:, :1]
    interval = mean_interval(change, n, **options)
    tokens = n.sum()
    clean = nll[:, 0].sum() / tokens
    columns: dict[str, Any] = {
        "site": [case.site for case in cases],
        "layer": pd.array([case.layer for case in cases], dtype="Int64"),
        "sublayer": [case.sublayer for case in cases],
        "role": [case.role for case in cases],
        "head": pd.array([case.head for case in cases], dtype="Int64"),
        "kind": [case.intervention.name for case in cases],
        "target": [case.intervention.kind for case in cases],
        "scope": [case.scope for case in cases],
        "nll_clean": clean,
        "nll": nll[:, 1:].sum(axis=0) / tokens,
    }
    columns |= interval_columns("dnll", interval)
    ratio = interval_columns("ppl_ratio", interval)
    columns |= {name: np.exp(values) for name, values in ratio.items()}
    tests, test_flags, facts = _tests(cases, change, n, options)
    columns |= tests
    static = np.array(["static" if case.static else "" for case in cases])
    marks = np.array(["" if case.intervention.causal else "not_causal" for case in cases])
    marks = join_marks(static, marks)
    table = pd.DataFrame(
        {
            **columns,
            "n_documents": int(documents_in(n, n_documents)),
            "n_tokens": int(tokens),
            "flags": join_marks(join_marks(marks, interval.flags), test_flags),
        }
    )
    whole = [index for index, case in enumerate(cases) if case.scope == "model"]
    summary = {
        "nll_clean": float(clean),
        "overall": {
            f"{cases[index].intervention.kind}.{cases[index].intervention.name}": interval_summary(
                interval, index
            )
            for index in whole
        },
        "interval": interval_protocol(interval, n_documents),
        **facts,
    }
    return table, summary


def _tests(
    cases: Sequence[Case], change: np.ndarray, n: np.ndarray, options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
    """Sign-flip tests of the mean change per document, adjusted within each kind and scope."""
    with np.errstate(invalid="ignore", divide="ignore"):
        within = change / n[:, None]
    columns = {name: np.full(len(cases), np.nan) for name in ("p", "p_adjusted", "p_min")}
    flags = np.full(len(cases), "", dtype=object)
    family = [(c.intervention.kind, c.intervention.name, c.scope) for c in cases]
    exact = True
    for name in dict.fromkeys(family):
        members = np.array([index for index, other in enumerate(family) if other == name])
        test = sign_flip_test(within[:, members], **options)
        for column, values in columns.items():
            values[members] = getattr(test, column)
        flags[members] = test.flags
        exact = exact and test.exact
    return columns, flags, {"adjustment": "max-T within a kind and scope", "exact_p": exact}
