"""What must hold of MUDDFormer (arXiv 2502.12170)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from straight_line import random_model, random_tokens, rms
from test_kernels import leaf, same_gradients
from torch.autograd import gradcheck

import satlens
from satlens.models.presets import reallocated_widths
from satlens.models.streams.mudd_mixing import DepthWeights, FusedPrePostRead, FusedRead

SMALL = {"n_layers": 4, "d_model": 16, "n_heads": 4, "n_key_value_heads": 2, "d_vocab": 29}
RELEASED = {"shared_first_norm": True, "expand_last": True, "round64": True}
EPS = 1e-3


# -- the start -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, RELEASED, {"d_mlp": (0, 8, 0, 8)}, {"n_layers": 1}])
@pytest.mark.parametrize("variant", ["muddformer", "muddformer-prepost"])
def test_starts_as_the_transformer(variant, fields):
    common = {**SMALL, **{k: v for k, v in fields.items() if k not in RELEASED}}
    model = satlens.build(variant, seed=3, **{**common, **fields})
    plain, tokens = satlens.build("transformer", seed=3, **common), random_tokens()
    with torch.no_grad():
        difference = (model(tokens) - plain(tokens)).abs().max()
        # Layer 0 of the transformer, and of the release, projects by one product, not three.
        assert difference < 1e-6
        model, plain = model.double(), plain.double()
        with satlens.attention("eager"):
            assert (model(tokens) - plain(tokens)).abs().max() < 1e-13


@pytest.mark.parametrize("variant", ["muddformer", "muddformer-prepost"])
def test_reads_start_as_the_newest_state(variant):
    """Exactly: what each way delivers is the state the transformer has there."""
    model = satlens.build(variant, seed=3, **SMALL)
    names = [f"blocks.2.hook_attn_read_{way}" for way in "qkvr"]
    inputs = ["blocks.1.hook_mlp_read", "blocks.1.hook_mlp_out"]
    _, cache = model.run_with_cache(random_tokens(), names_filter=[*inputs, *names])
    state = cache[inputs[0]] + cache[inputs[1]]
    for name in names:
        assert torch.equal(cache[name], state)


@pytest.mark.parametrize("variant", ["muddformer", "muddformer-prepost"])
def test_what_learns_first(variant):
    """While W_2 is zero, W_1 waits, and the norms wait for a mixture that is not zero."""
    model = satlens.build(variant, dtype=torch.float64, **SMALL)
    model(random_tokens(), return_type="loss").backward()
    waiting = ("w1.weight", "pre", "post") if "prepost" in variant else ("w1.weight",)
    for name, parameter in model.named_parameters():
        if "_read." in name:
            assert parameter.grad.any() == (not name.endswith(waiting)), name


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("muddformer-small", 128_729_008),
        ("muddformer-medium", 335_849_700),
        ("muddformer-large", 768_164_456),
    ],
)
def test_parameter_counts(name, count):
    assert satlens.build(name, device="meta").n_parameters() == count


def test_reallocated_widths():
    """The first are the widths in a tiny checkpoint that the released code wrote."""
    assert reallocated_widths(128, 4, "release") == (0, 128, 128, 256)
    assert reallocated_widths(128, 4) == (256,) * 4
    assert reallocated_widths(3072, 1) == 3072
    widths = reallocated_widths(3072, 11)
    assert (widths[0], widths[5], widths[-1]) == (1536, 3072, 4608)
    assert sorted(widths) == list(widths)


@pytest.mark.parametrize(
    ("fields", "hidden"),
    [
        ({}, [8, 12, 16, 5]),
        ({"expand_last": True}, [8, 12, 16, 20]),
        ({"round64": True}, [64] * 4),
        ({"n_layers": 16, "round64": True, "expand_last": True}, [*[64] * 14, 128, 128]),
    ],
)
def test_hidden_widths(fields, hidden):
    """C n, times four in the output read if asked, then strictly above to a multiple of 64."""
    model = satlens.build("muddformer", **{**SMALL, **fields})
    reads = [block.depth_read for block in model.blocks[1:]] + [model.out_read]
    assert [len(read.w1.weight) for read in reads] == hidden
    assert [read.w2.weight.shape[0] for read in reads] == [read.static.numel() for read in reads]


def test_the_first_layer_reads_the_embedding():
    model = satlens.build("muddformer", **SMALL)
    assert not hasattr(model.blocks[0], "depth_read")
    assert hasattr(model.blocks[0], "ln1_q") and not hasattr(model.blocks[0], "ln1")
    released = satlens.build("muddformer", **SMALL, **RELEASED)
    assert hasattr(released.blocks[0], "ln1") and not hasattr(released.blocks[0], "ln1_q")
    assert hasattr(released.blocks[1], "ln1_q")
    one = satlens.build("muddformer", **{**SMALL, "n_layers": 1})
    assert [site.hook for site in one.sites] == ["hook_route_out"]


def test_sites():
    model = satlens.build("muddformer-prepost", **SMALL)
    assert [site.role for site in model.sites] == [*"qkvr" * 3, "r"]
    for site in model.sites:
        assert (site.support, site.per_token, site.base) == ("signed", True, "residual")
        lasts = [source.last for source in site.sources[1:]]
        assert lasts == [2 * layer + 1 for layer in range(site.layer)]


# -- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("fields", [{}, {"pre_post_norm": True}, RELEASED])
def test_ways_are_edited_apart(layer, fields):
    """An edit of one way reaches its own projection, or the stream, and no other."""
    model, tokens = random_model("muddformer", **fields), random_tokens()
    at = f"blocks.{layer}."
    watched = {way: f"{at}attn.hook_{way}" for way in "qkv"}
    names = [*watched.values(), f"{at}hook_attn_read_r"]

    def edit(tensor, hook):
        tensor.add_(torch.linspace(0.1, 1, tensor.shape[-1], dtype=tensor.dtype))

    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=names)
        for way in "qkvr":
            points = [f"{at}hook_attn_read_{way}", f"{at}hook_route_{way}"]
            points += [f"{at}ln1_{way}.hook_scale", f"{at}ln1_{way}.hook_normalized"]
            for point in (p for p in points if p in model.hook_dict):
                with model.hooks(fwd_hooks=[(point, edit)]):
                    _, after = model.run_with_cache(tokens, names_filter=names)
                for other, name in {**watched, "r": names[-1]}.items():
                    same = torch.allclose(before[name], after[name], atol=1e-9)
                    assert same == (other != way), (point, name)


def test_weights_come_from_the_raw_newest_state():
    """The scales that PrePostDANorm divides the states by do not enter the weights."""
    model, tokens = random_model("muddformer-prepost"), random_tokens()
    route, scale = "blocks.2.hook_route_k", "blocks.2.depth_read.hook_pre_scale"
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=route)
        with model.hooks(fwd_hooks=[(scale, lambda tensor, hook: 2 * tensor)]):
            _, after = model.run_with_cache(tokens, names_filter=route)
    assert torch.equal(before[route], after[route])


# -- fused arithmetic ----------------------------------------------------------------------------

N, C, R, D = 3, 4, 3, 6


def mixture_inputs(ways):
    """Weights (B, T, C, n), norm weights and states of one read."""
    return (
        leaf(2, 3, ways, N),
        leaf(min(ways, R), D, seed=1),
        [leaf(2, 3, D, seed=9 + i) for i in range(N)],
    )


def test_depth_weights():
    inputs = leaf(2, 3, D), leaf(C, N, seed=1), leaf(8, D, seed=2), leaf(C * N, 8, seed=3)

    def fused(*inputs):
        return DepthWeights.apply(*inputs, EPS)

    def plain(newest, static, w1, w2):
        hidden = F.gelu(rms(newest, EPS) @ w1.T)
        return (hidden @ w2.T).view(2, 3, C, N) + static

    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)


def normed(reads, weights):
    """The first ways normalised, all stacked."""
    first = [rms(x, EPS) * w for x, w in zip(reads, weights, strict=False)]
    return torch.stack([*first, *reads[len(first) :]])


@pytest.mark.parametrize("ways", [C, 1])
def test_fused_read(ways):
    weights, norms, states = mixture_inputs(ways)

    def fused(weights, norms, *states):
        return torch.stack(FusedRead.apply(weights, norms, EPS, torch.float64, *states))

    def plain(weights, norms, *states):
        reads = torch.einsum("btcn,nbtd->cbtd", weights, torch.stack(states))
        return normed(reads.unbind(), norms)

    assert gradcheck(fused, (weights, norms, *states))
    same_gradients(fused, plain, (weights, norms, *states))


@pytest.mark.parametrize("ways", [C, 1])
def test_fused_pre_post_read(ways):
    weights, norms, states = mixture_inputs(ways)
    inputs = weights, leaf(N, D, seed=3), leaf(ways, D, seed=4), norms, *states

    def fused(weights, pre, post, norms, *states):
        settings = norms, EPS, torch.float64
        return torch.stack(FusedPrePostRead.apply(weights, pre, post, 2 * EPS, *settings, *states))

    def plain(weights, pre, post, norms, *states):
        terms = torch.stack([rms(s, 2 * EPS) * w for s, w in zip(states, pre, strict=True)])
        mixtures = torch.einsum("btcn,nbtd->cbtd", weights, terms)
        reads = [states[-1] + rms(m, 2 * EPS) * w for m, w in zip(mixtures, post, strict=True)]
        return normed(reads, norms)

    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)
