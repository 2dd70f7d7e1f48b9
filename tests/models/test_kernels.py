"""Fused autograd functions against finite differences and against plain autograd, in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from straight_line import random_model, random_tokens, rms, rotate
from test_backbone import EVERY, build
from torch.autograd import gradcheck

import satlens
from satlens.models.layers import MLP, HeadNorm, RMSNorm, rope, rope_table
from satlens.models.streams.attnres import AttnResState, DepthRead, source_scales

D = 6


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def same_gradients(fused, plain, inputs):
    """Value and every gradient of two formulations of one function."""
    ours, theirs = fused(*inputs), plain(*inputs)
    assert (ours - theirs).abs().max() < 1e-12
    seed = leaf(*ours.shape, seed=99).detach()
    for one, other in zip(
        torch.autograd.grad(ours, inputs, seed),
        torch.autograd.grad(theirs, inputs, seed),
        strict=True,
    ):
        assert (one - other).abs().max() < 1e-11


def with_weights(module, **tensors):
    """Call a module as a function of its parameters."""
    return lambda *args: torch.func.functional_call(module, tensors, args)


@pytest.mark.parametrize("kind", [RMSNorm, HeadNorm])
def test_norms(kind):
    norm = kind(D, 1e-3).double()

    def fused(x, weight):
        return with_weights(norm, weight=weight)(x)

    inputs = leaf(2, 3, 4, D), leaf(D, seed=1)
    assert gradcheck(fused, inputs)
    same_gradients(fused, lambda x, w: rms(x, 1e-3) * w, inputs)


def test_rope():
    table = rope_table(5, D, 100.0, torch.float64, torch.device("cpu"))

    def fused(q, k):
        return torch.cat(rope(q, k, *table), 2)

    def plain(q, k):
        heads = torch.cat((q, k), 2)
        return torch.stack([rotate(head, 100.0) for head in heads.unbind(2)], 2)

    inputs = leaf(2, 5, 3, D), leaf(2, 5, 1, D, seed=1)
    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)


def test_swiglu():
    mlp = MLP(D, 4).double()

    def fused(y, gate_up, down):
        return with_weights(mlp, **{"gate_up.weight": gate_up, "down.weight": down})(y)

    def plain(y, gate_up, down):
        gate, up = (y @ gate_up.T).chunk(2, -1)
        return (F.silu(gate) * up) @ down.T

    inputs = leaf(2, 3, D), leaf(8, D, seed=1), leaf(D, 4, seed=2)
    assert gradcheck(fused, inputs)
    same_gradients(fused, plain, inputs)


@pytest.mark.parametrize("roles", [1, 2])
@pytest.mark.parametrize("partial", [True, False])
def test_fused_read(roles, partial):
    cfg = random_model("rd-attnres", d_model=D, n_heads=1, n_key_value_heads=1, d_head=2).cfg
    read = DepthRead(cfg, sublayer=1, two_roles=True).double()
    norm = RMSNorm(D, 1e-3).double()
    read.eps = 1e-3

    def call(function, query, query_v, gamma, weight, *sources):
        """``function(state)`` with these weights put in place of the modules' own."""
        kept = dict(read._parameters), dict(norm._parameters)
        read._parameters.update(query=query, query_v=query_v, gamma=gamma)
        norm._parameters.update(weight=weight)
        try:
            bank, late = (sources[:-1], sources[-1]) if partial else (sources, None)
            with torch.no_grad():
                scales = tuple((s.square().mean(-1, keepdim=True) + 1e-3).sqrt() for s in bank)
            return function(AttnResState(bank, scales, late))
        finally:
            read._parameters.update(kept[0])
            norm._parameters.update(kept[1])

    def fused(*inputs):
        def mixtures(state):
            return torch.stack(read.fused(state, source_scales(state, 1e-3), norm, roles))

        return call(mixtures, *inputs)

    def plain(query, query_v, gamma, weight, *sources):
        outputs = []
        for q in (query, query_v)[:roles]:
            scores = torch.stack([(rms(s, 1e-3) * gamma) @ q for s in sources]).softmax(0)
            outputs.append(rms((scores[..., None] * torch.stack(sources)).sum(0), 1e-3) * weight)
        return torch.stack(outputs) + 0 * query_v.sum()

    vectors = [leaf(D, seed=i) for i in range(4)]
    inputs = (*vectors, *(leaf(2, 3, D, seed=10 + i) for i in range(3)))
    ours, theirs = fused(*inputs), plain(*inputs)
    assert (ours - theirs).abs().max() < 1e-12
    seed = leaf(*ours.shape, seed=99).detach()
    used = [x for i, x in enumerate(inputs) if roles == 2 or i != 1]
    pairs = zip(
        torch.autograd.grad(ours, used, seed), torch.autograd.grad(theirs, used, seed), strict=True
    )
    for one, other in pairs:
        assert (one - other).abs().max() < 1e-11
    assert gradcheck(lambda *a: fused(*a[:1], vectors[1], *a[1:]), (vectors[0], *inputs[2:]))


@pytest.mark.parametrize("name", EVERY)
def test_whole_models_against_the_explicit_path(name):
    """Fused steps and explicit, hookable steps: one function, one gradient."""
    tokens = random_tokens()
    gradients = {}
    for implementation in ("eager", "fused"):
        model = build(name, qk_norm=True, qkv_bias=True)
        with satlens.attention(implementation):
            model(tokens, return_type="loss").backward()
        gradients[implementation] = {n: p.grad for n, p in model.named_parameters()}
    for parameter, explicit in gradients["eager"].items():
        fused = gradients["fused"][parameter]
        if explicit is None or fused is None:
            left = explicit if fused is None else fused
            assert left is None or left.abs().max() < 1e-12, parameter
        else:
            assert (explicit - fused).abs().max() < 1e-10, parameter
