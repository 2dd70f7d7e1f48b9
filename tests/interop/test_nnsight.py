"""Tracing satlens models with nnsight: what a trace reads and edits is what our hooks do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import satlens
from satlens.errors import ConfigError, DataError
from satlens.interop.huggingface import to_hf
from satlens.models.layers import is_hooked
from satlens.models.presets import VARIANTS

nnsight = pytest.importorskip("nnsight")
from satlens.interop.nnsight import wrap  # noqa: E402

TAKEN = "input output source skip trace edit cache session iter all device parent root path".split()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_hook_point_is_seen(name, build, tokens):
    """One trace records what run_with_cache does, to the bit."""
    model = build(name)
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        logits, expected = model.run_with_cache(tokens)
    with torch.no_grad():
        plain = model(tokens)
        with traced.trace(tokens) as tracer:
            recorded = tracer.cache().save()
            output = traced.output.save()
        assert torch.equal(output, logits)
        for point, tensor in expected.items():
            assert torch.equal(recorded[f"model.{point}"].output, tensor), point
        assert torch.equal(model(tokens), plain)
    assert not any(is_hooked(point) for point in model.hook_dict.values())


@pytest.mark.parametrize("name", VARIANTS)
def test_no_submodule_takes_a_name_of_nnsights(name, build):
    model = to_hf(build(name, value_residual="satformer", qk_norm=True))
    parts = {part for path, _ in model.named_modules() for part in path.split(".")}
    assert not parts & set(TAKEN)
    clashes = {part for part in parts if part and hasattr(nnsight.NNsight, part)}
    assert not clashes


def test_gates_and_routes_are_read(build, tokens):
    model = build("rd-attnres", value_residual="satformer")
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        _, cache = model.run_with_cache(tokens)
    with torch.no_grad(), traced.trace(tokens):
        route = traced.blocks[1].hook_route_qk.output.save()
        value_route = traced.blocks[1].hook_route_v.output.save()
        gate = traced.blocks[1].attn.hook_v_gate.output.save()
        pattern = traced.blocks[1].attn.hook_pattern.output.save()
        last = traced.hook_route_out.output.save()
    assert torch.equal(route, cache["blocks.1.hook_route_qk"])
    assert torch.equal(value_route, cache["blocks.1.hook_route_v"])
    assert torch.equal(gate, cache["blocks.1.attn.hook_v_gate"])
    assert torch.equal(pattern, cache["blocks.1.attn.hook_pattern"])
    assert torch.equal(last, cache["hook_route_out"])


def test_editing_gates_equals_our_interventions(build, tokens):
    model = build("satformer")
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        with satlens.intervene(model, satlens.ZeroGate(layer=2, head=1)):
            one = model(tokens)
        with satlens.intervene(model, satlens.ScaleGate(factor=0.5)):
            half = model(tokens)
    with torch.no_grad():
        with traced.trace(tokens):
            traced.blocks[2].attn.hook_v_gate.output[:, :, 1] = 0
            in_place = traced.output.save()
        with traced.trace(tokens):
            for layer in (1, 2):
                gate = traced.blocks[layer].attn.hook_v_gate
                gate.output = gate.output * 0.5
            replaced = traced.output.save()
    assert torch.equal(in_place, one)
    assert torch.equal(replaced, half)
    assert not torch.equal(one, half)


def test_editing_routes_equals_our_interventions(build, tokens):
    model = build("rd-attnres")
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        with satlens.intervene(model, satlens.UniformRoute(layer=1, role="v")):
            uniform = model(tokens)
        with satlens.intervene(model, satlens.TieValueRoute()):
            tied = model(tokens)
    with torch.no_grad():
        with traced.trace(tokens):
            route = traced.blocks[1].hook_route_v
            route.output = torch.full_like(route.output, 1 / route.output.shape[-1])
            edited = traced.output.save()
        with traced.trace(tokens):
            for layer in range(3):
                block = traced.blocks[layer]
                qk = block.hook_route_qk.output
                block.hook_route_v.output = qk
            both = traced.output.save()
    assert torch.equal(edited, uniform)
    assert (both - tied).abs().max() < 1e-6


@pytest.mark.parametrize("name", ["hyperconnections", "muddformer", "denseformer", "delta-attnres"])
def test_editing_other_streams(name, build, tokens):
    model = build(name)
    site = next(s for s in model.sites if len(s.sources) > 2)
    point = site.hook
    with torch.no_grad(), satlens.attention("eager"):
        double = [(point, lambda weights, hook: weights * 2)]
        expected = model.run_with_hooks(tokens, fwd_hooks=double)
        plain = model(tokens)
    traced = wrap(model)
    with torch.no_grad(), traced.trace(tokens):
        module = traced.get(point)
        module.output = module.output * 2
        edited = traced.output.save()
    assert torch.equal(edited, expected)
    assert not torch.equal(edited, plain)


def test_gradients_come_back_through_a_trace(build, tokens):
    model = build("satformer")
    seen = []
    with (
        satlens.attention("eager"),
        model.hooks([("blocks.1.attn.hook_v_gate", lambda gate, hook: seen.append(gate))]),
    ):
        (expected,) = torch.autograd.grad(model(tokens, return_type="loss"), seen)
    traced = wrap(model)
    with traced.trace(tokens, return_type="loss"):
        gate = traced.blocks[1].attn.hook_v_gate.output
        loss = traced.output
        with loss.backward():
            gradient = gate.grad.save()
    assert (gradient - expected).abs().max() < 1e-6 * expected.abs().max()


# -- several invokes -------------------------------------------------------------------------------


def test_invokes_of_one_length_are_a_batch(build, tokens):
    model = build("satformer")
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        expected = model(tokens)
        with satlens.intervene(model, satlens.ZeroGate(layer=1)):
            closed = model(tokens)
    with torch.no_grad(), traced.trace() as tracer:
        with tracer.invoke(tokens[:2]):
            gate = traced.blocks[1].attn.hook_v_gate.output.save()
            first = traced.output.save()
        with tracer.invoke(tokens[2:]):
            traced.blocks[1].attn.hook_v_gate.output[:] = 0
            second = traced.output.save()
        with tracer.invoke():
            everything = traced.output.save()
    assert gate.shape == (2, 7, 2)
    assert torch.equal(first, expected[:2])
    assert torch.equal(second, closed[2:])
    assert torch.equal(everything, torch.cat((first, second)))


def test_invokes_of_several_lengths(build, tokens):
    """Padded on the left: counted from the end, each sees what it does alone."""
    model = build("rd-attnres", value_residual="satformer")
    traced = wrap(model)
    with torch.no_grad(), satlens.attention("eager"):
        alone = model(tokens[:1, :4])
        loss = model(tokens[1:], return_type="loss", loss_per_token=True)
    with torch.no_grad(), traced.trace(return_type="both", loss_per_token=True) as tracer:
        with tracer.invoke(tokens[:1, :4]):
            route = traced.blocks[1].hook_route_v.output.save()
            short = traced.output.save()
        with tracer.invoke(tokens=tokens[1:]):
            long = traced.output.save()
    assert route.shape[:2] == (1, 7)
    assert (short[0][:, -4:] - alone).abs().max() < 1e-5
    assert short[1][0, :3].eq(0).all()
    assert (long[1] - loss).abs().max() < 1e-5


def test_arguments_of_invokes(build, tokens):
    model = build("satformer")
    traced = wrap(model)
    mask = torch.ones_like(tokens[:1])
    mask[0, :2] = 0
    with torch.no_grad(), satlens.attention("eager"):
        masked = model(tokens[:1], attention_mask=mask)
    with torch.no_grad(), traced.trace() as tracer:
        with tracer.invoke(tokens[:1], attention_mask=mask):
            one = traced.output.save()
        with tracer.invoke(tokens[1:2]):
            other = traced.output.save()
    assert (one[:, 2:] - masked[:, 2:]).abs().max() < 1e-6
    assert (other - model(tokens[1:2])).abs().max() < 1e-5

    def two_invokes(**options):
        with traced.trace() as tracer:
            with tracer.invoke(tokens[:1], **options):
                one = traced.output.save()
            with tracer.invoke(tokens[1:2]):
                other = traced.output.save()
        return one, other

    with pytest.raises(DataError, match="targets is given in some invokes only"):
        two_invokes(targets=tokens[:1])
    with pytest.raises(DataError, match="settings differ"):
        two_invokes(return_type="loss")
    assert not any(is_hooked(point) for point in model.hook_dict.values())


def test_texts(build, tokenizer):
    model = build("satformer", d_vocab=260)
    model.tokenizer = tokenizer
    traced = wrap(model)
    texts = ["the cat sat", "a dog barked at the cat"]
    with torch.no_grad(), traced.trace() as tracer:
        with tracer.invoke(texts[0]):
            first = traced.output[:, -1].save()
        with tracer.invoke([texts[1]]):
            second = traced.output[:, -1].save()
    with torch.no_grad():
        for text, last in zip(texts, (first, second), strict=True):
            assert (model(text)[:, -1] - last).abs().max() < 1e-5


def test_generation_is_traced(build, tokens):
    """The prompt but its last token, then a token a pass: the gates of one pass over the whole."""
    model = build("satformer")
    traced = wrap(model)
    with torch.no_grad():
        with traced.trace(tokens, fn="generate", max_new_tokens=4) as tracer:
            gates = [].save()
            for _ in tracer.iter[:5]:
                gates.append(traced.blocks[1].attn.hook_v_gate.output)
            longer = tracer.result.save()
        assert torch.equal(longer, model.generate(tokens, 4))
        _, cache = model.run_with_cache(longer[:, :-1], names_filter="blocks.1.attn.hook_v_gate")
    assert [gate.shape[1] for gate in gates] == [6, 1, 1, 1, 1]
    whole = cache["blocks.1.attn.hook_v_gate"]
    assert (torch.cat(gates, 1) - whole).abs().max() < 1e-5


# -- what else -------------------------------------------------------------------------------------


def test_other_attention(build, tokens):
    """Without explicit scores a trace sees all but scores and patterns, and keeps the kernel."""
    model = build("satformer")
    traced = wrap(model, attention="auto")
    with torch.no_grad():
        expected = model(tokens)
        with traced.trace(tokens):
            gate = traced.blocks[1].attn.hook_v_gate.output.save()
            output = traced.output.save()
        assert torch.equal(output, expected)
        assert gate.shape == (3, 7, 2)
        with pytest.raises(Exception, match="hook_pattern"), traced.trace(tokens):
            traced.blocks[1].attn.hook_pattern.output.save()


def test_what_is_refused(build):
    model = build("satformer")
    with pytest.raises(ConfigError, match="expected a satlens model, got Linear"):
        wrap(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="attention: must be auto, eager or fused"):
        wrap(model, attention="flash")


def test_nothing_is_imported_before_it_is_needed():
    code = (
        "import sys, satlens, satlens.interop\n"
        "assert not {'torch', 'transformers', 'nnsight'} & set(sys.modules)\n"
        "import satlens.checkpoints, satlens.analysis.sparsity\n"
        "assert 'nnsight' not in sys.modules\n"
        "assert not hasattr(object(), 'save')\n"
        # The name it gives every object does not hide ours.
        "import nnsight\n"
        "assert hasattr(object(), 'save')\n"
        "from satlens import save\n"
        "assert save is satlens.save is satlens.checkpoints.save\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
