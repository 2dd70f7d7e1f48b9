"""What a cache says reads and heads consist of adds up to them, on every stream."""

from __future__ import annotations

import pytest
import torch
from straight_line import random_model, random_tokens
from transformer_lens import ActivationCache

from satlens.errors import HookError
from satlens.models.presets import VARIANTS
from satlens.models.reads import reads_of


@torch.no_grad()
def cached(model, names=None, rows=2, **options):
    return model.run_with_cache(random_tokens(rows), names_filter=names, **options)[1]


def small(name, **fields):
    return random_model(name, dtype=torch.float32, **fields)


def close(found, expected):
    return (found - expected).abs().max() <= 1e-5 * expected.abs().max()


# -- reads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS)
def test_parts_add_up_to_the_read(name):
    model = small(name, n_layers=2)
    cache = cached(model)
    for read in reads_of(model.hook_dict, 2):
        role = None if read.role == "shared" else read.role
        where = {"layer": read.layer, "mlp_input": read.sublayer == "mlp", "role": role}
        parts, labels = cache.decompose_resid(**where, return_labels=True)
        assert (
            labels == ["embed", "0_attn_out", "0_mlp_out", "1_attn_out", "1_mlp_out"][: len(parts)]
        )
        assert len(parts) == read.n_components
        assert parts.shape[1:] == cache[read.hook].shape
        assert close(parts.sum(0), cache[read.hook])
        attention, mlp = (
            cache.decompose_resid(**where, mode="attn"),
            cache.decompose_resid(**where, mode="mlp"),
        )
        assert torch.equal(attention[0], mlp[0])
        assert len(attention) + len(mlp) == len(parts) + 1
    assert torch.equal(cache.decompose_resid(), cache.decompose_resid(2))
    assert torch.equal(cache.decompose_resid(-1), cache.decompose_resid(2))


@pytest.mark.parametrize("name", ["muddformer-prepost", "rd-attnres", "denseformer"])
def test_parts_do_not_depend_on_how_many_tokens_are_unfolded_at_once(name, monkeypatch):
    cache = cached(small(name, n_layers=2))
    whole = cache.decompose_resid(1, mlp_input=True)
    for most in (1, 40_000):  # one token; some, the last part shorter
        monkeypatch.setattr("satlens.models.decomposition.UNFOLDED_BYTES", most)
        assert torch.equal(cache.decompose_resid(1, mlp_input=True), whole)


@pytest.mark.parametrize("name", VARIANTS)
def test_normed_parts_add_up_to_what_the_norm_gives(name):
    model = small(name, n_layers=2)
    cache = cached(model)
    for read in reads_of(model.hook_dict, 2):
        role = None if read.role == "shared" else read.role
        where = {"layer": read.layer, "mlp_input": read.sublayer == "mlp", "role": role}
        if read.role == "r":
            with pytest.raises(HookError, match="not normalised"):
                cache.decompose_resid(**where, apply_ln=True)
            continue
        normed = cache.decompose_resid(**where, apply_ln=True).sum(0)
        norms = [n for n in cache if n.endswith("hook_normalized") and n.startswith(_at(read))]
        assert any(close(normed, cache[n]) for n in norms), read.hook


@pytest.mark.parametrize(("name", "roles"), [("rd-attnres", "qk, v"), ("muddformer", "q, k, v, r")])
def test_a_scale_that_is_of_one_role_only_is_refused(name, roles):
    cache = cached(small(name))
    parts = cache.decompose_resid(1, role="v")
    message = rf"roles {roles}, each .*decompose_resid\(1, apply_ln=True, role"
    for where in ((1,), (1, False)):
        with pytest.raises(HookError, match=message) as error:
            cache.apply_ln_to_stack(parts, *where)
    assert "\n" not in str(error.value)
    for where in ({"layer": 1, "mlp_input": True}, {"layer": None}):
        normed = cache.apply_ln_to_stack(cache.decompose_resid(**where), **where)
        assert torch.equal(normed, cache.decompose_resid(**where, apply_ln=True))


