"""Damaged, unsafe and foreign files: one line naming file and field, never a model."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import satlens
from satlens.errors import CheckpointError, SatlensError

FOREIGN = "satformer-repo-satformer-gqa"
FILES = ["config.json", "manifest.json", "model.safetensors", "tokenizer.json", "training.json"]


@pytest.fixture
def foreign(golden, tmp_path):
    return Path(shutil.copytree(golden / FOREIGN, tmp_path / "foreign"))


def refusal(folder, *named):
    with pytest.raises(SatlensError) as error:
        satlens.load(folder)
    message = str(error.value)
    assert "\n" not in message
    for name in named:
        assert name in message
    return message


def edit_json(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# -- damage ----------------------------------------------------------------------------------------


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(file=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(folder, file, where, bit):
    path = folder / file
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[int(where * len(content))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        refusal(folder)
    finally:
        path.write_bytes(content)
    satlens.load(folder)


@pytest.mark.parametrize("own", [True, False], ids=["satlens", "foreign"])
@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b[: len(b) // 2],
        lambda b: b[:-1],
        lambda b: b[:5],
        lambda b: b + b"\0",
        lambda b: b"\xff" * 8 + b[8:],
        lambda b: b[:8] + b"[" + b[9:],
    ],
    ids=["empty", "half", "one short", "no header", "trailing", "huge header", "bad header"],
)
def test_damaged_weights(folder, foreign, own, damage):
    target = folder if own else foreign
    file = target / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    refusal(target, "model.safetensors")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"null"],
    ids=["empty", "cut", "list", "not UTF-8", "deep", "null"],
)
@pytest.mark.parametrize(
    "file", ["foreign/config.json", "final/config.json", "final/manifest.json"]
)
def test_damaged_json(folder, foreign, content, file):
    path = folder.parent / file
    path.write_bytes(content)
    refusal(path.parent, path.name)


@pytest.mark.parametrize("file", FILES)
def test_missing_files(folder, file):
    (folder / file).unlink()
    refusal(folder, file)


def test_foreign_folder_without_weights(foreign):
    (foreign / "model.safetensors").unlink()
    refusal(foreign, "model.safetensors")


# -- hostile files ---------------------------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return (pytest.fail, ("a checkpoint was unpickled",))


@pytest.mark.parametrize("own", [True, False], ids=["satlens", "foreign"])
@pytest.mark.parametrize("zipped", [True, False], ids=["torch.save", "pickle"])
def test_a_pickle_named_safetensors(folder, foreign, own, zipped):
    target = folder if own else foreign
    file = target / "model.safetensors"
    if zipped:
        torch.save({"a": Hostile()}, file)
    else:
        file.write_bytes(pickle.dumps(Hostile()))
    refusal(target, "model.safetensors", "pickle")


def test_a_hostile_bin_is_refused_and_named(foreign):
    (foreign / "model.safetensors").unlink()
    torch.save({"a": Hostile()}, foreign / "pytorch_model.bin")
    message = refusal(foreign, "pytorch_model.bin", "it asks to run _pytest.outcomes")
    assert "weights_only" not in message
    torch.save([torch.ones(2)], foreign / "pytorch_model.bin")
    refusal(foreign, "pytorch_model.bin", "table of tensors")
    (foreign / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
    refusal(foreign, "pytorch_model.bin")


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b", "..", "", "c:\\x"])
def test_paths_in_the_manifest(folder, name):
    manifest = folder / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    manifest.write_text(json.dumps({"files": {**files, name: "0" * 64}}))
    refusal(folder, "manifest.json", "files", repr(name))


def test_an_unlisted_file_is_not_read(folder):
    manifest = folder / "manifest.json"
    files = json.loads(manifest.read_text())["files"]
    del files["tokenizer.json"]
    manifest.write_text(json.dumps({"files": files}))
    refusal(folder, "manifest.json", "tokenizer.json is not listed")


# -- contents --------------------------------------------------------------------------------------


def test_newer_version(folder):
    edit_json(folder / "config.json", version=2)
    refusal(folder, "config.json", "version", "2", "newer")


@pytest.mark.parametrize("version", [None, "1", 0])
def test_no_version(folder, version):
    edit_json(folder / "config.json", version=version)
    refusal(folder, "config.json", "version")


def test_config_faults_name_the_field(folder):
    config = json.loads((folder / "config.json").read_text())
    for field, value in (("n_heads", 3), ("n_layers", "many"), ("n_head", 4)):
        edit_json(folder / "config.json", model={**config["model"], field: value})
        refusal(folder, "config.json", field)
    edit_json(folder / "config.json", model=None)
    refusal(folder, "config.json", "model")


def test_missing_extra_and_misshaped_tensors(foreign):
    name = "model.layers.2.attn.value_residual_mixing.alpha_proj.weight"
    kept = load_file(foreign / "model.safetensors")[name]
    edit_weights(foreign, lambda t: t.pop(name))
    refusal(foreign, "model.safetensors", "missing", name)
    edit_weights(foreign, lambda t: t.update({name: kept[:, :-1].contiguous()}))
    refusal(foreign, "model.safetensors", name, "[2, 31]", "[2, 32]")
    edit_weights(foreign, lambda t: t.update({name: kept, "model.surprise": torch.ones(2)}))
    refusal(foreign, "model.safetensors", "model.surprise")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(foreign, value):
    def spoil(tensors):
        tensors["model.norm.weight"][3] = value

    edit_weights(foreign, spoil)
    refusal(foreign, "model.safetensors", "model.norm.weight", "NaN" if value != value else "inf")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.int64])
def test_quantised_weights(foreign, dtype):
    edit_weights(foreign, lambda t: t.update({"model.norm.weight": torch.ones(32).to(dtype)}))
    refusal(foreign, "model.safetensors", "model.norm.weight", str(dtype))


def test_nan_in_our_own_format(tiny, tmp_path):
    with torch.no_grad():
        tiny.ln_final.weight[0] = float("nan")
    refusal(satlens.save(tiny, tmp_path / "out"), "model.safetensors", "ln_final.weight", "NaN")


def test_compiled_and_plain_names_together(foreign):
    edit_weights(foreign, lambda t: t.update({"_orig_mod.model.norm.weight": torch.ones(32)}))
    refusal(foreign, "model.norm.weight is there twice")


def test_unknown_options_are_rejected(folder):
    with pytest.raises(TypeError):
        satlens.load(folder, weights_only=False)
    with pytest.raises(TypeError):
        satlens.save(satlens.load(folder), folder / "x", overwrite=True)


def test_bad_input_is_a_checkpoint_error(folder):
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="model_type"):
        satlens.load(folder)


def test_a_header_as_long_as_a_pickle_begins_is_no_pickle(tiny, tmp_path):
    """The first bytes of a safetensors file are its header's length: 640 is a pickle's 80 02."""
    satlens.save(tiny, tmp_path / "model", layout="satformer_repo")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors, file, {"x": ""})
    length = int.from_bytes(file.read_bytes()[:8], "little")
    save_file(tensors, file, {"x": "." * ((640 - length) % 65_536)})
    assert file.read_bytes()[:2] == b"\x80\x02"
    again = satlens.load(tmp_path / "model")
    assert all(torch.equal(v, tiny.state_dict()[k]) for k, v in again.state_dict().items())
