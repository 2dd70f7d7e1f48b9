"""Paired comparison of trained arms, from run folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from planted import documents, tiny
from scipy import stats

import satlens
from satlens.analysis.comparison import compare, curves
from satlens.analysis.evaluation import evaluate
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
    assert len(compare(arms, docs, allow=("lr",), **FAST).table) == 1


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
