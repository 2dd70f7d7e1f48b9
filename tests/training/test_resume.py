"""A run interrupted anywhere, any number of times, equals one that never was, to the bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from small_runs import BreakAt, BrokenOffError, lines, model_config, outputs, train_config

from satlens.config import ModelConfig, TrainConfig, to_dict
from satlens.data.dataset import PreparedDataset
from satlens.errors import CheckpointError
from satlens.training import state_tensors, train

KINDS = {
    "satformer-bf16": ({"name": "satformer"}, {"precision": "bf16"}),
    "rd-fp32": ({"name": "rd-attnres", "block_size": 2}, {"precision": "fp32", "schedule": "wsd"}),
}


@pytest.fixture(scope="module", params=list(KINDS))
def whole(
    request: pytest.FixtureRequest,
    dataset: PreparedDataset,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[ModelConfig, TrainConfig, Path]:
    """A run that nothing interrupted, through more than two epochs."""
    model, train_fields = KINDS[request.param]
    model_cfg = model_config(n_layers=2, **model)
    train_cfg = train_config(44, milestones=(0, 3000), **train_fields)
    out = tmp_path_factory.mktemp("whole") / "run"
    train(model_cfg, train_cfg, dataset, out, progress="none", device="cpu")
    return model_cfg, train_cfg, out


def interrupted(
    model_cfg: ModelConfig, train_cfg: TrainConfig, dataset: Any, out: Path, at: int
) -> int:
    """Run until a step, then break off; returns the step it went on from."""
    follower = BreakAt(at)
    with pytest.raises(BrokenOffError):
        train(model_cfg, train_cfg, dataset, out, progress=follower, device="cpu")
    assert follower.first is not None
    return follower.first


@pytest.mark.parametrize("stops", [(17,), (8, 33), (3, 4, 43)])
def test_resumed_equals_uninterrupted(
    whole: tuple[ModelConfig, TrainConfig, Path],
    dataset: PreparedDataset,
    tmp_path: Path,
    stops: tuple[int, ...],
) -> None:
    model_cfg, train_cfg, reference = whole
    begun = [interrupted(model_cfg, train_cfg, dataset, tmp_path / "run", at) for at in stops]
    assert begun == [0, *(at // 5 * 5 for at in stops[:-1])]
    follower = BreakAt()
    final = train(model_cfg, train_cfg, dataset, tmp_path / "run", progress=follower, device="cpu")
    assert follower.first == stops[-1] // 5 * 5
    assert final == tmp_path / "run" / "final"
    assert outputs(tmp_path / "run") == outputs(reference)
    assert [m["step"] for m in lines(reference, "train")] == [*range(3, 43, 3), 44]
    assert [m["step"] for m in lines(reference, "eval")] == [0, 8, 16, 24, 32, 40, 44]


def test_the_optimiser_resumes_to_the_bit(
    whole: tuple[ModelConfig, TrainConfig, Path], dataset: PreparedDataset, tmp_path: Path
) -> None:
    model_cfg, train_cfg, _ = whole
    for name, stops in (("once", [41]), ("thrice", [9, 22, 41])):
        for at in stops:
            interrupted(model_cfg, train_cfg, dataset, tmp_path / name, at)
    states = [tmp_path / name / "resume" / "000000040" for name in ("once", "thrice")]
    first, second = (state / "state.safetensors" for state in states)
    assert first.read_bytes() == second.read_bytes()
    tensors = load_file(first)
    moments = [name for name in tensors if name.startswith("optimiser.exp_avg_sq.")]
    assert all(tensors[name].count_nonzero() for name in moments)
    assert {float(t) for n, t in tensors.items() if n.startswith("optimiser.step.")} == {40.0}


@settings(max_examples=6, deadline=None)
@given(stops=st.lists(st.integers(1, 11), max_size=3), every=st.integers(1, 6))
def test_resume_at_any_step_and_cadence(
    dataset: PreparedDataset, stops: list[int], every: int
) -> None:
    model_cfg, cfg = model_config(n_layers=1), train_config(12, checkpoint_every=every)
    folder = Path(tempfile.mkdtemp())
    try:
        train(model_cfg, cfg, dataset, folder / "whole", progress="none", device="cpu")
        for at in stops:
            follower = BreakAt(at)
            try:
                train(model_cfg, cfg, dataset, folder / "cut", progress=follower, device="cpu")
            except BrokenOffError:
                continue
        train(model_cfg, cfg, dataset, folder / "cut", progress="none", device="cpu")
        assert outputs(folder / "cut") == outputs(folder / "whole")
    finally:
        shutil.rmtree(folder)


# -- processes that are killed -------------------------------------------------------------------

CHILD = """
import json, sys
from satlens.config import ModelConfig, TrainConfig, make
from satlens.data.dataset import PreparedDataset
from satlens.training import train
model, recipe, data, out = json.loads(sys.argv[1])
train(make(ModelConfig, model, "m"), make(TrainConfig, recipe, "t"), PreparedDataset.open(data),
      out, progress="none", device="cpu")
