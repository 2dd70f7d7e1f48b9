"""Drivers against least squares with pandas and numpy in fp64, planted models, and closed forms."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from planted import documents, gated, tags_of, tiny

from satlens.analysis.categories import categories
from satlens.analysis.engine.coding import position_bands
from satlens.analysis.engine.inputs import open_windows
from satlens.analysis.engine.reference import halves
from satlens.analysis.result import Result
from satlens.analysis.tokens.drivers import DRIVERS
from satlens.analysis.tokens.effects import (
    joint_effects,
    level_counts,
    shrunk_effects,
    variance_ratio,
)
from satlens.data.prepare import prepare
from satlens.data.tags import tag_documents

FAST = {"n_resamples": 99}
FACTORS = list(DRIVERS[:-1])


# -- least squares by hand -------------------------------------------------------------------------


@torch.no_grad()
def recorded(model, windows, tags):
    """A row a counted token: its factors, its document, and the value of every cell."""
    names = position_bands(windows).names
    starts = [int(name.removeprefix("position ").split("..")[0]) for name in names]
    tables, n_ctx = [], windows.n_ctx
    for k, (document, tagged) in enumerate(zip(windows.documents, tags.documents, strict=True)):
        ids = document.tokens
        for start in range(0, len(ids) - 1, n_ctx):
            piece = ids[start : start + n_ctx + 1][:-1]
            _, cache = model.run_with_cache(torch.from_numpy(piece.astype(np.int64))[None])
            values = [
                cache[site.hook][0].double() if site.kind == "gate" else cache[site.hook][0, :, :1]
                for site in model.sites
            ]
            rows = pd.DataFrame(torch.cat(values, 1).double().numpy())
            rows["document"] = k
            rows["token"] = piece
            rows["previous_token"] = np.append(-1, piece[:-1])
            rows["category"] = tagged.category[start : start + len(piece)]
            place = np.arange(len(piece))
            rows["position"] = np.searchsorted(starts, place, side="right")
            tables.append(rows[1:][~np.isin(piece[1:], list(windows.special_ids))])
    return pd.concat(tables, ignore_index=True)


def one_way(fitted, factor, cell):
    """Variance ratio of a one-way layout from its residuals, in the textbook's terms."""
    y = fitted[cell] - fitted[cell].mean()
    groups = y.groupby(fitted[factor])
    size, n = len(y), groups.size()
    within = ((y - groups.transform("mean")) ** 2).sum() / (size - len(n))
    between = (n * groups.mean() ** 2).sum()
    spread = (between - (len(n) - 1) * within) / (size - (n**2).sum() / size)
    return max(spread, 0.0) / max(within, 1e-6 * (y**2).mean())


def predictions(fitted, measured, cell):
    """Of each driver: shrunk group means, and ridge regression on the dummies of all factors."""
    mean = fitted[cell].mean()
    y = (fitted[cell] - mean).to_numpy()
    found, blocks, new_blocks, penalties = {}, [], [], []
    for factor in FACTORS:
        ratio = one_way(fitted, factor, cell)
        groups = (fitted[cell] - mean).groupby(fitted[factor])
        n = groups.size()
        effect = groups.mean() * n * ratio / (n * ratio + 1)
        found[factor] = mean + measured[factor].map(effect).fillna(0.0)
        if ratio > 0:
            levels = effect.index
            blocks.append(np.equal.outer(fitted[factor].to_numpy(), levels).astype(float))
            new_blocks.append(np.equal.outer(measured[factor].to_numpy(), levels).astype(float))
            penalties += [1 / ratio] * len(levels)
    found["all"] = np.full(len(measured), mean)
    if blocks:
        design = np.concatenate(blocks, axis=1)
        effects = np.linalg.solve(design.T @ design + np.diag(penalties), design.T @ y)
        found["all"] = mean + np.concatenate(new_blocks, axis=1) @ effects
    return mean, found


def explained(pairs, cell):
    """R2 of each driver over (fitted on, measured) pairs, about the fitted means."""
    null, left = 0.0, dict.fromkeys(DRIVERS, 0.0)
    for fitted, measured in pairs:
        mean, found = predictions(fitted, measured, cell)
        null += ((measured[cell] - mean) ** 2).sum()
        for driver in DRIVERS:
            left[driver] += ((measured[cell] - found[driver]) ** 2).sum()
    return {driver: 1 - left[driver] / null for driver in DRIVERS}


