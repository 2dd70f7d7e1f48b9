"""Interventions touch what they name, leave nothing behind, and meet known equalities."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
from planted import documents, tiny

from satlens.analysis.interventions.donors import fit_donors
from satlens.analysis.interventions.gates import (
    FreezeGate,
    MeanGate,
    OpenGate,
    ResampleGate,
    ScaleGate,
    ShuffleGate,
    ZeroGate,
    intervene,
)
from satlens.analysis.interventions.kinds import GATE_KINDS, ROUTE_KINDS
from satlens.analysis.interventions.means import fit_means
from satlens.analysis.interventions.removal import RemoveSublayer
from satlens.analysis.interventions.routes import (
    MaskRoute,
    MeanRoute,
    OneHotRoute,
    ResampleRoute,
    SwapRoutes,
    TieValueRoute,
    UniformRoute,
    ZeroRoute,
)
from satlens.errors import AnalysisError, HookError
from satlens.hooks import ReadOnly
from satlens.models.cache import KVCache

TOKENS = torch.randint(0, 32, (3, 16), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model, *interventions):
    with intervene(model, *interventions):
        return model(TOKENS)


def installed(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def same_weights(model, name, **fields):
    """A model of another variant with every weight the two have in common."""
    other = tiny(name, **fields).to(model.dtype)
    other.load_state_dict(
        {k: v for k, v in model.state_dict().items() if k in other.state_dict()}, strict=True
    )
    return other


def test_zero_gate_on_satformer_is_the_transformer():
    model = tiny("satformer")
    with torch.no_grad():
        expected = same_weights(model, "transformer")(TOKENS)
    assert torch.equal(logits(model, ZeroGate()), expected)


def test_zero_gate_works_on_static_gates():
    """lambda1 = 0 leaves lambda2 V, which is a ResFormer of weights (0, lambda2)."""
    model = tiny("resformer-identity")
    expected = same_weights(model, "resformer", mode="constant", weights=(0.0, 0.5))
    with torch.no_grad():
        assert torch.equal(logits(model, ZeroGate()), expected(TOKENS))


def test_scale_and_open():
    model = tiny("satformer")
    assert torch.equal(logits(model, ScaleGate(factor=1.0)), logits(model))
    assert torch.equal(logits(model, ScaleGate(factor=0.0)), logits(model, ZeroGate()))
    identity = tiny("resformer", mode="constant", weights=(0.25, 1.0))
    identity.load_state_dict(
        {k: v for k, v in model.state_dict().items() if k in identity.state_dict()}
    )
    with torch.no_grad():
        torch.testing.assert_close(logits(model, OpenGate(value=0.25)), identity(TOKENS))


@pytest.mark.parametrize(
    "make",
    [ZeroGate, lambda **w: OpenGate(value=2.0, **w), lambda **w: ShuffleGate(seed=3, **w)],
)
def test_only_the_named_layer_and_head_differ(make):
    model = tiny("satformer")
    hook = "blocks.2.attn.hook_v_gate"
    with torch.no_grad():
        _, clean = model.run_with_cache(TOKENS)
        with intervene(model, make(layer=2, head=1)):
            _, edited = model.run_with_cache(TOKENS)
    assert torch.equal(clean[hook][..., 0], edited[hook][..., 0])
    assert not torch.equal(clean[hook][..., 1], edited[hook][..., 1])
    below = [name for name in clean if not name.startswith(("blocks.2", "ln_final", "hook_out"))]
    below = [name for name in below if name != "hook_logits"]
    below += ["blocks.2.attn.hook_v", "blocks.2.attn.hook_pattern", "blocks.2.attn.hook_v_gate_pre"]
    for name in below:
        assert torch.equal(clean[name], edited[name]), name
    mixed = "blocks.2.attn.hook_v_mixed"
    assert torch.equal(clean[mixed][:, :, 0], edited[mixed][:, :, 0])


@pytest.mark.parametrize(
    ("intervention", "message"),
    [
        (ZeroGate(layer=0), "layers with one: 1, 2"),
        (ZeroGate(layer=9), "layer 9"),
        (ZeroGate(layer=1, head=2), "KV heads 0 to 1"),
        (ZeroGate(role="qk"), "roles with one: v"),
        (ZeroGate(sublayer="mlp"), "sublayers with one: attn"),
    ],
)
def test_what_does_not_exist_is_named(intervention, message):
    model = tiny("satformer")
    with pytest.raises(HookError, match=message), intervene(model, intervention):
        pytest.fail("entered")
    assert not installed(model)


@pytest.mark.parametrize(
    ("name", "intervention"),
    [
        ("transformer", ZeroGate()),
        ("rd-attnres", ZeroGate()),
        ("satformer", UniformRoute()),
        ("attnres", TieValueRoute()),
        ("satformer", TieValueRoute()),
        ("muddformer", TieValueRoute()),
        ("attnres", ZeroRoute()),
        ("transformer", ZeroRoute()),
    ],
)
def test_a_model_without_such_sites_is_refused(name, intervention):
    with pytest.raises(AnalysisError, match="this model"), intervene(tiny(name), intervention):
        pytest.fail("entered")


# -- every kind ------------------------------------------------------------------------------------


@cache
def both():
    """A model with gates and routes of two roles, in fp64, and what is fitted for it."""
    model = tiny("rd-attnres", value_residual="satformer").double()
    pool = documents(d_vocab=32, seed=9)
    means, by_position = fit_means(model, pool), fit_means(model, pool, per="position")
    donors = fit_donors(model, pool)
    return model, means, by_position, donors


EVERY = {
    "zero": lambda m, p, d: ZeroGate(layer=1),
    "open": lambda m, p, d: OpenGate(value=2.0, head=1),
    "scale": lambda m, p, d: ScaleGate(factor=-1.0),
    "mean": lambda m, p, d: MeanGate(means=m, head=0),
    "mean by position": lambda m, p, d: MeanGate(means=p),
    "freeze": lambda m, p, d: FreezeGate(values=m, layer=2),
    "resample": lambda m, p, d: ResampleGate(donors=d, seed=5, head=1),
    "shuffle": lambda m, p, d: ShuffleGate(seed=1),
    "uniform route": lambda m, p, d: UniformRoute(role="qk"),
    "mean route": lambda m, p, d: MeanRoute(means=m),
    "mean route by position": lambda m, p, d: MeanRoute(means=p, sublayer="attn"),
    "mask": lambda m, p, d: MaskRoute(family="embedding"),
    "resample route": lambda m, p, d: ResampleRoute(donors=d),
    "tie": lambda m, p, d: TieValueRoute(),
    "swap": lambda m, p, d: SwapRoutes(layer=[1, 2]),
    "onehot": lambda m, p, d: OneHotRoute(source=-1, layer=2),
    "remove": lambda m, p, d: RemoveSublayer(component="L0.mlp", role="v"),
}
CAUSAL = [kind for kind in EVERY if kind != "shuffle"]


@pytest.mark.parametrize(
    "given",
    [np.int64(1), np.array(1), torch.tensor(1), [np.int32(1)], torch.tensor([1]), range(1, 2)],
)
def test_whole_numbers_of_any_library_are_layers_and_heads(given):
    one = ZeroGate(layer=given, head=given)
    expected = ZeroGate(layer=1, head=1)
    model = tiny("satformer")
    with intervene(model, one):
        found = model(TOKENS)
    with intervene(model, expected):
        assert torch.equal(found, model(TOKENS))
    assert json.loads(json.dumps(one.identity))["layer"] in (1, [1])


@pytest.mark.parametrize(
    "value", [True, [False], 1.0, np.float64(1), np.bool_(True), torch.tensor(True), "1", [], ()]
)
@pytest.mark.parametrize("field", ["layer", "head"])
def test_what_is_no_layer_or_head_is_refused(field, value):
    with pytest.raises(HookError, match=f"ZeroGate: {field}.*(whole number|empty)"):
        ZeroGate(**{field: value})


@pytest.mark.parametrize("given", ["zero", ZeroGate, None])
def test_only_interventions_are_installed(given):
    with (
        pytest.raises(AnalysisError, match=r"intervene: .*: not an intervention"),
        intervene(tiny("satformer"), given),
    ):
        pass


@pytest.mark.parametrize("kind", EVERY)
def test_nothing_is_left_after_an_exception(kind):
    """Raised by the caller, by a hook in the middle of a pass, or while installing."""
    model, *fitted = both()
    before, one = logits(model), EVERY[kind](*fitted)

    def fail(tensor, hook):
        raise RuntimeError("in the middle")

    def by_caller():
        with intervene(model, one):
            assert installed(model)
            fail(None, None)

    def by_a_hook():
        failing = [("blocks.1.hook_mlp_read", ReadOnly(fail))]
        with intervene(model, one), model.hooks(failing):
            logits(model)

    for raising in (by_caller, by_a_hook):
        with pytest.raises(RuntimeError, match="in the middle"):
            raising()
        assert not installed(model)
        assert torch.equal(logits(model), before)
    with pytest.raises(HookError), intervene(model, one, ZeroGate(layer=9)):
        pytest.fail("entered")
    assert not installed(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("kind", EVERY)
def test_an_intervention_says_what_it_is(kind):
    """As JSON, equal when made again, different from the others."""
    _, *fitted = both()
    said = json.dumps(EVERY[kind](*fitted).identity, sort_keys=True)
    assert said == json.dumps(EVERY[kind](*fitted).identity, sort_keys=True)
    others = [json.dumps(make(*fitted).identity, sort_keys=True) for make in EVERY.values()]
    assert others.count(said) == 1
    assert len(said) < 5000


@pytest.mark.parametrize("kind", CAUSAL)
def test_passes_with_a_cache_are_one_full_pass(kind):
    """Also behind padding on the left, and when the same intervention is installed anew."""
    model, *fitted = both()
    mask = torch.ones_like(TOKENS)
    mask[1, :3] = 0
    with torch.no_grad(), intervene(model, EVERY[kind](*fitted)):
        full = model(TOKENS, attention_mask=mask)
    assert (full - logits(model))[0].abs().max() > 1e-4
    past, parts = KVCache(), []
    for tokens, part in zip(
        TOKENS.split([5, 1, 7, 3], 1), mask.split([5, 1, 7, 3], 1), strict=True
    ):
        with torch.no_grad(), intervene(model, EVERY[kind](*fitted)):
            parts.append(model(tokens, attention_mask=part, past=past))
    real = mask.bool()
    assert (torch.cat(parts, 1) - full)[real].abs().max() < 1e-10


@pytest.mark.parametrize("kind", CAUSAL)
def test_generation_is_under_the_intervention(kind):
    """Of texts of two lengths: the likeliest tokens of full passes."""
    model, *fitted = both()
    tokens, mask = TOKENS[:2, :6], torch.ones(2, 6, dtype=torch.int64)
    mask[1, :2] = 0
    with torch.no_grad(), intervene(model, EVERY[kind](*fitted)):
        found = model.generate(tokens, 8, attention_mask=mask)
        expected = tokens
        for _ in range(8):
            longer = torch.nn.functional.pad(mask, (0, expected.shape[1] - 6), value=1)
            newest = model(expected, attention_mask=longer)[:, -1].argmax(-1)
            expected = torch.cat((expected, newest[:, None]), 1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", EVERY)
def test_rows_of_a_batch_do_not_matter_to_each_other(kind):
    model, *fitted = both()
    together = logits(model, EVERY[kind](*fitted))
    with torch.no_grad(), intervene(model, EVERY[kind](*fitted)):
        for row in range(3):
            alone = model(TOKENS[row : row + 1])
            torch.testing.assert_close(alone[0], together[row], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", EVERY)
def test_gradients_pass_through_the_model_under_it(kind):
    """A step along the gradient of the embedding changes the loss as it says."""
    model, *fitted = both()
    with intervene(model, EVERY[kind](*fitted)):
        (gradient,) = torch.autograd.grad(model(TOKENS, return_type="loss"), [model.embed.weight])
        h = 1e-6 / gradient.norm()
        with torch.no_grad():
            moved = []
            for step in (h, -h):
                model.embed.weight.add_(step * gradient)
                moved.append(model(TOKENS, return_type="loss"))
                model.embed.weight.sub_(step * gradient)
    torch.testing.assert_close(
        (moved[0] - moved[1]) / (2 * h), gradient.square().sum(), rtol=1e-4, atol=0
    )


def test_kinds_are_made_from_what_is_fitted():
    model, means, by_position, donors = both()
    given = {
        "means": means,
        "means_position": by_position,
        "means_category": means,
        "tags": None,
        "donors": donors,
        "static": means,
        "seed": 3,
    }
    rest = {"mask": {"source": 0}, "onehot": {"source": 0}, "remove": {"component": "embed"}}
    for kinds, target in ((GATE_KINDS, "gate"), (ROUTE_KINDS, "route")):
        for name, kind in kinds.items():
            one = kind.maker(given)(layer=2, **(rest.get(name, {}) if target == "route" else {}))
            assert one.kind == target
            assert one.layer == 2
            sites = kind.sites(model)
            assert {site.kind for site in sites} <= {target}
            assert bool(sites) == ((target, name) not in {("route", "zero"), ("route", "remove")})
    assert GATE_KINDS["resample"].maker(given)().seed == 3
    assert not ROUTE_KINDS["swap"].sites(tiny("attnres"))
    assert not ROUTE_KINDS["mean"].sites(tiny("denseformer"))
    assert GATE_KINDS["optimal"].sites(tiny("resformer"))


# -- beside other hooks ----------------------------------------------------------------------------


def test_hooks_run_before_or_after_by_when_they_were_added():
    """Those that were there act first, those added inside see and change what is left."""
    model, hook = tiny("satformer"), "blocks.1.attn.hook_v_gate"
    order = []

    def note(name, factor):
        def look(x, hook):
            order.append((name, float(x.detach().flatten()[0])))
            return x * 0 + factor

        return look

    model.add_hook(hook, note("before", 3.0))
    try:
        with intervene(model, ScaleGate(factor=2.0, layer=1), ScaleGate(factor=5.0, layer=1)):
            with intervene(model, ScaleGate(factor=0.5, layer=1)):
                model.run_with_hooks(TOKENS, fwd_hooks=[(hook, note("inside", 7.0))])
            _, seen = model.run_with_cache(TOKENS, names_filter=hook)
    finally:
        model.reset_hooks()
    assert [name for name, _ in order] == ["before", "inside", "before"]
    assert order[1][1] == 3.0 * 2 * 5 * 0.5
    assert (seen[hook] == 30).all()


def test_a_hook_of_the_user_survives_and_sees_the_intervention():
    model = tiny("satformer")
    seen = []
    model.add_hook("blocks.1.attn.hook_v_mixed", lambda x, hook: seen.append(x.clone()))
    clean = logits(model)
    logits(model, ZeroGate())
    assert torch.equal(logits(model), clean)
    assert len(seen) == 3
    assert not torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_several_apply_in_order():
    model = tiny("satformer")
    assert torch.equal(
        logits(model, ZeroGate(), OpenGate(value=0.5)), logits(model, OpenGate(value=0.5))
    )


def test_an_intervention_composes_with_both_kinds_of_sites():
    model = tiny("rd-attnres", value_residual="satformer")
    kinds = [ZeroGate(), UniformRoute()]
    both = logits(model, *kinds)
    assert not torch.equal(both, logits(model, kinds[0]))
    assert not torch.equal(both, logits(model, kinds[1]))
