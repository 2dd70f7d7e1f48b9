"""Forty random models of every kind: built, trained a step, saved, loaded, decoded, analysed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import satlens
from satlens.config import to_dict
from satlens.models.decoder import Decoder

VOCAB, CONTEXT = 23, 12

value_residuals = st.one_of(
    st.just({"kind": "none"}),
    st.fixed_dictionaries(
        {
            "kind": st.just("static"),
            "mode": st.sampled_from(["identity", "learnable", "learnable_plus"]),
            "last_k": st.sampled_from([None, 1, 2]),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("gated"),
            "gate": st.sampled_from(
                ["relu", "sigmoid", "softmax", "softmax_sigmoid", "tanh", "identity"]
            ),
            "bias": st.booleans(),
            "last_k": st.sampled_from([None, 1, 2]),
        }
    ),
)
block_sizes = st.integers(1, 5)
streams = st.one_of(
    st.just({"kind": "residual"}),
    st.fixed_dictionaries(
        {
            "kind": st.just("attnres"),
            "block_size": block_sizes,
            "output_read": st.booleans(),
            "route_bias": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("rd_attnres"),
            "block_size": block_sizes,
            "control": st.sampled_from(["none", "tied", "average", "frozen_v"]),
            "output_read": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {"kind": st.just("dense"), "dilation": st.integers(1, 3), "period": st.integers(1, 3)}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("mudd"),
            "pre_post_norm": st.booleans(),
            "shared_first_norm": st.booleans(),
            "expand_last": st.booleans(),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("hyper"),
            "n_streams": st.integers(1, 4),
            "dynamic": st.booleans(),
            "tanh": st.booleans(),
            "norm": st.sampled_from(["rms", "layer"]),
        }
    ),
    st.fixed_dictionaries({"kind": st.just("delta"), "block_size": block_sizes}),
)


@st.composite
def configs(draw):
    n_layers = draw(st.integers(1, 4))
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    width = draw(st.sampled_from([8, 16]))
    one_width = draw(st.booleans())
    widths = draw(st.lists(st.sampled_from([0, 8, 12]), min_size=n_layers, max_size=n_layers))
    return satlens.ModelConfig(
        d_vocab=VOCAB,
        n_ctx=CONTEXT,
        n_layers=n_layers,
        d_model=width,
        n_heads=4,
        n_key_value_heads=kv_heads,
        d_head=draw(st.sampled_from([2, 4, 6])),
        d_mlp=widths[0] if one_width else tuple(widths),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        window_size=draw(st.sampled_from([None, 1, 3, 8])),
        tied_embeddings=draw(st.booleans()),
        init=draw(st.sampled_from(["fan_in", "normal_0.02"])),
        value_residual=draw(value_residuals),
        stream=draw(streams),
    )


def trained_a_step(cfg, tokens):
    """A random model after one step of the trainer's optimiser; every gradient is finite."""
    from satlens.training.optimiser import make_optimiser

    model = Decoder(cfg, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    before = [parameter.clone() for parameter in model.parameters()]
    optimiser = make_optimiser(model, satlens.TrainConfig(precision="fp32"))
    model(tokens, "loss").backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    after = zip(before, model.parameters(), strict=True)
    assert any(not torch.equal(old, new) for old, new in after)
    return model.eval()


def decoded(model, tokens, sizes):
    """Logits of cached decoding in chunks of these sizes."""
    cache, parts = satlens.KVCache(), []
    for chunk in tokens.split(sizes, dim=1):
        parts.append(model(chunk, past=cache))
    return torch.cat(parts, 1)


def analyses_of(model, tokens):
    """Every analysis that the model has sites for, without loss of a token."""
    results = [satlens.evaluate(model, tokens)]
    if model.sites:
        results += [
            satlens.sparsity(model, tokens),
            satlens.ablate(model, tokens, scope=("model",)),
        ]
    if model.cfg.stream.kind != "residual":
        results.append(satlens.routes(model, tokens))
    return results


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@seed(20_260_501)
@settings(
    max_examples=40,
    phases=[Phase.generate],  # shrinking would train and analyse a thousand models
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(cfg=configs(), chunk=st.integers(1, CONTEXT - 1))
def test_every_model_goes_the_whole_way(cfg, chunk):
    tokens = torch.randint(0, VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    model = trained_a_step(cfg, tokens)
    assert satlens.ModelConfig(**to_dict(cfg)) == cfg
    with tempfile.TemporaryDirectory() as folder:
        satlens.save(model, Path(folder) / "model")
        again = satlens.load(Path(folder) / "model")
    assert again.cfg == cfg
    with torch.no_grad():
        logits = model(tokens)
        assert torch.equal(again(tokens), logits)
        for sizes in (1, [chunk, CONTEXT - chunk]):
            assert (decoded(model, tokens, sizes) - logits).abs().max() < 1e-4
    for result in analyses_of(again, tokens):
        table = result.to_frame()
        assert len(table)
        assert table["n_tokens"].max() <= tokens.numel()
