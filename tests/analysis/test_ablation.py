"""Ablation against whole intervened passes in float64, and what must come out as nothing."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch
from planted import documents, gated, tags_of, tiny, token_class
from scipy.special import log_softmax, rel_entr

from satlens.analysis.ablation import ablate
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.stream import running
from satlens.analysis.interventions.donors import fit_donors
from satlens.analysis.interventions.gates import (
    FreezeGate,
    MeanGate,
    OpenGate,
    ResampleGate,
    ShuffleGate,
    ZeroGate,
    intervene,
)
from satlens.analysis.interventions.means import fit_means
from satlens.analysis.interventions.removal import RemoveSublayer
from satlens.analysis.interventions.routes import (
    MaskRoute,
    MeanRoute,
    OneHotRoute,
    ResampleRoute,
    SwapRoutes,
    TieValueRoute,
    UniformRoute,
    ZeroRoute,
)
from satlens.analysis.interventions.static import fit_static
from satlens.analysis.sweeps.cases import SCOPES
from satlens.analysis.sweeps.kinds import available_kinds
from satlens.errors import AnalysisError

FAST = {"n_resamples": 99}
FAMILIES = ("embedding", "blocks", "partial", "states", "streams")


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def log_p(model, windows, *interventions):
    """Log-probabilities of every batch by whole passes, in float64."""
    found = []
    with torch.no_grad(), intervene(model, *interventions):
        for batch in windows:
            real = torch.arange(batch.tokens.shape[1]) < batch.valid.sum(1)[:, None]
            with running(windows, batch):  # donors are not a token's own document
                found.append(model(batch.tokens, attention_mask=real.long()).double().numpy())
    return [log_softmax(logits, axis=-1) for logits in found]


def changes(model, windows, clean, *interventions):
    """Mean dNLL, KL and top-1 change over scored tokens."""
    totals, n = np.zeros(3), 0
    for batch, before, after in zip(
        windows, clean, log_p(model, windows, *interventions), strict=True
    ):
        targets = batch.targets.numpy()
        scored = targets >= 0
        at = np.where(scored, targets, 0)[..., None]
        dnll = np.take_along_axis(before - after, at, -1)[..., 0]
        kl = rel_entr(np.exp(before), np.exp(after)).sum(-1)
        top1 = before.argmax(-1) != after.argmax(-1)
        totals += [values[scored].sum() for values in (dnll, kl, top1)]
        n += scored.sum()
    return totals / n


def intervention(row, fitted):
    """The one that a row is about, from its labels alone."""
    given = {
        "mean": {"means": fitted.get("means")},
        "mean_position": {"means": fitted.get("means_position")},
        "resample": {"donors": fitted.get("donors"), "seed": 0},
        "optimal": {"values": fitted.get("static")},
        "shuffle": {"seed": 0},
    }
    gates = {
        "zero": ZeroGate,
        "mean": MeanGate,
        "mean_position": MeanGate,
        "resample": ResampleGate,
        "optimal": FreezeGate,
        "shuffle": ShuffleGate,
        "open": OpenGate,
    }
    routes = {
        "zero": ZeroRoute,
        "uniform": UniformRoute,
        "mean": MeanRoute,
        "mean_position": MeanRoute,
        "resample": ResampleRoute,
        "mask": MaskRoute,
        "onehot": OneHotRoute,
        "tie_v": TieValueRoute,
        "swap": SwapRoutes,
    }
    reads = {"remove": RemoveSublayer}
    make = {"gate": gates, "route": routes, "read": reads}[row["target"]][row["kind"]]
    where = {k: int(row[k]) for k in ("layer", "head") if not pd.isna(row[k])}
    where |= {k: row[k] for k in ("sublayer", "role", "component") if row[k]}
    if row["source"]:
        family = row["source"] in FAMILIES
        where["family" if family else "source"] = row["source"]
    return make(**given.get(row["kind"], {}), **where)


@pytest.mark.parametrize(
    ("name", "n_layers", "scopes"),
    [
        ("satformer", 3, SCOPES),
        ("rd-attnres", 2, SCOPES),
        ("resformer", 2, ("model", "head", "component")),
        ("attnres", 3, ("layer", "source", "component")),
        ("delta-attnres", 2, ("model", "layer", "source")),
        ("denseformer", 2, SCOPES),
        ("muddformer-prepost", 2, ("model", "source", "component")),
        ("hyperconnections", 2, ("layer", "source", "component")),
        ("transformer", 2, ("component",)),
    ],
)
def test_every_row_is_its_intervention(name, n_layers, scopes):
    """State from a block border, paired differences and float32 give what whole passes give."""
    docs = documents((20, 9, 31, 5), d_vocab=32)
    model = tiny(name, n_layers=n_layers).eval()
    kinds = [kind for kind in available_kinds(model) if kind != "mean_category"]
    windows = open_windows(model, docs)
    fitted = {"static": fit_static(model, docs)} if "optimal" in kinds else {}
    if model.sites:
        fitted["means"] = fit_means(model, docs)
        fitted["means_position"] = fit_means(model, docs, per="position")
        fitted["donors"] = fit_donors(model, docs)
    table = ablate(model, docs, kinds=kinds, scope=scopes, **FAST).table
    clean = log_p(model, windows)
    for row in table.to_dict("records"):
        expected = changes(model, windows, clean, intervention(row, fitted))
        found = [row[stat] for stat in ("dnll", "kl", "top1_change")]
        np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5, err_msg=str(row))
        assert row["nll"] == pytest.approx(row["nll_clean"] + row["dnll"], rel=1e-12)
        assert row["ppl_ratio"] == pytest.approx(math.exp(row["dnll"]), rel=1e-12)


def test_kinds_and_rows(docs):
    gates = ablate(tiny("satformer"), docs, **FAST).table
    assert gates.groupby(["kind", "scope"]).size().to_dict() == {
        (kind, scope): n
        for kind in ("zero", "mean", "shuffle")
        for scope, n in (("model", 1), ("layer", 2), ("head", 4))
    }
    assert gates.loc[gates["kind"] == "shuffle", "flags"].str.contains("not_causal").all()
    routes = ablate(tiny("rd-attnres"), docs, scope=("model", "layer", "role", "source"), **FAST)
    sizes = routes.table.groupby(["kind", "scope"]).size().to_dict()
    assert sizes["uniform", "layer"] == 4  # the output read is layer n_layers
    assert sizes["tie_v", "layer"] == 2  # layer 0 has one source
    assert sizes["uniform", "role"] == 3
    masked = routes.table[(routes.table["kind"] == "mask") & (routes.table["scope"] == "source")]
    # Blocks of four sublayers: none is complete before layer 2, and layer 0 alone lacks others.
    assert list(zip(masked["layer"], masked["source"], strict=True)) == [
        *((layer, source) for layer in (0, 1) for source in ("embedding", "partial")),
        *((layer, source) for layer in (2, 3) for source in ("embedding", "blocks", "partial")),
    ]
    streams = ablate(tiny("hyperconnections"), docs, kinds="mask", scope="source", **FAST).table
    n_streams = tiny("hyperconnections").cfg.stream.n_streams
    assert list(streams["source"]) == [f"stream {k}" for k in range(n_streams)] * 3


def test_components_of_reads(docs):
    """1 + 2 + 3 + ... reads times components; the embedding alone is the first read."""
    table = ablate(tiny("transformer"), docs, scope="component", **FAST).table
    assert set(table["target"]) == {"read"}
    assert len(table) == 1 + 2 + 3 + 4 + 5 + 6 + 7
    assert list(table["component"][:3]) == ["embed", "embed", "L0.attn"]


def test_changes_by_category_of_the_target(docs):
    """The categories' changes, weighted by their tokens, are the change; each is its own mean."""
    model, tags = tiny("satformer"), tags_of(docs)
    found = ablate(model, docs, kinds="zero", scope=("model", "head"), tags=tags, **FAST)
    rows = found.part("ablation_categories").table
    assert found.summary["by"] == "category"
    weighted = rows["dnll"] * rows["n_tokens"]
    keys = ["scope", "layer", "head"]
    total = weighted.groupby([rows[k] for k in keys], dropna=False, sort=False).sum()
    np.testing.assert_allclose(total / found.table["n_tokens"][0], found.table["dnll"], atol=1e-12)
    model.eval()
    windows = open_windows(model, docs)
    before, after = log_p(model, windows), log_p(model, windows, ZeroGate())
    sums = np.zeros((2, 2))
    for batch, x, y in zip(windows, before, after, strict=True):
        targets = batch.targets.numpy()
        dnll = np.take_along_axis(x - y, np.where(targets < 0, 0, targets)[..., None], -1)[..., 0]
        for code in (0, 1):
            chosen = (targets >= 0) & (token_class(targets) == code)
            sums[code] += dnll[chosen].sum(), chosen.sum()
    whole = rows[rows["scope"] == "model"].set_index("category")
    for code, name in enumerate(("semantic", "functional")):
        assert whole.loc[name, "dnll"] == pytest.approx(sums[code, 0] / sums[code, 1], abs=1e-6)
        assert whole.loc[name, "n_tokens"] == sums[code, 1]


