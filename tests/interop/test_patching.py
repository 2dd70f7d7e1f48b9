"""transformer_lens.patching on satlens models, against the same patches written out."""

from __future__ import annotations

import pytest
import torch
from transformer_lens import patching

from satlens.errors import HookError
from satlens.interop.transformer_lens import (
    get_act_patch_kv_head,
    get_act_patch_resid_pre_and_v_first,
    residual_and_v_first_hooks,
)

CASES = ("transformer", "satformer", "resformer")
SMALL = {"n_layers": 2, "d_model": 12, "n_heads": 4, "n_key_value_heads": 2, "d_head": 6}


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(patching, "tqdm", lambda rows: rows)


def metric(logits):
    return logits[:, -1, 5].mean()


@pytest.fixture
def runs(build):
    """(model, corrupted tokens, the clean run's cache) of a variant."""

    def make(name, **fields):
        model = build(name, **{**SMALL, **fields})
        corrupted, clean = torch.randint(
            0, 29, (2, 2, 4), generator=torch.Generator().manual_seed(3)
        )
        with torch.no_grad():
            return model, corrupted, model.run_with_cache(clean)[1]

    return make


def written_out(model, corrupted, cache, name, index):
    """The metric with one place of one activation taken from the clean run."""

    def patch(tensor, hook):
        tensor = tensor.clone()
        tensor[index] = cache[name][index]
        return tensor

    with torch.no_grad():
        return metric(model.run_with_hooks(corrupted, fwd_hooks=[(name, patch)]))


@pytest.mark.parametrize("case", CASES)
def test_blocks(case, runs):
    model, corrupted, cache = runs(case)
    with torch.no_grad():
        result = patching.get_act_patch_block_every(model, corrupted, cache, metric)
    assert result.shape == (3, 2, 4)
    for i, part in enumerate(("resid_pre", "attn_out", "mlp_out")):
        for layer, pos in ((0, 1), (1, 3)):
            name = f"blocks.{layer}.hook_{part}"
            expected = written_out(model, corrupted, cache, name, (slice(None), pos))
            assert torch.equal(result[i, layer, pos], expected), part


@pytest.mark.parametrize("case", [*CASES, "rd-attnres", "muddformer"])
def test_heads_with_fewer_for_keys_and_values(case, runs):
    model, corrupted, cache = runs(case)
    with torch.no_grad():
        result = patching.get_act_patch_attn_head_all_pos_every(model, corrupted, cache, metric)
        by_pos = patching.get_act_patch_attn_head_v_by_pos(model, corrupted, cache, metric)
    assert result.shape == (5, 2, 4)
    assert by_pos.shape == (2, 4, 2)
    for i, part in enumerate(("z", "q", "k", "v", "pattern")):
        heads = 2 if part in "kv" else 4
        for layer, head in ((0, heads - 1), (1, 0)):
            name = f"blocks.{layer}.attn.hook_{part}"
            index = (slice(None), head) if part == "pattern" else (slice(None), slice(None), head)
            expected = written_out(model, corrupted, cache, name, index)
            assert torch.equal(result[i, layer, head], expected), part
        assert result[i, :, heads:].eq(0).all()
    name, index = "blocks.0.attn.hook_v", (slice(None), 1, 1)
    assert torch.equal(by_pos[0, 1, 1], written_out(model, corrupted, cache, name, index))


@pytest.mark.parametrize("case", ["attnres", "rd-attnres", "denseformer", "muddformer"])
@pytest.mark.parametrize("part", ["resid_pre", "resid_mid"])
def test_no_residual_to_patch(case, part, runs):
    model, corrupted, cache = runs(case)
    sweep = getattr(patching, f"get_act_patch_{part}")
    with pytest.raises(HookError, match=rf"hook_{part}: .* no single residual.*hook_attn_read"):
        sweep(model, corrupted, cache, metric)
    with pytest.raises(HookError, match="no single residual"):
        get_act_patch_resid_pre_and_v_first(model, corrupted, cache, metric)


def test_what_a_cache_lacks(runs):
    model, corrupted, _ = runs("satformer")
    _, cache = model.run_with_cache(corrupted, names_filter="hook_embed")
    with pytest.raises(HookError, match=r"^blocks\.1\.attn\.hook_v: was not recorded"):
        cache["v", 1]
    with pytest.raises(KeyError, match="did you mean"):
        cache["blocks.1.attn.hook_w"]
    assert "blocks.1.attn.hook_v" not in cache


@pytest.mark.parametrize("case", CASES)
def test_a_residual_alone_leaves_v_first_flowing(case, runs):
    """The joint patch at every position is the clean run; the residual's own is not."""
    model, corrupted, cache = runs(case, n_layers=3)
    clean = cache["hook_logits"]
    with torch.no_grad():
        for layer in range(3):
            hooks = residual_and_v_first_hooks(model, cache, layer)
            joint = model.run_with_hooks(corrupted, fwd_hooks=hooks)
            assert (joint - clean).abs().max() < 1e-5
            alone = model.run_with_hooks(corrupted, fwd_hooks=hooks[:1])
            assert ((alone - clean).abs().max() < 1e-5) == (layer == 0 or case == "transformer")


def test_residual_and_v_first_by_position(runs):
    model, corrupted, cache = runs("satformer")
    result = get_act_patch_resid_pre_and_v_first(model, corrupted, cache, metric)
    alone = patching.get_act_patch_resid_pre(model, corrupted, cache, metric)
    assert result.shape == (2, 4)
    assert torch.equal(result[0], alone[0])
    assert (result[1] - alone[1]).abs().max() > 1e-4
    with torch.no_grad():  # the border's own patch: a snapshot of the corrupted run, changed
        border = model(corrupted, stop_at_layer=1)
        x, v_first = border.state.x.clone(), border.v_first.clone()
        x[:, 2] = cache["resid_pre", 1][:, 2]
        v_first[:, 2] = cache["hook_v_first"][:, 2]
        changed = border._replace(state=border.state._replace(x=x), v_first=v_first)
        assert torch.equal(result[1, 2], metric(model(corrupted, start_at=changed)))


@pytest.mark.parametrize("point", ["v_mixed", "v_first", "v_gate", "v"])
def test_points_of_the_value_path(point, runs):
    model, corrupted, cache = runs("satformer", n_layers=3)
    result = get_act_patch_kv_head(model, corrupted, cache, metric, point)
    assert result.shape == (3, 2)
    assert result[0].isnan().all() == (point in ("v_first", "v_gate"))
    for layer, head in ((1, 0), (2, 1)):
        name, index = f"blocks.{layer}.attn.hook_{point}", (slice(None), slice(None), head)
        assert torch.equal(result[layer, head], written_out(model, corrupted, cache, name, index))
    plain, corrupted, cache = runs("transformer")
    if point == "v_gate":
        with pytest.raises(HookError, match="no such hook point"):
            get_act_patch_kv_head(plain, corrupted, cache, metric, point)


def test_the_configuration_says_where_the_model_is(runs):
    model, *_ = runs("satformer")
    assert model.cfg.device == torch.device("cpu")
    assert model.to("meta").cfg.device == torch.device("meta")
    assert model.cfg.with_changes(n_layers=3).device is None
