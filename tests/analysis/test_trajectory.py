"""Along training: each checkpoint's rows are those of the analysis run on it."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import satlens
from satlens.analysis.result import Result
from satlens.cli import main
from satlens.config import TrainConfig
from satlens.errors import AnalysisError, CheckpointError
from satlens.models.presets import config_for

SHAPE = {"n_layers": 3, "d_model": 16, "n_heads": 4, "n_key_value_heads": 2, "n_ctx": 16}
FAST = {"n_resamples": 99}
TOKENS = 12 * 64


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    words = "the red fox saw a blue bird and ran over old hills to rest".split()
    generator = np.random.default_rng(1)
    with (folder / "corpus.jsonl").open("w") as stream:
        for k in range(60):
            text = " ".join(generator.choice(words, generator.integers(20, 80)))
            stream.write(json.dumps({"id": f"d{k:02}", "text": text}) + "\n")
    return satlens.prepare(folder / "corpus.jsonl", folder / "prepared", vocab_size=300)


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """12 steps of 64 tokens; checkpoints at 0, 320 (the first step past 300) and 768 tokens."""
    out = tmp_path_factory.mktemp("run") / "satformer"
    cfg = TrainConfig(
        tokens=TOKENS,
        batch_size=4,
        precision="fp32",
        eval_tokens=64,
        milestones=(0, 300),
        seed=3,
        n_threads=1,
    )
    model = config_for("satformer", d_vocab=data.vocab_size, **SHAPE)
    satlens.train(model, cfg, data, out, progress="none", device="cpu")
    return out


@pytest.fixture(scope="module")
def along(run, data):
    return satlens.trajectory(run, data, ("sparsity", "routes", "evaluation"), **FAST)


@pytest.mark.parametrize(
    ("tokens", "place"), [(0, "milestones/0"), (320, "milestones/300"), (TOKENS, "final")]
)
def test_rows_of_a_checkpoint_are_those_of_its_analyses(run, data, along, tokens, place):
    model = satlens.load(run / place)
    alone = {
        "sparsity": satlens.sparsity(model, data, baseline=False, **FAST),
        "routes": satlens.routes(model, data, baseline=False, **FAST),
        "evaluation": satlens.evaluate(model, data, **FAST),
    }
    for name, result in along.items():
        assert result.summary["tokens_seen"] == [0, 320, TOKENS]
        assert result.summary["checkpoints"][str(tokens)] == alone[name].summary
        for stacked, one in zip(
            (result, *result.parts), (alone[name], *alone[name].parts), strict=True
        ):
            assert stacked.name == f"trajectory_{one.name}"
            rows = stacked.table[stacked.table["tokens_seen"] == tokens]
            rows = rows.drop(columns="tokens_seen").reset_index(drop=True)
            assert rows[list(one.table)].equals(one.table)
            assert set(rows) == set(one.table)
    kept = along["sparsity"].provenance["milestones"]
    assert [m["tokens_seen"] for m in kept] == [0, 320, TOKENS]
    assert len({m["weights_sha256"] for m in kept}) == 3


def copied(run, place, *, without=()):
    shutil.copytree(run, place)
    for name in without:
        shutil.rmtree(place / name)
    return place


def test_the_untrained_model_is_drawn_where_the_run_did_not_keep_it(run, data, along, tmp_path):
    shorter = copied(run, tmp_path / "run", without=("milestones/0",))
    shutil.copytree(shorter / "final", shorter / "milestones" / str(TOKENS))  # not a second time
    found = satlens.trajectory(shorter, data, ("sparsity",), **FAST)["sparsity"]
    assert found.table.equals(along["sparsity"].table)


def test_a_run_that_still_trains_and_one_without_checkpoints(run, data, tmp_path):
    training = copied(run, tmp_path / "training", without=("final",))
    found = satlens.trajectory(training, data, ("evaluation",), **FAST)["evaluation"]
    assert found.summary["tokens_seen"] == [0, 320]
    started = copied(run, tmp_path / "started", without=("final", "milestones"))
    with pytest.raises(AnalysisError, match="started: no milestone and no final checkpoint"):
        satlens.trajectory(started, data, **FAST)
    with pytest.raises(CheckpointError, match=r"run\.json"):
        satlens.trajectory(run / "final", data, **FAST)


def test_it_resumes_checkpoint_by_checkpoint(run, data, along, tmp_path):
    def followed(progress):
        options = {**FAST, "resume_dir": tmp_path, "progress": progress}
        return satlens.trajectory(run, data, ("sparsity",), **options)["sparsity"]

    class KilledError(Exception):
        pass

    def kill(label, done, total):
        if label == "analyze at 320 tokens":
            raise KilledError

    with pytest.raises(KilledError):
        followed(kill)
    steps = []
    assert followed(lambda *step: steps.append(step)).table.equals(along["sparsity"].table)
    starts = {label: done for label, done, _ in reversed(steps)}
    totals = {label: total for label, _, total in steps}
    assert starts["analyze at 0 tokens"] == totals["analyze at 0 tokens"] > 0
    assert starts["analyze at 320 tokens"] == 0


def test_files_and_figures_come_back(along, tmp_path):
    for name, result in along.items():
        result.save(tmp_path)
        again = Result.load(tmp_path, f"trajectory_{name}")
        assert again.table.equals(result.table)
        assert "tokens_seen" in again.key_columns
        assert (tmp_path / f"trajectory_{name}.png").stat().st_size > 5_000


@pytest.mark.parametrize("place", ["run", "checkpoint"])
def test_the_command_writes_what_python_gives(run, data, place, tmp_path, monkeypatch, capsys):
    of_run = place == "run"
    arguments = [str(run), "--trajectory"] if of_run else [str(run / "final")]
    arguments += ["--data", str(data.path), "--only", "sparsity", "--only", "evaluation"]
    arguments += ["--out", str(tmp_path), "--json"]
    monkeypatch.setattr("sys.argv", ["satlens", "analyze", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    summaries = json.loads(capsys.readouterr().out)
    names = ("sparsity", "evaluation")
    expected = (
        satlens.trajectory(run, data, names)
        if of_run
        else satlens.analyze(satlens.load(run / "final"), data, names)
    )
    for name, result in expected.items():
        saved = Result.load(tmp_path, result.name)
        assert saved.table.equals(result.table)
        assert summaries[name] == saved.summary == result.summary
