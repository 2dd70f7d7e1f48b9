"""A key-value cache changes nothing: passes over parts of a sequence equal one pass over all."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from straight_line import random_model, random_tokens

import satlens
from satlens import KVCache
from satlens.analysis.interventions.gates import GateIntervention, ZeroGate
from satlens.errors import DataError, HookError
from satlens.hooks import ReadOnly
from satlens.models.presets import VARIANTS

COMPOSED = {
    "satformer on rd-attnres": ("rd-attnres", "satformer"),
    "satformer on muddformer-prepost": ("muddformer-prepost", "satformer"),
    "satformer on hyperconnections": ("hyperconnections", "satformer"),
    "resformer on denseformer": ("denseformer", "resformer"),
    "resformer on delta-attnres": ("delta-attnres", "resformer"),
}
every_variant = pytest.mark.parametrize("name", [*VARIANTS, *COMPOSED])
CHUNKS = {"token by token": [1] * 12, "chunks": [4, 1, 5, 2], "one chunk": [12]}
GATE = "blocks.1.attn.hook_v_gate"


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield


def build(name, dtype=torch.float64, **fields):
    name, residual = COMPOSED.get(name, (name, None))
    fields = fields if residual is None else {**fields, "value_residual": residual}
    return random_model(name, dtype=dtype, **fields)


def decode(model, tokens, sizes, cache=None, masks=None, **options):
    """Logits of all tokens, read in parts of these sizes."""
    cache = KVCache() if cache is None else cache
    parts = tokens.split(sizes, 1)
    masks = [None] * len(parts) if masks is None else masks.split(sizes, 1)
    logits = [
        model(part, past=cache, attention_mask=mask, **options)
        for part, mask in zip(parts, masks, strict=True)
    ]
    assert len(cache) == tokens.shape[1]
    return torch.cat(logits, 1)


# -- equal to a full pass -------------------------------------------------------------------------


@every_variant
def test_cached_equals_full(name):
    model, tokens = build(name), random_tokens(2, 12)
    full = model(tokens)
    for how, sizes in CHUNKS.items():
        assert (decode(model, tokens, sizes) - full).abs().max() < 1e-10, how
    single = build(name, dtype=torch.float32)
    difference = decode(single, tokens, CHUNKS["token by token"]) - single(tokens)
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("implementation", ["auto", "eager", "fused"])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_every_kind_of_attention(implementation, window, n_kv):
    model = build("satformer", n_key_value_heads=n_kv, window_size=window, qk_norm=True)
    tokens = random_tokens(2, 12)
    full = model(tokens)
    with satlens.attention(implementation):
        for how, sizes in CHUNKS.items():
            assert (decode(model, tokens, sizes) - full).abs().max() < 1e-10, how


def test_half_precision_is_as_near_as_without_a_cache():
    """bf16 takes another attention kernel; a first part alone is the same to the bit."""
    model, tokens = build("satformer on rd-attnres", dtype=torch.float32), random_tokens(2, 12)
    exact = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        full = model(tokens)
        error = (full - exact).abs().mean()
        for sizes in CHUNKS.values():
            assert (decode(model, tokens, sizes) - exact).abs().mean() < 1.5 * error
        resformer = build("resformer", dtype=torch.float32)
        assert torch.equal(decode(resformer, tokens, [12]), resformer(tokens))


@pytest.mark.parametrize(
    ("name", "window"),
    [("satformer", None), *((name, 5) for name in [*VARIANTS, *COMPOSED])],
)
def test_left_padded_rows_equal_themselves_alone(name, window):
    model, lengths = build(name, window_size=window), (4, 9)
    rows = random_tokens(2, 12)
    tokens, mask = rows.clone(), torch.ones_like(rows)
    for row, length in enumerate(lengths):
        mask[row, : 9 - length] = 0
        tokens[row, 9 - length :] = rows[row, : length + 3]
    logits = decode(model, tokens, [9, 1, 2], masks=mask)
    for row, length in enumerate(lengths):
        alone = model(rows[row : row + 1, : length + 3])
        assert (logits[row, 9 - length :] - alone[0]).abs().max() < 1e-10
    # Padding that the first pass was told of is remembered.
    cache = KVCache()
    model(tokens[:, :9], past=cache, attention_mask=mask[:, :9])
    assert (model(tokens[:, 9:], past=cache) - logits[:, 9:]).abs().max() < 1e-10


def test_padding_is_checked_where_it_can_be_inside(monkeypatch):
    """Not at each decoded token; again where padding or a shorter cache is continued."""
    model, tokens = build("satformer"), random_tokens(2, 12)
    checked = []
    inside = satlens.models.cache._padded_inside
    monkeypatch.setattr(
        "satlens.models.cache._padded_inside", lambda ids: checked.append(1) or inside(ids)
    )
    mask, cache = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]]), KVCache()
    model(tokens[:, :4], past=cache, attention_mask=mask)
    for position in range(4, 7):
        model(tokens[:, position : position + 1], past=cache)
    assert len(checked) == 1
    documents = torch.tensor([[1, 1, -1, -1, 2, 2], [1, 1, 1, 1, 1, 1]])
    cache = KVCache()
    model(tokens[:, :6], past=cache, documents=documents)
    model(tokens[:, 6:7], past=cache)
    cache.truncate(4)
    with pytest.raises(DataError, match="pad on the left"):
        model(tokens[:, 4:5], past=cache)


@pytest.mark.parametrize("name", ["transformer", "satformer on rd-attnres"])
def test_documents_are_remembered(name):
    model, tokens = build(name), random_tokens(1, 12)
    documents = torch.tensor([[4, 4, 4, 9, 9, 9, 9, 9, 2, 2, 2, 2]])
    full, loss = model(tokens, "both", documents=documents, loss_per_token=True)
    cache = KVCache()
    first = model(tokens[:, :5], past=cache, documents=documents[:, :5])
    second = model(tokens[:, 5:8], past=cache)  # of the last document
    third, part = model(
        tokens[:, 8:], "both", past=cache, documents=documents[:, 8:], loss_per_token=True
    )
    assert (torch.cat((first, second, third), 1) - full).abs().max() < 1e-10
    assert (part - loss[:, 8:]).abs().max() < 1e-10
    assert cache.documents is not None
    assert torch.equal(cache.documents, documents)


def test_the_loss_is_of_the_new_tokens():
    model, tokens = build("satformer"), random_tokens(2, 12)
    targets = random_tokens(2, 12, seed=5)
    expected = model(tokens, "loss", targets=targets, loss_per_token=True)
    cache, found = KVCache(), []
    for part, aims in zip(tokens.split([5, 7], 1), targets.split([5, 7], 1), strict=True):
        options = {"targets": aims, "loss_per_token": True}
        found.append(model(part, "loss", past=cache, **options))
    assert (torch.cat(found, 1) - expected).abs().max() < 1e-10


# -- hooks and interventions ----------------------------------------------------------------------


@every_variant
def test_hooks_see_the_new_positions(name):
    model, tokens = build(name), random_tokens(2, 12)
    names = [site.hook for site in model.sites] + ["hook_embed", "blocks.2.attn.hook_z"]
    _, full = model.run_with_cache(tokens, names_filter=names)
    past, parts = KVCache(), []
    for part in tokens.split([4, 1, 5, 2], 1):
        parts.append(model.run_with_cache(part, past=past, names_filter=names)[1])
    for point in names:
        together = torch.cat([part[point] for part in parts], 1)
        assert (together - full[point]).abs().max() < 1e-10, point


def test_patterns_are_over_all_keys():
    model, tokens = build("satformer"), random_tokens(2, 12)
    point = "blocks.1.attn.hook_pattern"
    _, full = model.run_with_cache(tokens, names_filter=point)
    past = KVCache()
    model(tokens[:, :7], past=past)
    _, new = model.run_with_cache(tokens[:, 7:], past=past, names_filter=point)
    assert new[point].shape == (2, 4, 5, 12)
    assert (new[point] - full[point][:, :, 7:]).abs().max() < 1e-10


INTERVENTIONS = {
    "zero": ("satformer", lambda: satlens.ZeroGate(layer=1)),
    "scale": ("satformer on rd-attnres", lambda: satlens.ScaleGate(factor=2.0, head=1)),
    "mean": ("satformer", lambda: satlens.MeanGate(means={GATE: [0.3, 0.6]}, layer=1)),
    "uniform": ("rd-attnres", lambda: satlens.UniformRoute(role="v")),
    "tie_v": ("rd-attnres", satlens.TieValueRoute),
}


@pytest.mark.parametrize("kind", INTERVENTIONS)
def test_an_intervention_applies_throughout(kind):
    """As in one full pass under it, whether it stays installed or is installed anew each time."""
    name, make = INTERVENTIONS[kind]
    model, tokens = build(name), random_tokens(2, 12)
    with satlens.intervene(model, make()):
        full = model(tokens)
        stays = decode(model, tokens, CHUNKS["token by token"])
    cache, anew = KVCache(), []
    for part in tokens.split([4, 1, 5, 2], 1):
        with satlens.intervene(model, make()):
            anew.append(model(part, past=cache))
    assert (stays - full).abs().max() < 1e-10
    assert (torch.cat(anew, 1) - full).abs().max() < 1e-10
    assert (full - model(tokens)).abs().max() > 1e-3


def test_interventions_cannot_change_under_a_cache():
    model, tokens = build("satformer"), random_tokens(2, 6)
    sets = [(), (ZeroGate(),), (ZeroGate(layer=1),), (satlens.ScaleGate(factor=0.0),)]
    for begun in sets:
        for then in sets:
            cache = KVCache()
            with satlens.intervene(model, *begun):
                model(tokens[:, :4], past=cache)
            with satlens.intervene(model, *then):
                if begun == then:
                    model(tokens[:, 4:], past=cache)
                    continue
                with pytest.raises(
                    HookError, match=r"past: blocks\.\d\.attn\.hook_v_gate"
                ) as error:
                    model(tokens[:, 4:], past=cache)
                assert "\n" not in str(error.value)
                assert len(cache) == 4


def test_hooks_cannot_change_under_a_cache_unless_they_only_look():
    model, tokens = build("satformer"), random_tokens(2, 6)

    def edit(tensor, hook):
        return tensor + 1

    cache = KVCache()
    model.run_with_hooks(tokens[:, :3], past=cache, fwd_hooks=[("hook_embed", edit)])
    again = model.run_with_hooks(tokens[:, 3:], past=cache, fwd_hooks=[("hook_embed", edit)])
    full = model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", edit)])
    assert (again - full[:, 3:]).abs().max() < 1e-10
    cache.truncate(3)
    for hooks in ([], [("hook_embed", lambda tensor, hook: None)], [(GATE, edit)]):
        with pytest.raises(HookError, match="other hooks"):
            model.run_with_hooks(tokens[:, 3:], past=cache, fwd_hooks=hooks)
    seen = []
    look = ReadOnly(lambda tensor, hook: seen.append(tensor.shape) or tensor * 0)
    for hooks in ([], [(GATE, look)], []):
        with model.hooks([("hook_embed", edit), *hooks]):
            looked = model(tokens[:, 3:], past=cache)
            cache.truncate(3)
        assert torch.equal(looked, again)
    assert seen == [(2, 3, 2)]
    handle = model.blocks[1].mlp.register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(HookError, match=r"blocks\.1\.mlp"):
        model.run_with_hooks(tokens[:, 3:], past=cache, fwd_hooks=[("hook_embed", edit)])
    handle.remove()


def test_what_is_not_causal_is_refused():
    model, tokens = build("satformer"), random_tokens(2, 6)
    cache = KVCache()
    with satlens.intervene(model, satlens.ShuffleGate()):
        with pytest.raises(HookError, match="ShuffleGate: it reads later tokens"):
            model(tokens, past=cache)
        model(tokens)
    assert len(cache) == 0


@dataclass(frozen=True, kw_only=True)
class ZeroEvenPositions(GateIntervention):
    name = "even"

    def edit(self, weights, site, running):
        position = torch.arange(weights.shape[1]) + running.start
        assert running.tokens.shape == weights.shape[:2]
        return weights * (position % 2)[:, None]


def test_interventions_see_positions():
    model, tokens = build("satformer", gate="sigmoid"), random_tokens(2, 12)
    with satlens.intervene(model, ZeroEvenPositions()):
        full = model(tokens)
        assert (decode(model, tokens, [1, 4, 2, 5]) - full).abs().max() < 1e-10
    assert (full - model(tokens)).abs().max() > 1e-3


def test_a_pass_that_raises_leaves_the_cache_as_it_was():
    model, tokens = build("satformer on rd-attnres"), random_tokens(2, 12)
    full, cache = model(tokens), KVCache()

    def fail(tensor, hook):
        raise ValueError("on purpose")

    for part in ([], [0, 1, 2], [3]):
        failing = model.hooks([("blocks.1.attn.hook_z", ReadOnly(fail))])
        with pytest.raises(ValueError, match="on purpose"), failing:
            model(tokens[:, :7], past=cache)
        if part:
            new = model(tokens[:, part], past=cache)
            assert (new - full[:, part]).abs().max() < 1e-10
    assert len(cache) == 4


# -- refusals -------------------------------------------------------------------------------------


def begun(model, n=4, **options):
    cache = KVCache()
    model(random_tokens(2, n), past=cache, **options)
    return cache


REFUSED = {
    "another model": (lambda m: {"past": begun(build("satformer"))}, "another model"),
    "other rows": (
        lambda m: {"tokens": random_tokens(3, 2), "past": begun(m)},
        "cache holds 2 rows, tokens has 3",
    ),
    "too long": (
        lambda m: {"tokens": random_tokens(2, 30), "past": begun(m)},
        "30 positions after 4 in the cache exceed n_ctx=32",
    ),
    "another object": (lambda m: {"past": ()}, "past: expected a satlens.KVCache, got tuple"),
    "mask of all": (
        lambda m: {"past": begun(m), "attention_mask": torch.ones(2, 6)},
        r"attention_mask: expected the shape of tokens \[2, 2\], got \[2, 6\]",
    ),
    "documents later": (
        lambda m: {"past": begun(m), "documents": torch.ones(2, 2, dtype=torch.int64)},
        "documents: this cache was begun without",
    ),
    "right padding": (
        lambda m: {"past": begun(m, attention_mask=torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]))},
        "pad on the left",
    ),
    "some layers": (lambda m: {"past": begun(m), "stop_at_layer": 1}, "past: .*stop_at_layer"),
    "a snapshot": (
        lambda m: {"past": begun(m), "start_at": m(random_tokens(2, 2), stop_at_layer=1)},
        "past: .*start_at",
    ),
}


@pytest.mark.usefixtures("_as_outside_tests")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_one_line(case):
    model = build("satformer")
    make, message = REFUSED[case]
    arguments = {"tokens": random_tokens(2, 2), **make(model)}
    with pytest.raises((DataError, HookError), match=message) as error:
        model(**arguments)
    assert "\n" not in str(error.value)


def test_another_dtype_is_refused():
    model = build("satformer", dtype=torch.float32)
    cache = begun(model)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(DataError, match=r"float32.*bfloat16"),
    ):
        model(random_tokens(2, 2), past=cache)


def test_no_gradients():
    model, tokens = build("satformer"), random_tokens(2, 6)
    with torch.enable_grad():
        assert not model(tokens, past=KVCache()).requires_grad
        with pytest.raises(HookError, match="incl_bwd"):
            model.run_with_cache(tokens, "loss", past=KVCache(), incl_bwd=True)
        assert model(tokens).requires_grad


# -- the cache itself -----------------------------------------------------------------------------


def test_inference_mode_can_begin_or_continue():
    model, tokens = build("satformer"), random_tokens(2, 12)
    full = model(tokens)
    cache = KVCache()
    mask = torch.ones(2, 4, dtype=torch.bool)
    with torch.inference_mode():
        first = model(tokens[:, :4], past=cache, attention_mask=mask)
    second = model(tokens[:, 4:7], past=cache)
    with torch.inference_mode():
        third = model(tokens[:, 7:], past=cache)
    assert (torch.cat((first, second, third), 1) - full).abs().max() < 1e-10


def test_it_holds_rotated_keys_and_mixed_values():
    model, tokens = build("resformer"), random_tokens(2, 12)
    names = [
        f"blocks.{i}.attn.{point}" for i in range(3) for point in ("hook_rot_k", "hook_v_mixed")
    ]
    _, full = model.run_with_cache(tokens, names_filter=names)
    cache = KVCache()
    decode(model, tokens, [5, 7], cache)
    assert cache.batch_size == 2
    for layer in range(3):
        for held, point in ((cache.keys, "hook_rot_k"), (cache.values, "hook_v_mixed")):
            expected = full[f"blocks.{layer}.attn.{point}"]
            assert held(layer).shape == expected.shape
            assert (held(layer) - expected).abs().max() < 1e-10
    assert cache.nbytes == 2 * 3 * 2 * cache.room * 2 * 4 * 8  # k and v, layers, rows, heads, E


def test_room_doubles(monkeypatch):
    monkeypatch.setattr("satlens.models.cache.SMALLEST_ROOM", 4)
    model, tokens = build("transformer", n_ctx=60), random_tokens(2, 60)
    cache, rooms = KVCache(), []
    for i in range(60):
        model(tokens[:, i : i + 1], None, past=cache)
        rooms.append(cache.room)
    assert sorted(set(rooms)) == [4, 8, 16, 32, 60]
    reserved = KVCache(reserve=50)
    model(tokens[:, :3], None, past=reserved)
    assert reserved.room == 50
    with pytest.raises(DataError, match="exceed n_ctx"):
        model(tokens[:, :1], past=cache)


def test_truncated_reordered_and_cloned():
    model, tokens = build("satformer on muddformer-prepost"), random_tokens(3, 12)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    full = model(tokens, attention_mask=mask)
    cache = KVCache()
    decode(model, tokens[:, :9], [9], cache, masks=mask[:, :9])
    other = cache.clone()
    model(random_tokens(3, 2, seed=4), past=other)
    assert len(other) == 11 and len(cache) == 9
    cache.truncate(6)
    again = model(tokens[:, 6:9], past=cache)
    assert (again - full[:, 6:9]).abs().max() < 1e-10
    cache.reorder(torch.tensor([2, 0, 0, 1]))
    assert cache.batch_size == 4
    rows = tokens[[2, 0, 0, 1], 9:]
    assert (model(rows, past=cache) - full[[2, 0, 0, 1], 9:]).abs().max() < 1e-10
    for call, message in (
        (partial(cache.truncate, 13), "cache holds 12 positions, got 13"),
        (partial(cache.reorder, torch.tensor([4])), "cache holds 4 rows, got row 4"),
        (partial(cache.reorder, torch.tensor([-1])), "got row -1"),
        (partial(KVCache().reorder, torch.tensor([0])), "cache holds 0 rows"),
    ):
        with pytest.raises(DataError, match=message):
            call()
    cache.truncate(0)
    assert (len(cache), cache.batch_size, cache.nbytes) == (0, 0, 0)
    with satlens.intervene(model, ZeroGate()):
        assert model(tokens, past=cache).shape == full.shape


def test_a_cache_keeps_no_model_alive():
    model = build("satformer")
    cache = begun(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
    with pytest.raises(DataError, match="another model"):
        build("satformer")(random_tokens(2, 2), past=cache)