def _at(read):
    if read.sublayer == "out":
        return "ln_final"
    return f"blocks.{read.layer}.ln{1 if read.sublayer == 'attn' else 2}"


@pytest.mark.parametrize("name", ["transformer", "satformer", "resformer"])
@pytest.mark.parametrize("options", [{}, {"apply_ln": True}, {"pos_slice": (1, 4)}])
def test_a_residual_stream_is_decomposed_as_by_transformer_lens(name, options):
    cache = cached(small(name))
    for layer, mlp_input in (
        (0, False),
        (0, True),
        (1, False),
        (2, True),
        (3, False),
        (None, False),
    ):
        for mode in ("all", "attn", "mlp"):
            where = {"layer": layer, "mlp_input": mlp_input, "mode": mode, **options}
            expected = ActivationCache.decompose_resid(cache, **where, return_labels=True)
            found = cache.decompose_resid(**where, return_labels=True)
            assert torch.equal(found[0], expected[0])
            assert found[1] == expected[1]


@pytest.mark.parametrize("name", ["rd-attnres", "muddformer-prepost", "hyperconnections"])
def test_caches_without_batch_or_positions(name):
    model = small(name, n_layers=2)
    whole = cached(model, rows=1).decompose_resid(1, mlp_input=True)
    single = cached(model, rows=1, remove_batch_dim=True)
    torch.testing.assert_close(single.decompose_resid(1, mlp_input=True), whole[:, 0])
    last = cached(model, rows=1, pos_slice=-1)
    torch.testing.assert_close(last.decompose_resid(1, mlp_input=True), whole[:, :, -1])
    one = cached(model, rows=1, pos_slice=-1, remove_batch_dim=True)
    torch.testing.assert_close(one.decompose_resid(1, mlp_input=True), whole[:, 0, -1])


@pytest.mark.parametrize("name", ["attnres", "muddformer", "hyperconnections", "denseformer"])
def test_what_is_needed_is_enough_and_what_is_missing_is_named(name):
    model = small(name)
    read = next(r for r in reads_of(model.hook_dict, 3) if (r.layer, r.sublayer) == (1, "mlp"))
    needed = ["hook_embed", "blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"]
    needed += ["blocks.1.hook_attn_out"]
    weights = [
        n for n in model.stream.unfolded_from(model.cfg) if n.startswith(("blocks.0", "blocks.1"))
    ]
    cache = cached(model, needed + weights + [read.hook])
    assert close(cache.decompose_resid(1, mlp_input=True).sum(0), cache[read.hook])
    with pytest.raises(HookError) as error:
        cached(model, needed[:2] + weights).decompose_resid(1, mlp_input=True)
    assert "lacks blocks.0.hook_mlp_out, blocks.1.hook_attn_out;" in str(error.value)
    with pytest.raises(HookError) as error:
        cached(model, needed).decompose_resid(1, mlp_input=True)
    assert all(hook in str(error.value) for hook in weights if "blocks.0" in hook)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "where", "message"),
    [
        ("rd-attnres", {"layer": 1}, "role: give one of the roles of the layer 1 attn read: qk, v"),
        ("muddformer", {"layer": 1}, "q, k, v, r"),
        ("muddformer", {"layer": 1, "role": "qk"}, "'qk' is none of"),
        ("attnres", {"layer": 1, "role": "v"}, "'v' is none of .*: shared"),
        ("attnres", {"layer": 4}, "layer: 4 is outside of 0 to 3"),
        ("attnres", {"layer": 3, "mlp_input": True}, "layer: 3 is outside of 0 to 2"),
        ("attnres", {"layer": 1, "mode": "head"}, "mode: must be all, mlp or attn, got 'head'"),
        ("attnres", {"layer": 0, "mode": "mlp", "incl_embeds": False}, "no such parts"),
    ],
)
def test_reads_that_do_not_exist_are_refused(name, where, message):
    with pytest.raises(HookError, match=message):
        cached(small(name)).decompose_resid(**where)


