"""Interventions touch what they name, leave nothing behind, and meet known equalities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted import documents, tiny

from satlens.analysis.evaluation import evaluate
from satlens.analysis.interventions import (
    MeanGate,
    OpenGate,
    ScaleGate,
    ShuffleGate,
    ZeroGate,
    intervene,
)
from satlens.analysis.means import fit_means
from satlens.analysis.route_interventions import MeanRoute, TieValueRoute, UniformRoute, ZeroRoute
from satlens.errors import AnalysisError, HookError

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


def test_tied_value_route_is_the_tied_control():
    """In fp64: one product of both roles and one for each are rounded differently."""
    model = tiny("rd-attnres").double()
    with torch.no_grad():
        expected = same_weights(model, "rd-attnres-tied")(TOKENS)
    tied = logits(model, TieValueRoute())
    torch.testing.assert_close(tied, expected, rtol=1e-12, atol=1e-12)
    assert (tied - logits(model)).abs().max() > 1e-3


def test_uniform_routes_are_the_untrained_routes():
    model = tiny("rd-attnres")
    zeroed = tiny("rd-attnres")
    zeroed.load_state_dict(model.state_dict())
    for name, parameter in zeroed.named_parameters():
        if "query" in name:
            parameter.data.zero_()
    with torch.no_grad():
        expected = zeroed(TOKENS)
    torch.testing.assert_close(logits(model, UniformRoute()), expected, rtol=1e-5, atol=1e-6)


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


def test_only_the_named_role_differs():
    model = tiny("rd-attnres")
    with torch.no_grad():
        _, clean = model.run_with_cache(TOKENS)
        with intervene(model, UniformRoute(layer=1, role="v")):
            _, edited = model.run_with_cache(TOKENS)
    assert torch.equal(clean["blocks.1.hook_route_qk"], edited["blocks.1.hook_route_qk"])
    assert torch.equal(clean["blocks.1.attn.hook_pattern"], edited["blocks.1.attn.hook_pattern"])
    changed = edited["blocks.1.hook_route_v"]
    assert torch.equal(changed, torch.full_like(changed, 1 / changed.shape[-1]))
    assert not torch.equal(clean["blocks.1.attn.hook_v"], edited["blocks.1.attn.hook_v"])


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


@pytest.mark.parametrize("name", ["satformer", "rd-attnres"])
def test_nothing_is_left_after_an_exception(name):
    model = tiny(name)
    before = logits(model)
    one = ZeroGate() if name == "satformer" else UniformRoute()

    def broken():
        with intervene(model, one):
            model(TOKENS)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        broken()
    assert not installed(model)
    assert torch.equal(logits(model), before)


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


def test_shuffle_permutes_real_tokens_within_a_context():
    model = tiny("satformer")
    documents = torch.zeros_like(TOKENS)
    documents[0, 10:] = -1
    hook = "blocks.1.attn.hook_v_gate"
    with torch.no_grad():
        _, clean = model.run_with_cache(TOKENS, names_filter=hook, documents=documents)
        with intervene(model, ShuffleGate(seed=1)):
            _, edited = model.run_with_cache(TOKENS, names_filter=hook, documents=documents)
    assert torch.equal(clean[hook][0, 10:], edited[hook][0, 10:])
    for row, n in ((0, 10), (1, 16)):
        before, after = clean[hook][row, :n], edited[hook][row, :n]
        assert not torch.equal(before, after)
        assert torch.equal(before.sort(0).values, after.sort(0).values)
        # Heads move together.
        pairs = {tuple(p) for p in before.tolist()}
        assert {tuple(p) for p in after.tolist()} == pairs


def test_shuffle_depends_on_seed_and_content_alone():
    model, docs = tiny("satformer"), documents(d_vocab=32)
    scores = {}
    for batch_size in (1, 4, 64):
        with intervene(model, ShuffleGate(seed=1)):
            result = evaluate(model, docs, batch_size=batch_size, n_resamples=99)
        scores[batch_size] = result.table["nll"].to_numpy()
    np.testing.assert_allclose(scores[1], scores[4], rtol=1e-5)
    np.testing.assert_allclose(scores[1], scores[64], rtol=1e-5)
    with intervene(model, ShuffleGate(seed=2)):
        other = evaluate(model, docs, n_resamples=99).table["nll"].to_numpy()
    assert np.abs(scores[1] - other).max() > 1e-4


def test_shuffle_is_the_same_inside_and_outside_of_an_analysis():
    model, docs = tiny("satformer"), documents(d_vocab=32, lengths=(11,) * 8)
    with intervene(model, ShuffleGate(seed=1)):
        inside = evaluate(model, docs, n_resamples=99).table["nll"].to_numpy()
        rows = torch.from_numpy(np.stack([d.tokens for d in docs]))
        with torch.no_grad():
            outside = model(
                rows[:, :-1], return_type="loss", targets=rows[:, 1:], loss_per_token=True
            )
    np.testing.assert_allclose(inside, outside.mean(1), rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("satformer", "resformer", "attnres", "rd-attnres"),
        *("denseformer", "muddformer", "hyperconnections"),
    ],
)
def test_means_are_those_of_the_cache(name):
    model, docs = tiny(name), documents(d_vocab=32)
    means = fit_means(model, docs)
    total, n = {site.hook: 0.0 for site in model.sites}, 0
    for document in docs:
        for start in range(0, len(document.tokens) - 1, 16):
            piece = torch.from_numpy(document.tokens[start : start + 17][:-1])[None]
            with torch.no_grad():
                _, cache = model.run_with_cache(piece, names_filter=list(total))
            n += piece.shape[1]
            for hook in total:
                total[hook] = total[hook] + cache[hook][0].double().sum(0).numpy()
    for hook, mean in means.items():
        np.testing.assert_allclose(mean, total[hook] / n, rtol=1e-5, err_msg=hook)


def test_mean_interventions_put_the_means_there():
    gates, routes = tiny("satformer"), tiny("rd-attnres")
    for model, make, hook in (
        (gates, MeanGate, "blocks.2.attn.hook_v_gate"),
        (routes, MeanRoute, "blocks.2.hook_route_mlp"),
    ):
        means = fit_means(model, documents(d_vocab=32))
        with torch.no_grad(), intervene(model, make(means=means)):
            _, cache = model.run_with_cache(TOKENS, names_filter=hook)
        expected = torch.from_numpy(means[hook]).float().expand_as(cache[hook])
        assert torch.equal(cache[hook], expected)
    with pytest.raises(AnalysisError, match="nothing for blocks"):
        logits(gates, MeanGate(means={}))


def test_an_intervention_composes_with_both_kinds_of_sites():
    model = tiny("rd-attnres", value_residual="satformer")
    kinds = [ZeroGate(), UniformRoute()]
    both = logits(model, *kinds)
    assert not torch.equal(both, logits(model, kinds[0]))
    assert not torch.equal(both, logits(model, kinds[1]))
