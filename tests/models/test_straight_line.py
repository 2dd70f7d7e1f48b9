"""Every variant, and compositions that no published code offers, against the equations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from straight_line import evaluate, random_model, random_tokens

import satlens

GATES = ["relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity"]
CONTROLS = ["none", "tied", "average", "frozen_v"]
CASES = [
    {"name": "transformer"},
    {"name": "transformer", "n_key_value_heads": 4, "tied_embeddings": True},
    {"name": "transformer", "n_key_value_heads": 1, "qkv_bias": True, "d_head": 6},
    {"name": "transformer", "qk_norm": True, "window_size": 3, "rope_theta": 500.0},
    {"name": "transformer", "d_mlp": (0, 24, 8)},
    {"name": "transformer", "norm_eps": 0.0},
    {"name": "resformer"},
    {"name": "resformer", "last_k": 1},
    {"name": "resformer-identity"},
    {"name": "resformer-learnable"},
    {"name": "resformer", "mode": "constant", "weights": (2.0, 0.3)},
    {"name": "resformer", "mode": "sparse", "weights": (-1.0, 0.5), "layers": (2,)},
    *({"name": "satformer", "gate": gate} for gate in GATES),
    {"name": "satformer", "bias": True, "last_k": 1},
    {"name": "satformer", "bias": True, "qkv_bias": True, "qk_norm": True},
    {"name": "attnres"},
    *({"name": "attnres", "block_size": size} for size in (1, 2, 3, 5, 6, 100)),
    {"name": "attnres", "route_bias": True},
    {"name": "attnres", "output_read": False},
    *({"name": "rd-attnres", "control": control, "block_size": 2} for control in CONTROLS),
    {"name": "rd-attnres", "route_bias": True, "block_size": 3},
    {"name": "rd-attnres", "value_residual": "satformer", "gate": "tanh", "block_size": 2},
    {"name": "rd-attnres", "value_residual": "satformer", "bias": True, "qkv_bias": True},
    {"name": "rd-attnres-tied", "value_residual": "satformer"},
    {"name": "rd-attnres-average", "value_residual": "satformer", "gate": "identity"},
    {"name": "rd-attnres-frozen-v", "value_residual": "resformer"},
    {"name": "attnres", "value_residual": "resformer", "block_size": 1},
    {"name": "attnres", "value_residual": "satformer", "gate": "softmax"},
]


def check(model, tokens, **options):
    expected = evaluate(model, tokens, **options)
    hooks = [*expected.routes, *expected.gates]
    with torch.no_grad():
        assert (model(tokens, **options) - expected.logits).abs().max() < 1e-9
        for implementation in ("eager", "fused"):
            with satlens.attention(implementation):
                assert (model(tokens, **options) - expected.logits).abs().max() < 1e-9
        if hooks:
            _, cache = model.run_with_cache(tokens, names_filter=hooks, **options)
            for name, value in {**expected.routes, **expected.gates}.items():
                assert (cache[name] - value).abs().max() < 1e-10, name


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_variants(fields):
    check(random_model(**fields), random_tokens())


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["transformer", "attnres", "rd-attnres"]),
    value_residual=st.sampled_from([None, "resformer", "resformer-learnable", "satformer"]),
    n_layers=st.integers(1, 4),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (3, 1)]),
    block_size=st.integers(1, 9),
    qk_norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_compositions(name, value_residual, n_layers, heads, block_size, qk_norm, seed):
    fields = {} if name == "transformer" else {"block_size": block_size}
    if value_residual is not None:
        fields["value_residual"] = value_residual
    model = random_model(
        name,
        seed,
        n_layers=n_layers,
        n_heads=heads[0],
        n_key_value_heads=heads[1],
        d_head=4,
        qk_norm=qk_norm,
        **fields,
    )
    check(model, random_tokens(1, 6, seed=seed))


@pytest.mark.parametrize("name", ["transformer", "satformer", "resformer", "attnres", "rd-attnres"])
def test_document_mask(name):
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [7, 7, 7, 7, 7, 7, 3, 3, -1]])
    check(random_model(name), random_tokens(), documents=documents)
