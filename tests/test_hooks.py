"""Hook points: harmless, live, described, and honest about what they cannot do."""

from __future__ import annotations

import gc
from functools import partial

import jaxtyping
import pytest
import torch

import satlens
from satlens.errors import HookError
from satlens.hook_table import describe_hook
from satlens.hooks import position_axis
from satlens.models.layers import is_hooked
from satlens.models.presets import VARIANTS

# Every size differs, so that a wrong axis shows.
B, T, D, H, K, E, M, V = 2, 7, 16, 4, 2, 6, 20, 29
SIZES = {
    "n_layers": 2,
    "d_model": D,
    "n_heads": H,
    "n_key_value_heads": K,
    "d_head": E,
    "d_mlp": M,
    "d_vocab": V,
    "n_ctx": 16,
}
CASES = {
    **{name: {"name": name} for name in VARIANTS},
    "qk-norm": {"name": "transformer", "qk_norm": True, "qkv_bias": True, "window_size": 3},
    "softmax gate": {"name": "satformer", "gate": "softmax", "bias": True, "tied_embeddings": True},
    "route bias": {"name": "rd-attnres", "route_bias": True, "block_size": 2},
    "no output read": {"name": "attnres", "output_read": False, "block_size": 3},
    "dilated dense": {"name": "denseformer", "n_layers": 4, "dilation": 2, "period": 3},
    "released mudd": {
        "name": "muddformer",
        "shared_first_norm": True,
        "expand_last": True,
        "round64": True,
        "value_residual": "satformer",
    },
    "satformer on rd": {"name": "rd-attnres", "value_residual": "satformer", "block_size": 1},
    "satformer on tied": {"name": "rd-attnres-tied", "value_residual": "satformer"},
    "resformer on block": {"name": "attnres", "value_residual": "resformer", "block_size": 2},
}
every_variant = pytest.mark.parametrize("case", CASES)
CONSTANT = ("hook_v_gate", "hook_v_scale", "hook_route_v")  # under some modes and controls
APPROXIMATE = ("hook_attn_scores", "hook_pattern")  # hooking these chooses another kernel


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(case, dtype=torch.float32, **fields):
    """A variant with every parameter moved off its start."""
    model = satlens.build(dtype=dtype, **{**SIZES, **CASES.get(case, {"name": case}), **fields})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.add_(noise, alpha=0.1)
    return model


@pytest.fixture
def tokens():
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))


def noise_like(tensor):
    generator = torch.Generator().manual_seed(2)
    return torch.rand(tensor.shape, generator=generator).to(tensor.dtype) + 0.1


def look(tensor, hook):
    return None


def keep(seen, tensor, hook):
    seen[hook.name] = tensor


def returned(tensor, hook):
    return tensor + noise_like(tensor)


def in_place(tensor, hook):
    tensor.add_(noise_like(tensor))


# -- hooked = plain --------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("precision", ["fp32", "bf16 autocast", "fp64"])
def test_looking_changes_no_bit(case, precision, tokens):
    model = build(case, dtype=torch.float64 if precision == "fp64" else torch.float32)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16 autocast")
    with torch.no_grad(), autocast:
        plain = model(tokens)
        # Every point in fp32; one layer's, which stands for all, in the other precisions.
        every = precision == "fp32"
        for name in [n for n in model.hook_dict if every or n.startswith("blocks.1.")]:
            hooked = model.run_with_hooks(tokens, fwd_hooks=[(name, look)])
            if name.endswith(APPROXIMATE) and precision != "bf16 autocast":
                assert (hooked - plain).abs().max() <= 1e-6 * plain.abs().max(), name
            else:
                assert torch.equal(hooked, plain), name
        exact = [n for n in model.hook_dict if not n.endswith(APPROXIMATE)]
        assert torch.equal(model.run_with_hooks(tokens, fwd_hooks=[(exact, look)]), plain)
        with satlens.attention("eager"):
            eager = model(tokens)
            assert torch.equal(model.run_with_cache(tokens)[0], eager)


# -- liveness -------------------------------------------------------------------------------------


