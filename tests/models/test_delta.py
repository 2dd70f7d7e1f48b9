"""What must hold of Delta Attention Residuals (arXiv 2605.18855)."""

from __future__ import annotations

import pytest
import torch
from straight_line import attend, feed_forward, random_model, random_tokens, rms, visible
from test_attnres import share, zero_queries

import satlens
from satlens.models.streams.attnres import n_sources

SIZES = [1, 2, 3, 4, 5, 100]


@pytest.mark.parametrize("size", SIZES)
def test_zero_queries_are_the_transformer(size):
    tokens = random_tokens()
    model = zero_queries(random_model("delta-attnres", block_size=size, norm_eps=0.0, qk_norm=True))
    plain = share(random_model("transformer", seed=5, norm_eps=0.0, qk_norm=True), model)
    with torch.no_grad():
        assert (model(tokens) - plain(tokens)).abs().max() < 1e-12
        # At eps > 0 a read of n sources is (1 + 1/n) h~, so its norm has eps / (1 + 1/n)^2; the
        # final norm receives h~ itself.
        eps = 1e-2
        for module in (*model.modules(), plain.ln_final):
            if getattr(module, "eps", None) == 0.0:
                module.eps = eps
        for layer, block in enumerate(plain.blocks):
            for norm, sublayer in ((block.ln1, 2 * layer), (block.ln2, 2 * layer + 1)):
                norm.eps = eps / (1 + 1 / n_sources(sublayer, size)) ** 2
        assert (model(tokens) - plain(tokens)).abs().max() < 1e-12


def test_the_first_read_is_twice_the_embedding():
    model = random_model("delta-attnres")
    names = ["hook_embed", "blocks.0.hook_route_attn", "blocks.0.hook_attn_read"]
    _, cache = model.run_with_cache(random_tokens(), names_filter=names)
    embedding, route, read = (cache[name] for name in names)
    assert (route == 1).all()
    assert torch.equal(read, 2 * embedding)


def full_delta_attention_residuals(model, tokens):
    """The full form on its own terms: a residual stream, and attention over all additions to it."""
    cfg, W = model.cfg, dict(model.state_dict())
    stream = W["embed.weight"][tokens]
    added = stream[None]
    mask = visible(cfg, tokens.shape[1], None)

    def read(at):
        keys = rms(added, cfg.norm_eps) * W[at + "gamma"]
        weights = torch.einsum("nbtd,d->nbt", keys, W[at + "query"]).softmax(0)
        return stream + torch.einsum("nbt,nbtd->btd", weights, added)

    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}."
        x = rms(read(at + "attn_read."), cfg.norm_eps) * W[at + "ln1.weight"]
        out, _ = attend(cfg, W, at + "attn.", x, x, lambda v: v, mask)
        stream, added = stream + out, torch.cat((added, out[None]))
        y = rms(read(at + "mlp_read."), cfg.norm_eps) * W[at + "ln2.weight"]
        out = feed_forward(W, at + "mlp.", y)
        stream, added = stream + out, torch.cat((added, out[None]))
    return rms(stream, cfg.norm_eps) * W["ln_final.weight"] @ W["unembed.weight"].T


def test_block_size_one_is_the_full_form():
    model, tokens = random_model("delta-attnres-full", n_layers=4), random_tokens()
    with torch.no_grad():
        expected = full_delta_attention_residuals(model, tokens)
        assert (model(tokens) - expected).abs().max() < 1e-10


@pytest.mark.parametrize("size", SIZES)
def test_sites(size):
    """A softmax over the sources of AttnRes, added to the residual; no read of the output."""
    model, tokens = random_model("delta-attnres", block_size=size), random_tokens()
    sites = model.sites
    assert [(s.layer, s.sublayer) for s in sites] == [
        (layer, sublayer) for layer in range(3) for sublayer in ("attn", "mlp")
    ]
    _, cache = model.run_with_cache(tokens, names_filter=[s.hook for s in sites])
    for site in sites:
        sublayer = 2 * site.layer + (site.sublayer == "mlp")
        assert (site.base, site.support, site.per_token) == ("residual", "simplex", True)
        covered = [m for source in site.sources for m in source.sublayers]
        assert covered == [-1, *range(sublayer)]
        assert cache[site.hook].shape == (*tokens.shape, len(site.sources))
        assert (cache[site.hook].sum(-1) - 1).abs().max() < 1e-12


def test_gradients_at_the_start():
    model = satlens.build(
        "delta-attnres", n_layers=3, d_model=16, n_heads=4, d_vocab=29, dtype=torch.float64
    )
    model(random_tokens(), return_type="loss").backward()
    for name, parameter in model.named_parameters():
        if name.endswith(".query"):
            assert parameter.grad.any() == ("blocks.0.attn_read" not in name), name
        elif name.endswith(".gamma"):
            assert not parameter.grad.any(), name
