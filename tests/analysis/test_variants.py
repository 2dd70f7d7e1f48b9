"""Every analysis on every architecture, with grouped heads: it measures, or says why it cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import documents, tags_of, tiny
from scipy.spatial.distance import jensenshannon

from satlens.analysis.ablation import ablate, available_kinds
from satlens.analysis.categories import categories
from satlens.analysis.divergence import divergence
from satlens.analysis.evaluation import evaluate
from satlens.analysis.interventions.gates import intervene
from satlens.analysis.interventions.means import fit_means
from satlens.analysis.interventions.routes import UniformRoute, ZeroRoute
from satlens.analysis.routes import routes
from satlens.analysis.sparsity import sparsity
from satlens.errors import AnalysisError
from satlens.models.presets import VARIANTS
from satlens.models.reads import component_hooks
from satlens.plotting import picture_bytes

FAST = {"n_resamples": 49, "max_documents": 9, "max_tokens_per_document": 18, "batch_size": 16}
EVERY = {
    **{name: (name, {}) for name in VARIANTS},
    "satformer on muddformer": ("muddformer", {"value_residual": "satformer"}),
    "resformer on hyperconnections": ("hyperconnections", {"value_residual": "resformer"}),
    "sparse denseformer": ("denseformer", {"dilation": 2, "period": 2}),
    "one layer of muddformer": ("muddformer-prepost", {"n_layers": 1}),
    "a period beyond the depth": ("denseformer", {"period": 9}),
}
DRAWN = ("satformer on muddformer", "hyperconnections", "sparse denseformer", "delta-attnres")
every_variant = pytest.mark.parametrize("case", EVERY)


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def build(case):
    name, fields = EVERY[case]
    return tiny(name, **{"n_layers": 2, **fields})


ANALYSES = {
    "evaluate": evaluate,
    "sparsity": sparsity,
    "categories": lambda model, docs, **o: categories(model, docs, tags=tags_of(docs), **o),
    "divergence": divergence,
    "divergence over sublayers": lambda m, docs, **o: divergence(m, docs, over="sublayers", **o),
    "routes": routes,
    "ablate": lambda m, docs, **o: ablate(m, docs, scope=("model", "layer", "role", "site"), **o),
}


def can_measure(analysis, model):
    """Whether a model has what an analysis is about, by its sites alone."""
    sites = model.sites
    match analysis:
        case "sparsity" | "ablate":
            return bool(sites)
        case "categories":
            return any(site.kind == "gate" or site.support == "simplex" for site in sites)
        case "divergence":
            reads = [(s.layer, s.sublayer) for s in sites if s.kind == "route"]
            return len(set(reads)) < len(reads)
    return True


@every_variant
@pytest.mark.parametrize("analysis", ANALYSES)
@pytest.mark.filterwarnings("error")
def test_a_result_or_one_line(docs, case, analysis):
    model = build(case)
    chosen = [d._replace(tokens=d.tokens[:18]) for d in docs[:9]]
    if not can_measure(analysis, model):
        with pytest.raises(AnalysisError) as refusal:
            ANALYSES[analysis](model, chosen, **FAST)
        assert "\n" not in str(refusal.value)
        assert model.cfg.variant in str(refusal.value)
        return
    result = ANALYSES[analysis](model, chosen, **FAST)
    assert len(result.table)
    assert (result.table["n_tokens"] > 0).all()
    for table in (result, *result.parts):
        numbers = table.table.select_dtypes("number").to_numpy(float, na_value=np.nan)
        assert not np.isinf(numbers).any()
        assert table.table.groupby(list(table.key_columns), dropna=False).size().max() == 1
    if case in DRAWN and result.name in ("sparsity", "divergence", "routes"):
        assert picture_bytes(result.figure(), dpi=30).startswith(b"\x89PNG")


SIGNED = ["denseformer", "muddformer", "muddformer-prepost", "hyperconnections"]


@pytest.mark.parametrize("name", SIGNED)
def test_signed_weights_have_norm_shares_and_no_entropy(docs, name):
    model = tiny(name)
    result = sparsity(model, docs, **FAST)
    table, weights = result.table, result.part("route_weights").table
    assert table["flags"].str.contains("signed").all()
    undefined = table[["normalised_entropy", "effective_sources", "depth_distance"]]
    assert undefined.isna().to_numpy().all()
    assert (table["n_undefined"] == 0).all()
    assert result.summary["routes"]["n_signed"] == len(table)
    by_read = weights.groupby("site", sort=False)
    np.testing.assert_allclose(by_read["norm_share"].sum(), 1, rtol=1e-9)
    negative = by_read.apply(lambda w: (w["norm_share"] - w["signed_norm_share"]).sum() / 2)
    found = table.set_index("site")["negative_norm_share"]
    np.testing.assert_allclose(found[negative.index], negative, rtol=1e-9, atol=1e-12)
    n_sources = table["n_sources"].to_numpy()
    assert (table["norm_effective_sources"].to_numpy() <= n_sources + 1e-9).all()
    assert 0 < result.summary["routes"]["overall"]["negative_norm_share"]["estimate"] < 1


def read_of(site, n_layers):
    """The hook point of the read that a site's mixture is."""
    if site.sublayer == "out" or (site.sublayer == "depth" and site.layer + 1 == n_layers):
        return "hook_out_read"
    if site.sublayer == "depth":
        return f"blocks.{site.layer + 1}.hook_attn_read"
    role = "" if site.role == "shared" else f"_{site.role}"
    return f"blocks.{site.layer}.hook_{site.sublayer}_read{role}"


