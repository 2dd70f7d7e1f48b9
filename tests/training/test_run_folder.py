from __future__ import annotations

import json
import multiprocessing
import os
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
def test_an_altered_output_is_named_and_nothing_is_removed(
    dataset: PreparedDataset, tmp_path: Path, name: str
) -> None:
    """The other files of a finished run may be a month of work."""
    cfg, out = train_config(6, milestones=(0,)), tmp_path / "run"
    train(model_config(), cfg, dataset, out, progress="none", device="cpu")
    if (out / name).is_dir():
        (out / name / "config.json").unlink()
    else:
        (out / name).write_bytes((out / name).read_bytes()[:-1])
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    with pytest.raises(CheckpointError, match=f"{name}.*missing or changed since the run ended"):
        train(model_config(), cfg, dataset, out, progress="none", device="cpu")
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before


class MoveAt(BreakAt):
    """A follower that moves the run's folder away when a step is finished."""

    def __init__(self, step: int, out: Path) -> None:
        super().__init__()
        self.at, self.out = step, out

    def update(self, done: int, fields: dict[str, float] | None = None) -> None:
        if done == self.at:
            self.out.rename(self.out.with_name("moved"))


def test_a_run_whose_folder_is_moved_says_so(dataset: PreparedDataset, tmp_path: Path) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"
    follower = MoveAt(6, out)
    with pytest.raises(CheckpointError, match=r"run.*: was moved or removed while"):
        train(model_config(), train_config(), dataset, out, progress=follower, device="cpu")
    assert not out.exists()
    train(model_config(), train_config(), dataset, moved, progress="none", device="cpu")
    train(model_config(), train_config(), dataset, out, progress="none", device="cpu")
    metrics = [folder / "metrics.jsonl" for folder in (moved, out)]
    assert metrics[0].read_bytes() == metrics[1].read_bytes()


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


def test_a_process_that_reads_ahead_does_not_keep_the_lock(tmp_path: Path) -> None:
    """It may outlive, for a moment, a run that was killed."""
    forked, folder = multiprocessing.get_context("fork"), RunFolder(tmp_path / "run")
    mine, theirs = forked.Pipe()

    def read_ahead() -> None:
        theirs.send(os.getpid())
        time.sleep(60)

    def hold() -> None:
        with folder.locked():
            forked.Process(target=read_ahead).start()
            time.sleep(60)

    holder = forked.Process(target=hold)
    holder.start()
    reader = mine.recv()
    with pytest.raises(CheckpointError, match=f"process {holder.pid} is writing this run"):
        folder.locked().__enter__()
    holder.kill()
    holder.join()
    try:
        with folder.locked():
            pass
    finally:
        os.kill(reader, signal.SIGKILL)


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


def test_resume_may_be_forbidden_or_demanded(dataset: PreparedDataset, tmp_path: Path) -> None:
    def run(resume: str, follower: BreakAt) -> BreakAt:
        arguments = model_config(), train_config(9), dataset, tmp_path / "run"
        train(*arguments, progress=follower, resume=resume)  # type: ignore[arg-type]
        return follower

    with pytest.raises(ConfigError, match="resume: 'always' is none of auto, never, must"):
        run("always", BreakAt())
    with pytest.raises(CheckpointError, match=r"run: holds no run to go on with \(resume must"):
        run("must", BreakAt())
    assert not (tmp_path / "run").exists()
    with pytest.raises(BrokenOffError):
        run("never", BreakAt(4))
    # Begun, but nothing saved yet.
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"run: no saved state to go on from \(resume must"):
        run("must", BreakAt())
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    with pytest.raises(BrokenOffError):
        run("auto", BreakAt(7))
    with pytest.raises(CheckpointError, match=r"run: holds a run already \(resume never"):
        run("never", BreakAt())
    assert run("must", BreakAt()).first == 5
    assert run("must", BreakAt()).first is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data_workers": 1}, None),
        ({"gradient_checkpointing": True, "strategy": "fsdp"}, "gradient_checkpointing"),
        ({"deterministic": False}, "deterministic"),
    ],
)
def test_a_run_may_go_on_computed_otherwise(
    dataset: PreparedDataset, tmp_path: Path, changes: dict, named: str | None
) -> None:
    """How steps are computed is none of a run's identity; what may change bits is said."""
    with pytest.raises(BrokenOffError):
        train(model_config(), train_config(9), dataset, tmp_path, progress=BreakAt(6))
    follower = BreakAt()
    train(model_config(), train_config(9, **changes), dataset, tmp_path, progress=follower)
    assert follower.first == 5
    said = f"{tmp_path}: {named} changed since this run began: it goes on, but not to the bit"
    assert follower.notes == ([] if named is None else [said])


def test_settings_of_the_process_are_restored(dataset: PreparedDataset, tmp_path: Path) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    threads = torch.get_num_threads()
    with pytest.raises(BrokenOffError):
        train(model_config(), train_config(3, n_threads=2), dataset, tmp_path, progress=BreakAt(1))
    assert torch.get_num_threads() == threads
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


def test_hidden_files_of_others_survive(dataset: PreparedDataset, tmp_path: Path) -> None:
    """A run may lie in somebody's folder: only what satlens itself left half-written goes."""
    out = tmp_path / "run"
    kept = [out / ".git" / "config", out / ".env"]
    ours = [out / ".run.json.tmp", out / ".final.12-0123abcd.partial" / "model.safetensors"]
    ours += [out / ".final.old" / "config.json"]
    cfg = train_config(2, checkpoint_every=1)
    train(model_config(n_layers=1), cfg, dataset, out, progress="none", device="cpu")
    (out / "finished.json").unlink()
    for file in (*kept, *ours):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x")
    train(model_config(n_layers=1), cfg, dataset, out, progress="none", device="cpu")
    assert all(file.exists() for file in kept)
    assert not any(file.exists() for file in ours)


def test_a_run_needs_a_folder_of_its_own(dataset: PreparedDataset) -> None:
    before = sorted(dataset.path.iterdir())
    with pytest.raises(ConfigError, match="holds the data"):
        train(model_config(), train_config(), dataset, dataset.path, progress="none", device="cpu")
    assert sorted(dataset.path.iterdir()) == before
