"""Logits and internals that the original code computed, reproduced from its own files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import satlens

FOLDERS = sorted(f for f in (Path(__file__).parents[1] / "golden").iterdir() if f.is_dir())
TOLERANCE = 2e-5

every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)


def open_golden(folder, named=None):
    identity = (named or folder).name == "resformer-release-identity"
    return satlens.load(folder, value_residual="identity" if identity else None)


def hook_of(name, n_layers):
    """The hook point that shows an expected internal (naming: the golden folder's README)."""
    kind, *rest = name.split(".")
    if kind == "gate_pre":
        return f"blocks.{rest[0]}.attn.hook_v_gate_pre"
    if rest == ["out"]:
        return "hook_route_out"
    if len(rest) == 2:
        return f"blocks.{rest[1]}.hook_route_{rest[0]}"
    sublayer = int(rest[0]) + 1
    if sublayer == 2 * n_layers:
        return "hook_route_out"
    return f"blocks.{sublayer // 2}.hook_route_{'mlp' if sublayer % 2 else 'attn'}"


def check(model, folder):
    expected = load_file(folder / "expected.safetensors")
    tokens, logits = expected.pop("input_ids"), expected.pop("logits")
    with torch.no_grad():
        assert (model(tokens) - logits).abs().max() <= TOLERANCE
        if expected:
            hooks = {name: hook_of(name, model.cfg.n_layers) for name in expected}
            _, cache = model.run_with_cache(tokens, names_filter=list(hooks.values()))
            for name, value in expected.items():
                assert cache[hooks[name]].shape == value.shape, name
                assert (cache[hooks[name]] - value).abs().max() <= TOLERANCE, name
    return tokens


def test_every_family_is_here():
    names = " ".join(f.name for f in FOLDERS)
    for kind in ("transformer", "resformer", "satformer", "denseformer", "muddformer"):
        assert f"satformer-repo-{kind}-" in names
    for prefix in ("satformer-repo-hyperconnections-", "fla-attnres-", "rd-attnres-"):
        assert prefix in names
    assert "muddformer-release-" in names
    assert "resformer-release-" in names
    assert len(FOLDERS) == 33


@every_folder
def test_logits_and_internals(folder):
    check(open_golden(folder), folder)


@every_folder
def test_round_trip_through_its_own_layout(folder, tmp_path):
    model = open_golden(folder)
    satlens.save(model, tmp_path / "copy", layout=model.provenance["layout"])
    before = load_file(folder / "model.safetensors")
    after = load_file(tmp_path / "copy" / "model.safetensors")
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name]), name
    again = open_golden(tmp_path / "copy", named=folder)
    assert again.cfg == model.cfg
    check(again, folder)


@every_folder
def test_round_trip_through_our_layout(folder, tmp_path):
    model = open_golden(folder)
    satlens.save(model, tmp_path / "ours")
    again = satlens.load(tmp_path / "ours")
    assert again.cfg == model.cfg
    tokens = check(again, folder)
    with torch.no_grad():
        assert torch.equal(again(tokens), model(tokens))


def test_llama_mode_is_never_guessed(golden):
    plain = satlens.load(golden / "resformer-release-identity")
    assert plain.cfg.variant == "transformer"
    told = satlens.load(golden / "resformer-release-identity", value_residual="identity")
    assert told.cfg.variant == "resformer"
    with pytest.raises(satlens.SatlensError, match="value_residual"):
        satlens.load(golden / "resformer-release-identity", value_residual="learnable")
    with pytest.raises(satlens.SatlensError, match="value_residual"):
        satlens.load(golden / "fla-attnres-full", value_residual="identity")