@torch.no_grad()
@pytest.mark.parametrize("name", ["denseformer", "muddformer", "hyperconnections"])
def test_a_source_is_as_large_as_the_read_of_it_alone(name):
    model = tiny(name).double()
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    points = model.stream.measured_from(model.cfg)
    _, cache = model.run_with_cache(tokens, names_filter=points)
    norms = dict(model.stream.source_norms(model, cache.cache_dict))
    assert list(norms) == [site.hook for site in model.sites]
    for site in model.sites:
        assert norms[site.hook].shape == (2, 9, len(site.sources))
        for j, norm in enumerate(norms[site.hook].unbind(-1)):

            def alone(weights, hook, j=j):
                weights.zero_()[..., j] = 1

            at = read_of(site, model.cfg.n_layers)
            with model.hooks([(site.hook, alone)]):
                _, read = model.run_with_cache(tokens, names_filter=at)
            torch.testing.assert_close(read[at].norm(dim=-1), norm)


@torch.no_grad()
def test_normed_sources_are_measured_after_their_norm():
    model = tiny("muddformer-prepost").double()
    tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    _, cache = model.run_with_cache(tokens)
    norms = dict(model.stream.source_norms(model, cache.cache_dict))
    states = [cache["hook_embed"]]
    for layer in range(3):
        at = f"blocks.{layer}.hook_mlp_"
        states.append(cache[f"{at}read"] + cache[f"{at}out"])
    for layer, read in ((1, model.blocks[1].depth_read), (3, model.out_read)):
        hook = "hook_route_out" if layer == 3 else f"blocks.{layer}.hook_route_q"
        for j, weight in enumerate(read.pre):
            x = states[j]
            normed = weight * x / (x.pow(2).mean(-1, keepdim=True) + model.cfg.norm_eps).sqrt()
            torch.testing.assert_close(norms[hook][..., j], normed.norm(dim=-1))


# -- divergence ------------------------------------------------------------------------------------


def test_roles_of_signed_weights_are_compared_by_norms(docs):
    table = divergence(tiny("muddformer"), docs, **FAST).table
    assert table["flags"].str.contains("norm_rectified").all()
    assert set(table["role"]) == {"q|k", "q|v", "q|r", "k|v", "k|r", "v|r"}
    assert set(table["layer"]) == {1, 2}
    assert (table["js_token"] > 0).all()
    assert (table["js_token_init"] == 0).all()
    # Before training PrePostDANorm takes nothing: no distribution, and said to be none.
    table = divergence(tiny("muddformer-prepost"), docs, **FAST).table
    assert table["js_token_init"].isna().all()


def test_sign_does_not_matter_to_a_divergence_by_norms(docs):
    plain = divergence(tiny("muddformer"), docs, baseline=False, **FAST).table
    model = tiny("muddformer")
    last = [f"blocks.2.hook_route_{way}" for way in "qk"]
    for hook in last:
        model.add_hook(hook, lambda weights, hook: -weights)
    flipped = divergence(model, docs, baseline=False, **FAST).table
    rows = (plain["layer"] == 2) & plain["role"].isin(["q|k", "q|v"])
    np.testing.assert_allclose(flipped["js_token"][rows], plain["js_token"][rows], rtol=1e-9)


def test_reads_of_other_sources_compare_over_sublayers(docs):
    """Attention and MLP reads of uniform routes, whose components weigh by their norms alone."""
    model, rows = tiny("attnres", block_size=1), torch.from_numpy(docs[1].tokens[:17])[None]
    with intervene(model, UniformRoute()), torch.no_grad():
        result = divergence(model, rows, over="sublayers", baseline=False, n_resamples=49)
        _, cache = model.run_with_cache(rows[:, :-1], names_filter=component_hooks(3))
    norms = np.stack([cache[h][0, 1:].norm(dim=-1).numpy() for h in component_hooks(3)], -1)
    assert result.summary["over"] == "sublayers"
    table = result.table.set_index(["comparison", "layer"])
    assert {"attn, next layer", "mlp, next layer", "attn|mlp"} == set(table.index.levels[0])
    assert (table.loc["attn|mlp", "n_sources"] == [2, 4, 6]).all()
    for layer in range(3):
        shorter, longer = norms.copy(), norms.copy()
        shorter[:, 1 + 2 * layer :], longer[:, 2 + 2 * layer :] = 0, 0
        expected = np.mean(jensenshannon(shorter, longer, axis=1) ** 2)
        found = table.loc[("attn|mlp", layer), "js_token"]
        assert found == pytest.approx(expected, rel=1e-5)


