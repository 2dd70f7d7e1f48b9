"""Edges from V_1, one at a time, against whole passes with one number changed by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from test_circuits import MODELS, model_of

import satlens
from satlens.errors import AnalysisError

sys.path.append(str(Path(__file__).parents[1] / "models"))
from straight_line import attend, feed_forward, gate_function, random_model, rms, visible

CLEAN = torch.tensor([[3, 11, 5, 7, 2], [1, 1, 20, 28, 4]])
CORRUPTED = torch.tensor([[9, 11, 6, 7, 2], [1, 8, 20, 27, 4]])


def third_logit(logits):
    return logits[..., 3].mean()


def by_hand(model, tokens, other, edge):
    """SATFormer in a straight line; ``edge`` (layer, head, token) receives the other run's V_1."""
    cfg, W = model.cfg, {k: v.detach().double() for k, v in model.state_dict().items()}
    mask = visible(cfg, tokens.shape[1], None)
    heads = cfg.n_heads, cfg.n_key_value_heads, cfg.d_head

    def first_values(ids):
        x = rms(W["embed.weight"][ids], cfg.norm_eps) * W["blocks.0.ln1.weight"]
        rows = W["blocks.0.attn.qkv.weight"][sum(heads[:2]) * heads[2] :]
        return (x @ rows.T).unflatten(-1, heads[1:])

    v_first = first_values(tokens)
    x = W["embed.weight"][tokens]
    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}."
        read = rms(x, cfg.norm_eps) * W[at + "ln1.weight"]
        given = v_first.clone()
        if edge is not None and edge[0] == layer:
            given[:, edge[2], edge[1]] = first_values(other)[:, edge[2], edge[1]]

        def mix(v, at=at, read=read, given=given, layer=layer):
            if layer == 0:
                return v
            gate = gate_function("relu", read @ W[at + "attn.values.alpha.weight"].T)
            return v + gate[..., None] * given

        x = x + attend(cfg, W, at + "attn.", read, read, mix, mask)[0]
        x = x + feed_forward(W, at + "mlp.", rms(x, cfg.norm_eps) * W[at + "ln2.weight"])
    last = rms(x, cfg.norm_eps) * W["ln_final.weight"]
    return last @ W.get("unembed.weight", W["embed.weight"]).T


def test_every_edge_is_that_of_a_straight_line_model():
    model = random_model("satformer")
    found = satlens.patch_v_first(model, CLEAN, CORRUPTED, third_logit)
    assert found.layers == (1, 2)
    assert found.effect.shape == (2, 2, 5)
    before = third_logit(by_hand(model, CORRUPTED, CLEAN, None))
    assert found.corrupted == pytest.approx(float(before), rel=1e-9)
    assert found.clean == pytest.approx(float(third_logit(by_hand(model, CLEAN, CLEAN, None))))
    for number, layer in enumerate(found.layers):
        for head in range(2):
            for t in range(5):
                after = third_logit(by_hand(model, CORRUPTED, CLEAN, (layer, head, t)))
                effect = float(found.effect[number, head, t])
                assert effect == pytest.approx(float(after - before), abs=1e-12)
    # Where the runs have the same token, V_1 is the same.
    assert found.effect[..., -1].abs().max() < 1e-12
    assert found.effect[..., :-1].abs().max() > 1e-3
    torch.testing.assert_close(
        found.recovered, found.effect / (found.clean - found.corrupted), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_an_edge_is_one_hook_of_a_whole_pass(name):
    model = model_of(name)
    found = satlens.patch_v_first(model, CLEAN, CORRUPTED, third_logit, rows_at_once=6)
    v_first = model.run_with_cache(CLEAN)[1]["hook_v_first"]
    for number, layer in enumerate(found.layers):
        for head, t in ((0, 0), (1, 2), (1, 3)):

            def patch(value, hook, head=head, t=t):
                value[:, t, head] = v_first[:, t, head]
                return value

            hooks = [(f"blocks.{layer}.attn.hook_v_first", patch)]
            logits = model.run_with_hooks(CORRUPTED, fwd_hooks=hooks)
            expected = float(third_logit(logits)) - found.corrupted
            assert float(found.effect[number, head, t]) == pytest.approx(expected, abs=1e-12)
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_how_many_edges_run_at_once_changes_nothing():
    model = model_of("rd-attnres")
    effects = [
        satlens.patch_v_first(model, CLEAN, CORRUPTED, third_logit, rows_at_once=n).effect
        for n in (1, 6, 64)
    ]
    for other in effects[1:]:
        torch.testing.assert_close(other, effects[0], rtol=1e-10, atol=1e-12)


def test_closed_gates_carry_nothing():
    model = model_of("satformer")
    with satlens.intervene(model, satlens.ZeroGate(layer=2, head=1)):
        found = satlens.patch_v_first(model, CLEAN, CORRUPTED, third_logit)
    assert (found.effect[1, 1] == 0).all()
    assert (found.effect[1, 0] != 0).any()


@torch.no_grad()
def test_the_default_metric_is_the_difference_of_the_two_answers():
    model = model_of("satformer")
    other = CLEAN.flip(1)
    found = satlens.patch_v_first(model, CLEAN, other)
    clean, corrupted = model(CLEAN)[:, -1], model(other)[:, -1]
    right, wrong = clean.argmax(-1, keepdim=True), corrupted.argmax(-1, keepdim=True)
    for logits, value in ((clean, found.clean), (corrupted, found.corrupted)):
        difference = (logits.gather(1, right) - logits.gather(1, wrong)).mean()
        assert value == pytest.approx(float(difference), rel=1e-9)
    assert found.clean > 0 > found.corrupted


def test_what_cannot_be_patched_is_refused():
    model = model_of("satformer")
    with pytest.raises(AnalysisError, match="has no V_1 to patch"):
        satlens.patch_v_first(random_model("rd-attnres"), CLEAN, CORRUPTED)
    with pytest.raises(AnalysisError, match=r"shape \[2, 5\], corrupted \[2, 4\]"):
        satlens.patch_v_first(model, CLEAN, CORRUPTED[:, :4])
    with pytest.raises(AnalysisError, match=r"metric: must give one number, got \[2\]"):
        satlens.patch_v_first(model, CLEAN, CORRUPTED, lambda logits: logits[:, -1, 3])
    with pytest.raises(AnalysisError, match=r"row 0: .* predict the same token"):
        satlens.patch_v_first(model, CLEAN, CLEAN)