"""


def start_child(
    model_cfg: ModelConfig, cfg: TrainConfig, dataset: PreparedDataset, out: Path
) -> subprocess.Popen[str]:
    arguments = [to_dict(model_cfg), to_dict(cfg), str(dataset.path), str(out)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_for_step(step: int, out: Path, child: subprocess.Popen[str]) -> None:
    while not any(int(state.name) >= step for state in (out / "resume").glob("[0-9]*")):
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.005)


@pytest.mark.slow
def test_killed_and_terminated_processes_resume_to_the_bit(
    dataset: PreparedDataset, tmp_path: Path
) -> None:
    model_cfg, cfg = model_config("satformer"), train_config(150, milestones=(9000,))
    signals = {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}
    children = {name: start_child(model_cfg, cfg, dataset, tmp_path / name) for name in signals}
    for name, number in signals.items():
        wait_for_step(20, tmp_path / name, children[name])
        children[name].send_signal(number)
    errors = {name: child.communicate(timeout=60)[1] for name, child in children.items()}
    assert children["killed"].returncode == -signal.SIGKILL
    assert children["terminated"].returncode == 0, errors["terminated"]
    train(model_cfg, cfg, dataset, tmp_path / "whole", progress="none", device="cpu")
    for name in signals:
        assert not (tmp_path / name / "finished.json").exists()
        follower = BreakAt()
        train(model_cfg, cfg, dataset, tmp_path / name, progress=follower, device="cpu")
        assert follower.notes == []
        assert follower.first is not None
        assert follower.first >= 20
        if name == "terminated":
            expected = f"stopped by SIGTERM after step {follower.first} of 150, state saved; run"
            assert expected in errors[name]
            assert errors[name].count("\n") == 1
        assert outputs(tmp_path / name) == outputs(tmp_path / "whole")


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture
def stopped(dataset: PreparedDataset, tmp_path: Path) -> Path:
    """A run broken off after step 17, with states at 10 and 15."""
    interrupted(model_config(), train_config(), dataset, tmp_path / "run", 17)
    states = sorted(path.name for path in (tmp_path / "run" / "resume").iterdir())
    assert states == ["000000010", "000000015"]
    return tmp_path / "run"


def damage(file: Path, how: str) -> None:
    content = bytearray(file.read_bytes())
    if how == "truncated":
        del content[-7:]
    elif how == "flipped":
        content[len(content) // 2] ^= 4
    elif how == "empty":
        content.clear()
    if how == "missing":
        file.unlink()
    else:
        file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("state.safetensors", how) for how in ("truncated", "flipped", "empty", "missing")),
        # A flipped bit of the manifest may hit white space.
        *(("state.json", how) for how in ("truncated", "empty", "missing")),
    ],
)
def test_a_damaged_state_is_named_and_the_one_before_is_used(
    stopped: Path, dataset: PreparedDataset, tmp_path: Path, how: str, name: str
) -> None:
    damage(stopped / "resume" / "000000015" / name, how)
    follower = BreakAt(19)
    with pytest.raises(BrokenOffError):
        train(model_config(), train_config(), dataset, stopped, progress=follower, device="cpu")
    assert follower.first == 10
    (note,) = follower.notes
    assert note.startswith(f"{stopped / 'resume' / '000000015' / name}: ")
    assert "\n" not in note
    states = sorted(path.name for path in (stopped / "resume").iterdir())
    assert states == ["000000010", "000000015"]
    train(model_config(), train_config(), dataset, stopped, progress=BreakAt(), device="cpu")
    train(model_config(), train_config(), dataset, tmp_path / "w", progress="none", device="cpu")
    assert outputs(stopped) == outputs(tmp_path / "w")


def test_when_no_state_is_whole_it_says_so(stopped: Path, dataset: PreparedDataset) -> None:
    for state in (stopped / "resume").iterdir():
        damage(state / "state.safetensors", "truncated")
    with pytest.raises(
        CheckpointError, match=r"no other state is whole: remove .*resume"
    ) as caught:
        train(model_config(), train_config(), dataset, stopped, progress=BreakAt(), device="cpu")
    assert "\n" not in str(caught.value)


def test_cut_metrics_are_refused(stopped: Path, dataset: PreparedDataset) -> None:
    damage(stopped / "metrics.jsonl", "empty")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: 0 bytes, the saved state says"):
        train(model_config(), train_config(), dataset, stopped, progress=BreakAt(), device="cpu")


def test_changed_metrics_are_refused(stopped: Path, dataset: PreparedDataset) -> None:
    """A flipped bit of what is kept would be signed by the end of the run."""
    damage(stopped / "metrics.jsonl", "flipped")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: sha256: the first \d+ bytes"):
        train(model_config(), train_config(), dataset, stopped, progress=BreakAt(), device="cpu")


def test_a_full_disk_leaves_the_state_before(
    stopped: Path, dataset: PreparedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cfg = train_config(30)
    shutil.rmtree(stopped)
    interrupted(model_config(), cfg, dataset, stopped, 17)
    with monkeypatch.context() as patch:
        patch.setattr(state_tensors, "save_file", full)
        with pytest.raises(CheckpointError, match=r"000000020: cannot be written .No space left"):
            train(model_config(), cfg, dataset, stopped, progress="none", device="cpu")
    assert sorted(os.listdir(stopped / "resume")) == ["000000010", "000000015"]
    train(model_config(), cfg, dataset, stopped, progress="none", device="cpu")
    train(model_config(), cfg, dataset, tmp_path / "w", progress="none", device="cpu")
    assert outputs(stopped) == outputs(tmp_path / "w")
