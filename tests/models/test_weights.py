"""Weights under TransformerLens' names, and the decompositions that multiply caches with them."""

from __future__ import annotations

import pytest
import torch
from straight_line import random_model, random_tokens

import satlens
from satlens.errors import ConfigError, HookError

RESIDUAL = ["transformer", "resformer", "satformer"]


@torch.no_grad()
@pytest.mark.parametrize("bias", [False, True])
def test_weights_compute_what_the_hooks_show(bias):
    model, tokens = random_model("transformer", qkv_bias=bias), random_tokens()
    _, cache = model.run_with_cache(tokens)
    for layer, block in enumerate(model.blocks):
        at = f"blocks.{layer}."
        y = cache[at + "ln1.hook_normalized"] * block.ln1.weight
        for role in "QKV":
            weight, offset = getattr(model, f"W_{role}")[layer], getattr(block.attn, f"b_{role}")
            found = torch.einsum("btd,hde->bthe", y, weight) + offset
            assert (found - cache[f"{at}attn.hook_{role.lower()}"]).abs().max() < 1e-12
        out = torch.einsum("bthe,hed->btd", cache[at + "attn.hook_z"], model.W_O[layer])
        assert (out + block.attn.b_O - cache[at + "hook_attn_out"]).abs().max() < 1e-12
        y = cache[at + "ln2.hook_normalized"] * block.ln2.weight
        pre, linear = y @ model.W_gate[layer], y @ model.W_in[layer] + block.mlp.b_in
        assert (pre - cache[at + "mlp.hook_pre"]).abs().max() < 1e-12
        assert (linear - cache[at + "mlp.hook_pre_linear"]).abs().max() < 1e-12
        out = cache[at + "mlp.hook_post"] @ model.W_out[layer] + block.mlp.b_out
        assert (out - cache[at + "hook_mlp_out"]).abs().max() < 1e-12
    logits = cache["ln_final.hook_normalized"] * model.ln_final.weight @ model.W_U + model.b_U
    assert (logits - cache["hook_logits"]).abs().max() < 1e-12
    assert torch.equal(model.W_E[tokens], cache["hook_embed"])


def test_shapes():
    model = random_model("satformer")
    shapes = {
        "W_Q": (3, 4, 16, 4), "W_K": (3, 2, 16, 4), "W_V": (3, 2, 16, 4), "W_O": (3, 4, 4, 16),
        "W_in": (3, 16, 24), "W_gate": (3, 16, 24), "W_out": (3, 24, 16),
        "W_E": (29, 16), "W_U": (16, 29), "b_U": (29,),
    }  # fmt: skip
    assert {name: tuple(getattr(model, name).shape) for name in shapes} == shapes


@torch.no_grad()
@pytest.mark.parametrize("name", RESIDUAL)
@pytest.mark.parametrize("expand_neurons", [False, True])
def test_the_full_decomposition_sums_to_the_stream(name, expand_neurons):
    model = random_model(name, dtype=torch.float32, qkv_bias=True, qk_norm=True)
    tokens = random_tokens()
    _, cache = model.run_with_cache(tokens)
    for layer in range(4):
        last = layer == 3
        expected = cache["blocks.2.hook_resid_post" if last else f"blocks.{layer}.hook_resid_pre"]
        parts, labels = cache.get_full_resid_decomposition(
            layer, expand_neurons=expand_neurons, return_labels=True
        )
        assert len(parts) == len(labels)
        assert labels[-2:] == ["embed", "bias"]
        assert (parts.sum(0) - expected).abs().max() < 1e-4 * expected.abs().max()
    heads, labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    assert labels[:5] == ["L0H0", "L0H1", "L0H2", "L0H3", "L1H0"]
    attention = sum(cache[f"blocks.{layer}.hook_attn_out"] for layer in range(3))
    assert (heads[:-1].sum(0) - attention).abs().max() < 1e-4 * attention.abs().max()
    neurons = cache.stack_neuron_results(3)
    mlps = sum(cache[f"blocks.{layer}.hook_mlp_out"] for layer in range(3))
    assert len(neurons) == 3 * 24
    assert (neurons.sum(0) - mlps).abs().max() < 1e-4 * mlps.abs().max()


@torch.no_grad()
def test_final_norm_folds_into_the_parts():
    """With the last norm's scale applied, the parts give the logits themselves."""
    model, tokens = random_model("satformer"), random_tokens()
    logits, cache = model.run_with_cache(tokens)
    parts = cache.get_full_resid_decomposition(expand_neurons=False, apply_ln=True)
    found = parts.sum(0) * model.ln_final.weight @ model.W_U
    assert (found - logits).abs().max() < 1e-5 * logits.abs().max()


@torch.no_grad()
def test_logits_are_attributed_to_parts():
    model, tokens = random_model("satformer").eval(), random_tokens()
    logits, cache = model.run_with_cache(tokens)
    parts = cache.get_full_resid_decomposition()
    found = cache.logit_attrs(parts, tokens).sum(0)
    assert (found - logits.gather(-1, tokens[..., None])[..., 0]).abs().max() < 1e-5
    difference = cache.logit_attrs(parts, 3, incorrect_tokens=5).sum(0)
    assert (difference - (logits[..., 3] - logits[..., 5])).abs().max() < 1e-5


@torch.no_grad()
def test_the_logit_lens_is_two_calls():
    model, tokens = random_model("satformer"), random_tokens()
    logits, cache = model.run_with_cache(tokens)
    lens = cache.accumulated_resid(apply_ln=True) @ model.W_U
    assert lens.shape == (4, *logits.shape)
    assert (lens[-1] - logits).abs().max() < 1e-5
    early = model.ln_final(cache["blocks.1.hook_resid_pre"]) @ model.W_U
    assert (lens[1] - early).abs().max() < 1e-12
    assert (cache.logit_lens() - lens).abs().max() < 1e-12


@torch.no_grad()
def test_unequal_widths():
    model, tokens = random_model("transformer", d_mlp=(24, 8, 0)), random_tokens()
    _, cache = model.run_with_cache(tokens)
    for name in ("W_in", "W_gate", "W_out"):
        with pytest.raises(ConfigError, match=rf"{name}: MLPs of widths \[0, 8, 24\] do not stack"):
            getattr(model, name)
    assert model.blocks[1].mlp.W_out.shape == (8, 16)
    for call in (cache.stack_neuron_results, cache.get_full_resid_decomposition):
        with pytest.raises(HookError, match="needs MLPs of one width"):
            call(2)
    parts = cache.get_full_resid_decomposition(expand_neurons=False)
    assert (parts.sum(0) - cache["blocks.2.hook_resid_post"]).abs().max() < 1e-10


def test_bf16_caches_decompose():
    model, tokens = satlens.build("satformer", n_layers=2, d_model=16, d_vocab=29), random_tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, cache = model.run_with_cache(tokens)
    with torch.no_grad():
        parts = cache.get_full_resid_decomposition()
    expected = cache["blocks.1.hook_resid_post"]
    assert (parts.sum(0) - expected).abs().max() < 0.02 * expected.abs().max()
