"""What must hold of Hyper-Connections (arXiv 2409.19606)."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from hyper_connections import HyperConnections
from straight_line import random_model, random_tokens
from test_attnres import share
from test_kernels import leaf, same_gradients
from torch.autograd import gradcheck
from torch.nn.functional import layer_norm

import satlens
from satlens.models.attention import Reads
from satlens.models.decoder import Decoder
from satlens.models.reads import component_hooks
from satlens.models.streams import hyper
from satlens.models.streams.hyper_mixing import (
    AddOutput,
    FusedDynamicRead,
    FusedStaticRead,
    combine,
)


def connections(model):
    """The parameters of a model's connections, by name."""
    return {name: p for name, p in model.named_parameters() if "_hc." in name}


# -- the start ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("fields", [{}, {"dynamic": False}, {"norm": "layer"}, {"tanh": False}])
def test_starts_as_the_transformer(n, fields):
    """The sum of n equal streams: the transformer whose final norm has eps / n^2."""
    common = {"norm_eps": 1e-2, "qk_norm": True, "n_layers": 4}
    plain = random_model("transformer", seed=5, **common)
    cfg = random_model("hyperconnections", n_streams=n, **fields, **common).cfg
    model = share(Decoder(cfg).double(), plain)
    plain.ln_final.eps /= n**2
    with torch.no_grad():
        assert (model(random_tokens()) - plain(random_tokens())).abs().max() < 1e-12


def test_sublayers_start_by_reading_one_stream_in_turn():
    model = satlens.build("hyperconnections", n_layers=4, n_streams=3, d_model=16, n_heads=4)
    sublayers = [hc for block in model.blocks for hc in (block.attn_hc, block.mlp_hc)]
    for s, hc in enumerate(sublayers):
        assert hc.static_alpha[:, 0].tolist() == [float(i == s % 3) for i in range(3)]
        assert torch.equal(hc.static_alpha[:, 1:], torch.eye(3))
        assert torch.equal(hc.static_beta, torch.ones(3))
        assert hc.alpha_scale.item() == hc.beta_scale.item() == pytest.approx(0.01)
        assert not hc.dynamic_alpha.any()
        assert not hc.dynamic_beta.any()


def test_what_learns_first():
    """W moves at step 0; its scales and the norm, which it multiplies, cannot."""
    model = satlens.build("hyperconnections", n_layers=2, d_model=16, n_heads=4, d_vocab=29)
    model(random_tokens(), return_type="loss").backward()
    for name, parameter in connections(model).items():
        waits = name.endswith(("_scale", "norm.weight"))
        assert bool(parameter.grad.any()) == (not waits), name


def test_scaled_outputs():
    sizes = {"n_layers": 2, "d_model": 16, "n_heads": 4, "d_vocab": 29}
    plain = satlens.build("transformer", **sizes).state_dict()
    scaled = satlens.build("hyperconnections", scaled_outputs=True, n_streams=4, **sizes)
    for name, value in scaled.state_dict().items():
        if name in plain:
            output = name.endswith((".o.weight", ".down.weight"))
            expected = plain[name] / 2 if output else plain[name]
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("norm", "eps"), [("rms", torch.finfo(torch.float32).eps), ("layer", 1e-5)]
)
def test_the_norms_eps_is_its_own(norm, eps):
    model = random_model("hyperconnections", norm=norm, norm_eps=0.1, dtype=torch.float64)
    assert {block.mlp_hc.norm.eps for block in model.blocks} == {eps}


# -- another implementation -----------------------------------------------------------------------


