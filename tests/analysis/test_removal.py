"""RemoveSublayer: reads without what a sublayer brought, on every stream."""

from __future__ import annotations

import pytest
import torch
from planted import tiny

from satlens.analysis.interventions.gates import ZeroGate, intervene
from satlens.analysis.interventions.removal import RemoveSublayer, removal_points
from satlens.analysis.interventions.routes import SwapRoutes, UniformRoute
from satlens.errors import HookError
from satlens.models.presets import VARIANTS
from satlens.models.reads import component_hooks, component_names, reads_of

TOKENS = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
N_LAYERS = 3
NAMES = component_names(N_LAYERS)


def place(read):
    return {"layer": read.layer, "sublayer": read.sublayer, "role": read.role}


def part(cache, read, name):
    """What a component brings to a read, from the cache of a pass."""
    role = None if read.role == "shared" else read.role
    layer = None if read.sublayer == "out" else read.layer
    parts = cache.decompose_resid(layer, read.sublayer == "mlp", role=role)
    return parts[NAMES.index(name)]


@torch.no_grad()
def logits(model, *interventions, **kwargs):
    with intervene(model, *interventions):
        return model(TOKENS, **kwargs)


@torch.no_grad()
def cached(model, *interventions, **kwargs):
    with intervene(model, *interventions):
        return model.run_with_cache(TOKENS, **kwargs)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_read_loses_what_the_cache_says_a_sublayer_brought(name):
    """Every read of every stream, against an edit of the read by hand."""
    model = tiny(name).double()
    _, cache = cached(model)
    for read in reads_of(model.hook_dict, N_LAYERS):
        component = NAMES[(2 * read.layer + 5) % read.n_components]
        removed = part(cache, read, component)
        by_hand = model.run_with_hooks(
            TOKENS, fwd_hooks=[(read.hook, lambda x, hook, part=removed: x - part)]
        )
        found, after = cached(model, RemoveSublayer(component=component, **place(read)))
        torch.testing.assert_close(found, by_hand, rtol=1e-11, atol=1e-11)
        assert torch.equal(after[read.hook], cache[read.hook] - removed)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_read_is_what_the_stream_gives_without_the_output(name):
    """With its weights and other outputs held, the model itself mixes a zero in its place."""
    model = tiny(name).double()
    _, cache = cached(model)
    weights, outputs = model.stream.unfolded_from(model.cfg), component_hooks(N_LAYERS)
    held = [(point, lambda x, hook: cache[hook.name]) for point in (*weights, *outputs)]
    for component in ("embed", "L0.attn", "L1.mlp"):
        off = (outputs[NAMES.index(component)], lambda x, hook: torch.zeros_like(x))
        with torch.no_grad(), model.hooks([*held, off]):
            _, without = model.run_with_cache(TOKENS, names_filter=lambda name: "_read" in name)
        for read in reads_of(model.hook_dict, N_LAYERS):
            if NAMES.index(component) >= read.n_components:
                continue
            one = RemoveSublayer(component=component, **place(read))
            _, found = cached(model, one, names_filter=read.hook)
            size = cache[read.hook].abs().max()
            assert (found[read.hook] - without[read.hook]).abs().max() < 1e-12 * size, read.hook


@pytest.mark.parametrize("name", VARIANTS)
def test_reads_lose_the_output_of_their_own_pass(name):
    """By hand, read after read: each from a pass that the edits before it act on."""
    model, component = tiny(name).double(), "L0.attn"
    one = RemoveSublayer(component=component)
    edits, at = [], NAMES.index(component)
    for read in one.reads(model):
        with torch.no_grad(), model.hooks(edits):
            _, cache = model.run_with_cache(TOKENS)
        removed = part(cache, read, component)
        edits.append((read.hook, lambda x, hook, part=removed: x - part))
    named = [r for r in reads_of(model.hook_dict, N_LAYERS) if r.n_components > at]
    assert len(edits) == sum(read.role != "r" for read in named)
    with torch.no_grad(), model.hooks(edits):
        by_hand = model(TOKENS)
    found, _ = cached(model, one)
    torch.testing.assert_close(found, by_hand, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["satformer", "rd-attnres", "muddformer", "hyperconnections"])
def test_everything_below_is_the_clean_pass_to_the_bit(name):
    model = tiny(name)
    _, clean = cached(model)
    _, edited = cached(model, RemoveSublayer(component="L0.mlp", layer=2, sublayer="mlp"))
    read = "blocks.2.hook_mlp_read"
    points = list(clean)
    for point in points[: points.index("blocks.2.ln2.hook_scale")]:
        if not point.startswith(("blocks.2.hook_mlp", "blocks.2.mlp")):
            same = point.startswith(("hook_e", "hook_v", "blocks.0", "blocks.1", "blocks.2.attn"))
            assert torch.equal(clean[point], edited[point]) or not same, point
    assert not torch.equal(clean[read], edited[read])


