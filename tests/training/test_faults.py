"""What goes wrong around a run: each fault is one line that names the place, and nothing is lost.

Faults of checkpoints are in tests/checkpoints/test_bad_checkpoints.py, of prepared data in
tests/data/test_dataset.py and test_shards.py, of corpora in tests/data/test_corpora.py.
"""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import run_ranks
from safetensors.torch import load_file, save_file
from small_disk import Disk, in_a_process
from small_runs import BreakAt, BrokenOffError, model_config, outputs, train_config

import satlens
from satlens.checkpoints.files import file_sha256
from satlens.cli import main
from satlens.data.dataset import PreparedDataset
from satlens.data.prepare import prepare
from satlens.errors import CheckpointError, ConfigError, DataError, SatlensError
from satlens.models.decoder import Decoder
from satlens.processes import world
from satlens.training import loop, resume, train
from satlens.training.monitors import NonFiniteError
from satlens.training.step import forward_backward

MODEL, CFG = model_config(n_layers=1), train_config(12, checkpoint_every=3, milestones=(0, 1000))


def run(dataset: PreparedDataset, out: Path) -> BreakAt:
    follower = BreakAt()
    train(MODEL, CFG, dataset, out, progress=follower, device="cpu")
    return follower


def refused(kind: type[SatlensError], body: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        body()
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture(scope="module")
def whole(dataset: PreparedDataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("whole") / "run"
    run(dataset, out)
    return outputs(out)


@pytest.fixture
def stopped(dataset: PreparedDataset, tmp_path: Path) -> Path:
    """A run broken off after step 8, with states at 3 and 6."""
    with pytest.raises(BrokenOffError):
        train(MODEL, CFG, dataset, tmp_path / "run", progress=BreakAt(8), device="cpu")
    return tmp_path / "run"


# -- disks -----------------------------------------------------------------------------------------


def test_a_full_disk_at_any_moment(
    dataset: PreparedDataset, whole: dict[str, bytes], tmp_path: Path
) -> None:
    def body() -> None:
        disk = Disk(tmp_path / "disk", "8k")
        out, begun = disk.folder / "run", []
        for size in (8, 40, 160, 300, 450, 600, 750, 900):
            disk.resize(f"{size}k")
            follower = BreakAt()
            line = refused(
                CheckpointError,
                lambda follower=follower: train(
                    MODEL, CFG, dataset, out, progress=follower, device="cpu"
                ),
            )
            assert line.startswith(f"{out}")
            assert "No space left on device" in line
            begun.append(follower.first or 0)
            left = [path for path in out.rglob(".*") if path.name != ".lock"]
            assert left == [], left
        assert begun == sorted(begun)  # no state was lost
        assert begun[-1] > 0
        disk.resize("16m")
        assert run(dataset, out).first == begun[-1]
        assert outputs(out) == whole

        model = satlens.load(out / "final")
        disk.fill()
        assert "No space left" in refused(
            CheckpointError, lambda: satlens.save(model, disk.folder / "copy")
        )
        corpus = dataset.path.parent / "corpus.jsonl"
        assert "No space left" in refused(
            DataError, lambda: prepare(corpus, disk.folder / "data", vocab_size=300)
        )
        assert not (disk.folder / "copy").exists()
        assert not (disk.folder / "data").exists()
        assert outputs(out) == whole

    in_a_process(body, tmp_path / "log.txt")


def test_a_disk_that_can_only_be_read(
    dataset: PreparedDataset, whole: dict[str, bytes], tmp_path: Path
) -> None:
    def body() -> None:
        disk = Disk(tmp_path / "disk", "16m")
        out = disk.folder / "run"
        with pytest.raises(BrokenOffError):
            train(MODEL, CFG, dataset, out, progress=BreakAt(8), device="cpu")
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        disk.protect(True)
        model, corpus = Decoder(MODEL), dataset.path.parent / "corpus.jsonl"
        for kind, work in (
            (CheckpointError, lambda: run(dataset, out)),
            (CheckpointError, lambda: run(dataset, disk.folder / "new")),
            (CheckpointError, lambda: satlens.save(model, disk.folder / "copy")),
            (DataError, lambda: prepare(corpus, disk.folder / "data", vocab_size=300)),
        ):
            line = refused(kind, work)
            assert line.startswith(str(disk.folder))
            assert "Read-only file system" in line
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
        disk.protect(False)
        assert run(dataset, out).first == 6
        assert outputs(out) == whole

    in_a_process(body, tmp_path / "log.txt")


# -- saved states ----------------------------------------------------------------------------------


def resealed(state: Path) -> None:
    """Give the manifest of a state the digest that its tensors have now."""
    manifest = json.loads((state / "state.json").read_text())
    manifest["sha256"] = {f.name: file_sha256(f) for f in state.glob("*.safetensors")}
    manifest["checksum"] = resume._checksum(manifest)
    (state / "state.json").write_text(json.dumps(manifest))


def edited(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


class Hostile:
    def __reduce__(self) -> tuple:
        return (pytest.fail, ("a state was unpickled",))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "trailing": (
        lambda s: (s / "state.safetensors").open("ab").write(b"\0"),
        "state.safetensors: sha256: differs from state.json, damaged",
    ),
    "pickle": (
        lambda s: (s / "state.safetensors").write_bytes(pickle.dumps(Hostile())),
        "state.safetensors: sha256: differs from state.json, damaged",
    ),
    "path": (
        lambda s: edited(s / "state.json", sha256={"../../final/model.safetensors": "0" * 64}),
        "state.json: sha256: '../../final/model.safetensors' is not a plain file name; refused",
    ),
    "unlisted": (
        lambda s: shutil.copy(s / "state.safetensors", s / "more.safetensors"),
        "more.safetensors: state.json does not list it",
    ),
    "newer": (
        lambda s: edited(s / "state.json", version=3),
        "state.json: version: 3, this satlens reads 2",
    ),
    "step": (
        lambda s: edited(s / "state.json", step="six"),
        "state.json: step: missing or not a number",
    ),
    "true": (
        lambda s: edited(s / "state.json", step=True),
        "state.json: step: missing or not a number",
    ),
    "another step": (
        lambda s: edited(s / "state.json", step=7),
        "state.json: step: 7 in folder 000000006",
    ),
    "another place": (
        lambda s: edited(s / "state.json", metrics_bytes=0),
        "state.json: checksum: the file was changed or damaged",
    ),
    "no files": (
        lambda s: edited(s / "state.json", sha256={}),
        "state.json: sha256: lists no file",
    ),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_state_that_cannot_be_trusted_is_passed_over(
    stopped: Path, dataset: PreparedDataset, whole: dict[str, bytes], how: str
) -> None:
    state, (damage, reason) = stopped / "resume" / "000000006", DAMAGE[how]
    damage(state)
    follower = run(dataset, stopped)
    assert follower.first == 3
    assert follower.notes[0] == f"{state}/{reason}; trying an earlier state"
    assert outputs(stopped) == whole


def test_a_state_of_other_tensors_is_refused(stopped: Path, dataset: PreparedDataset) -> None:
    state = stopped / "resume" / "000000006"
    file, name = state / "state.safetensors", "optimiser.exp_avg.ln_final.weight"
    sound = load_file(file)
    for change, reason in (
        ({name: None}, "missing"),
        ({name: torch.ones(3)}, "torch.float32 [3], torch.float32 [32] expected"),
        ({name: torch.ones(32).double()}, "torch.float64 [32], torch.float32 [32] expected"),
        ({"model.surprise": torch.ones(2)}, "unexpected"),
    ):
        tensors = {n: t for n, t in {**sound, **change}.items() if t is not None}
        save_file(tensors, file)
        resealed(state)
        line = refused(CheckpointError, lambda: run(dataset, stopped))
        assert line == f"{file}: {next(iter(change))}: {reason}"
    file.write_bytes(pickle.dumps(Hostile()))
    resealed(state)
    assert refused(CheckpointError, lambda: run(dataset, stopped)).startswith(f"{file}: cannot be")


# -- data ------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_its_own_data_and_tokenizer_only(
    stopped: Path, dataset: PreparedDataset, whole: dict[str, bytes], tmp_path: Path
) -> None:
    corpus = dataset.path.parent / "corpus.jsonl"
    other = prepare(corpus, tmp_path / "other", vocab_size=290)
    assert other.fingerprint != dataset.fingerprint
    line = refused(ConfigError, lambda: run(other, stopped))
    assert line.startswith(f"{stopped / 'run.json'}: data.sha256: this run has ")
    run(dataset, stopped)
    assert outputs(stopped) == whole


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("train-00000.bin", lambda b: b[:-2]),
        ("train-00000.bin", lambda b: b + b"\0"),
        ("train-00000.bin", lambda b: b[:99] + bytes([b[99] ^ 4]) + b[100:]),
        ("tokenizer.json", lambda b: b.replace(b'"a"', b'"A"')),
        ("manifest.json", lambda b: b.replace(b'"val-0', b'"../val-0')),
    ],
    ids=["truncated", "trailing", "flipped", "tokenizer", "path"],
)
def test_damaged_data_is_one_line_of_the_command(
    dataset: PreparedDataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: Callable[[bytes], bytes],
) -> None:
    data = Path(shutil.copytree(dataset.path, tmp_path / "data"))
    (data / name).write_bytes(damage((data / name).read_bytes()))
    monkeypatch.setattr("sys.argv", ["satlens", "train", str(data), str(tmp_path / "run")])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    assert stop.value.code == 1
    assert said.out == ""
    assert said.err.startswith(f"satlens: error: {data / name}: ")
    assert said.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