def package_logits(model, tokens):
    """The same model with its connections from the hyper-connections package.

    There the streams of a row lie one after another on the batch axis, the norm's weight is
    1 + gamma and has no eps, and each scale is a 0-d parameter. Returns logits and the package's
    parameters by our names.
    """
    cfg, context = model.cfg, model._context(tokens, None)
    n = cfg.stream.n_streams
    parameters = {}

    def connection(ours, at, index):
        theirs = HyperConnections(n, dim=cfg.d_model, layer_index=index, tanh=cfg.stream.tanh)
        theirs = theirs.double()
        pairs = {
            "static_alpha": theirs.static_alpha,
            "static_beta": theirs.static_beta,
            "dynamic_alpha": theirs.dynamic_alpha_fn,
            "dynamic_beta": theirs.dynamic_beta_fn,
            "alpha_scale": theirs.dynamic_alpha_scale,
            "beta_scale": theirs.dynamic_beta_scale,
            "norm.weight": theirs.norm.gamma,
        }
        for name, parameter in pairs.items():
            value = ours.get_parameter(name).detach().reshape(parameter.shape)
            parameter.data.copy_(value - 1 if name == "norm.weight" else value)
            parameters[at + name] = parameter
        return theirs

    def attend(block, x):
        y = block.ln1(x)
        return block.attn(block.attn.project(Reads(y, y, y)), None, context)

    expand, reduce = HyperConnections.get_expand_reduce_stream_functions(n)
    streams = expand(model.embed(tokens))
    for layer, block in enumerate(model.blocks):
        for s, part, run in (
            (2 * layer, "attn", partial(attend, block)),
            (2 * layer + 1, "mlp", lambda x, block=block: block.mlp(block.ln2(x))),
        ):
            hc = getattr(block, f"{part}_hc")
            x, add = connection(hc, f"blocks.{layer}.{part}_hc.", s)(streams)
            streams = add(run(x))
    x = model.ln_final(reduce(streams))
    return model.unembed(x, model.embed.weight), parameters


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("tanh", [True, False])
def test_against_the_hyper_connections_package(n, tanh):
    model = random_model("hyperconnections", n_streams=n, tanh=tanh)
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 0.0
    tokens = random_tokens()
    seed = leaf(*tokens.shape, model.cfg.d_vocab, seed=7).detach()

    ours = model(tokens)
    (ours * seed).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    theirs, parameters = package_logits(model, tokens)
    assert (ours - theirs).abs().max() < 1e-11
    (theirs * seed).sum().backward()
    expected = {name: p.grad for name, p in model.named_parameters() if "_hc." not in name}
    expected |= {name: p.grad for name, p in parameters.items()}
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        error = (found[name].view_as(gradient) - gradient).abs().max()
        assert error < 1e-10 * max(1, gradient.abs().max()), name


# -- fused steps ----------------------------------------------------------------------------------

N, B, T, D = 3, 2, 2, 5
C = N + 2


def joined(outputs):
    """One vector; gradients come back from it in an order of their own."""
    return torch.cat([x.movedim(-1, 0).flatten() for x in outputs])


def plain_norm(x, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_fused_dynamic_read(norm, tanh):
    streams, static = leaf(N, B, T, D), leaf(C, N, seed=1)
    directions, scales, weight = leaf(C, D, seed=2), leaf(C, seed=3), leaf(D, seed=4)
    offset = leaf(C, seed=5) if norm == "layer" else None

    def fused(streams, static, directions, scales, weight, offset=offset):
        if norm == "layer":  # what the directions of a layer norm must be
            directions = directions - directions.mean(1, keepdim=True)
        outputs = FusedDynamicRead.apply(
            streams, static, directions, offset, scales, 1e-3, tanh, weight, 1e-2, torch.float64
        )
        return joined(outputs)

    def plain(streams, static, directions, scales, weight, offset=offset):
        if norm == "layer":
            normed = layer_norm(streams, (D,), eps=1e-3)
        else:
            normed = plain_norm(streams, 1e-3)
        dynamic = torch.einsum("nbtd,cd->cnbt", normed, directions)
        if offset is not None:
            dynamic = dynamic + offset[:, None, None, None]
        dynamic = dynamic.tanh() if tanh else dynamic
        weights = static[..., None, None] + scales[:, None, None, None] * dynamic
        read = torch.einsum("nbt,nbtd->btd", weights[0], streams)
        new = torch.einsum("mnbt,nbtd->mbtd", weights[1:-1], streams)
        outputs = plain_norm(read, 1e-2) * weight, new, weights[-1]
        return joined(outputs)

    inputs = (streams, static, directions, scales, weight)
    inputs = inputs if offset is None else (*inputs, offset)
    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)


