"""What must hold of AttnRes (arXiv 2603.15031) and RD-AttnRes (arXiv 2608.01075)."""

from __future__ import annotations

import math

import pytest
import torch
from straight_line import attend, feed_forward, random_model, random_tokens, rms, visible

import satlens
from satlens.models.streams.attnres import n_sources
from satlens.models.streams.mixing import mix, route_weights

SIZES = [1, 2, 3, 5, 6, 7, 100]
STREAMS = ["attnres", "rd-attnres", "rd-attnres-tied", "rd-attnres-average", "rd-attnres-frozen-v"]


def share(target, source):
    """Copy every parameter both have."""
    theirs = source.state_dict()
    state = {k: v for k, v in theirs.items() if k in target.state_dict()}
    target.load_state_dict(state, strict=False)
    return target


def zero_queries(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] in ("query", "query_v"):
                parameter.zero_()
    return model


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("size", SIZES)
def test_zero_queries_are_the_transformer(stream, size):
    tokens = random_tokens()
    model = zero_queries(random_model(stream, block_size=size, norm_eps=0.0, qk_norm=True))
    plain = share(random_model("transformer", seed=5, norm_eps=0.0, qk_norm=True), model)
    with torch.no_grad():
        assert (model(tokens) - plain(tokens)).abs().max() < 1e-12
        # At eps > 0: the transformer whose norm after a read of n sources has eps n^2.
        eps = 1e-2
        for module in model.modules():
            if getattr(module, "eps", None) == 0.0:
                module.eps = eps
        for layer, block in enumerate(plain.blocks):
            block.ln1.eps = eps * n_sources(2 * layer, size) ** 2
            block.ln2.eps = eps * n_sources(2 * layer + 1, size) ** 2
        plain.ln_final.eps = eps * n_sources(2 * plain.cfg.n_layers, size) ** 2
        assert (model(tokens) - plain(tokens)).abs().max() < 1e-12


def full_attention_residuals(model, tokens):
    """Full AttnRes on its own terms: every sublayer attends over all earlier outputs."""
    cfg, W = model.cfg, dict(model.state_dict())
    history = W["embed.weight"][tokens][None]
    mask = visible(cfg, tokens.shape[1], None)

    def read(at):
        keys = rms(history, cfg.norm_eps) * W[at + "gamma"]
        weights = torch.einsum("nbtd,d->nbt", keys, W[at + "query"]).softmax(0)
        return torch.einsum("nbt,nbtd->btd", weights, history)

    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}."
        x = rms(read(at + "attn_read."), cfg.norm_eps) * W[at + "ln1.weight"]
        out, _ = attend(cfg, W, at + "attn.", x, x, lambda v: v, mask)
        history = torch.cat((history, out[None]))
        y = rms(read(at + "mlp_read."), cfg.norm_eps) * W[at + "ln2.weight"]
        history = torch.cat((history, feed_forward(W, at + "mlp.", y)[None]))
    return rms(read("out_read."), cfg.norm_eps) * W["ln_final.weight"] @ W["unembed.weight"].T


