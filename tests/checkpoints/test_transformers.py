"""Llama and Qwen3: the logits of transformers' own classes, in both directions."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import satlens

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GROUPED = COMMON
PLAIN = {**COMMON, "num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5}
WIDE_HEADS = {**COMMON, "head_dim": 24, "rope_parameters": {"rope_type": "default"}}
WIDE_HEADS["rope_parameters"]["rope_theta"] = 5e5
BIASED = {**COMMON, "attention_bias": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}

THEIRS = [
    ("Llama", {**GROUPED}),
    ("Llama", {**PLAIN}),
    ("Llama", {**WIDE_HEADS}),
    ("Llama", {**BIASED}),
    ("Qwen3", {**GROUPED, "head_dim": 8}),
    ("Qwen3", {**PLAIN, "head_dim": 8, "max_window_layers": 3, "use_sliding_window": True}),
    ("Qwen3", {**WIDE_HEADS}),
    ("Qwen3", {**BIASED, "head_dim": 8, **WINDOW}),
]
SIZES = {"d_vocab": 61, "n_layers": 3, "d_model": 32, "n_heads": 4, "n_ctx": 64, "d_mlp": 48}
OURS = [
    ("Llama", {"n_key_value_heads": 2, "rope_theta": 5e5}),
    ("Llama", {"tied_embeddings": True, "d_head": 16, "qkv_bias": True, "norm_eps": 1e-5}),
    ("Qwen3", {"n_key_value_heads": 1, "tied_embeddings": True, "qkv_bias": True}),
    ("Qwen3", {"n_key_value_heads": 2, "d_head": 24, "window_size": 5, "norm_eps": 1e-5}),
]


def name_of(value):
    return value if isinstance(value, str) else "-".join(k for k in value if k not in COMMON)


def randomise(model):
    """Weights seven times their usual spread, so that a wrong one shows; output biases stay zero.

    Logits then reach 3, and either side is within 5e-6 of the same in float64.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.endswith("o_proj.bias"):
                spread = 0.15 * torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + spread if "norm" in name or "ln" in name else spread)
    return model


def assert_same_logits(theirs, ours):
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize(("family", "fields"), THEIRS, ids=name_of)
def test_theirs_to_ours(family, fields, tmp_path):
    config = getattr(transformers, f"{family}Config")(**fields)
    theirs = randomise(getattr(transformers, f"{family}ForCausalLM")(config)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = satlens.load(tmp_path / "theirs")
    assert ours.provenance["layout"] == f"hf_{family.lower()}"
    assert_same_logits(theirs, ours)


@pytest.mark.parametrize(("family", "fields"), OURS, ids=name_of)
def test_ours_to_theirs(family, fields, tmp_path):
    if family == "Qwen3":
        fields = {**fields, "qk_norm": True, "qk_norm_eps": fields.get("norm_eps", 1e-6)}
    ours = randomise(satlens.build("transformer", **{**SIZES, **fields})).eval()
    satlens.save(ours, tmp_path / "ours", layout=f"hf-{family.lower()}")
    theirs, report = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert_same_logits(theirs.eval(), ours)
    again = satlens.load(tmp_path / "ours")
    state = ours.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items())


def test_an_output_bias_is_refused(tmp_path):
    config = transformers.LlamaConfig(**BIASED)
    theirs = transformers.LlamaForCausalLM(config)
    torch.nn.init.ones_(theirs.model.layers[1].self_attn.o_proj.bias)
    theirs.save_pretrained(tmp_path / "theirs")
    with pytest.raises(satlens.SatlensError, match=r"layers\.1\.self_attn\.o_proj\.bias"):
        satlens.load(tmp_path / "theirs")


def test_their_default_tokens_are_not_claimed(tmp_path):
    satlens.save(satlens.build("transformer", **SIZES), tmp_path / "ours", layout="hf_llama")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["eos_token_id"] is None
    assert config["bos_token_id"] is None
