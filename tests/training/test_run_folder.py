from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import torch
from small_runs import BreakAt, BrokenOffError, model_config, train_config

import satlens
from satlens.data.dataset import PreparedDataset
from satlens.errors import CheckpointError, ConfigError, DataError
from satlens.models.decoder import Decoder
from satlens.training import describe, train
from satlens.training.run_folder import RunFolder


@pytest.fixture(scope="module")
def finished(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    cfg = train_config(12, milestones=(0, 1000))
    train(model_config(), cfg, dataset, out, progress="none", device="cpu")
    return out


def test_a_finished_run_returns_at_once(finished: Path, dataset: PreparedDataset) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("[!.]*")}
    follower, start = BreakAt(), time.perf_counter()
    cfg = train_config(12, milestones=(0, 1000))
    final = train(model_config(), cfg, dataset, finished, progress=follower, device="cpu")
    assert final == finished / "final"
    assert follower.first is None
    assert time.perf_counter() - start < 1
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("[!.]*")} == before


def test_what_a_finished_run_consists_of(finished: Path) -> None:
    names = {str(path.relative_to(finished)) for path in finished.iterdir()}
    assert names == {
        str(Path(n))
        for n in (".lock", "run.json", "metrics.jsonl", "timing.jsonl", "milestones", "final")
    } | {"finished.json"}
    outcome = json.loads((finished / "finished.json").read_text())
    assert outcome["steps"] == 12
    assert outcome["tokens"] == 12 * 6 * 32
    assert outcome["unchanged_parameters"] == []
    timing = [json.loads(line) for line in (finished / "timing.jsonl").read_text().splitlines()]
    assert [line["step"] for line in timing] == [3, 6, 9, 12]
    assert all(line["tokens_per_second"] > 0 for line in timing)


def test_milestones_and_the_final_checkpoint_load(finished: Path, dataset: PreparedDataset) -> None:
    # 1000 tokens are reached by the sixth step of 192.
    steps = {}
    for name in ("milestones/0", "milestones/1000", "final"):
        model = satlens.load(finished / name)
        training = json.loads((finished / name / "training.json").read_text())
        steps[name] = training["steps"]
        assert training["data"] == {"sha256": dataset.sha256, "tokenizer": dataset.fingerprint}
        if name == "milestones/0":
            start = dict(Decoder(model_config(), seed=0).named_parameters())
            for parameter, value in model.named_parameters():
                assert torch.equal(value, start[parameter])
    assert steps == {"milestones/0": 0, "milestones/1000": 6, "final": 12}


def test_dead_parameters_are_named(dataset: PreparedDataset, tmp_path: Path) -> None:
    """The first attention read of a depth stream has one source: its query gets no gradient."""
    train(model_config("attnres"), train_config(3), dataset, tmp_path / "run", progress="none")
    outcome = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert "blocks.0.attn_read.query" in outcome["unchanged_parameters"]
    assert not any("mlp" in name for name in outcome["unchanged_parameters"])


@pytest.mark.parametrize(
    ("model", "recipe", "field"),
    [
        ({}, {"lr": 1e-3}, r"train\.lr: this run has 0\.003, not 0\.001"),
        ({"gate": "tanh"}, {}, r"model\.value_residual\.gate: this run has 'relu', not 'tanh'"),
        ({}, {"seed": 1}, r"train\.seed: this run has 0, not 1"),
        ({"n_layers": 2}, {}, r"model\.n_layers: this run has 3, not 2"),
    ],
)
def test_other_arguments_are_refused_by_field(
    finished: Path, dataset: PreparedDataset, model: dict, recipe: dict, field: str
) -> None:
    cfg = train_config(12, milestones=(0, 1000), **recipe)
    with pytest.raises(ConfigError, match=rf"run\.json: {field}") as caught:
        train(model_config(**model), cfg, dataset, finished, progress="none", device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["final/model.safetensors", "metrics.jsonl", "milestones/0"])
