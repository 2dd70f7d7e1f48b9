"""Statistics and divergences of routes against a straight computation from the cache in fp64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from from_cache import N_CTX, cached
from planted import PULL, documents, routed, tiny, token_class
from scipy.spatial.distance import jensenshannon
from scipy.special import entr

from satlens.analysis.depth.tables import Routes, route_table
from satlens.analysis.divergence import divergence
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.reducers import RouteStatistics
from satlens.analysis.engine.stream import n_groups, run
from satlens.analysis.sparsity import sparsity
from satlens.errors import AnalysisError

FAST = {"n_resamples": 99}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def test_route_summary_against_the_cache(docs):
    """The first token and the embedding's weight, over reads of several sources."""
    model = tiny("attnres", block_size=2)
    summary = sparsity(model, docs, **FAST).summary["routes"]
    sites = [site for site in model.sites if len(site.sources) > 1]
    first = {site.hook: [] for site in sites}
    with torch.no_grad():
        for document in docs:
            for start in range(0, len(document.tokens) - 1, N_CTX):
                piece = torch.from_numpy(document.tokens[start : start + 1])[None]
                _, cache = model.run_with_cache(piece, names_filter=list(first))
                for hook, rows in first.items():
                    rows.append(cache[hook][0, 0].double().numpy())
    for name, kind in (("embedding", "embedding"), ("blocks", "block"), ("partial", "partial")):
        masses = [
            np.mean(first[site.hook], axis=0)[[s.kind == kind for s in site.sources]].sum()
            for site in sites
            if any(s.kind == kind for s in site.sources)
        ]
        assert summary["first_token"][f"mass_{name}"] == pytest.approx(np.mean(masses), rel=1e-5)
    found = cached(model, docs, list(first))
    weights = np.stack([found[site.hook][:, 0] for site in sites])
    assert summary["embedding_weight"]["mean"] == pytest.approx(weights.mean(), rel=1e-5)
    within = math.sqrt(weights.var(axis=1).mean())
    assert summary["embedding_weight"]["sd_within_read"] == pytest.approx(within, rel=1e-4)


@pytest.mark.parametrize("scale", [0.5, 1.001])
def test_weights_that_do_not_add_up_are_undefined(docs, scale):
    model = tiny("attnres")
    site = model.sites[3]

    def scaled(route, hook):
        route = route.clone()
        route[:, ::2] *= scale
        return route

    model.add_hook(site.hook, scaled)
    row = sparsity(model, docs, baseline=False, **FAST).table.set_index("site").loc[site.name]
    assert row["n_undefined"] > 0
    assert 0 < row["normalised_entropy"] <= 1


@pytest.mark.parametrize("support", ["nonnegative", "signed"])
def test_entropy_exists_for_distributions_alone(docs, support):
    model = tiny("attnres")
    sites = [dataclasses.replace(model.sites[3], support=support)]
    windows = open_windows(model, docs)
    reducer = RouteStatistics(sites, n_groups(windows))
    model.add_hook(sites[0].hook, lambda route, hook: route * (-2 if support == "signed" else 2))
    run(model, windows, [reducer])
    row = route_table(Routes(reducer, None), None, windows.n_documents, FAST).iloc[0]
    assert row["n_undefined"] == 0
    assert math.isnan(row["normalised_entropy"])
    assert math.isnan(row["effective_sources"])
    assert abs(row["mass_embedding"]) > 0


@pytest.mark.parametrize(
    ("name", "fields"),
    [("attnres", {"block_size": 2}), ("rd-attnres", {"block_size": 3}), ("attnres-full", {})],
)
def test_routes_against_the_cache(docs, name, fields):
    model = tiny(name, **fields)
    result = sparsity(model, docs, **FAST)
    table = result.table.set_index("site")
    weights = result.part("route_weights").table.set_index(["site", "source"])
    found = cached(model, docs, [site.hook for site in model.sites])
    for site in model.sites:
        w = found[site.hook]
        row = table.loc[site.name]
        entropy = -np.sum(np.where(w > 0, w * np.log(np.where(w > 0, w, 1)), 0), axis=1)
        assert row["effective_sources"] == pytest.approx(np.exp(entropy).mean(), rel=1e-5)
        if len(site.sources) > 1:
            normalised = entropy.mean() / math.log(len(site.sources))
            assert row["normalised_entropy"] == pytest.approx(normalised, rel=1e-5)
            assert row["token_variance"] == pytest.approx(w.var(0).sum(), rel=1e-4, abs=1e-9)
            gained = (entr(w.mean(0)).sum() - entr(w).sum(1).mean()) / math.log(w.shape[1])
            assert row["content_dependence"] == pytest.approx(gained, rel=1e-4, abs=1e-9)
            assert row["content_dependence_low"] <= gained <= row["content_dependence_high"]
        else:
            assert np.isnan(row["normalised_entropy"])
            assert np.isnan(row["content_dependence"])
            assert "single_source" in row["flags"]
        reader = {"attn": 2 * site.layer, "mlp": 2 * site.layer + 1}
        at = reader.get(site.sublayer, 2 * model.cfg.n_layers)
        distance = 0.0
        for source, mean in zip(site.sources, w.mean(0), strict=True):
            assert weights["weight"][site.name, source.label] == pytest.approx(mean, rel=1e-5)
            distance += mean * (at - np.mean(source.sublayers))
        assert row["depth_distance"] == pytest.approx(distance, rel=1e-5)
        for family, kind in (("embedding", "embedding"), ("blocks", "block")):
            mass = sum(m for s, m in zip(site.sources, w.mean(0), strict=True) if s.kind == kind)
            if any(s.kind == kind for s in site.sources):
                assert row[f"mass_{family}"] == pytest.approx(mass, rel=1e-5)
    several = [site.name for site in model.sites if len(site.sources) > 1]
    assert table.loc[several, "normalised_entropy_init"].to_numpy() == pytest.approx(1)
    assert (table.loc[several, "content_dependence_init"] == 0).all()


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer"])
def test_where_weights_vary(docs, name):
    """Shares of the variance of all weights, from their deviations one by one."""
    model = tiny(name)
    summary = sparsity(model, docs, baseline=False, **FAST).summary["routes"]
    sites = [s for s in model.sites if s.kind == "route" and len(s.sources) > 1]
    found = list(cached(model, docs, [site.hook for site in sites]).values())
    mean = np.concatenate([w.ravel() for w in found]).mean()
    parts = np.zeros(3)
    for w in found:
        parts[0] += w.size * (w.mean() - mean) ** 2
        parts[1] += len(w) * np.sum((w.mean(0) - w.mean()) ** 2)
        parts[2] += np.sum((w - w.mean(0)) ** 2)
    for part, expected in zip(("reads", "sources", "tokens"), parts / parts.sum(), strict=True):
        share = summary["weight_variance"][part]
        assert share["estimate"] == pytest.approx(expected, rel=1e-4, abs=1e-9)
        assert share["low"] <= share["estimate"] <= share["high"]