@every_variant
def test_every_hook_is_live(case, tokens):
    """Edits by return value and in place change the logits, and by the same bits."""
    model = build(case)
    with torch.no_grad():
        plain = model(tokens)
        for name in model.hook_dict:
            one = model.run_with_hooks(tokens, fwd_hooks=[(name, returned)])
            other = model.run_with_hooks(tokens, fwd_hooks=[(name, in_place)])
            assert (one - plain).abs().max() > 1e-5, name
            assert torch.equal(one, other), name
        assert torch.equal(model(tokens), plain)


@every_variant
def test_every_hook_is_live_with_gradients(case, tokens):
    """With gradients an in-place edit works as by return value, or torch refuses it."""
    model, refused = build(case), {}
    for name in model.hook_dict:
        one = model.run_with_hooks(tokens, fwd_hooks=[(name, returned)])
        try:
            other = model.run_with_hooks(tokens, fwd_hooks=[(name, in_place)])
        except RuntimeError as error:
            refused[name] = str(error)
            continue
        assert torch.equal(one, other), name
    assert all("inplace" in reason for reason in refused.values()), refused


@every_variant
def test_gradients_flow_through_every_hook(case, tokens):
    """Every point that depends on a weight receives a gradient, and looking changes no loss."""
    model = build(case, dtype=torch.float64)
    plain = model(tokens, return_type="loss")
    with satlens.attention("eager"):
        for name in model.hook_dict:
            seen = {}
            with model.hooks(fwd_hooks=[(name, partial(keep, seen))]):
                loss = model(tokens, return_type="loss")
            assert (loss - plain).abs() < 1e-12, name
            if not seen[name].requires_grad:
                assert name.endswith(CONSTANT), name
                continue
            (gradient,) = torch.autograd.grad(loss, seen[name], allow_unused=True)
            assert gradient is not None, name


@pytest.mark.parametrize(
    "case", ["rd-attnres", "rd-attnres-tied", "rd-attnres-average", "rd-attnres-frozen-v"]
)
@pytest.mark.parametrize("edit", [returned, in_place])
@pytest.mark.parametrize("layer", [0, 1])
def test_roles_are_edited_apart(case, edit, layer, tokens):
    """An edit of one role's route, read or norm leaves the other role's projections alone."""
    model = build(case, value_residual="satformer")
    at = f"blocks.{layer}."
    watched = [at + "attn.hook_q", at + "attn.hook_k", at + "attn.hook_v"]
    gate = at + "attn.hook_v_gate_pre"
    watched += [gate] if gate in model.hook_dict else []
    points = {
        "qk": ["hook_route_qk", "hook_attn_read_qk", "ln1.hook_scale", "ln1.hook_normalized"],
        "v": ["hook_route_v", "hook_attn_read_v", "ln1_v.hook_scale", "ln1_v.hook_normalized"],
    }
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=watched)
        for role, names in points.items():
            for name in names:
                with model.hooks(fwd_hooks=[(at + name, edit)]):
                    _, after = model.run_with_cache(tokens, names_filter=watched)
                for point in watched:
                    of_qk = point.endswith(("hook_q", "hook_k"))
                    changed = not torch.allclose(before[point], after[point], atol=1e-5)
                    assert changed == (of_qk == (role == "qk")), (name, point)


@pytest.mark.parametrize("case", ["transformer", "attnres", "satformer"])
def test_reads_are_edited_apart_from_the_stream(case, tokens):
    """In-place edits of what a sublayer reads do not reach what later sublayers read."""
    model = build(case)
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter="hook_embed")
        with model.hooks(fwd_hooks=[("blocks.0.hook_attn_read", in_place)]):
            _, after = model.run_with_cache(tokens, names_filter="hook_embed")
        assert torch.equal(before["hook_embed"], after["hook_embed"])


def test_v_first_of_one_layer_is_its_own(tokens):
    model = build("satformer", n_layers=3)
    names = ["blocks.1.attn.hook_v_first", "blocks.2.attn.hook_v_first"]
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=names[1])
        with model.hooks(fwd_hooks=[(names[0], in_place)]):
            _, after = model.run_with_cache(tokens, names_filter=names[1])
        assert torch.equal(before[names[1]], after[names[1]])
        with model.hooks(fwd_hooks=[("hook_v_first", in_place)]):
            _, joint = model.run_with_cache(tokens, names_filter=names)
        assert torch.equal(joint[names[0]], joint[names[1]])
        assert not torch.equal(joint[names[1]], before[names[1]])


