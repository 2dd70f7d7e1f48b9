"""The community's Attention-Residuals layout: golden models under its names, units of its blocks,
and a value route with a gamma of its own."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import satlens
from satlens.checkpoints.layouts import layout_of
from satlens.errors import ConfigError

BASE = {
    "model_type": "qwen3_attnres",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 4,
    "head_dim": 8,
    "vocab_size": 61,
}
# flash-linear-attention's names -> theirs.
NAMES = {
    "model.embeddings.": "model.embed_tokens.",
    ".attn_norm.": ".input_layernorm.",
    ".attn.": ".self_attn.",
    ".mlp_norm.": ".post_attention_layernorm.",
    "model.res_": "model.final_res_",
}


def read(**changes):
    config = {**BASE, **changes}
    return layout_of(config, "config.json").model_config(config, "config.json")


def test_a_golden_model_under_their_names(golden, tmp_path):
    source = golden / "fla-attnres-block2-mha"
    fla = json.loads((source / "config.json").read_text())
    config = {
        "model_type": "llama_attnres",
        "hidden_size": fla["hidden_size"],
        "intermediate_size": fla["intermediate_size"],
        "num_hidden_layers": fla["num_hidden_layers"],
        "num_attention_heads": fla["num_heads"],
        "vocab_size": fla["vocab_size"],
        "rms_norm_eps": fla["norm_eps"],
        "tie_word_embeddings": fla["tie_word_embeddings"],
        "attnres_mode": "block",
        "attnres_num_blocks": fla["num_hidden_layers"],  # one layer, two sublayers, a block
    }
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in NAMES.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = satlens.load(tmp_path)
    assert model.provenance["layout"] == "attnres_community"
    expected = load_file(source / "expected.safetensors")
    with torch.no_grad():
        assert (model(expected["input_ids"]) - expected["logits"]).abs().max() <= 2e-5


@pytest.mark.parametrize(
    ("changes", "sublayers"),
    [
        ({"attnres_num_blocks": 5}, 4),
        ({"attnres_num_blocks": 4}, 6),  # ceil(10 / 4) = 3 layers
        ({"attnres_num_blocks": 99}, 2),
        ({"attn_res_block_size": 3}, 6),  # K3 counts layers
        ({"attnres_block_size": 3}, 3),  # flash-linear-attention counts sublayers
        ({"attnres_mode": "full", "attnres_num_blocks": 8}, 1),
        ({"attnres_mode": "full"}, 1),
    ],
)
def test_block_sizes_in_their_units(changes, sublayers):
    assert read(**changes).stream.block_size == sublayers


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, "attnres_num_blocks: missing"),
        ({"attnres_num_blocks": 0}, "attnres_num_blocks"),
        ({"attnres_num_blocks": 5, "attn_res_block_size": 2}, "num_blocks and attn_res_block_size"),
        ({"block_size": 4}, "block_size: may count layers or sublayers"),
        ({"attnres_num_blocks": 5, "attnres_mode": "delta"}, "attnres_mode"),
        ({"attnres_num_blocks": 5, "attnres_gate_type": "sigmoid_scalar"}, "attnres_gate_type"),
        ({"attnres_num_blocks": 5, "attnres_use_null_source": True}, "attnres_use_null_source"),
        ({"attnres_num_blocks": 5, "attnres_recency_bias_init": 3.0}, "attnres_recency_bias_init"),
    ],
)
def test_refused_routes(changes, named):
    with pytest.raises(ConfigError, match=named):
        read(**changes)


def test_a_value_route_with_its_own_gamma():
    """Only gamma times the query matters, so a shared gamma can stand for two."""
    sizes = {"n_layers": 3, "d_model": 16, "n_heads": 2, "d_vocab": 19, "block_size": 2}
    own = satlens.build("rd-attnres", own_value_gamma=True, **sizes).double()
    shared = satlens.build("rd-attnres", **sizes).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if "gamma" in name:
                parameter.abs_().add_(0.5)
        state = own.state_dict()
        for key in [k for k in state if k.endswith("gamma_v")]:
            gamma_v, read = state.pop(key), key.removesuffix("gamma_v")
            state[f"{read}query_v"] = state[f"{read}query_v"] * gamma_v / state[f"{read}gamma"]
        shared.load_state_dict(state)
        tokens = torch.arange(18).view(2, 9)
        assert (own(tokens) - shared(tokens)).abs().max() < 1e-10
    tokens = torch.arange(18).view(2, 9)
    with satlens.attention("eager"):
        explicit = own(tokens, "loss")
    fused = own(tokens, "loss")
    assert torch.allclose(fused, explicit, rtol=1e-12)
    weight = own.blocks[1].attn_read.gamma_v
    assert weight is not None
    fused_grad = torch.autograd.grad(fused, weight)[0]
    explicit_grad = torch.autograd.grad(explicit, weight)[0]
    assert fused_grad.abs().max() > 0
    assert torch.allclose(fused_grad, explicit_grad, rtol=1e-9)


def test_an_own_gamma_needs_a_route_of_its_own():
    with pytest.raises(ConfigError, match="own_value_gamma"):
        satlens.build("rd-attnres-tied", own_value_gamma=True)