def test_an_altered_output_is_made_again(
    dataset: PreparedDataset, tmp_path: Path, name: str
) -> None:
    cfg, out = train_config(6, milestones=(0,)), tmp_path / "run"
    train(model_config(), cfg, dataset, out, progress="none", device="cpu")
    outcome = (out / "finished.json").read_bytes()
    if (out / name).is_dir():
        (out / name / "config.json").unlink()
    else:
        (out / name).write_bytes((out / name).read_bytes()[:-1])
    follower = BreakAt()
    train(model_config(), cfg, dataset, out, progress=follower, device="cpu")
    assert follower.first == 0
    assert "missing or changed since the run ended" in follower.notes[0]
    assert (out / "finished.json").read_bytes() == outcome


def test_two_writers_are_refused_and_a_dead_one_is_not_in_the_way(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    with folder.locked():
        with pytest.raises(CheckpointError, match=r"process \d+ is writing this run") as caught:
            train(model_config(), train_config(3), dataset, folder.path, progress="none")
        assert "\n" not in str(caught.value)
    # The file of a process that died stays, the lock does not.
    (folder.path / ".lock").write_text("999999999\n")
    train(model_config(), train_config(3), dataset, folder.path, progress="none")


def test_foreign_outputs_are_left_alone(dataset: PreparedDataset, tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match=r"final: exists without run\.json"):
        train(model_config(), train_config(3), dataset, tmp_path, progress="none")
    assert (tmp_path / "final" / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ('{"format": "other"}', "format: "),
        ('{"format": "satlens-run", "version": 2}', "version: 2, this satlens reads 1"),
    ],
)
def test_a_damaged_run_file_is_named(
    dataset: PreparedDataset, tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=rf"run\.json: {reason}"):
        train(model_config(), train_config(3), dataset, tmp_path, progress="none")


def test_a_place_that_cannot_be_written_is_one_line(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written") as caught:
        train(model_config(), train_config(3), dataset, tmp_path / "file" / "run", progress="none")
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_refused_before_anything_is_written(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError, match=r"vocab_size: \d+ exceeds the model's d_vocab=64"):
        train(model_config(d_vocab=64), train_config(3), dataset, out, progress="none")
    with pytest.raises(ConfigError, match="tokens: 100 is less than one step of 192"):
        train(model_config(), train_config(tokens=100), dataset, out, progress="none")
    with pytest.raises(ConfigError, match="progress: unknown kind 'fancy'"):
        train(model_config(), train_config(3), dataset, out, progress="fancy")  # type: ignore[arg-type]
    assert not out.exists()


def test_a_dry_run_counts(dataset: PreparedDataset) -> None:
    facts = describe(model_config(), train_config(tokens=1000))
    n_parameters = Decoder(model_config()).n_parameters()
    assert facts["n_steps"] == 5
    assert facts["tokens"] == 960
    assert facts["n_parameters"] == n_parameters
    assert facts["state_bytes"] == 16 * n_parameters


def test_lines_and_bar_report_progress(
    dataset: PreparedDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(model_config(), train_config(6), dataset, tmp_path / "a", progress="auto")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("a: step 6/6 loss ")
    assert "val_loss" in captured.err
    train(model_config(), train_config(6), dataset, tmp_path / "b", progress="bar")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "6/6" in captured.err


def test_going_on_with_other_code_is_said(dataset: PreparedDataset, tmp_path: Path) -> None:
    with pytest.raises(BrokenOffError):
        train(model_config(), train_config(9), dataset, tmp_path, progress=BreakAt(6))
    record = json.loads((tmp_path / "run.json").read_text())
    record["environment"]["code_sha256"] = "0" * 64
    (tmp_path / "run.json").write_text(json.dumps(record))
    follower = BreakAt()
    train(model_config(), train_config(9), dataset, tmp_path, progress=follower)
    assert follower.first == 5
    assert follower.notes == [
        f"{tmp_path}: code_sha256 changed since this run began: it goes on, but not to the bit"
    ]


def test_settings_of_the_process_are_restored(dataset: PreparedDataset, tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threads = torch.get_num_threads()
    with pytest.raises(BrokenOffError):
        train(model_config(), train_config(3, n_threads=2), dataset, tmp_path, progress=BreakAt(1))
    assert torch.get_num_threads() == threads
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
