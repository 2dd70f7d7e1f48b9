"""Every variant that a layout can express comes back with the same configuration and bits."""

from __future__ import annotations

import pytest
import torch

import satlens
from satlens.checkpoints.layouts import LAYOUTS
from satlens.errors import ConfigError
from satlens.models.presets import VARIANTS

SIZES = {
    "n_layers": 4,
    "d_model": 32,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_mlp": 40,
    "d_vocab": 19,
    "n_ctx": 32,
    "document_mask": False,
    "init": "normal_0.02",
}
RELEASE = {"shared_first_norm": True, "d_mlp": (0, 128, 128, 256)}
QWEN3 = {"qk_norm": True, "qk_norm_eps": 1e-6}

# What each published layout holds; every variant that is not here must be refused.
EXPRESSED = {
    "satformer_repo": [
        ("transformer", {"qkv_bias": True, "window_size": 5}),
        ("resformer", {"qk_norm": True, "last_k": 2, "lambda2_init": 0.25}),
        ("satformer", {"gate": "softmax", "bias": True, "tied_embeddings": True}),
        ("denseformer", {"dilation": 3, "period": 2}),
        ("muddformer", {"qkv_bias": True}),
        ("muddformer-prepost", {"d_mlp": (256, 256, 512, 768)}),
        ("hyperconnections", {"n_streams": 3, "tanh": False, "norm": "layer"}),
        ("hyperconnections-static", {"rope_theta": 5e5}),
    ],
    "fla": [
        ("transformer", {"qk_norm": True}),
        ("attnres", {"block_size": 3}),
        ("attnres-full", {"tied_embeddings": True}),
        ("rd-attnres", {"qkv_bias": True}),
        ("rd-attnres-tied", {}),
        ("rd-attnres-average", {}),
        ("rd-attnres-frozen-v", {}),
    ],
    "hf_llama": [("transformer", {"d_head": 12, "qkv_bias": True, "tied_embeddings": True})],
    "hf_qwen3": [("transformer", {**QWEN3, "window_size": 5, "rope_theta": 5e5})],
    "resformer_release": [("resformer-identity", {"norm_eps": 1e-5})],
    "muddformer_release": [
        ("muddformer", {**RELEASE, "expand_last": True, "round64": True}),
        ("muddformer", {**RELEASE, "qk_norm": True, "qk_norm_eps": 1e-5, "norm_eps": 1e-5}),
    ],
    "attnres_community": [
        ("attnres", {**QWEN3, "block_size": 4, "qkv_bias": True}),
        ("attnres-full", {"tied_embeddings": True}),
        ("rd-attnres", {"block_size": 2, "own_value_gamma": True}),
        ("rd-attnres", {**QWEN3, "block_size": 8, "own_value_gamma": True}),
    ],
}
# As each layout wants its backbone; what is left for it to refuse is the architecture.
BACKBONE = {"hf_qwen3": QWEN3}


def random_model(name, fields):
    model = satlens.build(name, **{**SIZES, **fields})
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def open_as(layout, folder):
    return satlens.load(folder, value_residual="identity" if "resformer" in layout else None)


@pytest.mark.parametrize(
    ("layout", "name", "fields"),
    [(layout, *case) for layout, cases in EXPRESSED.items() for case in cases],
)
def test_the_same_bits_come_back(layout, name, fields, tmp_path):
    model = random_model(name, fields)
    satlens.save(model, tmp_path / "out", layout=layout)
    again = open_as(layout, tmp_path / "out")
    assert again.provenance["layout"] == layout
    assert again.cfg == model.cfg
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    tokens = torch.arange(14).view(2, 7)
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("layout", EXPRESSED)
def test_every_other_variant_is_refused_by_field(layout, tmp_path):
    known = {name for name, _ in EXPRESSED[layout]}
    for name in set(VARIANTS) - known:
        model = satlens.build(name, **{**SIZES, **BACKBONE.get(layout, {})})
        with pytest.raises(ConfigError, match=rf"^[a-z_.]+: the {layout} layout cannot express"):
            satlens.save(model, tmp_path / "out", layout=layout)
    assert list(tmp_path.iterdir()) == []


def test_every_writable_layout_is_covered():
    writable = {layout.name for layout in LAYOUTS if layout.writable}
    assert writable == {"satlens", *EXPRESSED}


@pytest.mark.parametrize("name", VARIANTS)
def test_our_own_layout_holds_every_variant(name, tmp_path):
    model = random_model(name, {"value_residual": "satformer"} if "-" in name else {})
    satlens.save(model, tmp_path / "out")
    again = satlens.load(tmp_path / "out")
    state = model.state_dict()
    assert again.cfg == model.cfg
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
