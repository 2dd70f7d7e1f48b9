"""Ablation against interventions one at a time, and what must come out as nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from planted import documents, gated, tiny

from satlens.analysis.ablation import ablate, available_kinds
from satlens.analysis.evaluation import evaluate
from satlens.analysis.interventions import MeanGate, ShuffleGate, ZeroGate, intervene
from satlens.analysis.means import fit_means
from satlens.analysis.route_interventions import MeanRoute, TieValueRoute, UniformRoute, ZeroRoute
from satlens.errors import AnalysisError

FAST = {"n_resamples": 99}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def nll(model, docs, *interventions):
    with intervene(model, *interventions):
        return evaluate(model, docs, **FAST).summary["nll"]["estimate"]


@pytest.mark.parametrize(
    "name",
    [
        *("satformer", "rd-attnres", "resformer", "attnres"),
        *("denseformer", "muddformer-prepost", "hyperconnections"),
    ],
)
def test_every_row_is_its_intervention(docs, name):
    """Reusing the clean state below a layer gives what a whole intervened pass gives."""
    model = tiny(name)
    means = fit_means(model, docs)
    table = ablate(model, docs, means=means, scope=("model", "layer", "head", "site"), **FAST).table
    makers = {
        ("gate", "zero"): ZeroGate,
        ("gate", "mean"): lambda **w: MeanGate(means=means, **w),
        ("gate", "shuffle"): lambda **w: ShuffleGate(seed=0, **w),
        ("route", "zero"): ZeroRoute,
        ("route", "uniform"): UniformRoute,
        ("route", "mean"): lambda **w: MeanRoute(means=means, **w),
        ("route", "tie_v"): TieValueRoute,
    }
    clean = nll(model, docs)
    for row in table.to_dict("records"):
        where = {
            k: int(row[k])
            for k in ("layer", "head")
            if row[k] == row[k] and row[k] is not None and str(row[k]) != "<NA>"
        }
        where |= {k: row[k] for k in ("sublayer", "role") if row[k]}
        expected = nll(model, docs, makers[row["target"], row["kind"]](**where))
        assert row["nll"] == pytest.approx(expected, abs=1e-6)
        assert row["nll_clean"] == pytest.approx(clean, abs=1e-7)
        assert row["dnll"] == pytest.approx(expected - clean, abs=1e-6)
        assert row["ppl_ratio"] == pytest.approx(math.exp(row["dnll"]), rel=1e-12)


def test_kinds_and_rows(docs):
    gates = ablate(tiny("satformer"), docs, **FAST).table
    assert gates.groupby(["kind", "scope"]).size().to_dict() == {
        (kind, scope): n
        for kind in ("zero", "mean", "shuffle")
        for scope, n in (("model", 1), ("layer", 2), ("head", 4))
    }
    assert gates.loc[gates["kind"] == "shuffle", "flags"].str.contains("not_causal").all()
    routes = ablate(tiny("rd-attnres"), docs, scope=("model", "layer", "role"), **FAST).table
    sizes = routes.groupby(["kind", "scope"]).size().to_dict()
    assert sizes["uniform", "layer"] == 4  # the output read is layer n_layers
    assert sizes["tie_v", "layer"] == 2  # layer 0 has one source
    assert sizes["uniform", "role"] == 3
    assert available_kinds(tiny("attnres")) == ("uniform", "mean")
    assert available_kinds(tiny("rd-attnres", value_residual="satformer")) == (
        *("zero", "mean", "shuffle"),
        *("uniform", "tie_v"),
    )


def test_the_idle_head_costs_exactly_nothing(docs):
    table = ablate(gated(), documents(), kinds="zero", scope="head", **FAST).table
    idle = table[table["head"] == 1].iloc[0]
    assert idle["dnll"] == idle["dnll_low"] == idle["dnll_high"] == 0
    assert idle["p"] == idle["p_adjusted"] == 1


def test_means_fitted_on_the_data_are_said_to_be(docs):
    same = ablate(tiny("satformer"), docs, kinds="mean", scope="model", **FAST)
    assert same.summary["means_fitted_on"]["same_documents"]
    assert any("no pool split" in note for note in same.notes)
    apart = ablate(
        tiny("satformer"),
        docs,
        kinds="mean",
        scope="model",
        pool=documents(d_vocab=32, seed=7),
        **FAST,
    )
    assert not apart.summary["means_fitted_on"]["same_documents"]
    assert apart.table["dnll"][0] != same.table["dnll"][0]


def test_refusals(docs):
    with pytest.raises(AnalysisError, match="kinds: 'drop' is not one of"):
        ablate(tiny("satformer"), docs, kinds="drop")
    with pytest.raises(AnalysisError, match="scope: 'block' is not one of"):
        ablate(tiny("satformer"), docs, scope="block")
    with pytest.raises(AnalysisError, match="nothing for kinds"):
        ablate(tiny("satformer"), docs, kinds="tie_v")
    with pytest.raises(AnalysisError, match="no access sites"):
        ablate(tiny("transformer"), docs)


def test_intervals_are_paired(docs):
    """A large clean loss spread over documents does not widen the interval of the change."""
    table = ablate(tiny("satformer"), docs, kinds="zero", scope="model", **FAST).table
    evaluation = evaluate(tiny("satformer"), docs, **FAST)
    width = table["dnll_high"][0] - table["dnll_low"][0]
    spread = evaluation.summary["nll"]
    assert np.isfinite(width)
    assert width < spread["high"] - spread["low"]


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