def test_one_head_is_one_head(tokens):
    """Zeroing one gate leaves the other heads' values alone."""
    model = build("satformer", gate="sigmoid")

    def zero_head(tensor, hook):
        tensor[:, :, 1] = 0

    own, mixed = "blocks.1.attn.hook_v", "blocks.1.attn.hook_v_mixed"
    with torch.no_grad():
        _, before = model.run_with_cache(tokens, names_filter=[mixed])
        with model.hooks(fwd_hooks=[("blocks.1.attn.hook_v_gate", zero_head)]):
            _, after = model.run_with_cache(tokens, names_filter=[own, mixed])
    assert torch.equal(after[mixed][:, :, 0], before[mixed][:, :, 0])
    assert torch.equal(after[mixed][:, :, 1], after[own][:, :, 1])
    assert not torch.equal(after[mixed][:, :, 1], before[mixed][:, :, 1])


# -- the table ------------------------------------------------------------------------------------


@every_variant
def test_every_hook_has_a_row_and_its_shape(case, tokens):
    model = build(case)
    letters = {"B": B, "T": T, "D": D, "H": H, "K": K, "E": E, "M": M, "V": V, "1": 1}
    sources = {site.hook: len(site.sources) for site in model.sites}
    for site in model.sites:  # the norms around MUDD's mixtures
        block = site.hook.partition("hook_route")[0]
        sources[f"{block}{'depth' if block else 'out'}_read.hook_pre_scale"] = len(site.sources)
    streams = getattr(model.cfg.stream, "n_streams", 0)
    letters["n+1"] = streams + 1
    _, cache = model.run_with_cache(tokens)
    assert cache.keys() == model.hook_dict.keys()
    table = model.hook_table()
    for name, tensor in cache.items():
        shape, equation = describe_hook(name)
        ways = 1 if name.startswith("out_read") else 4
        lookup = {**letters, "n": sources.get(name, streams), "C": ways}
        sizes = [lookup[letter] for letter in shape.split()]
        assert [*tensor.shape] == sizes, name
        assert equation
        assert f"{name} " in table
    with pytest.raises(HookError, match="no row"):
        describe_hook("blocks.0.hook_surprise")


@every_variant
def test_sites_name_hooks_that_exist(case):
    model = build(case)
    assert {site.hook for site in model.sites} <= set(model.hook_dict)
    assert len({site.name for site in model.sites}) == len(model.sites)


# -- selectors ------------------------------------------------------------------------------------


def test_selector_forms_agree(tokens):
    model = build("satformer")
    name = "blocks.1.attn.hook_v_gate"
    forms = [name, [name], (name,), lambda n: n == name]
    caches = [model.run_with_cache(tokens, names_filter=form)[1] for form in forms]
    for cache in caches:
        assert list(cache.keys()) == [name]
        assert torch.equal(cache[name], caches[0][name])
    assert model.hook_names(None) == list(model.hook_dict)
    counts = []
    for form in forms:
        model.run_with_hooks(tokens, fwd_hooks=[(form, lambda t, hook: counts.append(hook.name))])
    assert counts == [name] * len(forms)


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("blocks.1.attn.hook_v_gat", "blocks.1.attn.hook_v_gate"),
        (["hook_embed", "blocks.9.hook_attn_out"], "blocks.9.hook_attn_out"),
        (lambda name: False, "matches no hook point"),
        ([], "empty"),
    ],
)
def test_a_selector_without_a_match_is_an_error(selector, words, tokens):
    model = build("satformer")
    with pytest.raises(HookError, match=words):
        model.run_with_cache(tokens, names_filter=selector)
    with pytest.raises(HookError, match=words):
        model.run_with_hooks(tokens, fwd_hooks=[(selector, look)])
    with pytest.raises(HookError, match=words), model.hooks(fwd_hooks=[(selector, look)]):
        pass
    assert not any(is_hooked(point) for point in model.hook_dict.values())


