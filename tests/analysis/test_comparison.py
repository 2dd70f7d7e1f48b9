"""Paired comparison of trained arms, from run folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planted import documents, tiny
from scipy import stats

import satlens
from satlens.analysis.comparison import compare
from satlens.analysis.curves import curves
from satlens.analysis.evaluation import evaluate
from satlens.analysis.stats import hierarchical_interval, mean_interval
from satlens.config import TrainConfig, to_dict
from satlens.errors import AnalysisError, CheckpointError, ConfigError

FAST = {"n_resamples": 99}


@pytest.fixture(scope="module")
def docs():
    return documents(d_vocab=32)


def run_folder(root, name, seed, train=None, **fields):
    """A finished run as the trainer leaves it."""
    model = tiny(name, seed=seed + 10, **fields)
    folder = root / f"{name}-{seed}"
    folder.mkdir(parents=True)
    record = {
        "format": "satlens-run",
        "version": 1,
        "model": to_dict(model.cfg),
        "train": {**to_dict(TrainConfig()), "seed": seed, **(train or {})},
        "data": {"sha256": "d" * 64, "tokenizer": "t" * 64},
        "evaluation": {"sha256": "e" * 64},
        "device": "cpu",
    }
    (folder / "run.json").write_text(json.dumps(record))
    lines = [
        {"kind": "train", "step": 1, "tokens": 64, "loss": 4.0},
        {"kind": "eval", "step": 1, "tokens": 64, "val_loss": 3.9 + seed},
        {"kind": "eval", "step": 2, "tokens": 128, "val_loss": 3.5 + seed},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    satlens.save(model, folder / "final", training={"config": {"seed": seed}})
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    arms = ("transformer", "satformer", "rd-attnres")
    return {arm: [run_folder(root, arm, seed) for seed in (0, 3, 5)] for arm in arms}


def test_differences_are_those_of_separate_evaluations(runs, docs):
    result = compare(runs, docs, **FAST)
    table = result.table.set_index("first")
    assert table.index.tolist() == ["satformer", "rd-attnres"]
    assert set(table["second"]) == {"transformer"}
    nll = {
        arm: [
            evaluate(satlens.load(folder / "final"), docs, **FAST).summary["nll"]["estimate"]
            for folder in folders
        ]
        for arm, folders in runs.items()
    }
    for arm in table.index:
        expected = np.subtract(nll[arm], nll["transformer"])
        row = table.loc[arm]
        assert [row[f"seed_{k}"] for k in (0, 3, 5)] == pytest.approx(expected, abs=1e-12)
        assert row["difference"] == pytest.approx(expected.mean(), abs=1e-12)
        low, high = stats.t.interval(0.95, 2, expected.mean(), stats.sem(expected))
        assert (row["difference_low"], row["difference_high"]) == pytest.approx((low, high))
        assert np.isnan(row["difference_bca_low"])
        assert (
            row["difference_documents_low"] < row["difference"] < row["difference_documents_high"]
        )
        assert row["n_seeds"] == 3
        assert row["sign_p_min"] == 0.25
        assert "seeds<5" in row["flags"]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    """Two arms over five seeds."""
    root = tmp_path_factory.mktemp("five")
    arms = ("transformer", "satformer")
    return {arm: [run_folder(root, arm, seed, n_layers=2) for seed in range(5)] for arm in arms}


@pytest.fixture(scope="module")
def clustered():
    """Twenty documents of ten authors."""
    drawn = documents(range(5, 25), d_vocab=32)
    return [doc._replace(cluster=f"author {k % 10}") for k, doc in enumerate(drawn)]


@pytest.fixture(scope="module")
def over_five(five, clustered):
    return compare(five, clustered, n_resamples=499, seed=2)


def changes_of(runs, docs):
    """Summed losses (seeds, documents) of the second arm minus the first, and the tokens."""
    tables = {
        arm: [evaluate(satlens.load(f / "final"), docs, **FAST).table for f in folders]
        for arm, folders in runs.items()
    }
    n = tables["transformer"][0]["n_tokens"].to_numpy()
    sums = {arm: np.array([t["nll"] * n for t in found]) for arm, found in tables.items()}
    return sums["satformer"] - sums["transformer"], n


def test_five_seeds_have_every_interval(over_five, five, clustered):
    row = over_five.table.iloc[0]
    changes, n = changes_of(five, clustered)
    seeds = changes.sum(1) / n.sum()
    authors = np.arange(20) % 10
    pooled = [np.bincount(authors, values) for values in (changes.mean(0), n)]
    percentile = stats.bootstrap(
        (seeds,), np.mean, n_resamples=499, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    options = {"n_resamples": 499, "seed": 2}
    expected = {
        "difference": stats.ttest_1samp(seeds, 0).confidence_interval(),
        "difference_percentile": percentile,
        "difference_hierarchical": hierarchical_interval(changes, np.tile(n, (5, 1)), **options),
        "difference_documents": mean_interval(changes.mean(0), n, **options),
        "difference_clusters": mean_interval(*pooled, **options),
    }
    for name, interval in expected.items():
        assert row[name] == pytest.approx(seeds.mean(), abs=1e-12)
        ends = row[f"{name}_low"], row[f"{name}_high"]
        assert ends == pytest.approx((float(interval.low), float(interval.high)), rel=1e-6), name
    assert row["sign_p"] == stats.binomtest(int((seeds > 0).sum()), 5).pvalue
    assert "seeds<5" not in row["flags"]


def test_intervals_name_how_they_were_made(over_five):
    protocols = over_five.summary["intervals"]
    assert protocols["difference"]["method"] == "Student t"
    assert "percentile" in protocols["difference_percentile"]["method"]
    assert protocols["difference_hierarchical"]["covers"] == "other seeds, other documents"
    assert protocols["difference_hierarchical"]["units"] == "seeds and documents"
    assert protocols["difference_clusters"]["units"] == "clusters of documents"
    assert {p["units"] for n, p in protocols.items() if n in ("difference", "difference_bca")} == {
        "seeds"
    }


def test_parameters_that_are_not_matched_are_noted(over_five, five):
    row = over_five.table.iloc[0]
    sizes = [
        satlens.load(five[arm][0] / "final").n_parameters() for arm in ("satformer", "transformer")
    ]
    assert [row["parameters_first"], row["parameters_second"]] == sizes
    more = f"satformer - transformer: the first has {sizes[0] / sizes[1] - 1:.2%} more parameters"
    assert any(note.startswith(more) for note in over_five.notes)


def test_differences_below_the_noise_floor_are_noted(five, clustered, monkeypatch):
    monkeypatch.setattr("satlens.analysis.comparison.NOISE_FLOOR", 1e3)
    result = compare(five, clustered, **FAST)
    assert result.table["flags"].tolist() == ["below_noise_floor"]
    assert any("below the noise floor of about 1000" in note for note in result.notes)


def test_arms_are_compared_along_training(tmp_path, five, clustered):
    arms = {arm: folders[:2] for arm, folders in five.items()}
    late = []
    for seed in range(2):
        folder = run_folder(tmp_path, "satformer", seed, n_layers=2)
        lines = [
            {"kind": "eval", "step": k, "tokens": 64 * k, "val_loss": 4 - k - seed / (k + 1)}
            for k in range(2, 40)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        late.append(folder)
    result = compare({**arms, "satformer": late}, clustered, **FAST)
    part = result.part("comparison_milestones").table
    assert part["tokens"].tolist() == [128]  # the only one that both have logged
    changes = np.array([2.0 - 3.5, 2 - 1 / 3 - 4.5])
    interval = stats.ttest_1samp(changes, 0).confidence_interval()
    row = part.iloc[0]
    assert row["difference"] == pytest.approx(changes.mean())
    assert (row["difference_low"], row["difference_high"]) == pytest.approx(tuple(interval))

    again = compare({"late": late, "late too": late}, clustered, **FAST)
    tokens = again.part("comparison_milestones").table["tokens"]
    assert len(tokens) == 10
    assert (tokens.iloc[0], tokens.iloc[-1]) == (128, 64 * 39)
    assert (again.table["difference_high"] == 0).all()


def test_curves_come_from_the_logs(runs, tmp_path):
    table = curves(runs).table
    assert len(table) == 3 * 3 * 2
    one = table[(table["arm"] == "rd-attnres") & (table["seed"] == 3)]
    assert one["val_loss"].tolist() == [6.9, 6.5]
    assert one["tokens"].tolist() == [64, 128]
    silent = run_folder(tmp_path, "satformer", 0)
    (silent / "metrics.jsonl").unlink()
    with pytest.raises(AnalysisError, match="no run has logged"):
        curves({"satformer": [silent]})


def test_contrasts_can_be_named(runs, docs):
    table = compare(runs, docs, contrasts=[("rd-attnres", "satformer")], **FAST).table
    assert table[["first", "second"]].to_numpy().tolist() == [["rd-attnres", "satformer"]]
    with pytest.raises(AnalysisError, match="no arm 'mamba'"):
        compare(runs, docs, baseline="mamba")
    with pytest.raises(AnalysisError, match="two arms"):
        compare({"transformer": runs["transformer"]}, docs)


def test_undeclared_differences_are_refused(tmp_path, runs, docs):
    faster = run_folder(tmp_path, "satformer", 0, train={"lr": 1e-2})
    arms = {"transformer": runs["transformer"][:1], "satformer": [faster]}
    with pytest.raises(ConfigError, match="lr"):
        compare(arms, docs)
    result = compare(arms, docs, allow=("lr",), **FAST)
    assert len(result.table) == 1
    assert result.summary["declared"] == ["value_residual", "stream", "lr"]


def test_bad_sets_of_runs(tmp_path, runs, docs):
    both = {"transformer": runs["transformer"][:1], "satformer": runs["satformer"][1:2]}
    with pytest.raises(AnalysisError, match="no seed in common"):
        compare(both, docs)
    twice = {**runs, "satformer": [runs["satformer"][0], runs["satformer"][0]]}
    with pytest.raises(AnalysisError, match="share seed 0"):
        compare(twice, docs)
    unfinished = run_folder(tmp_path, "satformer", 0)
    (unfinished / "final").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="not finished"):
        compare({"transformer": runs["transformer"][:1], "satformer": [unfinished]}, docs)


def test_no_resamples_are_refused_before_any_run_is_opened():
    with pytest.raises(AnalysisError, match="n_resamples: must be at least 1, got 0"):
        compare({"a": ["absent"], "b": ["absent"]}, "sotu", n_resamples=0)
