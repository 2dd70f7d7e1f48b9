"""Our own layout: complete or not at all, the same bits back, the hub without a network."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import satlens
from satlens.checkpoints import files
from satlens.data.tokenizers import fingerprint, train_bpe
from satlens.errors import CheckpointError

VARIANTS = [
    {"name": "transformer", "tied_embeddings": True},
    {"name": "resformer"},
    {"name": "resformer-learnable", "qkv_bias": True},
    {"name": "satformer", "gate": "softmax", "bias": True, "last_k": 2},
    {"name": "attnres", "block_size": 3, "route_bias": True, "output_read": False},
    {"name": "rd-attnres", "value_residual": "satformer", "qk_norm": True},
    {"name": "transformer", "d_mlp": (0, 8, 16)},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda f: f["name"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_tensor_equals_the_file(fields, dtype, tmp_path):
    model = satlens.build(n_layers=3, d_model=16, d_vocab=19, dtype=dtype, **fields)
    satlens.save(model, tmp_path / "out")
    again = satlens.load(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert again.cfg == model.cfg
    assert again.dtype == dtype
    assert stored.keys() == again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, stored[name])
        assert torch.equal(tensor, model.state_dict()[name])


def test_what_comes_along(tiny, folder):
    assert sorted(f.name for f in folder.iterdir()) == [
        "config.json", "manifest.json", "model.safetensors", "tokenizer.json", "training.json",
    ]  # fmt: skip
    model = satlens.load(folder)
    assert fingerprint(model.tokenizer) == fingerprint(tiny.tokenizer)
    assert model.provenance["training"] == {"steps": 3, "tokens": 48}
    assert model.provenance["layout"] == "satlens"
    assert model.provenance["checkpoint"] == "final"
    assert len(model.provenance["sha256"]) == 64
    assert not model.training
    assert all(p.requires_grad for p in model.parameters())


def test_files_are_as_readable_as_the_umask_says(tiny, tmp_path):
    before = os.umask(0o027)
    try:
        satlens.save(tiny, tmp_path / "model")
    finally:
        os.umask(before)
    modes = {f.name: f.stat().st_mode & 0o777 for f in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o640}, modes


def test_sha256_follows_config_and_weights(tiny, folder, tmp_path):
    first = satlens.load(folder).provenance["sha256"]
    satlens.save(tiny, tmp_path / "same")
    assert satlens.load(tmp_path / "same").provenance["sha256"] == first
    with torch.no_grad():
        tiny.ln_final.weight[0] += 1
    satlens.save(tiny, tmp_path / "other")
    assert satlens.load(tmp_path / "other").provenance["sha256"] != first


def test_loaded_weights_own_their_memory(folder):
    model = satlens.load(folder)
    with torch.no_grad():
        model.embed.weight.fill_(7.0)
    assert not (load_file(folder / "model.safetensors")["embed.weight"] == 7).all()


def test_load_converts_dtype(folder):
    model = satlens.load(folder, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_an_existing_folder_is_refused(tiny, folder):
    before = {f.name: f.read_bytes() for f in folder.iterdir()}
    with pytest.raises(CheckpointError, match="exists already"):
        satlens.save(tiny, folder)
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == before


@pytest.mark.parametrize("atomic", [True, False])
def test_replacing_on_request(tiny, folder, monkeypatch, atomic):
    if not atomic:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    with torch.no_grad():
        tiny.ln_final.weight.fill_(3.0)
    satlens.save(tiny, folder, replace=True)
    model = satlens.load(folder)
    assert (model.ln_final.weight == 3).all()
    assert model.provenance["training"] is None
    assert [f.name for f in folder.parent.iterdir()] == ["final"]


def test_only_checkpoints_are_replaced(tiny, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="is no checkpoint folder"):
        satlens.save(tiny, tmp_path / "home", replace=True)
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"


@pytest.mark.parametrize("step", ["write_weights", "_flush", "_put"])
def test_a_failed_save_leaves_nothing(tiny, tmp_path, monkeypatch, step):
    def full(*args):
        raise OSError(28, "No space left on device")

    import satlens.checkpoints as package

    monkeypatch.setattr(package if step == "write_weights" else files, step, full)
    with pytest.raises(CheckpointError, match="No space left on device") as error:
        satlens.save(tiny, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_replacement_keeps_the_old_one(tiny, folder, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    before = satlens.load(folder).provenance["sha256"]
    monkeypatch.setattr(files, "_flush", full)
    with pytest.raises(CheckpointError):
        satlens.save(tiny, folder, replace=True)
    assert satlens.load(folder).provenance["sha256"] == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_read_only_directory(tiny, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(CheckpointError, match="Permission denied"):
        satlens.save(tiny, tmp_path / "out")
    tmp_path.chmod(0o700)


def test_training_must_be_json(tiny, tmp_path):
    with pytest.raises(CheckpointError, match=r"training\.json"):
        satlens.save(tiny, tmp_path / "out", training={"loss": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_is_told(tiny, tmp_path, monkeypatch):
    put = files._put

    def late(draft, path):
        shutil.copytree(draft, path)
        monkeypatch.setattr(Path, "exists", lambda self: False)
        try:
            put(draft, path)
        finally:
            monkeypatch.undo()

    monkeypatch.setattr(files, "_put", late)
    with pytest.raises(CheckpointError, match="another writer"):
        satlens.save(tiny, tmp_path / "out")
    satlens.load(tmp_path / "out")


# -- tokenizer and vocabulary ---------------------------------------------------------------------


def test_padded_vocabulary_is_legal(tiny, tmp_path):
    assert tiny.cfg.d_vocab > tiny.tokenizer.get_vocab_size()
    satlens.save(tiny, tmp_path / "out")
    assert satlens.load(tmp_path / "out").tokenizer is not None


def test_a_larger_tokenizer_is_refused(tmp_path):
    model = satlens.build("transformer", n_layers=1, d_model=16, d_vocab=100)
    model.tokenizer = train_bpe(["some words of text"], 260)
    satlens.save(model, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*vocabulary of 100"):
        satlens.load(tmp_path / "out")


# -- hub ------------------------------------------------------------------------------------------


def test_hub_id_downloads_only_data(folder, monkeypatch):
    asked = {}

    def download(name, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = satlens.load("someone/satformer")
    assert asked["name"] == "someone/satformer"
    assert asked["patterns"] == ["*.safetensors", "*.json"]
    assert model.provenance["checkpoint"] == "someone/satformer"


def test_hub_offline(monkeypatch):
    def download(name, allow_patterns):
        raise ConnectionError("offline\nlong explanation")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=r"someone/satformer: .*offline\)$") as error:
        satlens.load("someone/satformer")
    assert "\n" not in str(error.value)


def test_hub_without_config(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        satlens.load("someone/pickles-only")


def test_hub_repository_of_pickles(folder, monkeypatch):
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(folder))
    with pytest.raises(CheckpointError, match="someone/pickles-only: has no safetensors weights"):
        satlens.load("someone/pickles-only")


@pytest.mark.parametrize("name", ["/no/such/folder", "./runs/final", "a/b/c", "runs\\x"])
def test_paths_are_never_taken_for_hub_ids(name, monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", pytest.fail)
    with pytest.raises(CheckpointError, match="no such checkpoint folder"):
        satlens.load(name)


def test_a_parent_folder_gets_a_hint(folder):
    with pytest.raises(CheckpointError, match=r"did you mean .*final"):
        satlens.load(folder.parent)
    with pytest.raises(CheckpointError, match="is a file"):
        satlens.load(folder / "config.json")


def test_configs_are_json_with_every_number(folder):
    config = json.loads((folder / "config.json").read_text())
    assert config["format"] == "satlens"
    assert config["version"] == 1
    assert config["model"]["n_key_value_heads"] == 2
