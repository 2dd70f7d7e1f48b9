"""Interventions on routes against recomputed softmaxes, other models and each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planted import documents, tiny

from satlens.analysis.interventions.donors import fit_donors
from satlens.analysis.interventions.gates import intervene
from satlens.analysis.interventions.means import fit_means
from satlens.analysis.interventions.routes import (
    MaskRoute,
    MeanRoute,
    OneHotRoute,
    ResampleRoute,
    SwapRoutes,
    TieValueRoute,
    UniformRoute,
)
from satlens.errors import HookError, SatlensError
from satlens.models.sources import source_state

TOKENS = torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(0))
SIMPLEX = ["attnres", "attnres-full", "rd-attnres", "delta-attnres", "delta-attnres-full"]
SIGNED = ["hyperconnections", "hyperconnections-static", "denseformer", "muddformer"]


@torch.no_grad()
def logits(model, *interventions):
    with intervene(model, *interventions):
        return model(TOKENS)


@torch.no_grad()
def cached(model, *interventions, names=None):
    with intervene(model, *interventions):
        return model.run_with_cache(TOKENS, names_filter=names)[1].cache_dict


def query_of(model, site):
    """Query times gamma of a softmax route, and its eps, float64."""
    if site.sublayer == "out":
        read = model.out_read
    else:
        read = getattr(model.blocks[site.layer], f"{site.sublayer}_read")
    query = read.query_v if site.role == "v" else read.query
    return (query * read.gamma).detach().double(), read.eps


def test_uniform_routes_are_the_untrained_routes():
    model, zeroed = tiny("rd-attnres"), tiny("rd-attnres")
    for name, parameter in zeroed.named_parameters():
        if "query" in name:
            parameter.data.zero_()
    torch.testing.assert_close(logits(model, UniformRoute()), logits(zeroed), rtol=1e-5, atol=1e-6)


# -- masks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIMPLEX)
def test_a_masked_source_is_a_logit_of_minus_infinity(name):
    """Every route of the model, each source in turn, from the sources that the pass recorded."""
    model = tiny(name, n_layers=2)
    clean = cached(model)
    for site in model.sites:
        if len(site.sources) == 1:
            continue
        states = torch.stack([source_state(s, clean, 2) for s in site.sources], -2).double()
        direction, eps = query_of(model, site)
        scores = states @ direction / (states.square().mean(-1) + eps).sqrt()
        torch.testing.assert_close(
            clean[site.hook].double(), scores.softmax(-1), rtol=1e-5, atol=1e-7
        )
        where = {"layer": site.layer, "sublayer": site.sublayer, "role": site.role}
        for index, source in enumerate(site.sources):
            expected = scores.clone()
            expected[..., index] = -math.inf
            for asked in (index, source.label):
                one = MaskRoute(source=asked, **where)
                found = cached(model, one, names=site.hook)[site.hook]
                torch.testing.assert_close(
                    found.double(), expected.softmax(-1), rtol=1e-5, atol=1e-7
                )
                assert (found[..., index] == 0).all()


@pytest.mark.parametrize("name", SIGNED)
def test_a_masked_signed_weight_is_zero_and_the_others_stay(name):
    model = tiny(name)
    site = next(s for s in model.sites if len(s.sources) > 2)
    where = {"layer": site.layer, "sublayer": site.sublayer, "role": site.role}
    clean = cached(model)[site.hook]
    found = cached(model, MaskRoute(source=[0, -1], **where))[site.hook]
    assert (found[..., [0, -1]] == 0).all()
    assert torch.equal(found[..., 1:-1], clean[..., 1:-1])


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("attnres-full", family) for family in ("embedding", "blocks", "partial")),
        ("delta-attnres", "partial"),
        ("denseformer", "states"),
        ("muddformer", "embedding"),
    ],
)
def test_a_family_is_all_of_its_sources(name, family):
    """Where a site has none of them, or nothing else, it stays as it is."""
    model = tiny(name)
    one = MaskRoute(family=family)
    touched = {site.hook for site in one.sites(model)}
    left = set()
    with intervene(model, one), torch.no_grad():
        _, edited = model.run_with_cache(TOKENS)
    for site in model.sites:
        hit = torch.tensor([source.family == family for source in site.sources])
        if hit.all() or not hit.any():
            left.add(site.hook)
            continue
        weights = edited[site.hook]
        assert (weights[..., hit] == 0).all()
        assert (weights[..., ~hit] != 0).any()
        if site.support == "simplex":
            assert (weights.sum(-1) - 1).abs().max() < 1e-6
    assert touched == {site.hook for site in model.sites} - left
    assert left or name in ("denseformer", "muddformer")


def test_masking_a_label_elsewhere_leaves_other_sites_alone():
    """What only some routes have is masked there; the first layers stay clean to the bit."""
    model = tiny("attnres-full")
    clean, edited = cached(model), cached(model, MaskRoute(source="block 2..2"))
    first = next(s for s in model.sites if "block 2..2" in [x.label for x in s.sources])
    points = list(clean)
    for point in points[: points.index(first.hook)]:
        assert torch.equal(clean[point], edited[point]) or point.startswith("hook_l"), point
    assert not torch.equal(clean[first.hook], edited[first.hook])


def test_a_weight_of_one_leaves_equal_weights():
    """In fp32 the others are zero, so that nothing tells them apart."""
    model = tiny("attnres-full")
    model.blocks[2].mlp_read.query.data.mul_(1e5)
    where = {"layer": 2, "sublayer": "mlp"}
    clean = cached(model)["blocks.2.hook_route_mlp"]
    newest = int(clean[0, 0].argmax())
    assert clean[0, 0, newest] == 1
    found = cached(model, MaskRoute(source=newest, **where))["blocks.2.hook_route_mlp"]
    n = clean.shape[-1]
    expected = torch.full((n,), 1 / (n - 1))
    expected[newest] = 0
    torch.testing.assert_close(found[0, 0], expected)
    assert (found.sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (MaskRoute(), "a source or a family"),
        (MaskRoute(source=0, family="blocks"), "a source or a family"),
        (MaskRoute(source="block 9..9"), "source 'block 9..9': no route has it .* embed, partial"),
        (MaskRoute(family="streams"), "family 'streams': .* embedding, partial, blocks"),
        (MaskRoute(source="embed", layer=0, sublayer="attn"), "beside others"),
        (MaskRoute(source=30), "source 30"),
        (OneHotRoute(source="stream 0"), "no route has it; there are: embed"),
        (OneHotRoute(source=-9), "source -9"),
        (SwapRoutes(), "SwapRoutes: this model .* no value route"),
        (SwapRoutes(role="v"), "it changes the roles qk and v"),
        (TieValueRoute(role="qk"), "it changes the role v alone"),
    ],
)
def test_what_no_route_has_is_named(one, message):
    model = tiny("attnres-full")
    with pytest.raises(SatlensError, match=message) as error, intervene(model, one):
        pytest.fail("entered")
    assert "\n" not in str(error.value)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# -- one source ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["denseformer", "muddformer"])
def test_reading_the_newest_state_alone_is_the_transformer(name):
    model = tiny(name).double()
    transformer = tiny("transformer").double()
    weights = {k.replace("ln1_q", "ln1"): v for k, v in model.state_dict().items()}
    transformer.load_state_dict({k: weights[k] for k in transformer.state_dict()})
    found = logits(model, OneHotRoute(source=-1))
    torch.testing.assert_close(found, transformer(TOKENS), rtol=1e-12, atol=1e-12)
    assert (found - logits(model)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["rd-attnres", "hyperconnections", "delta-attnres"])
def test_one_hot_takes_one_source(name):
    model = tiny(name)
    site = next(s for s in model.sites if len(s.sources) > 2)
    where = {"layer": site.layer, "sublayer": site.sublayer, "role": site.role}
    label = site.sources[1].label
    found = cached(model, OneHotRoute(source=label, **where))[site.hook]
    expected = torch.zeros(len(site.sources))
    expected[1] = 1
    assert torch.equal(found, expected.expand_as(found))
    assert torch.equal(
        logits(model, OneHotRoute(source=1, **where)),
        logits(model, OneHotRoute(source=label, **where)),
    )


def test_one_hot_reads_a_block_sum():
    """Layer 2's MLP reads what layer 1's attention wrote, and nothing else."""
    model = tiny("attnres-full")
    cache = cached(model, OneHotRoute(source="block 2..2", layer=2, sublayer="mlp"))
    torch.testing.assert_close(
        cache["blocks.2.hook_mlp_read"], cache["blocks.1.hook_attn_out"], rtol=0, atol=0
    )


# -- roles -----------------------------------------------------------------------------------------


def test_tied_value_route_is_the_tied_control():
    """In fp64: one product of both roles and one for each are rounded differently."""
    model = tiny("rd-attnres").double()
    tied_model = tiny("rd-attnres-tied").double()
    tied_model.load_state_dict(model.state_dict())
    tied = logits(model, TieValueRoute())
    torch.testing.assert_close(tied, logits(tied_model), rtol=1e-12, atol=1e-12)
    assert (tied - logits(model)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "fields", [{}, {"route_bias": True}, {"own_value_gamma": True}, {"block_size": 1}]
)
def test_swapped_routes_are_those_of_swapped_queries(fields):
    model = tiny("rd-attnres", **fields).double()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith(("gamma", "gamma_v", "read.bias")):
            parameter.data.add_(torch.randn(parameter.shape, generator=generator))
    other = tiny("rd-attnres", **fields).double()
    other.load_state_dict(model.state_dict())
    for block in other.blocks:
        read = block.attn_read
        pairs = [(read.query.data, read.query_v.data)]
        if read.gamma_v is not None:
            pairs.append((read.gamma.data, read.gamma_v.data))
        if read.bias is not None:
            pairs.append((read.bias.data[0], read.bias.data[1]))
        for one, two in pairs:
            kept = one.clone()
            one.copy_(two)
            two.copy_(kept)
    found = logits(model, SwapRoutes())
    torch.testing.assert_close(found, logits(other), rtol=1e-11, atol=1e-11)
    assert (found - logits(model)).abs().max() > 1e-3
    assert not any(block.swapped_roles for block in model.blocks)


def test_swapping_one_layer_exchanges_its_two_routes():
    model = tiny("rd-attnres")
    clean, swapped = cached(model), cached(model, SwapRoutes(layer=1))
    qk, v = "blocks.1.hook_route_qk", "blocks.1.hook_route_v"
    assert torch.equal(swapped[qk], clean[v])
    assert torch.equal(swapped[v], clean[qk])
    assert not torch.equal(clean[v], clean[qk])
    below = [name for name in clean if name.startswith(("hook_e", "blocks.0"))]
    assert all(torch.equal(swapped[name], clean[name]) for name in below)
    # Twice is not at all, but for the path that visits the routes.
    twice = logits(model, SwapRoutes(layer=1), SwapRoutes(layer=1))
    torch.testing.assert_close(twice, logits(model), rtol=1e-5, atol=1e-6)


def test_other_edits_of_swapped_routes_come_after():
    model = tiny("rd-attnres")
    uniform = UniformRoute(layer=1, role="qk")
    for order in ((uniform, SwapRoutes(layer=1)), (SwapRoutes(layer=1), uniform)):
        found, clean = cached(model, *order), cached(model)
        qk = found["blocks.1.hook_route_qk"]
        assert torch.equal(qk, torch.full_like(qk, 1 / qk.shape[-1]))
        assert torch.equal(found["blocks.1.hook_route_v"], clean["blocks.1.hook_route_qk"])


def test_swapping_ends_with_the_context():
    model = tiny("rd-attnres")
    clean = logits(model)
    with pytest.raises(RuntimeError, match="inside"), intervene(model, SwapRoutes()):
        raise RuntimeError("inside")
    with pytest.raises(HookError), intervene(model, SwapRoutes(), MaskRoute(source="nothing")):
        pytest.fail("entered")
    assert torch.equal(logits(model), clean)
    assert not any(block.swapped_roles for block in model.blocks)


def test_a_frozen_value_route_moves_to_queries_and_keys():
    model = tiny("rd-attnres-frozen-v")
    clean, swapped = cached(model), cached(model, SwapRoutes(layer=2))
    qk, v = "blocks.2.hook_route_qk", "blocks.2.hook_route_v"
    assert torch.equal(swapped[qk], torch.full_like(clean[v], 1 / clean[v].shape[-1]))
    assert torch.equal(swapped[v], clean[qk])


def test_tied_controls_do_not_change_when_swapped():
    for name in ("rd-attnres-tied", "rd-attnres-average"):
        model = tiny(name)
        torch.testing.assert_close(logits(model, SwapRoutes()), logits(model))


# -- fitted ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer", "hyperconnections"])
def test_resampled_routes_are_those_of_a_donor_at_the_same_position(name):
    model, docs = tiny(name), documents(d_vocab=32, lengths=(17,) * 6, seed=4)
    donors = fit_donors(model, docs)
    hooks = [site.hook for site in model.sites]
    given = {hook: torch.from_numpy(donors[hook]) for hook in hooks}
    first = model.sites[0].hook if name != "rd-attnres" else "blocks.1.hook_route_qk"
    edited = cached(model, ResampleRoute(donors=donors, seed=3))
    for row in range(len(TOKENS)):
        for place in range(16):
            same = (given[first][:, place] == edited[first][row, place]).all(-1).nonzero()[:, 0]
            assert len(same)
            for hook in hooks:  # all sites from the same document
                matches = (given[hook][same, place] == edited[hook][row, place]).all(-1)
                assert matches.any(), (hook, place)


def test_means_of_routes_per_position():
    model, docs = tiny("rd-attnres"), documents(d_vocab=32)
    means = fit_means(model, docs, per="position")
    edited = cached(model, MeanRoute(means=means, role="v"))
    hook = "blocks.2.hook_route_v"
    assert torch.equal(edited[hook], torch.from_numpy(means[hook]).float().expand(3, 16, -1))
    np.testing.assert_allclose(means[hook].sum(-1), 1, rtol=1e-6)


# -- exact scope -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [UniformRoute, lambda **w: OneHotRoute(source=0, **w), lambda **w: MaskRoute(source=0, **w)],
)
@pytest.mark.parametrize(
    "name",
    ["attnres", "rd-attnres", "denseformer", "muddformer", "hyperconnections", "delta-attnres"],
)
def test_only_the_named_route_differs(name, make):
    """What runs before it, and the other routes of its read, are the clean pass to the bit."""
    model = tiny(name)
    site = [s for s in model.sites if s.layer == 1 and len(s.sources) > 1][-1]
    where = {"layer": 1, "sublayer": site.sublayer, "role": site.role}
    clean, edited = cached(model), cached(model, make(**where))
    for other in model.sites:
        if other.layer <= 1 and (other.layer, other.sublayer) <= (1, site.sublayer):
            assert torch.equal(clean[other.hook], edited[other.hook]) == (other.hook != site.hook)
    assert torch.equal(clean["blocks.0.hook_mlp_out"], edited["blocks.0.hook_mlp_out"])
    assert not torch.equal(logits(model, make(**where)), logits(model))