def test_several_components_are_removed_together():
    model = tiny("rd-attnres").double()
    where = {"layer": 2, "sublayer": "attn", "role": "v"}
    _, clean = cached(model)
    _, found = cached(model, RemoveSublayer(component=["L0.mlp", "embed"], **where))
    (read,) = RemoveSublayer(component="embed", **where).reads(model)
    expected = clean[read.hook] - part(clean, read, "embed") - part(clean, read, "L0.mlp")
    torch.testing.assert_close(found[read.hook], expected, rtol=1e-12, atol=1e-12)


def test_other_interventions_are_in_the_weights():
    """Routes made uniform, or swapped, are what the removal unfolds."""
    model = tiny("rd-attnres").double()
    where = {"layer": 2, "sublayer": "attn", "role": "v"}
    for other in (UniformRoute(role="v"), SwapRoutes()):
        _, cache = cached(model, other)
        (read,) = RemoveSublayer(component="embed", **where).reads(model)
        _, found = cached(model, RemoveSublayer(component="embed", **where), other)
        expected = cache[read.hook] - part(cache, read, "embed")
        torch.testing.assert_close(found[read.hook], expected, rtol=1e-12, atol=1e-12)


# -- passes that start at a border ----------------------------------------------------------------


@pytest.mark.parametrize("name", [*VARIANTS])
def test_a_pass_from_a_border_uses_what_was_recorded(name):
    model = tiny(name)
    one = RemoveSublayer(component="L0.mlp", layer=2, sublayer="mlp")
    whole = logits(model, one)
    points = removal_points(model)
    with torch.no_grad():
        _, recorded = model.run_with_cache(TOKENS, names_filter=points)
        border = model(TOKENS, stop_at_layer=2)
        given = RemoveSublayer(
            component="L0.mlp", layer=2, sublayer="mlp", recorded=recorded.cache_dict
        )
    assert torch.equal(logits(model, given, start_at=border), whole)
    with pytest.raises(HookError, match=r"did not visit .*recorded="):
        logits(model, one, start_at=border)


def test_the_logit_lens_continues_its_own_passes():
    model = tiny("muddformer")
    one = RemoveSublayer(component="L0.mlp", layer=[1, 2], role="v")
    whole = logits(model, one)
    with torch.no_grad(), intervene(model, one):
        lens = model.logit_lens(TOKENS)
    assert torch.equal(lens[-1], whole)


def test_a_border_of_another_pass_is_not_taken_for_ones_own():
    """What the edited pass saw below the border does not belong to the clean state there."""
    model = tiny("satformer")
    with torch.no_grad():
        border = model(TOKENS, stop_at_layer=2)
        with intervene(model, RemoveSublayer(component="L0.mlp")):
            model(TOKENS)
            with pytest.raises(HookError, match="did not visit"):
                model(TOKENS, start_at=border)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("transformer", {"component": "L9.mlp"}, "component 'L9.mlp': no such sublayer"),
        ("transformer", {"component": "L0.mlq"}, "did you mean L0.mlp"),
        ("transformer", {"component": []}, "empty list"),
        ("transformer", {"component": "L1.mlp", "layer": 1}, "runs after every read"),
        ("transformer", {"component": "L2.mlp", "layer": [0, 2]}, "runs after every read"),
        ("transformer", {"component": "embed", "role": "v"}, "roles with one: shared"),
        ("transformer", {"component": "embed", "layer": 7}, "layers with one: 0, 1, 2, 3"),
        ("muddformer", {"component": "embed", "role": "r"}, "name one layer"),
    ],
)
def test_what_does_not_exist_is_named(name, settings, message):
    model = tiny(name)
    with (
        pytest.raises(HookError, match=message) as error,
        intervene(model, RemoveSublayer(**settings)),
    ):
        pytest.fail("entered")
    assert "\n" not in str(error.value)
    assert not any(module._forward_hooks for module in model.modules())


def test_the_residual_way_is_left_out_unless_named():
    model = tiny("muddformer")
    every = RemoveSublayer(component="embed", layer=1).reads(model)
    assert [read.role for read in every] == ["q", "k", "v", "shared"]
    (one,) = RemoveSublayer(component="embed", layer=1, role="r").reads(model)
    assert one.hook == "blocks.1.hook_attn_read_r"


def test_it_composes_with_gates():
    model = tiny("satformer")
    both, _ = cached(model, ZeroGate(), RemoveSublayer(component="L0.mlp", layer=2))
    for alone in (ZeroGate(), RemoveSublayer(component="L0.mlp", layer=2)):
        assert not torch.equal(both, cached(model, alone)[0])


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer-prepost", "hyperconnections"])
def test_gradients_pass(name):
    """Through the weights and outputs that the removed part is made of, too."""
    model = tiny(name).double()
    with intervene(model, RemoveSublayer(component="L0.mlp", layer=2)):
        loss = model(TOKENS, return_type="loss")
        (gradient,) = torch.autograd.grad(loss, [model.embed.weight])
        step = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0)).double()
        with torch.no_grad():
            moved = []
            for h in (1e-6, -1e-6):
                model.embed.weight.add_(h * step)
                moved.append(model(TOKENS, return_type="loss"))
                model.embed.weight.sub_(h * step)
    finite = (moved[0] - moved[1]) / 2e-6
    torch.testing.assert_close((gradient * step).sum(), finite, rtol=1e-6, atol=0)