def test_unknown_options_are_rejected(tokens):
    model = build("transformer")
    for call in (model, model.run_with_cache, model.run_with_hooks):
        with pytest.raises(TypeError):
            call(tokens, prepend_bos=True)
    with pytest.raises(TypeError):
        model.run_with_cache(tokens, name_filter="hook_embed")
    assert not any(is_hooked(point) for point in model.hook_dict.values())


@pytest.mark.parametrize("part", ["pre", "mid", "post"])
@pytest.mark.parametrize("case", ["attnres", "rd-attnres"])
def test_no_single_residual(case, part, tokens):
    model = build(case)
    with pytest.raises(HookError) as error:
        model.run_with_cache(tokens, names_filter=f"blocks.1.hook_resid_{part}")
    reads = "hook_attn_read" if case == "attnres" else "hook_attn_read_qk"
    assert f"blocks.1.{reads}" in str(error.value)
    assert "blocks.1.hook_mlp_read" in str(error.value)


# -- what hooks leave behind ----------------------------------------------------------------------


@every_variant
def test_a_raising_hook_leaves_nothing(case, tokens):
    model = build(case)

    def fail(tensor, hook):
        raise ValueError("on purpose")

    with torch.no_grad():
        before = model(tokens)
        for name in list(model.hook_dict)[::7]:
            with pytest.raises(ValueError, match="on purpose"):
                model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", returned), (name, fail)])
            with pytest.raises(ValueError, match="on purpose"), model.hooks([(name, fail)]):
                model.run_with_cache(tokens)
        assert not any(is_hooked(point) for point in model.hook_dict.values())
        assert torch.equal(model(tokens), before)


def test_the_users_own_hooks_survive(tokens):
    model = build("satformer")
    name, calls = "blocks.1.attn.hook_v_gate", []

    def count(kind):
        return lambda *args, **kwargs: calls.append(kind)

    model.hook_dict[name].register_forward_hook(count("torch"))
    model.add_hook(name, count("permanent"), is_permanent=True)
    model.add_hook(name, count("plain"))
    model(tokens)
    everything = sorted(calls)
    assert everything == ["permanent", "plain", "torch"]
    with model.hooks(fwd_hooks=[(name, count("outer"))]):
        model.run_with_cache(tokens, names_filter=name)
        model.run_with_hooks(tokens, fwd_hooks=[(name, look)])
        with pytest.raises(HookError):
            model.run_with_cache(tokens, names_filter="nowhere")
        calls.clear()
        model(tokens)
        assert sorted(calls) == sorted([*everything, "outer"])
    calls.clear()
    model(tokens)
    assert sorted(calls) == everything


def test_repeated_captures_leave_no_tensors(tokens):
    model = build("satformer on rd")

    def live():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    model.run_with_cache(tokens)
    before = live()
    for _ in range(20):
        model.run_with_cache(tokens)
    assert live() == before


# -- caches ---------------------------------------------------------------------------------------


@every_variant
def test_cached_tensors_own_their_memory(case, tokens):
    model = build(case)
    for pos_slice in (None, 2, slice(1, 3)):
        _, cache = model.run_with_cache(tokens, pos_slice=pos_slice)
        storages = [t.untyped_storage() for t in cache.values()]
        assert len({s.data_ptr() for s in storages}) == len(storages)
        assert all(s.nbytes() == t.nbytes for s, t in zip(storages, cache.values(), strict=True))
        assert not any(t.requires_grad for t in cache.values())
        assert cache.nbytes == sum(s.nbytes() for s in storages)


@every_variant
def test_positions(case, tokens):
    model = build(case)
    _, full = model.run_with_cache(tokens)
    for pos in (0, -1, slice(2, 5), slice(None, None, 2), (1, 4)):
        _, cut = model.run_with_cache(tokens, pos_slice=pos)
        assert cut.keys() == full.keys()
        for name, tensor in full.items():
            moved = tensor.movedim(position_axis(name), 0)
            kept = moved[list(pos) if isinstance(pos, tuple) else pos]
            if not isinstance(pos, int):
                kept = kept.movedim(0, position_axis(name))
            assert torch.equal(cut[name], kept), name