def test_fused_static_read():
    inputs = leaf(N, B, T, D), leaf(N + 1, N, seed=1), leaf(D, seed=2)

    def fused(streams, alpha, weight):
        outputs = FusedStaticRead.apply(streams, alpha, weight, 1e-2, torch.float64)
        return joined(outputs)

    def plain(streams, alpha, weight):
        mixed = torch.einsum("mn,nbtd->mbtd", alpha, streams)
        outputs = plain_norm(mixed[0], 1e-2) * weight, mixed[1:]
        return joined(outputs)

    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)


@pytest.mark.parametrize("per_token", [True, False])
def test_adding_an_output(per_token):
    inputs = (
        leaf(N, B, T, D),
        leaf(N, *((B, T) if per_token else ()), seed=1),
        leaf(B, T, D, seed=2),
    )

    def fused(streams, beta, y):
        return joined([AddOutput.apply(streams, beta, y)])

    def plain(streams, beta, y):
        beta = beta if per_token else beta[:, None, None].expand(N, B, T)
        return joined([streams + torch.einsum("nbt,btd->nbtd", beta, y)])

    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)


def test_static_matrices_stay_matrices():
    """Nothing is spread over tokens where no hook edits it."""
    model, tokens = random_model("hyperconnections-static"), random_tokens()
    block, context = model.blocks[1], model._context(tokens, None)
    state = model(tokens, None, stop_at_layer=1).state

    def shapes():
        """Of b, and of the weights that make the read and the new streams."""
        with mock.patch.object(hyper, "combine", wraps=combine) as spy:
            after = block.read_attn(state, context)[0]
        return [[*x.shape] for x in (after.beta, *(call.args[1] for call in spy.mock_calls))]

    points = [block.attn_hc.hook_alpha.name, block.attn_hc.hook_beta.name]
    with torch.no_grad():
        assert shapes() == [[4]]
        with model.hooks(fwd_hooks=[(points, lambda t, hook: None)]):
            assert shapes() == [[4], [4], [4, 4]]
        with model.hooks(fwd_hooks=[(points, lambda t, hook: t + 1)]):
            assert shapes() == [[*own, *tokens.shape] for own in ([4], [4], [4, 4])]


# -- effective routes -----------------------------------------------------------------------------


def test_static_routes_unfold_once():
    model, tokens = random_model("hyperconnections-static"), random_tokens()
    names = model.stream.unfolded_from(model.cfg)
    _, cache = model.run_with_cache(tokens, names_filter=names)
    assert {c.shape[:2] for _, c in model.stream.unfold(model, cache.cache_dict)} == {(1, 1)}


def test_edited_matrices_unfold_as_they_were_used():
    """Edits that differ by token of matrices that did not."""
    model, tokens = random_model("hyperconnections-static"), random_tokens()
    edited = ["blocks.0.mlp_hc.hook_beta", "blocks.1.attn_hc.hook_alpha"]
    with model.hooks(fwd_hooks=[(edited, lambda t, hook: t * torch.rand_like(t))]):
        _, cache = model.run_with_cache(tokens)
    hooks = component_hooks(model.cfg.n_layers)
    delta = torch.stack([cache[hook] for hook in hooks], 2)
    for hook, c in model.stream.unfold(model, cache.cache_dict):
        assert ((c[..., None] * delta).sum(2) - cache[hook]).abs().max() < 1e-11, hook


def test_effective_routes_in_closed_form():
    """Two streams that never mix: the first sublayers write to one each, the output reads both."""
    model = satlens.build("hyperconnections-static", n_layers=1, n_streams=2, d_model=16, n_heads=4)
    attn, mlp = model.blocks[0].attn_hc, model.blocks[0].mlp_hc
    with torch.no_grad():
        attn.static_beta.copy_(torch.tensor([2.0, 0.0]))
        mlp.static_beta.copy_(torch.tensor([0.0, -3.0]))
        mlp.static_alpha[:, 0] = torch.tensor([0.5, 0.25])
    names = model.stream.unfolded_from(model.cfg)
    _, cache = model.run_with_cache(random_tokens(), names_filter=names)
    found = {k: c.flatten().tolist() for k, c in model.stream.unfold(model, cache.cache_dict)}
    assert found == {
        "blocks.0.hook_attn_read": [1, 0, 0],
        "blocks.0.hook_mlp_read": [0.75, 1, 0],
        "hook_out_read": [2, 2, -3],
    }