def cell_numbers(model):
    """(site name, head or None) -> column of the recorded values."""
    gates = [s for s in model.sites if s.kind == "gate"]
    cells = [(s.name, h) for s in gates for h in range(s.n_heads)]
    cells += [(s.name, None) for s in model.sites if s.kind == "route"]
    order = [
        (s.name, h) for s in model.sites for h in (range(s.n_heads) if s.kind == "gate" else [None])
    ]
    return {cell: order.index(cell) for cell in cells}


def check(model, table, pairs):
    for (site, head), column in cell_numbers(model).items():
        rows = table[table["site"] == site]
        rows = (rows if head is None else rows[rows["head"] == head]).set_index("driver")
        if rows["flags"].str.contains("undefined").all():
            assert pairs[0][1][column].nunique() == 1
            continue
        for driver, expected in explained(pairs, column).items():
            assert rows["r2"][driver] == pytest.approx(expected, rel=1e-6, abs=1e-7), (site, driver)


def test_halves_of_ragged_documents_against_least_squares():
    docs = documents(lengths=(90, 23, 9, 131, 64, 12, 150, 17, 33, 128), d_vocab=32)
    model, tags = tiny("rd-attnres", value_residual="satformer"), tags_of(docs)
    result = categories(model, docs, tags=tags, **FAST)
    rows = recorded(model, open_windows(model, docs), tags)
    even = rows["document"] % 2 == 0
    part = result.part("categories_drivers")
    check(model, part.table, [(rows[even], rows[~even]), (rows[~even], rows[even])])
    assert set(part.table["n_tokens"]) == {len(rows)}
    assert part.summary["fitted_on"] == "the other half of the documents"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    rng = np.random.default_rng(0)
    words = "the a of river stone and light under cold moves is dark it green old".split()
    folder = tmp_path_factory.mktemp("drivers")
    lines = [
        json.dumps({"text": " ".join(rng.choice(words, size=rng.integers(60, 160))) + "."})
        for _ in range(60)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    return prepare(folder / "corpus.jsonl", folder / "prepared", vocab_size=290)


def test_a_pool_against_least_squares(prepared, tmp_path):
    model = tiny("satformer", d_vocab=prepared.vocab_size)
    options = {"tagger": "wordlist", "cache_dir": tmp_path, **FAST}
    result = categories(model, prepared, max_tokens_per_document=50, **options)
    rows = {}
    for split in ("pool", "test"):
        windows = open_windows(model, prepared, split=split, max_tokens_per_document=50)
        tags = tag_documents(
            windows.documents, prepared.tokenizer, tagger="wordlist", cache_dir=tmp_path
        )
        rows[split] = recorded(model, windows, tags)
    part = result.part("categories_drivers")
    check(model, part.table, [(rows["pool"], rows["test"])])
    pool = part.provenance["data"]["pool"]
    assert pool["split"] == "pool" and pool["max_tokens_per_document"] == 50
    assert part.summary["fitted_on"] == "the pool"
    assert "pool" not in result.provenance["data"]
    unseen = ~rows["test"]["token"].isin(rows["pool"]["token"])
    assert part.summary["unseen"]["token"] == pytest.approx(unseen.mean())
    part.save(tmp_path, figures=False)
    assert Result.load(tmp_path, "categories_drivers").table.equals(part.table)


# -- planted ---------------------------------------------------------------------------------------


def test_a_gate_that_opens_on_one_class_is_explained_by_it():
    docs = documents(lengths=(200,) * 12)
    result = categories(gated(), docs, tags=tags_of(docs), **FAST)
    table = result.part("categories_drivers").table.set_index(["head", "driver"])
    for driver in ("token", "category", "all"):
        assert table["r2"][0, driver] == pytest.approx(1, abs=1e-9)
    for driver in ("previous_token", "position"):
        assert table["r2"][0, driver] == pytest.approx(0, abs=0.01)
        assert table["r2_low"][0, driver] < 0.01
    assert table.loc[1]["r2"].isna().all()
    assert set(table.loc[1]["flags"]) == {"undefined"}
    pooled = result.summary["drivers"]["pooled"]["gate"]
    assert pooled["category"]["estimate"] == pytest.approx(1, abs=1e-9)


def test_ids_that_were_not_fitted_on_get_the_mean():
    """Each half of the documents has ids of its own, all of one class: nothing carries over."""
    docs = documents(lengths=(40,) * 8)
    docs = [d._replace(tokens=d.tokens // 4 * 2 + 8 * (k % 2)) for k, d in enumerate(docs)]
    model = tiny("satformer", d_vocab=16)
    part = categories(model, docs, tags=tags_of(docs), **FAST).part("categories_drivers")
    assert part.summary["unseen"]["token"] == 1
    for driver in ("token", "previous_token", "category"):
        assert (part.table.query(f"driver == '{driver}'")["r2"] == 0).all()


def test_a_single_document_without_a_pool_has_no_drivers():
    docs = documents(lengths=(50,))
    result = categories(gated(), docs, tags=tags_of(docs), **FAST)
    assert "categories_drivers" not in [part.name for part in result.parts]
    assert any("at least two documents" in note for note in result.notes)
    without = categories(gated(), docs, tags=tags_of(docs), drivers=False, **FAST)
    assert not any("rivers" in note for note in without.notes)


def test_works_are_not_divided():
    docs = [
        d._replace(cluster=f"work {k // 3}") for k, d in enumerate(documents(lengths=(20,) * 9))
    ]
    assert halves(open_windows(gated(), docs)).tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    one = [d._replace(cluster="work") for d in docs]
    assert halves(open_windows(gated(), one)).tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0]


# -- effects ---------------------------------------------------------------------------------------


def test_variances_of_a_random_effects_model_are_recovered():
    rng = np.random.default_rng(0)
    n = rng.integers(2, 60, size=400)
    level = np.repeat(np.arange(400), n)
    effect, noise = rng.normal(0, 0.5, 400), rng.normal(0, 1.0, n.sum())
    y = effect[level] + noise
    y -= y.mean()
    total = np.bincount(level, y)[:, None]
    ratio = variance_ratio(total, n.astype(float), np.array([(y**2).sum()]))
    assert ratio[0] == pytest.approx(0.25, rel=0.15)
    shrunk = shrunk_effects(total, n.astype(float), ratio)[:, 0]
    assert np.mean((shrunk - effect) ** 2) < 0.9 * np.mean((total[:, 0] / n - effect) ** 2)


def test_levels_that_say_nothing_explain_nothing():
    """A thousand levels of about three tokens would cost plain means a third of the variance."""
    rng = np.random.default_rng(1)
    level, y = rng.integers(0, 1000, 3000), rng.normal(size=3000)
    y -= y.mean()
    n = np.bincount(level, minlength=1000).astype(float)
    total = np.bincount(level, y, 1000)[:, None]
    ratio = variance_ratio(total, n, np.array([(y**2).sum()]))
    new_level, new = rng.integers(0, 1000, 3000), rng.normal(size=3000)
    predicted = shrunk_effects(total, n, ratio)[new_level, 0]
    assert 1 - ((new - predicted) ** 2).sum() / (new**2).sum() > -0.01
    plain = (total[:, 0] / np.maximum(n, 1))[new_level]
    assert 1 - ((new - plain) ** 2).sum() / (new**2).sum() < -0.2


def test_joint_effects_without_shrinkage_are_least_squares():
    rng = np.random.default_rng(2)
    codes = np.stack([rng.integers(0, 7, 300), 7 + rng.integers(0, 4, 300)], axis=1)
    y = rng.normal(size=(300, 3)) + codes[:, :1] * 0.3
    y -= y.mean(axis=0)
    design = np.zeros((300, 11))
    np.put_along_axis(design, codes, 1.0, axis=1)
    counts = level_counts([codes[:100], codes[100:]], 11)
    np.testing.assert_array_equal(counts.toarray(), design.T @ design)
    effects = joint_effects(counts, design.T @ y, np.full((11, 3), 1e8))
    expected = design @ np.linalg.lstsq(design, y, rcond=None)[0]
    np.testing.assert_allclose(design @ effects, expected, atol=1e-7)