def test_content_dependence_in_closed_form():
    """Half of the tokens weigh the embedding by p, half by 1/2: H(mean) - mean H."""
    model = routed()
    even = documents(lengths=(41,) * 9, d_vocab=16)
    even = [d._replace(tokens=np.arange(41) % 16 // 8 + 2 * (np.arange(41) % 8)) for d in even]
    row = (
        sparsity(model, even, baseline=False, **FAST).table.set_index("site").loc["L1.attn.route_v"]
    )
    kinds = np.concatenate([token_class(d.tokens[:-1])[np.arange(40) % N_CTX != 0] for d in even])
    share = np.mean(kinds == 0)
    p = 1 / (1 + math.exp(-PULL))
    mean = share * p + (1 - share) / 2

    def entropy(x):
        return entr(x) + entr(1 - x)

    gained = entropy(mean) - share * entropy(p) - (1 - share) * math.log(2)
    assert row["content_dependence"] == pytest.approx(gained / math.log(2), rel=1e-5)
    overall = sparsity(model, even, **FAST).summary["routes"]["overall"]["content_dependence"]
    # Only this route of three with two sources or more depends on the token.
    assert 0 < overall["estimate"] < gained


def test_divergence_against_scipy(docs):
    model = tiny("rd-attnres", block_size=2)
    table = divergence(model, docs, **FAST).table.set_index("layer")
    hooks = [f"blocks.{layer}.hook_route_{role}" for layer in range(3) for role in ("qk", "v")]
    found = cached(model, docs, hooks)
    for layer in range(3):
        p, q = (found[f"blocks.{layer}.hook_route_{role}"] for role in ("qk", "v"))
        token = np.mean(jensenshannon(p, q, axis=1) ** 2)
        mean = jensenshannon(p.mean(0), q.mean(0)) ** 2
        assert table["js_token"][layer] == pytest.approx(np.nan_to_num(token), rel=1e-5, abs=1e-9)
        assert table["js_mean"][layer] == pytest.approx(mean, rel=1e-4, abs=1e-9)


def test_divergence_between_checkpoints(docs):
    model, other = tiny("attnres"), tiny("attnres", seed=9)
    table = divergence(model, docs, other=other, **FAST).table.set_index("site")
    hook = model.sites[5].hook
    p, q = (cached(m, docs, [hook])[hook] for m in (model, other))
    token = np.mean(jensenshannon(p, q, axis=1) ** 2)
    assert table["js_token"][model.sites[5].name] == pytest.approx(token, rel=1e-5)
    same = divergence(model, docs, other=model, **FAST).table
    assert (same["js_token"] == 0).all()
    assert (same["js_mean"] == 0).all()
    with pytest.raises(AnalysisError, match="other"):
        divergence(model, docs, other=tiny("attnres", block_size=2))


def test_closed_rows_are_counted_and_never_numbers(docs):
    """A hook that takes away all mass of a route at some tokens."""
    model = tiny("rd-attnres")

    def close(route, hook):
        route = route.clone()
        route[:, ::2] = 0.0
        return route

    model.add_hook("blocks.2.hook_route_v", close)
    table = divergence(model, docs, baseline=False, **FAST).table.set_index("layer")
    n = table["n_tokens"][1]
    assert table["n_undefined"][2] > 0
    assert table["n_tokens"][2] + table["n_undefined"][2] == n
    assert np.isfinite(table["js_token"][2])