def test_remove_batch_dim(tokens):
    model = build("rd-attnres")
    _, full = model.run_with_cache(tokens[:1])
    _, one = model.run_with_cache(tokens[:1], remove_batch_dim=True)
    for name, tensor in full.items():
        assert torch.equal(one[name], tensor[0])
    with pytest.raises(HookError, match="2 rows"):
        model.run_with_cache(tokens, remove_batch_dim=True)


def test_cache_dtype_and_device(tokens):
    model = build("transformer")
    _, cache = model.run_with_cache(tokens, names_filter="hook_embed", device="cpu")
    assert cache["hook_embed"].device.type == "cpu"


def test_backward_captures(tokens):
    model = build("satformer")
    names = ["hook_embed", "blocks.1.attn.hook_v_gate"]
    loss, cache = model.run_with_cache(
        tokens, return_type="loss", names_filter=names, incl_bwd=True
    )
    seen = {}
    with model.hooks(fwd_hooks=[(names, partial(keep, seen))]):
        again = model(tokens, return_type="loss")
    gradients = torch.autograd.grad(again, [seen[n] for n in names])
    for name, gradient in zip(names, gradients, strict=True):
        assert (cache[f"{name}_grad"] - gradient).abs().max() < 1e-6
    assert torch.equal(loss, again)
    with pytest.raises(HookError, match="bwd_hooks"):
        model.run_with_hooks(tokens, bwd_hooks=[("hook_embed", look)])
    with pytest.raises(HookError, match="hook_embed"):
        model.run_with_cache(tokens, names_filter="hook_embd", incl_bwd=True)


# -- decompositions -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["transformer", "satformer", "resformer"])
def test_residual_parts_sum_to_the_stream(case, tokens):
    model = build(case, n_layers=3)
    _, cache = model.run_with_cache(tokens)
    for layer in range(3):
        parts = cache.decompose_resid(layer)
        assert (parts.sum(0) - cache[f"blocks.{layer}.hook_resid_pre"]).abs().max() < 1e-4
    parts, labels = cache.decompose_resid(return_labels=True)
    assert len(labels) == len(parts) == 7
    assert (parts.sum(0) - cache["blocks.2.hook_resid_post"]).abs().max() < 1e-4
    stream = cache.accumulated_resid()
    assert torch.equal(stream[0], cache["hook_embed"])
    assert torch.equal(stream[-1], cache["blocks.2.hook_resid_post"])


@pytest.mark.parametrize("case", ["attnres", "attnres-full", "rd-attnres", "satformer on rd"])
@pytest.mark.parametrize(
    "name",
    [
        "accumulated_resid",
        "get_full_resid_decomposition",
        "stack_head_results",
        "stack_neuron_results",
    ],
)
def test_decompositions_without_a_residual_are_refused(case, name, tokens):
    model = build(case)
    _, cache = model.run_with_cache(tokens)
    with pytest.raises(HookError, match=name):
        getattr(cache, name)(1)


# -- compilation ----------------------------------------------------------------------------------


@pytest.fixture
def without_shape_checks():
    """Run-time shape checks cannot be compiled."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.slow
def test_hooks_on_a_compiled_model(tokens, without_shape_checks):
    model = build("satformer")
    with torch.no_grad():
        expected = model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", returned)])
        plain, cached = model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_v_gate")
        names = list(model.hook_dict)
        model.compile()
        assert (model(tokens) - plain).abs().max() < 1e-4
        assert list(model.hook_dict) == names
        hooked = model.run_with_hooks(tokens, fwd_hooks=[("hook_embed", returned)])
        assert torch.equal(hooked, expected)
        _, again = model.run_with_cache(tokens, names_filter="blocks.1.attn.hook_v_gate")
        assert torch.equal(again["blocks.1.attn.hook_v_gate"], cached["blocks.1.attn.hook_v_gate"])
        assert (model(tokens) - plain).abs().max() < 1e-4
