"""Interventions, hooks of TransformerLens and nnsight traces on one model at once."""

from __future__ import annotations

import pytest
import torch

import satlens
from satlens.models.presets import VARIANTS

pytest.importorskip("nnsight")
from satlens.interop.nnsight import wrap

GATE = "blocks.1.attn.hook_v_gate"


def test_all_three_on_one_model(build, tokens):
    """A trace is served first, then hooks that were there, then interventions, then hooks added."""
    model = build("rd-attnres", value_residual="satformer")
    traced = wrap(model)
    plain = [m for m in model.modules() if m._forward_hooks]
    model.add_hook(GATE, lambda gate, hook: gate + 1.0, is_permanent=True)
    interventions = [satlens.ScaleGate(factor=3.0, layer=1), satlens.MaskRoute(source=0, layer=2)]
    with torch.no_grad(), satlens.attention("eager"):
        inside = model.hooks([(GATE, lambda gate, hook: gate - 2.0)])
        with satlens.intervene(model, *interventions), inside, traced.trace(tokens):
            traced.blocks[0].hook_mlp_out.output[:] = 0
            traced.blocks[1].attn.hook_v_gate.output[:] = 0.5
            found = traced.output.save()
        model.reset_hooks(including_permanent=True)
        by_hand = [
            ("blocks.0.hook_mlp_out", lambda x, hook: torch.zeros_like(x)),
            (GATE, lambda gate, hook: torch.full_like(gate, (0.5 + 1.0) * 3.0 - 2.0)),
        ]
        with satlens.intervene(model, interventions[1]):
            expected = model.run_with_hooks(tokens, fwd_hooks=by_hand)
    assert torch.equal(found, expected)
    assert [m for m in model.modules() if m._forward_hooks] == plain


@pytest.mark.parametrize("name", VARIANTS)
def test_a_removal_takes_what_a_trace_made_of_the_output(name, build, tokens):
    model = build(name)
    traced = wrap(model)
    one = satlens.RemoveSublayer(component="L0.mlp", layer=[1, 2], sublayer="mlp")
    half = model.hooks([("blocks.0.hook_mlp_out", lambda x, hook: x * 0.5)])
    with torch.no_grad(), satlens.attention("eager"):
        with satlens.intervene(model, one), traced.trace(tokens):
            out = traced.blocks[0].hook_mlp_out
            out.output = out.output * 0.5
            found = traced.output.save()
        with half, satlens.intervene(model, one):
            expected = model(tokens)
        with satlens.intervene(model, one):
            whole = model(tokens)
    assert torch.equal(found, expected)
    assert not torch.equal(found, whole)


def test_swapped_routes_are_what_a_trace_reads(build, tokens):
    model = build("rd-attnres")
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        _, clean = model.run_with_cache(tokens)
        with satlens.intervene(model, satlens.SwapRoutes(layer=1)), traced.trace(tokens):
            qk = traced.blocks[1].hook_route_qk.output.save()
            v = traced.blocks[1].hook_route_v.output.save()
    assert torch.equal(qk, clean["blocks.1.hook_route_v"])
    assert torch.equal(v, clean["blocks.1.hook_route_qk"])


def test_a_trace_that_raises_leaves_nothing(build, tokens):
    model = build("rd-attnres", value_residual="satformer")
    traced = wrap(model)
    with torch.no_grad():
        before = model(tokens)

    def broken():
        both = satlens.intervene(model, satlens.ZeroGate(), satlens.SwapRoutes())
        with torch.no_grad(), both, traced.trace(tokens):
            raise RuntimeError(f"inside {traced.blocks[1].attn.hook_q.output.shape}")

    with pytest.raises(Exception, match="inside"):
        broken()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any(block.swapped_roles for block in model.blocks)
    with torch.no_grad():
        assert torch.equal(model(tokens), before)


def test_patching_of_transformer_lens_under_an_intervention(build, tokens):
    """The patched activation of a clean run goes into runs under the intervention."""
    from transformer_lens import patching

    model = build("satformer").eval()
    corrupted = tokens.flip(1)
    with torch.no_grad(), satlens.intervene(model, satlens.ZeroGate(layer=2)):
        _, clean = model.run_with_cache(tokens)

        def metric(logits):
            return logits[:, -1, 0].sum()

        found = patching.get_act_patch_resid_pre(model, corrupted, clean, metric)
        last = model.run_with_hooks(
            corrupted,
            fwd_hooks=[
                (
                    "blocks.2.hook_resid_pre",
                    lambda x, hook: torch.cat((x[:, :-1], clean[hook.name][:, -1:]), 1),
                )
            ],
        )
    assert found.shape == (3, tokens.shape[1])
    torch.testing.assert_close(found[2, -1], metric(last))
