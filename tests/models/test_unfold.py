"""Effective routes in fp32, of every stream under every value residual, also when edited."""

from __future__ import annotations

import pytest
import torch
from straight_line import random_model, random_tokens

from satlens.models.presets import VARIANTS
from satlens.models.reads import component_hooks, component_names, reads_of

STREAMS = [name for name, fields in VARIANTS.items() if "stream" in fields]
MORE = {
    "attnres of 3, no output read": ("attnres", {"block_size": 3, "output_read": False}),
    "rd-attnres with a bias": ("rd-attnres", {"block_size": 1, "route_bias": True}),
    "denseformer of dilation 2": ("denseformer", {"dilation": 2, "period": 3}),
    "muddformer as released": ("muddformer", {"shared_first_norm": True, "expand_last": True}),
    "two streams": ("hyperconnections", {"n_streams": 2, "norm": "layer", "tanh": False}),
    "no MLP": ("muddformer-prepost", {"d_mlp": (0, 24, 0)}),
}
CASES = {
    **{name: (name, {}) for name in VARIANTS},
    **{
        f"{name} with a {residual}": (name, {"value_residual": residual})
        for residual in ("satformer", "resformer")
        for name in STREAMS
    },
    **MORE,
}
every_case = pytest.mark.parametrize("case", CASES)
every_routed_case = pytest.mark.parametrize("case", [c for c in CASES if CASES[c][0] in STREAMS])


def build(case, **options):
    name, fields = CASES[case]
    return random_model(name, dtype=torch.float32, **{**fields, **options})


@torch.no_grad()
def run(model, tokens, edit=()):
    """All activations, with hooks installed before those that record."""
    with model.hooks(edit):
        return model.run_with_cache(tokens)[1].cache_dict


def misses(model, cache):
    """Read -> largest difference of its components' sum from it, by the read's largest entry."""
    n_layers = model.cfg.n_layers
    delta = torch.stack([cache[hook] for hook in component_hooks(n_layers)], 2).double()
    recorded = {name: cache[name] for name in model.stream.unfolded_from(model.cfg)}
    found = {}
    for hook, c in model.stream.unfold(model, recorded):
        total = ((c if c.ndim == 4 else c[..., None]) * delta).sum(2)
        found[hook] = float((total - cache[hook]).abs().max() / cache[hook].abs().max())
    return found


@every_case
def test_components_add_up_to_every_read(case):
    model = build(case)
    errors = misses(model, run(model, random_tokens()))
    reads = reads_of(model.hook_dict, model.cfg.n_layers)
    assert list(errors) == [read.hook for read in reads]
    assert len({read.name for read in reads}) == len(reads)
    assert max(errors.values()) <= model.stream.unfold_tolerance


@every_routed_case
def test_edited_routes_unfold_as_they_were_used(case):
    model, tokens = build(case), random_tokens()
    generator = torch.Generator().manual_seed(3)

    def disturb(weights, hook):
        return weights + 0.3 * torch.randn(weights.shape, generator=generator)

    routes = [site.hook for site in model.sites if site.kind == "route"]
    plain, edited = run(model, tokens), run(model, tokens, [(routes, disturb)])
    assert not torch.allclose(plain["hook_out_read"], edited["hook_out_read"], rtol=1e-2)
    assert max(misses(model, edited).values()) <= model.stream.unfold_tolerance


@every_case
def test_tokens_unfold_apart(case):
    """Analyses unfold some tokens at a time: these are the coefficients of all at once."""
    model = build(case, n_layers=2) if case != "no MLP" else build(case)
    cache = run(model, random_tokens())
    recorded = {name: cache[name] for name in model.stream.unfolded_from(model.cfg)}
    chosen = torch.tensor([3, 0, 16, 9])
    some = {name: tensor.flatten(0, 1)[chosen][None] for name, tensor in recorded.items()}
    whole, apart = (dict(model.stream.unfold(model, found)) for found in (recorded, some))
    assert list(whole) == list(apart)
    for hook, c in whole.items():
        one = c.expand(2, 9, *c.shape[2:]).flatten(0, 1)[chosen]
        torch.testing.assert_close(apart[hook][0].expand_as(one), one, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("name", ["transformer", *(n for n in STREAMS if "hyper" not in n)])
def test_coefficients_are_where_the_weights_were_recorded(name, with_model):
    """On the meta device mixing devices is an error too. It has no values to compare, which
    hyper-connections do; theirs come from the recorded matrices alone."""
    model = random_model(name, dtype=torch.float32, n_layers=2)
    cache = run(model, random_tokens())
    recorded = {n: cache[n].to("meta") for n in model.stream.unfolded_from(model.cfg)}
    model.to("meta" if with_model or not recorded else "cpu")
    devices = {c.device.type for _, c in model.stream.unfold(model, recorded)}
    assert devices == {"meta"}
    measured = {n: cache[n].to("meta") for n in model.stream.measured_from(model.cfg)}
    norms = model.stream.source_norms(model, measured)
    assert all(norm.device.type == "meta" for _, norm in norms)


def test_names_and_places_of_reads():
    model = random_model("muddformer", n_layers=2)
    names = [read.name for read in reads_of(model.hook_dict, 2)]
    ways = [[f"L{layer}.attn.read_{way}" for way in "qkvr"] for layer in (0, 1)]
    assert names == [*ways[0], "L0.mlp.read", *ways[1], "L1.mlp.read", "out"]
    assert [read.n_components for read in reads_of(model.hook_dict, 2)][3:6] == [1, 2, 3]
    assert component_names(2) == ["embed", "L0.attn", "L0.mlp", "L1.attn", "L1.mlp"]
    assert component_hooks(1) == ["hook_embed", "blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"]
