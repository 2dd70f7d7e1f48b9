"""Statistics of gates and categories against a straight computation from the cache in fp64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from from_cache import N_CTX, cached
from planted import blank, documents, tags_of, tiny, token_class

from satlens.analysis.ablation import ablate
from satlens.analysis.categories import categories
from satlens.analysis.divergence import divergence
from satlens.analysis.engine.coding import frequency_bands
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.evaluation import evaluate
from satlens.analysis.result import Result
from satlens.analysis.sparsity import sparsity
from satlens.analysis.stats import ratio_interval
from satlens.analysis.tokens.sae import SaeSettings
from satlens.errors import AnalysisError
from satlens.models.decoder import Decoder

FAST = {"n_resamples": 99}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def gate_statistics(model, docs):
    """(layer, head) -> statistics by name."""
    gates = [site for site in model.sites if site.kind == "gate"]
    hooks = ["hook_v_first"]
    for site in gates:
        at = site.hook.removesuffix("hook_v_gate")
        hooks += [site.hook, f"{at}hook_v", f"{at}hook_v_scale"]
    found = cached(model, docs, hooks)
    out = {}
    for site in gates:
        at = site.hook.removesuffix("hook_v_gate")
        for head in range(site.n_heads):
            x = found[site.hook][:, head]
            first = np.abs(x) * np.linalg.norm(found["hook_v_first"][:, head], axis=-1)
            own = np.linalg.norm(found[f"{at}hook_v"][:, head], axis=-1)
            own = own * np.abs(found[f"{at}hook_v_scale"][:, head])
            size, root = np.abs(x), math.sqrt(len(x))
            out[site.layer, head] = {
                "zero_fraction": np.mean(x == 0),
                "open_fraction": np.mean(x != 0),
                "below_0.05": np.mean(size < 0.05),
                "mean": x.mean(),
                "mean_open": x[x != 0].mean(),
                "hoyer": (root - size.sum() / np.linalg.norm(x)) / (root - 1),
                "norm_share": np.mean(first / (first + own)),
            }
    return out


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("satformer", {}),
        ("satformer", {"gate": "tanh", "bias": True, "last_k": 1}),
        ("satformer", {"gate": "softmax_sigmoid"}),
        ("resformer", {}),
        ("rd-attnres", {"value_residual": "satformer"}),
    ],
)
def test_gates_against_the_cache(docs, name, fields):
    model = tiny(name, **fields)
    table = sparsity(model, docs, **FAST).table
    table = table[table["kind"] == "gate"].set_index(["layer", "head"])
    fresh = Decoder(model.cfg, seed=0)
    for suffix, source in (("", model), ("_init", fresh)):
        for cell, expected in gate_statistics(source, docs).items():
            for stat, value in expected.items():
                found = table[f"{stat}{suffix}"][cell]
                assert found == pytest.approx(value, rel=1e-5, abs=1e-9), (cell, stat)


def test_gate_summary_against_the_cache(docs):
    model = tiny("satformer")
    result = sparsity(model, docs, **FAST)
    gates = [site.hook for site in model.sites]
    x = np.stack(list(cached(model, docs, gates).values()))  # (layers, tokens, heads)
    summary = result.summary["gates"]
    total = x.var() * x.size
    layers = ((x.mean((1, 2)) - x.mean()) ** 2).sum() * x[0].size
    heads = ((x.mean(1) - x.mean((1, 2))[:, None]) ** 2).sum() * x.shape[1]
    assert summary["variance_shares"]["layers"] == pytest.approx(layers / total, rel=1e-4)
    assert summary["variance_shares"]["heads"] == pytest.approx(heads / total, rel=1e-4)
    assert sum(summary["variance_shares"].values()) == pytest.approx(1)
    for part, cell in summary["variance_share_intervals"].items():
        assert cell["estimate"] == pytest.approx(summary["variance_shares"][part], rel=1e-12)
    assert summary["overall"]["zero_fraction"]["estimate"] == pytest.approx(np.mean(x == 0))
    n_windows = sum(-(-(len(d.tokens) - 1) // N_CTX) for d in docs)
    assert summary["first_token"]["n"] == n_windows * x.shape[0] * x.shape[2]


def test_change_of_zeros_is_paired_by_document(docs):
    model = tiny("satformer")
    fresh = Decoder(model.cfg, seed=0)
    found = sparsity(model, docs, **FAST).summary["gates"]
    change = found["zero_fraction_change"]
    rows, n = [], []
    for document in docs:
        zeros = [
            sum((w == 0).sum() for w in cached(m, [document], gate_hooks(m)).values())
            for m in (model, fresh)
        ]
        rows.append(zeros[0] - zeros[1])
        n.append(sum(w.size for w in cached(model, [document], gate_hooks(model)).values()))
    expected = ratio_interval(np.array(rows), np.array(n), **FAST)
    for name in ("estimate", "low", "high"):
        assert change[name] == pytest.approx(float(getattr(expected, name)), rel=1e-9)
    # The same weights twice differ nowhere, however much documents differ.
    same = sparsity(fresh, docs, **FAST).summary["gates"]
    assert (same["zero_fraction_change"]["low"], same["zero_fraction_change"]["high"]) == (0, 0)
    assert same["overall"]["zero_fraction"]["low"] < same["overall"]["zero_fraction"]["high"]


def gate_hooks(model):
    return [site.hook for site in model.sites if site.kind == "gate"]


def test_documents_are_counted_and_not_their_groups():
    many = documents(lengths=(12,) * 1500, d_vocab=32)
    few = [d._replace(tokens=d.tokens // 2 * 2) for d in many[:1490]] + many[1490:]
    n_odd = sum(bool((d.tokens[1:-1] % 2).any()) for d in many[1490:])
    model, tags = tiny("satformer"), tags_of(few)
    options = {"n_resamples": 9, "batch_size": 64}
    found = sparsity(model, few, baseline=False, **options)
    assert set(found.table["n_documents"]) == {1500}
    assert found.summary["gates"]["interval"]["units"] == "1024 groups of documents, by hash"
    found = categories(model, few, tags=tags, **options)
    counts = found.table.groupby("category")["n_documents"].first()
    assert counts.to_dict() == {"semantic": 1500, "functional": n_odd}
    both = sum(set(d.tokens[1:-1] % 2) == {0, 1} for d in few)
    assert found.summary["contrast"]["n_documents_with_both"] == both
    assert found.part("categories_contrasts").table["n_documents"].iloc[0] == both
    assert "units" in found.summary["contrast"]["interval"]
    found = divergence(tiny("rd-attnres"), few, baseline=False, **options)
    assert set(found.table["n_documents"]) == {1500}
    found = ablate(model, few, kinds="zero", scope="model", **options)
    assert found.table["n_documents"].iloc[0] == 1500
    assert sparsity(model, few[:9], **FAST).summary["gates"]["interval"]["units"] == "documents"


def test_data_without_splits_is_said_to_be_taken_whole(docs):
    for result in (
        sparsity(tiny("satformer"), docs, **FAST),
        categories(tiny("satformer"), docs, tags=tags_of(docs), **FAST),
        divergence(tiny("rd-attnres"), docs, **FAST),
        ablate(tiny("satformer"), docs, kinds="zero", **FAST),
        evaluate(tiny("satformer"), docs, **FAST),
    ):
        assert result.provenance["data"]["split"] is None
        assert "Data taken whole: no split." in result.notes


def test_categories_against_the_cache(docs):
    model = tiny("rd-attnres", value_residual="satformer")
    tags = tags_of(docs)
    result = categories(model, docs, tags=tags, **FAST)
    table = result.table
    kinds = np.concatenate(
        [token_class(d.tokens[:-1])[np.arange(len(d.tokens) - 1) % N_CTX != 0] for d in docs]
    )
    unit = np.concatenate(
        [np.full(np.sum(np.arange(len(d.tokens) - 1) % N_CTX != 0), k) for k, d in enumerate(docs)]
    )
    found = cached(model, docs, [site.hook for site in model.sites])
    contrasts = result.part("categories_contrasts").table.set_index("site")
    for site in model.sites:
        for head in range(site.n_heads if site.kind == "gate" else 1):
            x = found[site.hook][:, head]
            rows = table[table["site"] == site.name]
            if site.kind == "gate":
                rows = rows[rows["head"] == head]
            rows = rows.set_index("category")
            for code, name in enumerate(("semantic", "functional")):
                assert rows["mean"][name] == pytest.approx(x[kinds == code].mean(), rel=1e-5)
                # A route weight is never exactly zero: "open" says nothing about routes.
                open_ = np.mean(x[kinds == code] != 0) if site.kind == "gate" else math.nan
                assert rows["open_fraction"][name] == pytest.approx(open_, rel=1e-9, nan_ok=True)
                assert "open_fraction" not in rows["flags"][name]
            row = contrasts.loc[[site.name]].iloc[head]
            a, b = x[kinds == 0], x[kinds == 1]
            assert row["delta"] == pytest.approx(a.mean() - b.mean(), rel=1e-4, abs=1e-7)
            within = [
                x[(kinds == 0) & (unit == k)].mean() - x[(kinds == 1) & (unit == k)].mean()
                for k in range(len(docs))
            ]
            assert row["delta_document"] == pytest.approx(np.mean(within), rel=1e-4, abs=1e-7)
            signs = np.sign(a[:, None] - b[None, :]).mean()
            # Values that share a histogram bin count as ties.
            assert row["cliffs_delta"] == pytest.approx(signs, abs=0.02)


def test_controlled_contrast_sees_through_a_confounder(docs):
    """A gate that opens by frequency band alone differs between categories only through it."""
    rng = np.random.default_rng(2)
    # Even tokens are mostly rare and odd ones mostly frequent, but each band has both.
    frequency = np.tile([1.0, 9.0, 4.0, 12.0], 4)
    frequency[[0, 4]] = 30.0
    texts = [
        d._replace(tokens=rng.choice(16, size=300, p=frequency / frequency.sum())) for d in docs
    ]
    model = blank("satformer", n_layers=2, d_model=8, n_heads=2, d_vocab=16, n_ctx=N_CTX)
    bands = frequency_bands(open_windows(model, texts))
    with torch.no_grad():
        for document, codes in zip(texts, bands.codes, strict=True):
            frequent = torch.from_numpy((codes >= 3).astype(np.float32))
            model.embed.weight[document.tokens, 2] = frequent * 4.0
        model.blocks[1].attn.values.alpha.weight[:, 2] = 1.0
    result = categories(model, texts, tags=tags_of(texts), **FAST)
    row = result.part("categories_contrasts").table.iloc[0]
    assert abs(row["delta"]) > 0.05
    assert row["delta_controlled"] == pytest.approx(0, abs=1e-7)
    assert 0 < result.summary["contrast"]["common_support"]["first"] <= 1


@pytest.mark.parametrize("by", ["upos", "subword", "frequency", "position", "tag"])
def test_breakdowns_conserve_tokens(docs, by):
    result = categories(tiny("satformer"), docs, tags=tags_of(docs), by=by, **FAST)
    n_counted = sum(int(np.sum(np.arange(len(d.tokens) - 1) % N_CTX != 0)) for d in docs)
    assert sum(row["n"] for row in result.summary["tokens"].values()) == n_counted
    assert [part.name for part in result.parts] == ["categories_drivers"]


def test_refusals(docs):
    plain = tiny("transformer")
    for analysis in (sparsity, categories, divergence):
        with pytest.raises(AnalysisError, match=r"this model \(transformer\) has no"):
            analysis(plain, docs)
    with pytest.raises(AnalysisError, match="two routes over the same sources"):
        divergence(tiny("attnres"), docs)
    with pytest.raises(AnalysisError, match="not one of"):
        categories(tiny("satformer"), docs, tags=tags_of(docs), by="genre")
    with pytest.raises(AnalysisError, match="other documents"):
        categories(tiny("satformer"), docs, tags=tags_of(docs[1:]))


def test_contrasts_that_cannot_be_made(docs):
    model, tags = tiny("satformer"), tags_of(docs)
    options = {"tags": tags, "drivers": False, "n_resamples": 99}
    found = categories(model, docs, by="frequency", **options)
    note = "No contrast: no breakdown by frequency has both semantic and functional."
    assert note in found.notes
    assert not any(part.name == "categories_contrasts" for part in found.parts)
    with pytest.raises(AnalysisError, match="no breakdown by category has both NOUN and VERB"):
        categories(model, docs, contrast=("NOUN", "VERB"), **options)
    with pytest.raises(AnalysisError, match="contrast: two different names"):
        categories(model, docs, contrast=("semantic", "semantic"), **options)
    with pytest.raises(AnalysisError, match="sae: settings without 'sae' in by"):
        categories(model, docs, sae=SaeSettings(), **options)
    with pytest.raises(AnalysisError, match="seed: must not be negative, got -1"):
        categories(model, docs, seed=-1, **options)


def test_results_are_saved_with_their_parts(docs, tmp_path):
    result = categories(tiny("satformer"), docs, tags=tags_of(docs), **FAST)
    result.save(tmp_path, figures=False)
    loaded = Result.load(tmp_path, "categories")
    assert loaded.table.equals(result.table)
    part = loaded.part("categories_contrasts")
    assert part.table.equals(result.part("categories_contrasts").table)
    assert part.provenance["tagger"] == {"name": "planted", "version": "1"}
    assert (tmp_path / "categories_contrasts.csv").exists()
    for column in ("delta", "cliffs_delta", "p", "p_adjusted"):
        assert column in part.table
