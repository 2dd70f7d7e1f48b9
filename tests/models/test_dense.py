"""What must hold of DenseFormer (arXiv 2402.02622)."""

from __future__ import annotations

import pytest
import torch
from straight_line import random_model, random_tokens
from test_kernels import leaf, same_gradients
from torch.autograd import gradcheck

import satlens
from satlens.models.streams.weighted import StaticSum

SMALL = {"n_layers": 5, "d_model": 16, "n_heads": 4, "n_key_value_heads": 2, "d_vocab": 29}


def rows(model):
    """Length of each layer's row of weights, 0 where it has none."""
    return [len(getattr(block, "depth_weights", ())) for block in model.blocks]


@pytest.mark.parametrize("fields", [{}, {"dilation": 2, "period": 3}, {"d_mlp": (0, 8, 0, 8, 8)}])
def test_starts_as_the_transformer(fields):
    mlp = {key: value for key, value in fields.items() if key == "d_mlp"}
    model = satlens.build("denseformer", seed=3, **SMALL, **fields)
    plain = satlens.build("transformer", seed=3, **SMALL, **mlp)
    with torch.no_grad():
        assert torch.equal(model(random_tokens()), plain(random_tokens()))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(random_tokens()), plain(random_tokens()))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("denseformer-small", 128_404_173),
        ("denseformer-medium", 334_798_269),
        ("denseformer-large", 766_440_529),
    ],
)
def test_parameter_counts(name, count):
    assert satlens.build(name, device="meta").n_parameters() == count


@pytest.mark.parametrize(
    ("dilation", "period", "lengths"),
    [
        (1, 1, [2, 3, 4, 5, 6]),
        (2, 1, [1, 2, 2, 3, 3]),
        (1, 2, [0, 3, 0, 5, 0]),
        (2, 2, [0, 2, 0, 3, 0]),
        (3, 2, [0, 1, 0, 2, 0]),
        (9, 3, [0, 0, 1, 0, 0]),
        (1, 9, [0, 0, 0, 0, 0]),
    ],
)
def test_rows_and_sources(dilation, period, lengths):
    model = satlens.build("denseformer", dilation=dilation, period=period, **SMALL)
    assert rows(model) == lengths
    sites = {site.layer: site for site in model.sites}
    assert list(sites) == [layer for layer, length in enumerate(lengths) if length]
    for layer, site in sites.items():
        assert (site.sublayer, site.role, site.support) == ("depth", "shared", "signed")
        assert not site.per_token
        # In layers from 1, of which the embedding is 0: those that differ by a multiple of k.
        weighed = [j for j in range(layer + 2) if (layer + 1 - j) % dilation == 0]
        assert [source.kind == "embedding" for source in site.sources] == [j == 0 for j in weighed]
        lasts = [source.last for source in site.sources if source.kind == "cumulative"]
        assert lasts == [2 * j - 1 for j in weighed if j]


@pytest.mark.parametrize("period", [2, 3, 9])
def test_a_last_layer_without_a_row_ends_with_its_own_sum(period):
    model = random_model("denseformer", n_layers=5, period=period)
    names = ["blocks.4.hook_mlp_read", "blocks.4.hook_mlp_out", "hook_out_read"]
    with torch.no_grad():
        read, out, last = model.run_with_cache(random_tokens(), names_filter=names)[1].values()
    assert torch.equal(read + out, last)


def test_only_what_is_weighed_later_is_kept():
    model, tokens = random_model("denseformer", n_layers=6, dilation=2, period=2), random_tokens()
    with torch.no_grad():
        past = [model(tokens, stop_at_layer=layer).state.past for layer in range(7)]
    # X_0, X_2, X_4 and, where the next row needs it, the newest; none for the odd layers.
    assert [len(states) for states in past] == [1, 1, 2, 2, 3, 3, 0]


def test_route_edits_weigh_token_by_token():
    model, tokens = random_model("denseformer"), random_tokens()

    def only_the_embedding(weights, hook):
        weights[:, 4] = torch.tensor([1.0, 0, 0, 0], dtype=weights.dtype)

    with torch.no_grad():
        edit = [("blocks.2.hook_route_depth", only_the_embedding)]
        with model.hooks(edit):
            _, edited = model.run_with_cache(tokens, names_filter=["hook_embed", "hook_out_read"])
        _, plain = model.run_with_cache(tokens, names_filter="hook_out_read")
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(edited["hook_out_read"][:, 4], edited["hook_embed"][:, 4])
    assert torch.equal(edited["hook_out_read"][:, others], plain["hook_out_read"][:, others])


def test_static_sum():
    inputs = leaf(3), *(leaf(2, 3, 4, seed=1 + i) for i in range(3))

    def plain(weights, *sources):
        return torch.einsum("n,nbtd->btd", weights, torch.stack(sources))

    assert gradcheck(StaticSum.apply, inputs)
    same_gradients(StaticSum.apply, plain, inputs)


def test_every_row_learns_at_once():
    model = satlens.build("denseformer", **SMALL)
    model(random_tokens(), return_type="loss").backward()
    for block in model.blocks:
        assert (block.depth_weights.grad != 0).all()
