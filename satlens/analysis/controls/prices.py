"""Controls of what says what weights are worth: ablation and attribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy import optimize, stats

from satlens.analysis.ablation import ablate
from satlens.analysis.attribution import attribute
from satlens.analysis.controls.checks import ROUNDING, Check, Reader
from satlens.analysis.controls.planted import (
    CATEGORIES,
    FIRST_NORM,
    OWN_NORM,
    counted,
    tags_of,
    token_class,
)
from satlens.analysis.controls.priced import (
    GATES,
    HEADS,
    Prices,
    closed,
    priced,
    priced_documents,
)
from satlens.analysis.controls.priced_routes import (
    MASKED,
    ROUTE,
    log_probabilities,
    priced_route,
    route_documents,
)
from satlens.analysis.evaluation import evaluate
from satlens.analysis.interventions.gates import (
    Intervention,
    MeanGate,
    OpenGate,
    ScaleGate,
    intervene,
)
from satlens.analysis.interventions.means import fit_means
from satlens.data.dataset import DocumentTokens

PRICED = "gates with a known price"
ROUTED = "routes with a known price"
PRECISE = 1e-6
"""Tolerance in nats: differences of losses of fp32 models, averaged over tokens."""


# -- ablation --------------------------------------------------------------------------------------


def ablation_checks(**options: Any) -> Iterator[Check]:
    """Closing gates costs what the table says; heads that nothing depends on cost exactly nothing.

    So do gates at their mean and at the best constants.
    """
    docs, model = priced_documents(), priced()
    prices = Prices(docs)
    settings: dict[str, Any] = {
        "kinds": ("zero", "mean", "optimal"),
        "scope": ("model", "head"),
        "tags": tags_of(docs),
    }
    found = ablate(model, docs, **settings, **options)
    read = Reader("ablate", PRICED, found)
    every: dict[str, Any] = {"kind": "zero", "scope": "model"}
    yield read.check("nats a token", prices.nll(), "nll_clean", **every)
    yield from _losses(read, prices, "all gates closed", closed(), every)
    for head, name in enumerate(HEADS):
        at: dict[str, Any] = {"kind": "zero", "scope": "head", "head": head}
        yield from _losses(read, prices, f"{name} head closed", closed(head), at)
        if not prices.cost(closed(head)):
            yield read.check(f"{name} head closed: adjusted p", 1, "p_adjusted", **at)
    at = {"kind": "mean", "scope": "model"}
    yield from _losses(read, prices, "all gates at their mean", prices.mean, at)
    best = _best_constants(prices)
    at = {"kind": "optimal", "scope": "model"}
    yield read.check("all gates at their best constants", best, "dnll", tolerance=PRECISE, **at)
    read = Reader("ablate", PRICED, found.part("ablation_categories"))
    for target, category in enumerate(CATEGORIES):
        planted = prices.cost(closed(), target)
        name = f"all gates closed: {category} targets"
        at = {**every, "category": category}
        yield read.check(name, planted, "dnll", tolerance=PRECISE, **at)


def _losses(
    read: Reader, prices: Prices, name: str, weights: np.ndarray, at: dict[str, Any]
) -> Iterator[Check]:
    """Change in loss, KL divergence and changed predictions under other weights."""
    values = {
        "dnll": prices.cost(weights),
        "kl": prices.kl(weights),
        "top1_change": prices.changed(weights),
    }
    for column, planted in values.items():
        # Where nothing changes, not a bit does.
        tolerance = PRECISE if planted else 0.0
        yield read.check(f"{name}: {column}", planted, column, tolerance=tolerance, **at)


def _best_constants(prices: Prices) -> float:
    """What the best gates cost that are the same for every token, searched from their means."""

    def cost(gates: np.ndarray) -> float:
        return prices.cost(np.stack([gates, gates]))

    return float(optimize.minimize(cost, prices.mean[0], method="BFGS").fun)


def route_ablation_checks(**options: Any) -> Iterator[Check]:
    """The same for the route of an output read; what the idle MLP reads costs exactly nothing."""
    docs, model = route_documents(), priced_route()
    prices = Prices(docs, ROUTE, log_probabilities)
    settings: dict[str, Any] = {
        "kinds": ("uniform", "mean", "mask", "remove"),
        "scope": ("site", "source", "component"),
    }
    read = Reader("ablate", ROUTED, ablate(model, docs, **settings, **options))
    at: dict[str, Any] = {"site": "out", "scope": "site"}
    for kind, weights in (("uniform", np.full((2, 2), 0.5)), ("mean", prices.mean)):
        yield from _losses(read, prices, f"{kind} route", weights, {**at, "kind": kind})
    for family, weights in MASKED.items():
        at = {"kind": "mask", "scope": "source", "layer": 1, "source": family}
        yield from _losses(read, prices, f"without the {family}", weights, at)
        at = {**at, "layer": 0}
        yield read.check(f"idle MLP without the {family}", 0, "dnll", **at)
    for component, left in (("L0.attn", [1, 0]), ("embed", [0, 1])):
        at = {"kind": "remove", "scope": "component", "site": "out", "component": component}
        planted = prices.cost(ROUTE * left)
        name = f"{component} removed from the output read"
        yield read.check(name, planted, "dnll", tolerance=PRECISE, **at)


# -- interventions ---------------------------------------------------------------------------------


def intervention_checks(**options: Any) -> Iterator[Check]:
    """The loss under interventions that no sweep has, and under means by category, which are the
    gates themselves."""
    docs, model = priced_documents(), priced()
    prices, tags = Prices(docs), tags_of(docs)
    means = fit_means(model, docs, per="category", tags=tags)
    opened = GATES.copy()
    opened[:, 0] = 1.0
    every: dict[str, tuple[Intervention, np.ndarray]] = {
        "gates at their category's mean": (MeanGate(means=means, tags=tags), GATES),
        "gates half as open again": (ScaleGate(factor=1.5), 1.5 * GATES),
        "one head open by 1": (OpenGate(value=1.0, layer=1, head=0), opened),
    }
    for name, (intervention, weights) in every.items():
        planted = prices.nll() + prices.cost(weights)
        with intervene(model, intervention):
            cell = evaluate(model, docs, **options).summary["nll"]
        yield Check(
            analysis="intervene",
            control=PRICED,
            quantity=f"{name}: nats a token",
            rule="equal",
            planted=planted,
            recovered=cell["estimate"],
            low=cell["low"],
            high=cell["high"],
            tolerance=ROUNDING * planted,
            n_documents=len(docs),
            n_tokens=len(prices.following),
        )


# -- attribution -----------------------------------------------------------------------------------


def attribution_checks(**options: Any) -> Iterator[Check]:
    """Mass, slope and cost of every gate; the two heads whose mass misleads are named."""
    docs = priced_documents()
    prices = Prices(docs)
    found = attribute(priced(), docs, **options)
    read = Reader("attribute", PRICED, found)
    mass, cost = _masses(docs), []
    for head, name in enumerate(HEADS):
        at: dict[str, Any] = {"layer": 1, "head": head}
        cost.append(prices.cost(closed(head)))
        values = {"mass": mass[head], "attribution": prices.first_order(closed(head))}
        for column, planted in {**values, "dnll": cost[head]}.items():
            tolerance = PRECISE if planted else 0.0
            yield read.check(f"{name} head: {column}", planted, column, tolerance=tolerance, **at)
    facts = found.summary["by_kind"]["gate"]
    spearman: Any = stats.spearmanr(mass, cost)
    yield _fact(
        "rank correlation of mass and cost",
        spearman.statistic,
        facts["mass_dnll"]["estimate"],
        docs,
    )
    flagged = found.table.set_index("head")["flags"].str.contains("disagrees")
    named = [HEADS[int(head)] for head in flagged.index[flagged]]
    agree = float(named == ["loud", "quiet"])
    yield _fact("names the loud and the quiet head, no other", 1.0, agree, docs)


def _masses(docs: Sequence[DocumentTokens]) -> list[float]:
    """Norm share of V_1 in each head's values."""
    share = float(np.mean(token_class(counted(docs)) == 0))
    size = GATES * FIRST_NORM
    shares = size / (size + OWN_NORM)
    return (share * shares[0] + (1 - share) * shares[1]).tolist()