def test_block_size_one_is_full_attention_residuals():
    model, tokens = random_model("attnres-full", n_layers=4), random_tokens()
    with torch.no_grad():
        expected = full_attention_residuals(model, tokens)
        assert (model(tokens) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("size", SIZES)
def test_source_counts_and_sums(stream, size):
    model, tokens = random_model(stream, block_size=size), random_tokens()
    sites = [s for s in model.sites if s.kind == "route"]
    _, cache = model.run_with_cache(tokens, names_filter=[s.hook for s in sites])
    for site in sites:
        sublayer = 2 * site.layer + (site.sublayer == "mlp")
        n = math.ceil(sublayer / size) + 1
        weights = cache[site.hook]
        assert weights.shape == (*tokens.shape, n)
        assert len(site.sources) == n
        assert (weights.sum(-1) - 1).abs().max() < 1e-12
        assert weights.min() >= 0
        # The sources cover the embedding and every earlier sublayer exactly once.
        covered = [m for source in site.sources for m in source.sublayers]
        assert covered == [-1, *range(sublayer)]
        kinds = [source.kind for source in site.sources]
        assert kinds[0] == "embedding"
        assert all(kind == "block" for kind in kinds[1:-1])
        assert kinds[-1] == ("partial" if sublayer else "embedding")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tied_is_block_bit_for_bit(dtype, size):
    tied = random_model("rd-attnres-tied", dtype=dtype, block_size=size)
    block = share(random_model("attnres", seed=9, dtype=dtype, block_size=size), tied)
    tokens = random_tokens()
    results = {}
    for name, model in (("tied", tied), ("block", block)):
        loss = model(tokens, return_type="loss")
        loss.backward()
        results[name] = model(tokens), {k: p.grad for k, p in model.named_parameters()}
    assert torch.equal(results["tied"][0], results["block"][0])
    for name, gradient in results["block"][1].items():
        other = results["tied"][1][name]
        assert (gradient is None and other is None) or torch.equal(gradient, other), name
    with satlens.attention("eager"):
        assert torch.equal(tied(tokens), block(tokens))


def test_decoupled_with_equal_queries_is_block():
    decoupled = random_model("rd-attnres", block_size=2)
    with torch.no_grad():
        for block in decoupled.blocks:
            block.attn_read.query_v.copy_(block.attn_read.query)
    block = share(random_model("attnres", seed=9, block_size=2), decoupled)
    tokens = random_tokens()
    with torch.no_grad():
        assert (decoupled(tokens) - block(tokens)).abs().max() < 1e-12


def test_average_is_the_mean_of_both_routes():
    """At layer 1 of a model whose layer 0 has dead routes, both models see the same sources."""
    tokens = random_tokens()
    average = random_model("rd-attnres-average", block_size=100)
    decoupled = share(random_model("rd-attnres", seed=9, block_size=100), average)
    names = ["blocks.1.hook_route_qk", "blocks.1.hook_route_v"]
    _, ours = average.run_with_cache(tokens, names_filter=names)
    _, theirs = decoupled.run_with_cache(tokens, names_filter=names)
    mean = (theirs[names[0]] + theirs[names[1]]) / 2
    assert (theirs[names[0]] - theirs[names[1]]).abs().max() > 1e-3
    for name in names:
        assert (ours[name] - mean).abs().max() < 1e-12


def test_frozen_v_is_uniform():
    model = random_model("rd-attnres-frozen-v", block_size=2)
    _, cache = model.run_with_cache(random_tokens(), names_filter=lambda n: "route_v" in n)
    for weights in cache.values():
        assert (weights == 1 / weights.shape[-1]).all()


def test_two_phase_equals_naive():
    """Scores of the bank for a whole block at once, the running sum merged online."""
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(5, 2, 3, 8, generator=generator, dtype=torch.float64)
    queries = torch.randn(4, 8, generator=generator, dtype=torch.float64)
    gamma = torch.rand(8, generator=generator, dtype=torch.float64)
    scales = tuple((s.square().mean(-1, keepdim=True) + 1e-6).sqrt() for s in sources)
    weights = route_weights(tuple(sources), queries, gamma, scales)
    bank, partial = sources[:-1], sources[-1]
    scores = (rms(bank, 1e-6) * gamma) @ queries.T  # (n - 1, B, T, R), one product for all
    for role in range(len(queries)):
        high = scores[..., role].max(0).values
        exponentials = (scores[..., role] - high).exp()
        total, summed = exponentials.sum(0), (exponentials[..., None] * bank).sum(0)
        late = (rms(partial, 1e-6) * gamma) @ queries[role]
        peak = torch.maximum(high, late)
        old, new = (high - peak).exp(), (late - peak).exp()
        summed = (summed * old[..., None] + new[..., None] * partial) / (total * old + new)[
            ..., None
        ]
        naive = mix(tuple(sources), weights[..., role : role + 1])
        assert (naive - summed).abs().max() < 1e-12


@pytest.mark.parametrize("stream", ["attnres", "rd-attnres"])
def test_gradients_at_the_start(stream):
    model = satlens.build(
        stream, n_layers=3, d_model=16, n_heads=4, d_vocab=29, block_size=2, dtype=torch.float64
    )
    model(random_tokens(), return_type="loss").backward()
    for name, parameter in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind in ("query", "query_v") and name.startswith("blocks.0.attn_read"):
            assert parameter.grad is None or not parameter.grad.any(), name
        elif kind in ("query", "query_v"):
            assert parameter.grad.any(), name
        elif kind == "gamma":
            assert parameter.grad is None or not parameter.grad.any(), name


def test_queries_start_at_zero_and_routes_uniform():
    for stream in STREAMS:
        model = satlens.build(stream, n_layers=2, d_model=16, n_heads=4, d_vocab=29, block_size=1)
        _, cache = model.run_with_cache(random_tokens(), names_filter=lambda n: "hook_route" in n)
        for weights in cache.values():
            assert (weights - 1 / weights.shape[-1]).abs().max() < 1e-6


def test_only_the_product_of_gamma_and_query_matters():
    model, tokens = random_model("rd-attnres", block_size=2), random_tokens()
    with torch.no_grad():
        before = model(tokens)
        for name, parameter in model.named_parameters():
            kind = name.rpartition(".")[2]
            if kind == "gamma":
                parameter.mul_(2)
            elif kind in ("query", "query_v"):
                parameter.div_(2)
        assert (model(tokens) - before).abs().max() < 1e-12