# -- numbers ---------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_loses_nothing(
    dataset: PreparedDataset,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = iter(range(100))

    def poisoned(*args: Any) -> torch.Tensor:
        loss = forward_backward(*args)
        return loss * float("nan") if next(calls) == 7 else loss

    with monkeypatch.context() as patch:
        patch.setattr(loop, "forward_backward", poisoned)
        line = refused(NonFiniteError, lambda: run(dataset, tmp_path / "run"))
    assert line.startswith("step 7 (batches 14..15): loss or gradient is not finite; stopped")
    assert run(dataset, tmp_path / "run").first == 6
    assert outputs(tmp_path / "run") == whole


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_loss_that_is_not_finite_in_one_process_stops_both(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    def body() -> None:
        forward, calls = Decoder.forward, iter(range(100))

        def poisoned(self: Decoder, *args: Any, **kwargs: Any) -> Any:
            loss = forward(self, *args, **kwargs)
            if torch.is_grad_enabled() and world().rank == 1 and next(calls) == 4:
                return loss * float("nan")
            return loss

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Decoder, "forward", poisoned)
            line = refused(NonFiniteError, lambda: run(dataset, tmp_path / "run"))
        said: list[Any] = [None, None]
        dist.all_gather_object(said, line)
        assert said[0] == said[1]
        assert line.startswith("step 4 (batches 8..9): loss or gradient is not finite")
        begun = run(dataset, tmp_path / "run").first
        assert begun == (None if world().rank else 3)  # the first process alone is seen

    run_ranks(2, body, tmp_path / "ranks")
    assert json.loads((tmp_path / "run" / "finished.json").read_text())["skipped_steps"] == 0
