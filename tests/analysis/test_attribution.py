"""Mass, screens and exact removals of every weight, each against another computation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import documents, gated, tiny
from scipy import stats as scipy_stats

import satlens
from satlens.analysis.attribution import attribute, removals
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.interventions.gates import intervene
from satlens.analysis.interventions.running import Running
from satlens.analysis.sweeps.attribution_table import Measured, attribution_table, outer
from satlens.analysis.sweeps.gradients import (
    attributions,
    first_order,
    frozen,
    site_gradients,
    width_of,
)
from satlens.errors import AnalysisError
from satlens.models.sites import AccessSite

FAST = {"n_resamples": 99}
EVERY = (
    *("satformer", "resformer", "attnres", "rd-attnres", "delta-attnres", "denseformer"),
    *("muddformer", "muddformer-prepost", "hyperconnections", "hyperconnections-static"),
)


@pytest.fixture(scope="module")
def docs():
    return documents((20, 9, 31, 5, 17, 12, 8, 25, 16, 11), d_vocab=32)


def summed_loss(model, batch, *hooks):
    with torch.no_grad(), model.hooks(hooks):
        nll = model(batch.tokens, return_type="loss", targets=batch.targets, loss_per_token=True)
    return float(nll.sum())


@pytest.mark.parametrize("name", EVERY)
def test_first_order_is_the_derivative_along_the_removal(docs, name):
    """Central differences along what the removal itself does to the weights, in float64."""
    model = tiny(name).double().eval()
    batch = open_windows(model, docs)[0]
    cases, columns = removals(model.sites)
    owners = [(site, column) for site in model.sites for column in range(width_of(site))]
    gradients = site_gradients(model, batch, model.sites)
    seen = {site.hook: pair for site, pair in zip(model.sites, gradients, strict=True)}
    rng = np.random.default_rng(0)
    for unit in rng.choice(len(cases), min(6, len(cases)), replace=False):
        site, column = owners[columns[unit]]
        weights, gradient = seen[site.hook]
        change = torch.zeros_like(weights)
        removed = cases[unit].intervention.edit(weights.clone(), site, Running(model))
        only = [column] if site.kind == "gate" else range(width_of(site))
        change[..., list(only)] = (removed - weights)[..., list(only)]
        step = 1e-5
        ends = [
            summed_loss(model, batch, (site.hook, lambda w, hook, e=e, u=change: w + e * u))
            for e in (step, -step)
        ]
        expected = (ends[0] - ends[1]) / (2 * step)
        found = first_order(weights, gradient, site.support == "simplex")[..., column].sum()
        assert float(found) == pytest.approx(expected, rel=1e-5, abs=1e-7)


def test_a_source_that_holds_everything_leaves_nothing():
    weights = torch.tensor([[[1.0, 0.0], [0.25, 0.75]]])
    found = first_order(weights, torch.tensor([[[2.0, 3.0], [2.0, 3.0]]]), simplex=True)
    assert found[0, 0].tolist() == [0.0, 0.0]
    # Without the first source all weight is on the second: 0.25 (3 - 2).
    torch.testing.assert_close(found[0, 1], torch.tensor([0.25, -0.75]).double())


def test_sums_by_document_and_second_order(docs):
    """Windows of a document add up; the second order is half the square of each window's first."""
    model = tiny("satformer").double()
    windows = open_windows(model, docs, batch_size=3)
    sums = attributions(model, windows, model.sites, {})
    expected = np.zeros((2, len(docs), 4))
    for batch in windows:
        for row in range(len(batch.tokens)):
            one = batch._replace(
                **{k: v[row : row + 1] for k, v in batch._asdict().items() if k != "index"}
            )
            with frozen(model):
                pairs = site_gradients(model, one, model.sites)
            first = np.concatenate([(-w * g).sum((0, 1)).numpy() for w, g in pairs])
            expected[:, int(batch.document[row])] += first, first + first**2 / 2
    np.testing.assert_allclose(sums["attribution"], expected[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(sums["fisher"], expected[1], rtol=1e-9, atol=1e-12)


def test_the_parameters_stay_trainable(docs):
    model = tiny("satformer")
    model.embed.weight.requires_grad_(False)
    attribute(model, docs, exact="none", **FAST)
    with pytest.raises(RuntimeError), frozen(model):
        raise RuntimeError
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert not trained.pop("embed.weight")
    assert all(trained.values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer"])
def test_mass_and_cost_are_those_of_other_analyses(docs, name):
    """Mass is that of the sparsity analysis; cost that of one intervention, evaluated."""
    model = tiny(name, n_layers=2)
    found = attribute(model, docs, **FAST)
    table = found.table
    sparsity = satlens.sparsity(model, docs, baseline=False, **FAST)
    if name == "satformer":
        expected = sparsity.table.set_index(["site", "head"])["norm_share"]
        mass = [
            expected[site, head] for site, head in zip(table["site"], table["head"], strict=True)
        ]
    else:
        weights = sparsity.part("route_weights").table
        column = "weight" if name == "rd-attnres" else "norm_share"
        expected = weights.set_index(["site", "source"])[column]
        mass = [expected[key] for key in zip(table["site"], table["source"], strict=True)]
    np.testing.assert_allclose(table["mass"], mass, rtol=1e-9)
    cases, _ = removals(model.sites)
    clean = satlens.evaluate(model, docs, **FAST).summary["nll"]["estimate"]
    for unit in range(0, len(cases), 3):
        with intervene(model, cases[unit].intervention):
            edited = satlens.evaluate(model, docs, **FAST).summary["nll"]["estimate"]
        assert table["dnll"][unit] == pytest.approx(edited - clean, abs=2e-6)
    ranks = found.summary["by_kind"][table["kind"][0]]
    for pair, (x, y) in {
        "mass_dnll": ("mass", "dnll"),
        "fisher_dnll": ("fisher", "dnll"),
        "attribution_dnll": ("attribution", "dnll"),
    }.items():
        expected_rank = scipy_stats.spearmanr(table[x], table[y]).statistic
        assert ranks[pair]["estimate"] == pytest.approx(expected_rank, abs=1e-12)


def test_a_small_gate_costs_what_first_order_says(docs):
    """As the weights shrink, the exact change becomes the first-order one."""
    model = tiny("satformer", value_residual={"kind": "gated", "gate": "identity"})
    for layer in (1, 2):
        model.blocks[layer].attn.values.alpha.weight.data.mul_(1e-3)
    table = attribute(model.double(), docs, **FAST).table
    np.testing.assert_allclose(table["attribution"], table["dnll"], rtol=2e-2)


def test_the_idle_head_has_no_mass_and_no_cost():
    table = attribute(gated(), documents(), **FAST).table
    idle = table[table["head"] == 1].iloc[0]
    assert idle["mass"] == idle["attribution"] == idle["fisher"] == idle["dnll"] == 0
    assert idle["p"] == 1


def test_deciles_and_none(docs):
    model = tiny("rd-attnres")
    whole = attribute(model, docs, **FAST)
    some = attribute(model, docs, exact="deciles", **FAST)
    screen = attribute(model, docs, exact="none", **FAST)
    order = np.argsort(whole.table["fisher"])
    ends = [*order[:2], *order[-2:]]  # of 18 units
    removed = some.table["dnll"].notna()
    assert sorted(np.flatnonzero(removed)) == sorted(ends)
    np.testing.assert_array_equal(some.table["dnll"][removed], whole.table["dnll"][removed])
    assert some.table["flags"][~removed].str.contains("not_removed").all()
    assert some.table["rank_difference"].isna().all()
    assert "mass_dnll" not in some.summary["by_kind"]["route"]
    assert screen.summary["n_removed"] == 0
    assert screen.table["p"].isna().all()
    exact = whole.summary["by_kind"]["route"]["deciles"]["highest"]
    costly = set(np.argsort(whole.table["dnll"])[-2:])
    assert exact["shared"] == len(costly & set(order[-2:]))


def planted_units(mass, dnll, noise=0.01, n_groups=40, seed=0):
    """Units whose masses and costs are given, up to a little noise between documents."""
    rng = np.random.default_rng(seed)
    site = AccessSite(
        hook="h",
        kind="gate",
        layer=1,
        sublayer="attn",
        role="v",
        sources=(),
        per_token=True,
        support="nonnegative",
        base="own",
        n_heads=len(mass),
    )
    cases, _ = removals([site])
    n = np.full(n_groups, 10.0)

    def around(values):
        return n[:, None] * (np.array(values) + noise * rng.normal(size=(n_groups, len(values))))

    every = np.broadcast_to(n[:, None], (n_groups, len(mass)))
    return Measured(
        cases=cases,
        sites=[site] * len(mass),
        mass=around(mass),
        mass_n=every,
        attribution=around(dnll),
        fisher=around(dnll),
        chosen=np.ones(len(mass), dtype=bool),
        dnll=around(dnll),
        n=n,
    )


def test_units_that_disagree():
    """The heaviest costs least and the other way round; the rest are in order."""
    mass, dnll = [0.9, 0.1, 0.3, 0.4, 0.5, 0.6], [0.0, 0.6, 0.2, 0.3, 0.4, 0.5]
    found = planted_units(mass, dnll)
    table, summary = attribution_table(found, 40, "max_t", FAST)
    assert list(table["flags"].str.contains("disagrees")) == [True, True] + [False] * 4
    assert table["rank_difference"][0] == pytest.approx(1.0)
    assert table["rank_difference"][1] == pytest.approx(-1.0)
    assert summary["by_kind"]["gate"]["n_disagree"] == 2
    other, said = attribution_table(found, 40, "benjamini_hochberg", FAST)
    assert said["adjustment"].startswith("Benjamini-Hochberg")
    assert (other["p_adjusted"] <= table["p_adjusted"] + 1e-12).all()


def test_equal_costs_rarely_disagree():
    """Costs that differ by noise alone have some order, which is no disagreement."""
    mass = np.linspace(0.1, 0.9, 16)
    flagged = []
    for seed in range(6):
        table, _ = attribution_table(
            planted_units(mass, [0.0] * 16, noise=0.2, seed=seed), 40, "max_t", {"n_resamples": 299}
        )
        flagged += list(table["flags"].str.contains("disagrees"))
    # 5 % of units seem off the median by chance, some of them far enough.
    assert np.mean(flagged) <= scipy_stats.binom.ppf(0.999, len(flagged), 0.05) / len(flagged)


def test_outer_deciles():
    values = np.arange(30.0)[::-1]
    low, high = outer(values, values < 25)
    assert sorted(values[low]) == [0, 1, 2]
    assert sorted(values[high]) == [22, 23, 24]
    alone = outer(values, values == 7)
    assert [len(part) for part in alone] == [1, 0]


def test_a_removal_without_a_number_is_undefined_and_was_removed():
    found = planted_units([0.9, 0.1, 0.3], [0.0, 0.6, 0.2])
    found.dnll[3, 1] = np.inf
    found.dnll[:, 2] = np.nan
    found.chosen[2] = False
    table, summary = attribution_table(found, 40, "max_t", FAST)
    flags = [set(words.split(";")) for words in table["flags"]]
    assert not flags[0] & {"undefined", "not_removed"}
    assert "undefined" in flags[1]
    assert "not_removed" not in flags[1]
    assert "not_removed" in flags[2]
    assert np.isnan(table["dnll"][1])
    assert summary["n_removed"] == 1


def test_losses_that_are_not_finite_are_refused(docs):
    model = tiny("satformer")
    with torch.no_grad():
        model.ln_final.weight.fill_(np.nan)
    with pytest.raises(AnalysisError, match="attribute: document 'd0': the model's loss is not"):
        attribute(model, docs, exact="none", **FAST)
    with pytest.raises(AnalysisError, match="ablate: document 'd0': the model's loss is not"):
        satlens.ablate(model, docs, kinds="zero", scope="model", **FAST)
    with pytest.raises(AnalysisError, match="evaluation: document 'd0': the loss is not finite"):
        satlens.evaluate(model, docs, **FAST)


def test_refusals(docs):
    with pytest.raises(AnalysisError, match="no access sites"):
        attribute(tiny("transformer"), docs)
    with pytest.raises(AnalysisError, match="exact: 'some' is not one of all, deciles, none"):
        attribute(tiny("satformer"), docs, exact="some")
    with pytest.raises(AnalysisError, match="adjustment: 'holm' is not one of max_t"):
        attribute(tiny("satformer"), docs, adjustment="holm")


def test_continues_where_it_was(docs, tmp_path):
    options = {"batch_size": 3, "resume_dir": tmp_path, **FAST}
    model = tiny("satformer")
    plain = attribute(model, docs, batch_size=3, **FAST)

    def stop(label, done, total):
        if label == "attribution" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attribute(model, docs, progress=stop, **options)
    assert attribute(model, docs, **options).table.equals(plain.table)


def test_first_order_of_a_nearly_certain_route():
    scores = torch.tensor([20.0, 0.0, 1.5])
    weights = scores.softmax(-1)[None, None]
    gradient = torch.tensor([[[0.1, 3.0, -1.0]]])
    others = scores[1:].double().softmax(-1)
    expected = (gradient[0, 0, 1:].double() * others).sum() - (gradient * weights).double().sum()
    assert float(first_order(weights, gradient, True)[0, 0, 0]) == pytest.approx(
        float(expected), rel=1e-6
    )