def test_checkpoints_of_other_blocks_and_streams_compare_over_sublayers(docs):
    model = tiny("attnres", block_size=1)
    same = divergence(model, docs, over="sublayers", other=model, **FAST).table
    assert (same["js_token"] == 0).all()
    for name, fields in (("attnres", {"block_size": 2}), ("rd-attnres", {}), ("muddformer", {})):
        other = tiny(name, seed=3, **fields)
        table = divergence(model, docs, over="sublayers", other=other, **FAST).table
        assert (table["js_token"][table["n_sources"] > 1] > 0).all()
        roles = {s.role for s in other.sites if s.sublayer == "attn"}
        assert len(table) == 3 * len(roles) + 4
    with pytest.raises(AnalysisError, match="n_layers differs"):
        divergence(model, docs, over="sublayers", other=tiny("attnres", n_layers=2))
    with pytest.raises(AnalysisError, match="'depth' is not one of sources, sublayers"):
        divergence(model, docs, over="depth")


# -- interventions ---------------------------------------------------------------------------------


def test_kinds_are_those_that_mean_something():
    static = {"uniform", "mask", "onehot", "remove"}
    of_tokens = static | {"mean", "mean_position", "mean_category", "resample"}
    assert set(available_kinds(tiny("denseformer"))) == static
    assert set(available_kinds(tiny("muddformer"))) == of_tokens
    assert set(available_kinds(tiny("muddformer-prepost"))) == {"zero", *of_tokens}
    assert set(available_kinds(tiny("hyperconnections"))) == of_tokens
    assert set(available_kinds(tiny("hyperconnections-static"))) == static
    assert set(available_kinds(tiny("delta-attnres"))) == {"zero", *of_tokens}
    with pytest.raises(AnalysisError, match="no routes that are added to a residual stream"):
        ZeroRoute().sites(tiny("muddformer"))


@torch.no_grad()
@pytest.mark.parametrize("name", ["delta-attnres", "delta-attnres-full", "muddformer-prepost"])
def test_without_its_mixtures_an_additive_stream_is_the_transformer(name):
    model, plain = tiny(name), tiny("transformer")
    state = {k: v for k, v in model.state_dict().items() if k in plain.state_dict()}
    # Its attention has a norm each for q, k and v, all of one start.
    plain.load_state_dict(state, strict=False)
    tokens = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))
    with intervene(model, ZeroRoute()):
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(tokens), plain(tokens), atol=1e-3)


@torch.no_grad()
def test_uniform_signed_routes_keep_their_sum():
    model = tiny("muddformer")
    tokens = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(0))
    hook = "blocks.2.hook_route_v"
    _, clean = model.run_with_cache(tokens, names_filter=hook)
    with intervene(model, UniformRoute(layer=2, role="v")):
        _, edited = model.run_with_cache(tokens, names_filter=hook)
    torch.testing.assert_close(edited[hook].sum(-1), clean[hook].sum(-1))
    assert edited[hook].std(-1).max() < 1e-6


def test_roles_and_sublayers_of_new_sites_can_be_named(docs):
    table = ablate(tiny("muddformer"), docs, kinds="uniform", scope="role", **FAST).table
    assert list(table["role"]) == ["q", "k", "v", "r"]
    table = ablate(tiny("denseformer"), docs, kinds="uniform", scope="site", **FAST).table
    assert list(table["site"]) == ["L0.depth.route", "L1.depth.route", "L2.depth.route"]
    assert table["flags"].str.contains("static").all()
    with pytest.raises(AnalysisError, match="nothing for kinds"):
        ablate(tiny("denseformer"), docs, kinds="mean", **FAST)
    means = fit_means(tiny("hyperconnections"), docs)
    assert {len(mean) for mean in means.values()} == {4}


def test_categories_leave_out_what_is_no_distribution(docs):
    model = tiny("muddformer", value_residual="satformer")
    result = categories(model, docs, tags=tags_of(docs), **{**FAST, "max_documents": None,
                        "max_tokens_per_document": None})  # fmt: skip
    assert set(result.table["kind"]) == {"gate"}
    assert "9 routes are no distributions and were left out." in result.notes
    with pytest.raises(AnalysisError, match="no gates, and its routes are no distributions"):
        categories(tiny("denseformer"), docs, tags=tags_of(docs))
