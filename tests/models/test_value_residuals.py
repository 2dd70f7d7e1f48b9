"""What must hold of ResFormer and SATFormer (arXiv 2410.17897, 2605.03953)."""

from __future__ import annotations

import pytest
import torch
from straight_line import random_model, random_tokens

import satlens


def share(target, source):
    state = {k: v for k, v in source.state_dict().items() if k in target.state_dict()}
    target.load_state_dict(state, strict=False)
    return target


def zero_alpha(model, bias=None):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha.weight"):
                parameter.zero_()
            elif name.endswith("alpha.bias"):
                parameter.fill_(bias)
    return model


@pytest.mark.parametrize("gate", ["relu", "tanh", "identity"])
def test_zero_gate_is_the_transformer(gate):
    model = zero_alpha(random_model("satformer", gate=gate))
    plain = share(random_model("transformer", seed=4), model)
    tokens = random_tokens()
    assert torch.equal(model(tokens), plain(tokens))


@pytest.mark.parametrize("gate", ["sigmoid", "softmax", "softmax_sigmoid"])
def test_other_gates_are_open_at_zero(gate):
    model = zero_alpha(random_model("satformer", gate=gate))
    plain = share(random_model("transformer", seed=4), model)
    tokens = random_tokens()
    assert (model(tokens) - plain(tokens)).abs().max() > 1e-3
    open_at = {"sigmoid": 0.5, "softmax": 1.0, "softmax_sigmoid": 0.5}[gate]
    _, cache = model.run_with_cache(tokens, names_filter=lambda n: n.endswith("hook_v_gate"))
    for gates in cache.values():
        assert (gates - open_at).abs().max() < 1e-12


@pytest.mark.parametrize("value", [0.7, -1.5])
def test_identity_gate_with_a_bias_is_a_constant_resformer(value):
    gated = zero_alpha(random_model("satformer", gate="identity", bias=True), bias=value)
    static = random_model("resformer", seed=4, mode="constant", weights=(value, 1.0))
    share(static, gated)
    tokens = random_tokens()
    assert torch.equal(gated(tokens), static(tokens))


def test_identity_mode_is_the_constant_half():
    identity = random_model("resformer-identity")
    constant = random_model("resformer", mode="constant", weights=(0.5, 0.5), seed=3)
    share(constant, identity)
    tokens = random_tokens()
    assert torch.equal(identity(tokens), constant(tokens))


def test_sparse_mode_touches_only_its_layers():
    model = random_model("resformer", mode="sparse", weights=(0.0, 1.0), layers=(2,))
    plain = share(random_model("transformer", seed=4), model)
    tokens = random_tokens()
    assert torch.equal(model(tokens), plain(tokens))
    assert [s.layer for s in model.sites] == [2]


@pytest.mark.parametrize("n_layers", [2, 5])
def test_learnable_plus_starts_where_the_paper_says(n_layers):
    model = satlens.build("resformer", n_layers=n_layers, d_model=16, n_heads=4, d_vocab=29)
    names = [f"blocks.{i}.attn.hook_v_{w}" for i in range(1, n_layers) for w in ("gate", "scale")]
    _, cache = model.run_with_cache(random_tokens(), names_filter=names)
    for name, value in cache.items():
        start = 0.5 if name.endswith("scale") else n_layers / (n_layers - 1)
        assert value.shape == (2, 9, 4)
        assert (value - start).abs().max() < 1e-6


def test_last_k_has_no_tensors_below():
    model = random_model("satformer", n_layers=5, last_k=2)
    assert [n for n, _ in model.named_parameters() if "values" in n] == [
        "blocks.3.attn.values.alpha.weight",
        "blocks.4.attn.values.alpha.weight",
    ]
    resformer = random_model("resformer", n_layers=5, last_k=2)
    assert resformer.shared_lambda.logits.shape == (4,)
    assert [s.layer for s in resformer.sites] == [3, 4]


def test_zero_relu_gate_never_trains():
    model = zero_alpha(random_model("satformer"))
    model(random_tokens(), return_type="loss").backward()
    for name, parameter in model.named_parameters():
        if name.endswith("alpha.weight"):
            assert not parameter.grad.any()


def test_fresh_relu_gates_are_half_open():
    model = satlens.build("satformer", n_layers=4, d_model=64, n_heads=4, d_vocab=200)
    tokens = random_tokens(8, 32, vocab=200)
    _, cache = model.run_with_cache(tokens, names_filter=lambda n: n.endswith("hook_v_gate"))
    zero = torch.stack([(gate == 0).float().mean() for gate in cache.values()]).mean()
    assert 0.35 < zero < 0.65


def test_v_first_is_not_detached():
    """Layer 0's values receive gradient through later layers even where its own output is cut."""
    model = random_model("satformer", gate="sigmoid")
    with torch.no_grad():
        model.blocks[0].attn.o.weight.zero_()
    model(random_tokens(), return_type="loss").backward()
    rows = model.blocks[0].attn.qkv.weight.grad[model.blocks[0].attn.qk_rows :]
    assert rows.abs().max() > 1e-6


def test_v_first_is_layer_zeros_raw_value():
    model, tokens = random_model("resformer"), random_tokens()
    _, cache = model.run_with_cache(tokens)
    first = cache["blocks.0.attn.hook_v"]
    assert torch.equal(cache["hook_v_first"], first)
    assert torch.equal(cache["blocks.2.attn.hook_v_first"], first)
    assert torch.equal(cache["blocks.0.attn.hook_v_mixed"], first)
    for layer in (1, 2):
        at = f"blocks.{layer}.attn.hook_v"
        mixed = cache[f"{at}_gate"][..., None] * first + cache[f"{at}_scale"][..., None] * cache[at]
        assert (cache[f"{at}_mixed"] - mixed).abs().max() < 1e-12