def test_a_gate_that_is_a_function_of_the_category_is_its_mean():
    """Then the mean over all tokens changes something and the mean of the category nothing."""
    model, tags = gated(), tags_of(documents())
    torch.nn.init.normal_(model.unembed.weight, generator=torch.Generator().manual_seed(0))
    torch.nn.init.normal_(model.blocks[1].attn.o.weight, generator=torch.Generator().manual_seed(1))
    kinds = ("mean", "mean_category")
    found = ablate(model, documents(), kinds=kinds, scope="model", tags=tags, **FAST)
    by_kind = found.table.set_index("kind")
    assert by_kind.loc["mean", "kl"] > 1e-4
    assert by_kind.loc["mean_category", "kl"] < 1e-12
    assert "not_causal" in by_kind.loc["mean_category", "flags"]
    fitted = fit_means(model, documents(), per="category", tags=tags)
    again = ablate(
        model, documents(), kinds=kinds[1], scope="model", tags=tags, means=fitted, **FAST
    )
    assert again.table["dnll"][0] == by_kind.loc["mean_category", "dnll"]


def test_what_is_fitted_on_the_data_is_said_to_be(docs):
    same = ablate(tiny("satformer"), docs, kinds="mean", scope="model", **FAST)
    assert same.summary["fitted_on"]["same_documents"]
    assert any("no pool split" in note for note in same.notes)
    pool = documents(d_vocab=32, seed=7)
    apart = ablate(tiny("satformer"), docs, kinds="mean", scope="model", pool=pool, **FAST)
    assert not apart.summary["fitted_on"]["same_documents"]
    assert apart.table["dnll"][0] != same.table["dnll"][0]
    nothing = ablate(tiny("satformer"), docs, kinds="zero", scope="model", **FAST)
    assert nothing.summary["fitted_on"] is None