# -- heads -----------------------------------------------------------------------------------------

RESIDUALS = [
    ("satformer", {}),
    ("satformer", {"gate": "tanh", "bias": True, "n_key_value_heads": 4}),
    ("resformer", {"n_key_value_heads": 1}),
    ("rd-attnres", {"value_residual": "satformer"}),
    ("muddformer", {"value_residual": "satformer"}),
    ("hyperconnections", {"value_residual": "resformer"}),
]


@pytest.mark.parametrize(("name", "fields"), RESIDUALS)
def test_the_parts_of_heads_add_up_to_the_attention(name, fields):
    model = small(name, **fields)
    for cache in (cached(model), cached(model, rows=1, remove_batch_dim=True)):
        for layer in model.cfg.value_layers:
            at = f"blocks.{layer}.attn."
            parts = cache.decompose_heads(layer)
            assert parts.v_first.shape == cache[at + "hook_z"].shape
            assert close(sum(parts), cache[at + "hook_z"])
            # The rest, from the layer's own values.
            own = cache[at + "hook_v_scale"][..., None] * cache[at + "hook_v"]
            own = own.repeat_interleave(4 // model.cfg.n_key_value_heads, -2)
            rest = torch.einsum("...hts,...she->...the", cache[at + "hook_pattern"], own)
            assert (parts.rest - rest).abs().max() <= 1e-5 * cache[at + "hook_z"].abs().max()
            projected = cache.decompose_heads(layer, project=True)
            assert projected.rest.shape == (*parts.rest.shape[:-1], model.cfg.d_model)
            total = (projected.v_first + projected.rest).sum(-2)
            assert close(total, cache[f"blocks.{layer}.hook_attn_out"])


@pytest.mark.parametrize("name", ["satformer", "resformer"])
def test_heads_of_a_pass_under_autocast_are_split(name):
    """Its activations are of several dtypes."""
    model = small(name)
    with torch.autocast("cpu", torch.bfloat16):
        cache = cached(model)
    assert cache["blocks.1.attn.hook_pattern"].dtype == torch.bfloat16
    parts = cache.decompose_heads(1, project=True)
    total, added = sum(parts).sum(-2), cache["blocks.1.hook_attn_out"]
    assert parts.rest.dtype == torch.float32
    assert (total - added).abs().max() <= 2e-2 * added.abs().max()


def test_a_closed_gate_has_no_part_from_v_first():
    model = small("satformer")

    def close_first_head(gate, hook):
        gate[..., 0] = 0

    with torch.no_grad(), model.hooks([("blocks.1.attn.hook_v_gate", close_first_head)]):
        cache = cached(model)
    parts = cache.decompose_heads(1)
    assert not parts.v_first[:, :, :2].any()  # the query heads of KV head 0
    assert parts.v_first[:, :, 2:].any()
    assert torch.equal(parts.rest[:, :, :2], cache["blocks.1.attn.hook_z"][:, :, :2])


def test_heads_that_cannot_be_split_are_refused():
    model = small("satformer", last_k=1)
    cache = cached(model)
    for layer in (0, 1, 9):
        with pytest.raises(HookError, match=f"layer {layer} adds no V_1 .*: 2"):
            cache.decompose_heads(layer)
    with pytest.raises(HookError, match="layers that do: none"):
        cached(small("transformer")).decompose_heads(1)
    with pytest.raises(HookError, match=r"lacks blocks\.2\.attn\.hook_pattern;"):
        cached(model, [n for n in cache if not n.endswith("pattern")]).decompose_heads(2)
    for pos_slice in (-1, slice(2, 5)):
        with pytest.raises(HookError, match="without pos_slice"):
            cached(model, pos_slice=pos_slice).decompose_heads(2)
