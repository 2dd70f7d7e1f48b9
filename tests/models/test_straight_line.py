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
    {"name": "rd-attnres", "own_value_gamma": True, "block_size": 2},
    {"name": "rd-attnres-average", "own_value_gamma": True, "block_size": 2},
    {"name": "rd-attnres", "value_residual": "satformer", "gate": "tanh", "block_size": 2},
    {"name": "rd-attnres", "value_residual": "satformer", "bias": True, "qkv_bias": True},
    {"name": "rd-attnres-tied", "value_residual": "satformer"},
    {"name": "rd-attnres-average", "value_residual": "satformer", "gate": "identity"},
    {"name": "rd-attnres-frozen-v", "value_residual": "resformer"},
    {"name": "attnres", "value_residual": "resformer", "block_size": 1},
    {"name": "attnres", "value_residual": "satformer", "gate": "softmax"},
    *({"name": "delta-attnres", "block_size": size} for size in (1, 2, 3, 4, 100)),
    {"name": "delta-attnres", "norm_eps": 1e-2, "d_mlp": (0, 24, 8)},
    {"name": "denseformer"},
    *(
        {"name": "denseformer", "n_layers": 5, "dilation": dilation, "period": period}
        for dilation, period in ((2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (9, 1), (1, 9))
    ),
    {"name": "muddformer"},
    {"name": "muddformer", "d_mlp": (0, 24, 8), "norm_eps": 1e-2},
    {"name": "muddformer", "shared_first_norm": True, "expand_last": True, "round64": True},
    {"name": "muddformer-prepost"},
    {"name": "muddformer-prepost", "norm_eps": 1e-2, "round64": True, "qk_norm": True},
    {"name": "muddformer-prepost", "shared_first_norm": True, "expand_last": True},
    {"name": "hyperconnections"},
    *({"name": "hyperconnections", "n_streams": n, "n_layers": 4} for n in (1, 2, 3)),
    {"name": "hyperconnections", "tanh": False},
    {"name": "hyperconnections", "norm": "layer", "scaled_outputs": True},
    {"name": "hyperconnections", "norm": "layer", "tanh": False, "n_streams": 2},
    {"name": "hyperconnections-static"},
    {"name": "hyperconnections-static", "n_streams": 3},
]

# Every stream with every kind of value residual.
STREAMS = {
    "transformer": {},
    "denseformer": {"dilation": 2},
    "muddformer": {},
    "muddformer-prepost": {},
    "hyperconnections": {"n_streams": 3},
    "hyperconnections-static": {},
    "attnres": {"block_size": 2},
    "rd-attnres": {"block_size": 2},
    "delta-attnres": {"block_size": 2},
}
VALUE_RESIDUALS = {
    "satformer": {"gate": "tanh", "bias": True},
    "resformer": {},
    "resformer-identity": {},
    "resformer-learnable": {},
    "constant": {"value_residual": "resformer", "mode": "constant", "weights": (2.0, 0.3)},
    "sparse": {"value_residual": "resformer", "mode": "sparse", "layers": (2,)},
}


def check(model, tokens, **options):
    expected = evaluate(model, tokens, **options)
    with torch.no_grad():
        assert (model(tokens, **options) - expected.logits).abs().max() < 1e-10
        for implementation in ("eager", "fused"):
            with satlens.attention(implementation):
                assert (model(tokens, **options) - expected.logits).abs().max() < 1e-10
        shown = {**expected.routes, **expected.gates, **expected.reads}
        _, cache = model.run_with_cache(tokens, names_filter=list(shown), **options)
        for name, value in shown.items():
            assert cache[name].shape == value.shape, name
            assert (cache[name] - value).abs().max() < 1e-10, name


@pytest.mark.parametrize("fields", CASES, ids=str)
def test_variants(fields):
    check(random_model(**fields), random_tokens())


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("residual", VALUE_RESIDUALS)
def test_compositions(stream, residual):
    fields = {"value_residual": residual, **STREAMS[stream], **VALUE_RESIDUALS[residual]}
    model = random_model(stream, n_layers=4, qk_norm=True, window_size=4, **fields)
    check(model, random_tokens())


def sizes(stream):
    """Random fields of a stream."""
    if "attnres" in stream:
        return st.fixed_dictionaries({"block_size": st.integers(1, 9)})
    if stream == "denseformer":
        return st.fixed_dictionaries({"dilation": st.integers(1, 4), "period": st.integers(1, 4)})
    if stream == "hyperconnections":
        return st.fixed_dictionaries({"n_streams": st.integers(1, 5), "tanh": st.booleans()})
    return st.just({})


@settings(max_examples=40, deadline=None)
@given(
    stream=st.sampled_from(list(STREAMS)).flatmap(lambda s: st.tuples(st.just(s), sizes(s))),
    value_residual=st.sampled_from([None, "resformer", "resformer-learnable", "satformer"]),
    n_layers=st.integers(1, 4),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (3, 1)]),
    qk_norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_random_compositions(stream, value_residual, n_layers, heads, qk_norm, seed):
    name, fields = stream
    if value_residual is not None:
        fields = {**fields, "value_residual": value_residual}
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


@pytest.mark.parametrize("name", [*STREAMS, "satformer", "resformer"])
def test_document_mask(name):
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2], [7, 7, 7, 7, 7, 7, 3, 3, -1]])
    check(random_model(name), random_tokens(), documents=documents)


UNFOLDED = [
    *([name, fields] for name, fields in STREAMS.items()),
    ("denseformer", {"dilation": 1, "period": 2}),
    ("hyperconnections", {"norm": "layer", "tanh": False}),
    ("attnres", {"block_size": 1, "route_bias": True}),
    ("attnres", {"block_size": 3, "output_read": False}),
    ("rd-attnres-tied", {"block_size": 3}),
    ("rd-attnres-average", {"block_size": 2}),
    ("rd-attnres-frozen-v", {"block_size": 2}),
    ("delta-attnres", {"block_size": 1}),
]


@pytest.mark.parametrize(("name", "fields"), UNFOLDED, ids=str)
def test_effective_routes(name, fields):
    """sum_m c_m delta_m is what each read receives, in order, and nothing is used before it is."""
    model, tokens = random_model(name, n_layers=4, **fields), random_tokens()
    expected = evaluate(model, tokens)
    points, recorded = model.stream.unfolded_from(model.cfg), {}
    if points:
        recorded = model.run_with_cache(tokens, names_filter=points)[1].cache_dict
    routes = dict(model.stream.unfold(model, recorded))
    assert list(routes) == list(expected.reads)
    for point, coefficients in routes.items():
        assert coefficients.dtype == torch.float64
        assert coefficients.shape[2] == len(expected.added) == 9
        wide = coefficients if coefficients.ndim == 4 else coefficients[..., None]
        read = sum(c * x for c, x in zip(wide.unbind(2), expected.added, strict=True))
        assert (read - expected.reads[point]).abs().max() < 1e-10, point
        layer = 4 if point == "hook_out_read" else int(point.split(".")[1])
        sublayer = 2 * layer + ("mlp" in point)
        assert not coefficients[:, :, 1 + sublayer :].any(), point