def test_optimal_constants_are_no_worse_than_means(docs):
    found = ablate(tiny("satformer"), docs, kinds=("mean", "optimal"), scope="model", **FAST)
    mean, optimal = found.table.set_index("kind").loc[["mean", "optimal"], "dnll"]
    assert optimal < mean
    assert found.summary["optimal"]["nll"] == pytest.approx(found.table["nll"][1], abs=1e-5)


def test_refusals(docs):
    with pytest.raises(AnalysisError, match="kinds: 'drop' is not one of"):
        ablate(tiny("satformer"), docs, kinds="drop")
    with pytest.raises(AnalysisError, match="scope: 'block' is not one of"):
        ablate(tiny("satformer"), docs, scope="block")
    with pytest.raises(AnalysisError, match="nothing for kinds"):
        ablate(tiny("satformer"), docs, kinds="tie_v")
    with pytest.raises(AnalysisError, match="no access sites"):
        ablate(tiny("transformer"), docs)
    with pytest.raises(AnalysisError, match="tags: they belong to other documents"):
        ablate(tiny("satformer"), docs, tags=tags_of(documents((5, 6))), kinds="zero")


def test_what_was_asked_for_in_vain_is_said(docs):
    model = tiny("satformer")
    found = ablate(model, docs, kinds=("zero", "uniform"), scope=("model", "source"), **FAST)
    assert found.summary["kinds"] == ["zero"]
    assert found.summary["scopes"] == ["model"]
    assert "kinds without a row here: uniform." in found.notes
    assert "scopes without a row here: source." in found.notes
    assert not any("without a row" in note for note in ablate(model, docs, **FAST).notes)
    zero = {"kinds": "zero", "scope": "model"}
    with pytest.raises(AnalysisError, match="by: 'word' is not one of category, upos"):
        ablate(model, docs, by="word", **zero)
    with pytest.raises(AnalysisError, match="ablate: means: no kind swept here takes means"):
        ablate(model, docs, means=fit_means(model, docs), **zero)
    with pytest.raises(AnalysisError, match="ablate: pool: no kind swept here is fitted"):
        ablate(model, docs, pool=docs, **zero)
    with pytest.raises(AnalysisError, match="resample needs at least two documents"):
        ablate(model, docs[:1], kinds="resample", scope="model")
    with pytest.raises(AnalysisError, match="n_resamples: must be at least 1, got 0"):
        ablate(model, docs, n_resamples=0, **zero)


def test_intervals_are_paired(docs):
    """A large clean loss spread over documents does not widen the interval of the change."""
    table = ablate(tiny("satformer"), docs, kinds="zero", scope="model", **FAST).table
    model = tiny("satformer").eval()
    windows = open_windows(model, docs)
    per_document = [
        -np.take_along_axis(logits, np.maximum(batch.targets.numpy(), 0)[..., None], -1).mean()
        for batch, logits in zip(windows, log_p(model, windows), strict=True)
    ]
    width = table["dnll_high"][0] - table["dnll_low"][0]
    assert 0 < width < 4 * np.std(per_document) / math.sqrt(len(docs)) + 0.5 * per_document[0]


def test_the_slice_the_output_read_and_static_weights_are_recorded(docs):
    limits = {"max_documents": 9, "max_tokens_per_document": 12}
    options = {"scope": ("layer",), **limits, **FAST}
    found = ablate(tiny("rd-attnres"), docs, kinds=("uniform",), **options)
    assert limits.items() <= found.provenance["data"].items()
    assert found.provenance["data"]["context"] == tiny("rd-attnres").cfg.n_ctx
    last = found.table["layer"] == tiny("rd-attnres").cfg.n_layers
    assert (found.table["sublayer"] == np.where(last, "out", "")).all()
    flags = ablate(tiny("resformer"), docs, kinds=("zero",), **options).table["flags"]
    assert flags.str.split(";").map(lambda f: "static" in f).all()
    flags = ablate(tiny("satformer"), docs, kinds=("zero",), **options).table["flags"]
    assert not flags.str.contains("static").any()
