"""Answers about routes over depth: what reads take, from where, and whether roles differ."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from satlens.analysis.result import Result
from satlens.report.claims.measures import contrast, plain_arms, seeds_of
from satlens.report.claims.verdicts import mean_over_seeds
from satlens.report.collect import Run
from satlens.report.effects import NATS, Effect, Frame, count, effect, listed
from satlens.report.findings.phrases import (
    Row,
    above_zero,
    across,
    cells,
    change,
    how_many,
    mean,
    number,
    numbers,
    share,
)

Results = Mapping[int, Result]
SOFTMAX = ("attnres", "rd-attnres", "delta-attnres")
_COSTS = {
    "route.uniform": "making every route uniform",
    "route.zero": "taking nothing but the residual stream",
    "route.mean": "giving every route its mean over tokens",
    "route.mask embedding": "taking the embedding away from every read",
    "route.mask blocks": "taking the completed blocks away",
    "route.tie_v": "reading values by the route of queries and keys",
}


def routes(run: Run) -> list[str]:
    """Spread, sources and costs of the arms whose routes are mixtures."""
    said = []
    for variant in SOFTMAX:
        for arm in plain_arms(run, variant):
            said.append(_spread(arm, run.of("sparsity").get(arm, {})))
            said.append(_costs(arm, run.of("ablation").get(arm, {})))
    return [sentence for sentence in said if sentence]


def rows(run: Run) -> list[Row]:
    """The numbers behind the answers about mixtures and roles."""
    found = []
    for variant in SOFTMAX:
        for arm in plain_arms(run, variant):
            sparsity, diverged = run.of("sparsity").get(arm, {}), run.of("divergence").get(arm, {})
            zeros = dict.fromkeys(diverged, 0.0)
            for stat, label in (("js_token", "per token"), ("js_mean", "of mean routes")):
                name = f"JS divergence of q/k and v routes, nats, {label}"
                found.append(Row(run.name, arm, name, cells(diverged, stat), number(), zeros))
            for stat, label, write in _SPREAD:
                effects = cells(sparsity, "routes", "overall", stat)
                before = untrained(sparsity, stat)
                found.append(Row(run.name, arm, label, effects, write, before))
            for key, label in _COSTS.items():
                cost = cells(run.of("ablation").get(arm, {}), "overall", key)
                name = f"cost of {label}, {NATS}"
                found.append(Row(run.name, arm, name, cost, change(), beside_zero=True))
    return found


_SPREAD = (
    ("normalised_entropy", "normalised entropy (uniform: 1)", number()),
    ("effective_sources", "effective sources a read", number(2)),
    ("mass_embedding", "weight of the embedding, reads of several sources", share),
    ("content_dependence", "what the token decides", share),
)
_OF_LOG_SOURCES = ("normalised_entropy", "content_dependence")


def _spread(arm: str, results: Results) -> str:
    entropy = cells(results, "routes", "overall", "normalised_entropy")
    if not entropy:
        return ""
    effective = cells(results, "routes", "overall", "effective_sources")
    mass = cells(results, "routes", "overall", "mass_embedding")
    content = cells(results, "routes", "overall", "content_dependence")
    before = untrained(results, "mass_embedding")
    start = f" (untrained {share(mean(before.values()))})" if before else ""
    text = (
        f"**`{arm}`: from where?** Routes start uniform and end with a normalised entropy of "
        f"{across(entropy, number(2))}, {across(effective, number(2))} effective sources a read; "
        f"over reads of several sources the embedding has {across(mass, share)} of the weight"
        f"{start}"
    )
    if content:
        text += f", and the token decides {across(content, share)} of what a route could say of it"
    return f"{text}."


def untrained(results: Results, stat: str) -> dict[int, float]:
    """A statistic of untrained routes over all reads of several sources, by seed.

    Reads weigh by their tokens, and where the statistic is a share of the log of their number of
    sources, by that too: as in the summary of the trained model.
    """
    found = {}
    for seed, result in results.items():
        table: Frame = result.table
        if f"{stat}_init" not in table:
            continue
        reads = table[(table["n_sources"] > 1) & table[f"{stat}_init"].notna()]
        weight = reads["n_tokens"].astype(float)
        if stat in _OF_LOG_SOURCES:
            weight = weight * np.log(reads["n_sources"].astype(float))
        if weight.sum() > 0:
            found[seed] = float(np.average(reads[f"{stat}_init"].astype(float), weights=weight))
    return found


def _costs(arm: str, results: Results) -> str:
    costs = {label: cells(results, "overall", name) for name, label in _COSTS.items()}
    parts = [f"{label} costs {across(found, change())}" for label, found in costs.items() if found]
    if not parts:
        return ""
    known = above_zero(costs.values())
    return f"**`{arm}`: does it matter?** In {NATS}, {listed(parts)}; {known}."


# -- two roles -------------------------------------------------------------------------------------


def roles(run: Run) -> list[str]:
    """How far the value route is from the query-key route, and whether that matters."""
    said = []
    for arm in plain_arms(run, "rd-attnres"):
        results = run.of("divergence").get(arm, {})
        token, of_means = cells(results, "js_token"), cells(results, "js_mean")
        if token:
            said.append(
                f"**Do the routes differ?** Their Jensen-Shannon divergence in `{arm}` is "
                f"{across(token, number())} nats per token and {across(of_means, number())} "
                "between the routes averaged over tokens, of at most 0.693; both start equal, so "
                "untrained it is 0."
            )
            said += _by_layer(results)
        said += _embedding(arm, run.of("sparsity").get(arm, {}))
    return said


def _by_layer(results: Results) -> list[str]:
    layers: dict[int, dict[int, Effect]] = {}
    for seed, result in results.items():
        table: Frame = result.table
        for _, row in table[table["n_sources"] > 1].iterrows():
            found = effect(row, "js_token")
            layers.setdefault(int(row["layer"]), {})[seed] = found
    means = {layer: mean_over_seeds(found).value for layer, found in layers.items()}
    if len(means) < 2:
        return []
    order = sorted(means, key=lambda layer: means[layer])
    most, least = order[-1], order[0]
    above = sum(
        layers[most][seed].value > layers[least][seed].value
        for seed in layers[most].keys() & layers[least].keys()
    )
    return [
        f"By layer it is largest in layer {most}, {across(layers[most], number())}, and smallest "
        f"in layer {least}, {across(layers[least], number())}; {how_many(above, len(results))} "
        "these two layers are in that order."
    ]


def _embedding(arm: str, results: Results) -> list[str]:
    """Which of the two routes of attention leans on the embedding, by seed."""
    masses: dict[str, dict[int, float]] = {"qk": {}, "v": {}}
    for seed, result in results.items():
        table: Frame = result.table
        reads = table[(table["sublayer"] == "attn") & (table["n_sources"] > 1)]
        for role, part in reads.groupby("role"):
            if role in masses:
                masses[str(role)][seed] = float(part["mass_embedding"].mean())
    both = masses["qk"].keys() & masses["v"].keys()
    if not both:
        return []
    gaps = {
        seed: Effect(value=100 * (masses["v"][seed] - masses["qk"][seed])) for seed in sorted(both)
    }
    more = sum(found.value > 0 for found in gaps.values())
    qk, v = (share(mean(masses[role].values())) for role in ("qk", "v"))
    return [
        f"**Where values come from.** In `{arm}` the value route gives the embedding {v} of its "
        f"weight and the query-key route {qk} (mean over reads and seeds), "
        f"{across(gaps, change(1))} points more; the value route gives it more "
        f"{how_many(more, len(gaps))}."
    ]


def controls(run: Run) -> list[str]:
    """The controls of decoupling: the same parameters, routes averaged or one of them frozen."""
    said = []
    for arm in plain_arms(run, "rd-attnres"):
        for variant, what in (
            ("rd-attnres-average", "the average of both routes feeds queries, keys and values"),
            ("rd-attnres-frozen-v", "the value route stays uniform"),
        ):
            for control in plain_arms(run, variant):
                row = contrast(run, arm, [control])
                beside = contrast(run, control, plain_arms(run, "attnres"))
                if row is not None:
                    said.append(f"{control} ({what}): {_control(arm, row, beside)}")
    if not said:
        return []
    return [
        f"**Controls**, {NATS}. {'; '.join(said)}. The tied control computes exactly what attnres "
        "does, so it was not trained: its difference is 0 by identity."
    ]


def _control(arm: str, row: Frame, beside: Frame | None) -> str:
    each = listed([change()(value) for value in seeds_of(row).values()])
    text = f"{arm} minus it {each} by seed"
    if beside is not None:
        parent = listed([change()(value) for value in seeds_of(beside).values()])
        text += f", it minus attnres {parent}"
    return text


# -- signed weights and streams --------------------------------------------------------------------


def rows_of_components(run: Run) -> list[Row]:
    """Of what reads consist in every architecture whose effective routes were measured."""
    found = []
    for arm, results in run.of("routes").items():
        components = cells(results, "overall", "effective_components")
        before = numbers(results, "overall_init", "effective_components")
        embedding = cells(results, "overall", "embedding_share")
        early = numbers(results, "overall_init", "embedding_share")
        found += [
            Row(run.name, arm, "effective components a read", components, number(2), before),
            Row(run.name, arm, "share of the embedding by norm", embedding, share, early),
        ]
        negative = cells(results, "overall", "negative_share")
        if any(each.value for each in negative.values()):
            found.append(Row(run.name, arm, "share that is subtracted", negative, share))
    return found


def components(run: Run) -> list[str]:
    """Whether reads end with fewer components than they start with."""
    fewer, more = [], []
    for arm, results in run.of("routes").items():
        after = cells(results, "overall", "effective_components")
        before = numbers(results, "overall_init", "effective_components")
        for seed in after.keys() & before.keys():
            (fewer if after[seed].value < before[seed] else more).append(arm)
    total = len(fewer) + len(more)
    if not total:
        return []
    return [
        f"By the norms of what each sublayer brings, reads end with fewer effective components "
        f"than the untrained model's in {len(fewer)} of {count(total, 'checkpoint')} of study "
        f"`{run.name}` ({listed(list(dict.fromkeys(fewer + more)))})."
    ]


def ways(run: Run) -> list[str]:
    """How far the four ways of MUDDFormer are from each other."""
    said = []
    for arm in plain_arms(run, "muddformer"):
        token = cells(run.of("divergence").get(arm, {}), "js_token")
        if token:
            said.append(
                f"**Ways of `{arm}`.** By the size of what each source brings, the weights of its "
                f"ways differ by {across(token, number())} nats a token on average over pairs."
            )
    return said
