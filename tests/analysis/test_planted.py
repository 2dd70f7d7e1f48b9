"""The analyses give back what was planted: the closed form, and a null where nothing is."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planted import GATE, PULL, bigram, documents, gated, routed, tags_of, token_class
from scipy.spatial.distance import jensenshannon

from satlens.analysis.categories import categories
from satlens.analysis.divergence import divergence
from satlens.analysis.evaluation import evaluate
from satlens.analysis.sparsity import sparsity

FAST = {"n_resamples": 2000}


def counted_classes(docs, n_ctx):
    """Classes of the input tokens that count: not the first of a window, not the last token."""
    return [token_class(d.tokens[:-1])[np.arange(len(d.tokens) - 1) % n_ctx != 0] for d in docs]


@pytest.fixture(scope="module")
def docs():
    return documents()


def test_planted_gate_has_its_closed_form_sparsity(docs):
    model = gated()
    table = sparsity(model, docs, **FAST).table.set_index("head")
    share = np.mean(np.concatenate(counted_classes(docs, 16)) == 0)

    assert table["zero_fraction"][0] == pytest.approx(1 - share, abs=1e-12)
    assert table["open_fraction"][0] == pytest.approx(share, abs=1e-12)
    assert table["mean"][0] == pytest.approx(GATE * share, rel=1e-6)
    assert table["mean_open"][0] == pytest.approx(GATE, rel=1e-6)
    assert table["below_0.1"][0] == table["zero_fraction"][0]
    assert table["norm_share"][0] == pytest.approx(share * GATE * 3 / (GATE * 3 + 4), rel=1e-6)
    assert table["p95"][0] == pytest.approx(GATE, rel=0.024)  # the width of a histogram bin
    n = len(np.concatenate(counted_classes(docs, 16)))
    hoyer = (math.sqrt(n) - math.sqrt(share * n)) / (math.sqrt(n) - 1)
    assert table["hoyer"][0] == pytest.approx(hoyer, rel=1e-9)


def test_idle_head_is_dead(docs):
    result = sparsity(gated(), docs, **FAST)
    table = result.table.set_index("head")
    assert bool(table["dead"][1])
    assert not bool(table["dead"][0])
    assert table["zero_fraction"][1] == 1
    assert table["mean"][1] == 0
    assert np.isnan(table["mean_open"][1])
    assert table["norm_share"][1] == 0
    assert "dead" in table["flags"][1].split(";")
    assert result.summary["gates"]["dead_heads"] == [[1, 1]]
    assert 0.2 < table["zero_fraction_init"][1] < 0.8


def test_planted_contrast_and_the_null_of_the_idle_head(docs):
    result = categories(gated(), docs, tags=tags_of(docs), **FAST)
    contrasts = result.part("categories_contrasts").table.set_index("head")
    for suffix in ("", "_controlled"):
        assert contrasts[f"delta{suffix}"][0] == pytest.approx(GATE, rel=1e-6)
        assert contrasts[f"delta_document{suffix}"][0] == pytest.approx(GATE, rel=1e-6)
        # Of all sign patterns only the observed one and its mirror image are as extreme.
        assert contrasts[f"p{suffix}_adjusted"][0] == contrasts[f"p{suffix}_min"][0]
        assert contrasts[f"delta{suffix}"][1] == 0
        assert contrasts[f"p{suffix}"][1] == 1
        assert contrasts[f"p{suffix}_adjusted"][1] == 1
    assert contrasts["p_min"][0] == 2 / 2**10
    assert contrasts["cliffs_delta"].tolist() == [1, 0]

    means = result.table.set_index(["head", "category"])
    assert means["mean"][0, "semantic"] == pytest.approx(GATE, rel=1e-6)
    assert means["open_fraction"][0, "semantic"] == 1
    assert means["mean"][0, "functional"] == 0
    assert means["mean"][1, "semantic"] == 0


def test_category_counts_conserve(docs):
    result = categories(gated(), docs, tags=tags_of(docs), **FAST)
    counted = np.concatenate(counted_classes(docs, 16))
    tokens = result.summary["tokens"]
    assert tokens["semantic"]["n"] == np.sum(counted == 0)
    assert tokens["functional"]["n"] == np.sum(counted == 1)
    assert tokens["structural"]["n"] == tokens["none"]["n"] == 0
    for row in tokens.values():
        assert row["first"] + row["continuation"] == row["n"]


def test_shuffled_labels_give_a_null_at_the_nominal_rate():
    """Classes drawn at random, 40 times: p below 0.1 about one time in ten."""
    docs = documents(lengths=(60,) * 12)
    model = gated()
    rng = np.random.default_rng(3)
    rejected = 0
    for _ in range(40):
        tags = tags_of([d._replace(tokens=rng.integers(0, 16, len(d.tokens))) for d in docs])
        contrast = categories(model, docs, tags=tags, drivers=False, n_resamples=200)
        table = contrast.part("categories_contrasts").table.set_index("head")
        rejected += table["p"][0] < 0.1
    assert rejected <= 10  # Binomial(40, 0.1) exceeds 10 once in a thousand


def test_planted_divergence(docs):
    result = divergence(routed(), docs, **FAST)
    table = result.table.set_index("layer")
    share = np.mean(np.concatenate(counted_classes(docs, 16)) == 0)
    up = 1 / (1 + math.exp(-PULL))
    uniform, pulled = [0.5, 0.5], [up, 1 - up]
    mean = [share * a + (1 - share) * b for a, b in zip(pulled, uniform, strict=True)]

    token = share * jensenshannon(uniform, pulled) ** 2
    assert table["js_token"][1] == pytest.approx(token, rel=1e-5)
    assert table["js_mean"][1] == pytest.approx(jensenshannon(uniform, mean) ** 2, rel=1e-5)
    assert table["js_mean"][1] <= table["js_token"][1]
    assert table["js_token"][0] == table["js_mean"][0] == 0
    assert "single_source" in table["flags"][0]
    assert result.summary["js_token"]["estimate"] == pytest.approx(token, rel=1e-5)
    assert table["js_token_init"][1] == table["js_mean_init"][1] == 0
    bits = divergence(routed(), docs, base=2, **FAST).table.set_index("layer")
    assert bits["js_token"][1] == pytest.approx(token / math.log(2), rel=1e-5)
    assert bits["base"][1] == "2"


def test_the_unit_and_the_bound_of_a_divergence_follow_its_base(docs):
    for base, unit, bound in ((None, "nats", "0.693"), (2, "bits", "1.000")):
        found = divergence(routed(), docs, base=base, **FAST)
        assert found.summary["unit"] == unit
        assert found.summary["ceiling"] == pytest.approx(float(bound), abs=5e-4)
        assert any(f"at most log 2 = {bound} {unit}" in note for note in found.notes)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 64])
def test_planted_bigram_perplexity(docs, batch_size):
    model, log_p = bigram()
    result = evaluate(model, docs, batch_size=batch_size, **FAST)
    each = [-log_p[d.tokens[:-1], d.tokens[1:]].mean() for d in docs]
    total = sum(-log_p[d.tokens[:-1], d.tokens[1:]].sum() for d in docs)
    n = sum(len(d.tokens) - 1 for d in docs)
    assert result.table["nll"].tolist() == pytest.approx(each, rel=1e-5)
    assert result.summary["nll"]["estimate"] == pytest.approx(total / n, rel=1e-6)
    assert result.summary["perplexity"]["estimate"] == pytest.approx(math.exp(total / n), rel=1e-5)
    assert result.table["n_tokens"].tolist() == [len(d.tokens) - 1 for d in docs]


def test_planted_bigram_perplexity_with_padded_rows_and_clusters(docs):
    """Clusters get an interval of their own; a tensor of rows is data too."""
    model, log_p = bigram()
    tokens = torch.randint(0, 16, (9, 21), generator=torch.Generator().manual_seed(1))
    result = evaluate(model, tokens, **FAST)
    rows = tokens.numpy()
    expected = -log_p[rows[:, :-1], rows[:, 1:]].mean()
    assert result.summary["nll"]["estimate"] == pytest.approx(expected, rel=1e-6)
    works = [d._replace(cluster=f"work {k % 9}") for k, d in enumerate(docs)]
    clustered = evaluate(model, works, **FAST).summary
    assert clustered["n_clusters"] == 9
    assert clustered["nll_over_clusters"]["low"] < clustered["nll_over_clusters"]["high"]
