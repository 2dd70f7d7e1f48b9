"""The shared backbone: sizes, starts, masks, padding, resuming, mixed precision."""

from __future__ import annotations

import pytest
import torch
from straight_line import evaluate, random_model, random_tokens

import satlens
from satlens.errors import ConfigError, DataError, HookError
from satlens.models.initialise import family
from satlens.models.presets import PRESETS, VARIANTS

EVERY = [*VARIANTS, "satformer on rd-attnres"]


def build(name, seed=0, dtype=torch.float64, **fields):
    if " on " in name:
        residual, name = name.split(" on ")
        fields["value_residual"] = residual
    return random_model(name, seed, dtype, **fields)


# Parameter counts of the papers' scales: transformer, ResFormer, SATFormer, then AttnRes and RD.
COUNTS = {
    "transformer-small": 128_404_096,
    "resformer-small": 128_404_117,
    "satformer-small": 128_496_256,
    "transformer-medium": 334_798_080,
    "resformer-medium": 334_798_115,
    "satformer-medium": 335_076_608,
    "transformer-large": 766_440_320,
    "resformer-large": 766_440_357,
    "satformer-large": 767_103_872,
    "transformer-xl": 1_298_764_800,
    "resformer-xl": 1_298_764_847,
    "satformer-xl": 1_300_272_128,
    "hyperconnections-small": 128_522_940,
    "hyperconnections-medium": 335_057_064,
    "hyperconnections-large": 766_849_884,
    "attnres-s": 119_791_296,
    "attnres-m": 343_039_424,
    "rd-attnres-s": 119_800_512,
    "rd-attnres-m": 343_059_392,
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    assert satlens.build(name, device="meta").n_parameters() == COUNTS[name]


def test_every_preset_builds():
    for name in PRESETS:
        satlens.build(name, device="meta")


def test_shared_weights_start_equal():
    def start(name, seed):
        return satlens.build(name, seed=seed, n_layers=3, d_model=16, d_vocab=29).state_dict()

    reference = start("transformer", 3)
    for name in VARIANTS:
        state = start(name, 3)
        for key, value in reference.items():
            # MUDD's attention reads have a norm each.
            own = key if key in state else key.replace("ln1", "ln1_q")
            assert torch.equal(state[own], value), (name, key)
    assert not torch.equal(start("transformer", 4)["embed.weight"], reference["embed.weight"])
    gates = {start("satformer", s)["blocks.1.attn.values.alpha.weight"] for s in (0, 1)}
    assert len({g.sum().item() for g in gates}) == 2


def test_every_parameter_belongs_to_a_family():
    for name in EVERY:
        fields = {"route_bias": True} if name.startswith(("attnres", "rd-")) else {}
        for parameter, _ in build(name, qkv_bias=True, qk_norm=True, **fields).named_parameters():
            family(parameter)


def dead(name, model):
    """Parameters without effect: reads of one source, and the value query of two controls."""
    first = "blocks.0.attn_read."
    names = {n for n, _ in model.named_parameters() if n.startswith(first)}
    if name.endswith(("tied", "frozen-v")):
        names |= {n for n, _ in model.named_parameters() if n.endswith("query_v")}
    return names


@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_receives_gradient(name):
    model = build(name, qkv_bias=True, qk_norm=True)
    model(random_tokens(), return_type="loss").backward()
    for parameter, value in model.named_parameters():
        alive = value.grad is not None and bool(value.grad.any())
        assert alive == (parameter not in dead(name, model)), parameter


# -- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("window", [None, 3])
def test_documents_are_separate(name, window):
    """A packed row equals its documents run alone (RoPE is relative)."""
    model, tokens = build(name, window_size=window), random_tokens(1, 12)
    documents = torch.tensor([[4, 4, 4, 4, 4, 9, 9, 9, 9, 9, 9, 9]])
    with torch.no_grad():
        packed = model(tokens, documents=documents)
        alone = torch.cat((model(tokens[:, :5]), model(tokens[:, 5:])), 1)
        assert (packed - alone).abs().max() < 1e-10
        assert (packed - model(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model, tokens = build(name), random_tokens(2, 7)
    padding = random_tokens(2, 4, seed=8)
    order = (padding, tokens) if side == "left" else (tokens, padding)
    padded = torch.cat(order, 1)
    mask = torch.cat([torch.full_like(t, int(t is tokens)) for t in order], 1)
    real = slice(4, None) if side == "left" else slice(0, 7)
    with torch.no_grad():
        logits, loss = model(padded, attention_mask=mask, return_type="both")
        expected, expected_loss = model(tokens, return_type="both")
        assert (logits[:, real] - expected).abs().max() < 1e-10
        assert (loss - expected_loss).abs() < 1e-10
        gates = [n for n in model.hook_dict if "hook_v_gate" in n or "hook_route" in n]
        if gates:
            _, ours = model.run_with_cache(padded, attention_mask=mask, names_filter=gates)
            _, theirs = model.run_with_cache(tokens, names_filter=gates)
            for gate in gates:
                assert (ours[gate][:, real] - theirs[gate]).abs().max() < 1e-10
        assert torch.isfinite(logits).all()


@pytest.mark.parametrize("window", [1, 2, 5, 9, 50])
@pytest.mark.parametrize("implementation", ["eager", "fused"])
def test_window_by_brute_force(window, implementation):
    model, tokens = random_model("satformer", window_size=window), random_tokens()
    with torch.no_grad(), satlens.attention(implementation):
        assert (model(tokens) - evaluate(model, tokens).logits).abs().max() < 1e-10


@pytest.mark.parametrize("name", EVERY)
def test_causality(name):
    model, tokens = build(name), random_tokens()
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 29
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).min() > 0


# -- loss -----------------------------------------------------------------------------------------


def test_loss_is_the_mean_over_scored_positions():
    model, tokens = random_model("transformer"), random_tokens()
    logits, loss = model(tokens, return_type="both")
    surprise = -logits.log_softmax(-1)
    each = surprise[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    assert (loss - each.mean()).abs() < 1e-12
    per_token = model(tokens, return_type="loss", loss_per_token=True)
    assert (per_token - each).abs().max() < 1e-12
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[1, 2:5] = -100
    scored = targets >= 0
    own = surprise.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert (model(tokens, return_type="loss", targets=targets) - own[scored].mean()).abs() < 1e-12
    each = model(tokens, return_type="loss", targets=targets, loss_per_token=True)
    assert each.shape == tokens.shape
    assert not each[~scored].any()
    assert (each[scored] - own[scored]).abs().max() < 1e-12


def test_bad_tokens_are_named():
    model = random_model("transformer")
    for tokens, words in (
        (torch.tensor([[29]]), "d_vocab=29"),
        (torch.tensor([[-1]]), "-1"),
        (torch.zeros(1, 33, dtype=torch.long), "n_ctx=32"),
        (torch.zeros(3, dtype=torch.long), "batch, position"),
        (torch.zeros(1, 0, dtype=torch.long), "batch, position"),
    ):
        with pytest.raises(satlens.SatlensError, match=words):
            model(tokens)


# -- one result, several ways ---------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
def test_attention_implementations_agree(name):
    """Within 1e-6 of the largest logit, for weights of the size training starts from."""
    model, tokens = build(name, dtype=torch.float32, qk_norm=True), random_tokens(2, 16)
    for parameter in model.parameters():
        parameter.data.mul_(0.3)
    with torch.no_grad():
        with satlens.attention("eager"):
            explicit = model(tokens)
        with satlens.attention("fused"):
            fused = model(tokens)
    assert (explicit - fused).abs().max() <= 1e-6 * explicit.abs().max()


@pytest.mark.parametrize("name", EVERY)
def test_resuming_from_a_snapshot(name):
    model, tokens = build(name, n_layers=4), random_tokens()
    with torch.no_grad():
        full = model(tokens)
        for layer in range(5):
            snapshot = model(tokens, stop_at_layer=layer)
            assert snapshot.layer == layer
            assert torch.equal(model(tokens, start_at=snapshot), full)
        two = model(tokens, start_at=model(tokens, stop_at_layer=1), stop_at_layer=3)
        assert torch.equal(model(tokens, start_at=two), full)


@pytest.mark.usefixtures("_as_outside_tests")
def test_names_that_mean_nothing_are_refused():
    model = build("transformer", n_layers=1)
    with pytest.raises(
        ConfigError, match="attention: must be auto, eager, fused or flex, got 'flash'"
    ):
        satlens.attention("flash").__enter__()
    with pytest.raises(DataError, match="return_type: must be logits, loss, both or None"):
        model(random_tokens(), return_type="losses")


def test_borders_that_are_not_there_are_refused():
    model, tokens = build("transformer", n_layers=2), random_tokens()
    for layer in (-1, 3):
        with pytest.raises(HookError, match=f"stop_at_layer: {layer} is outside of 0"):
            model(tokens, stop_at_layer=layer)
    with pytest.raises(HookError, match="stop_at_layer: 0 is outside of 1, where the pass starts"):
        model(tokens, start_at=model(tokens, stop_at_layer=1), stop_at_layer=0)


@pytest.mark.parametrize("name", EVERY)
def test_bf16_autocast(name):
    """fp32 master weights, bf16 products: same loss to bf16's precision, fp32 gradients."""
    model = build(name, dtype=torch.float32)
    # At 0.5 the gradient of a connection's scale is a difference of large terms, which bf16 loses
    # in any formulation.
    tame = 0.4 if model.cfg.stream.kind == "hyper" else 0.5
    for parameter in model.parameters():
        parameter.data.mul_(tame)
    tokens = random_tokens(4, 16)
    exact = model(tokens, return_type="loss")
    exact.backward()
    reference = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, loss = model(tokens, return_type="both")
    assert logits.dtype == torch.float32
    assert (loss - exact).abs() < 2e-2 * exact
    loss.backward()
    for parameter, value in model.named_parameters():
        if value.grad is None or parameter not in reference:
            continue
        assert value.grad.dtype == torch.float32
        assert torch.isfinite(value.grad).all(), parameter
        error = (value.grad - reference[parameter]).norm()
        assert error <= 0.15 * reference[parameter].norm() + 1e-3, parameter


def test_bf16_weights():
    model = build("satformer on rd-attnres", dtype=torch.bfloat16)
    logits = model(random_tokens())
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["transformer", "rd-attnres"])
def test_zero_width_mlps(name):
    model, tokens = build(name, d_mlp=(0, 24, 0)), random_tokens()
    assert "blocks.0.mlp.hook_pre" not in model.hook_dict
    with torch.no_grad():
        assert (model(tokens) - evaluate(model, tokens).logits).abs().max() < 1e-10
    model(tokens, return_type="loss").backward()
    assert torch.isfinite(model.embed.weight.grad).all()


def test_sizes_of_one():
    for name in EVERY:
        model = build(name, n_layers=1, n_heads=1, n_key_value_heads=1)
        with torch.no_grad():
            logits = model(random_tokens(1, 1))
        assert (logits - evaluate(model, random_tokens(1, 1)).logits).abs().max() < 1e-10