def _fact(quantity: str, planted: float, recovered: float, docs: Sequence[DocumentTokens]) -> Check:
    return Check(
        analysis="attribute",
        control=PRICED,
        quantity=quantity,
        rule="equal",
        planted=float(planted),
        recovered=recovered,
        tolerance=PRECISE,
        n_documents=len(docs),
        n_tokens=sum(len(d.tokens) - 1 for d in docs),
    )


def route_attribution_checks(**options: Any) -> Iterator[Check]:
    """Weight, slope and cost of both sources of the output read; no cost of the idle MLP's."""
    docs = route_documents()
    prices = Prices(docs, ROUTE, log_probabilities)
    share = float(np.mean(token_class(counted(docs)) == 0))
    weights = share * ROUTE[0] + (1 - share) * ROUTE[1]
    read = Reader("attribute", ROUTED, attribute(priced_route(), docs, **options))
    for source, (label, family) in enumerate((("embed", "embedding"), ("partial 0..1", "partial"))):
        at: dict[str, Any] = {"site": "out", "source": label}
        masked = MASKED[family]
        values = {
            "mass": weights[source],
            "attribution": prices.first_order(masked),
            "dnll": prices.cost(masked),
        }
        for column, planted in values.items():
            yield read.check(f"{family}: {column}", planted, column, tolerance=PRECISE, **at)
    at = {"site": "L0.mlp.route", "source": "embed"}
    for column in ("attribution", "dnll"):
        yield read.check(f"idle MLP's embedding: {column}", 0, column, **at)
