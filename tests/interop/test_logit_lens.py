"""The logit lens on every stream: its end, its residual form, its reads over what there is."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import satlens
from satlens.errors import HookError
from satlens.models.presets import VARIANTS

CASES = {
    **{name: {"name": name} for name in VARIANTS},
    "route bias": {"name": "rd-attnres", "route_bias": True, "block_size": 2},
    "no output read": {"name": "attnres", "output_read": False, "block_size": 3},
    "satformer on rd": {"name": "rd-attnres", "value_residual": "satformer", "block_size": 1},
    "dilated": {"name": "denseformer", "dilation": 2, "period": 2},
}
every_case = pytest.mark.parametrize("case", CASES)


def built(build, case):
    return build(**CASES[case], n_layers=4)


def by_hand(model, x):
    """Final norm and unembedding in the plainest form."""
    weight = model.ln_final.weight
    return functional.rms_norm(x, x.shape[-1:], weight, model.cfg.norm_eps) @ model.W_U


@every_case
def test_it_ends_with_the_logits(case, build, tokens):
    model = built(build, case)
    with torch.no_grad():
        lens, logits = model.logit_lens(tokens), model(tokens)
        assert lens.shape == (5, 3, 7, 29)
        assert torch.equal(lens[-1], logits)
        assert torch.equal(model.logit_lens(tokens, [4, 1]), lens[[4, 1]])
        assert torch.equal(model.logit_lens(tokens, 2), lens[2])
        # Nothing is there but the embedding, which every stream reads as it is, or n times.
        start = by_hand(model, model.embed(tokens) * getattr(model.cfg.stream, "n_streams", 1))
        if "muddformer" not in case:
            assert (lens[0] - start).abs().max() < 1e-5


@every_case
def test_a_cache_gives_the_same(case, build, tokens):
    model = built(build, case)
    with torch.no_grad(), satlens.attention("eager"):  # which recording patterns chooses
        expected = model.logit_lens(tokens)
        _, cache = model.run_with_cache(tokens)
        assert torch.equal(cache.logit_lens(), expected)
        assert torch.equal(cache.logit_lens(1), expected[1])
        _, cut = model.run_with_cache(tokens, pos_slice=slice(2, 5))
        assert (cut.logit_lens([0, 3]) - expected[[0, 3], :, 2:5]).abs().max() < 1e-5
        _, one = model.run_with_cache(tokens[:1], remove_batch_dim=True)
        assert (one.logit_lens() - expected[:, 0]).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["transformer", "satformer", "resformer"])
def test_on_a_residual_stream_it_reads_the_residual(case, build, tokens):
    model = built(build, case)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=lambda n: "hook_resid" in n)
        lens = model.logit_lens(tokens)
        for layer in range(4):
            residual = cache["resid_pre", layer]
            assert torch.equal(lens[layer], model.ln_final(residual) @ model.W_U)
            assert (lens[layer] - by_hand(model, residual)).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["attnres", "attnres-full", "rd-attnres", "satformer on rd"])
def test_attention_residuals_read_the_sources_there_are(case, build, tokens):
    """A softmax over the block sums so far, with the output read's own query; not their sum."""
    model = built(build, case)
    size, read = model.cfg.stream.block_size, model.out_read
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        outputs = [
            cache[f"blocks.{i}.hook_{part}_out"] for i in range(4) for part in ("attn", "mlp")
        ]
        for layer in range(5):
            done = outputs[: 2 * layer]
            sums = [sum(done[i : i + size]) for i in range(0, len(done), size)]
            sources = torch.stack([cache["hook_embed"], *sums])
            keys = functional.rms_norm(sources, (16,), read.gamma, model.cfg.norm_eps)
            weights = (keys @ read.query).softmax(0)
            expected = by_hand(model, (weights[..., None] * sources).sum(0))
            assert (model.logit_lens(tokens, layer) - expected).abs().max() < 1e-5
            if layer > 1:
                running_sum = by_hand(model, sources.sum(0))
                assert (expected - running_sum).abs().max() > 1e-2


def test_what_stands_for_states_to_come(build, tokens):
    """MUDDFormer's output read weighs the newest state in place of those above it."""
    model = built(build, "muddformer")
    read, eps = model.out_read, model.cfg.norm_eps
    with torch.no_grad():
        states = list(model(tokens, stop_at_layer=2).state.sources)
        normed = functional.rms_norm(states[-1], (16,), eps=eps)
        weights = functional.gelu(normed @ read.w1.weight.T) @ read.w2.weight.T + read.static[0]
        states += [states[-1]] * 2
        mixture = sum(w * x for w, x in zip(weights.split(1, -1), states, strict=True))
        assert (model.logit_lens(tokens, 2) - by_hand(model, mixture)).abs().max() < 1e-5
    fresh = satlens.build("muddformer", n_layers=4, d_vocab=29).eval()
    with torch.no_grad():  # as it starts it is a transformer
        for layer in range(5):
            newest = fresh(tokens, stop_at_layer=layer).state.sources[-1]
            expected = by_hand(fresh, newest)
            assert (fresh.logit_lens(tokens, layer) - expected).abs().max() < 1e-5


def test_edits_and_masks_act(build, tokens):
    model = built(build, "rd-attnres")
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    with torch.no_grad():
        assert torch.equal(
            model.logit_lens(tokens, attention_mask=mask)[-1], model(tokens, attention_mask=mask)
        )
        with satlens.intervene(model, satlens.UniformRoute()), satlens.attention("eager"):
            lens, logits = model.logit_lens(tokens), model(tokens)
            _, cache = model.run_with_cache(tokens)
            assert torch.equal(lens[-1], logits)
            assert torch.equal(cache.logit_lens(), lens)
        assert (lens[2] - model.logit_lens(tokens, 2)).abs().max() > 1e-3
        with pytest.raises(HookError, match="under edits of reads or routes"):
            cache.logit_lens()


def test_what_is_refused(build, tokens):
    model = built(build, "satformer")
    for layers, words in ((5, "outside of 0 to 4"), ([1, -1], "outside"), ([], "empty")):
        with pytest.raises(HookError, match=words):
            model.logit_lens(tokens, layers)
    _, cache = model.run_with_cache(tokens, names_filter=["hook_embed"])
    with pytest.raises(HookError, match=r"logit_lens: blocks\.0\.hook_attn_out is not in"):
        cache.logit_lens()
    _, cache = model.run_with_cache(tokens, pos_slice=2)
    with pytest.raises(HookError, match="cut to one position"):
        cache.logit_lens()


def test_gradients_pass(build, tokens):
    model = built(build, "attnres")
    lens = model.logit_lens(tokens, 2)
    (gradient,) = torch.autograd.grad(lens.sum(), model.blocks[1].attn.o.weight)
    assert gradient.abs().max() > 0
