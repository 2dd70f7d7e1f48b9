"""FlexAttention against the other implementations, computed on the CPU by its dense fallback.

Its kernels need a GPU. What a GPU is given, masks, layouts and gradients, is the same here.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import satlens
from satlens.hooks import ReadOnly
from satlens.models import flex
from satlens.models.cache import KVCache

pytestmark = [
    pytest.mark.usefixtures("_as_outside_tests"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]

ROWS, LENGTH = 3, 256
SIZES = {"n_layers": 2, "d_model": 64, "n_heads": 4, "d_mlp": 48, "d_vocab": 41, "n_ctx": LENGTH}


@pytest.fixture
def taken(monkeypatch):
    """FlexAttention on the CPU, where torch gives it no gradients; counts its calls."""
    calls = []

    def counted(*args):
        calls.append(args)
        return original(*args)

    original = flex.flex
    monkeypatch.setattr("satlens.models.attention.flex", counted)
    monkeypatch.setattr(flex, "_has_kernels", lambda device: True)
    monkeypatch.setattr(flex, "DTYPES", (torch.float32,))
    monkeypatch.setattr(flex, "_compiled", lambda function: function)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    return calls


def build(name="transformer", **changes):
    model = satlens.build(name, **{**SIZES, **changes}).train()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():  # sharper patterns than those of the start
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def batch(length=LENGTH, documents=True, padding=False):
    """Tokens and documents: several a row, one row, or one for each token."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, SIZES["d_vocab"], (ROWS, length), generator=generator)
    if not documents:
        return {"tokens": tokens}
    starts = torch.rand(ROWS, length, generator=generator) < 0.02
    ids = starts.cumsum(-1)
    ids[1] = 0
    ids[2, 40:60] = torch.arange(100, 120)
    if padding:
        ids[0, :30], ids[1, -70:] = -1, -1
    return {"tokens": tokens, "documents": ids}


def loss_and_gradients(model, implementation, **given):
    model.zero_grad()
    with satlens.attention(implementation):
        loss = model(given["tokens"], "loss", documents=given.get("documents"))
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}


CASES = {
    "documents": ({}, {}),
    "padding": ({}, {"padding": True}),
    "window": ({"window_size": 100}, {"documents": False}),
    "window of one block": ({"window_size": 128}, {"documents": False}),
    "window and documents": ({"window_size": 37}, {"padding": True}),
    "grouped heads": ({"n_key_value_heads": 2}, {}),
    "one KV head": ({"n_key_value_heads": 1, "window_size": 200}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("other", ["fused", "eager"])
def test_flex_is_what_the_others_are(case, other, taken):
    changes, masks = CASES[case]
    model, given = build(**changes), batch(**masks)
    expected, gradients = loss_and_gradients(model, other, **given)
    assert not taken
    found, mine = loss_and_gradients(model, "flex", **given)
    assert len(taken) == SIZES["n_layers"]
    assert (found - expected).abs() <= 1e-5
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max()), name


def test_block_masks_hold_what_is_allowed(taken):
    """The mask as a function, and the blocks that are never computed, by brute force."""
    documents = batch(padding=True)["documents"]
    mask = flex.block_mask(LENGTH, 150, documents, torch.device("cpu"))
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    allowed = (j <= i) & (i - j < 150) & (documents[:, :, None] == documents[:, None, :])
    at = torch.arange(ROWS)[:, None, None], torch.tensor(0), i, j
    assert torch.equal(mask.mask_mod(*at), allowed)
    blocks = allowed.unflatten(-1, (2, 128)).unflatten(1, (2, 128)).any(-1).any(2)
    assert torch.equal(mask.to_dense()[:, 0] > 0, blocks)


def test_documents_save_blocks(taken):
    documents = torch.arange(LENGTH).div(128, rounding_mode="floor").expand(ROWS, -1)
    mask = flex.block_mask(LENGTH, None, documents, torch.device("cpu"))
    assert mask.to_dense()[:, 0].tolist() == [[[1, 0], [0, 1]]] * ROWS


def test_auto_takes_it_for_masked_passes_with_gradients(taken):
    model, given = build(), batch()
    loss_and_gradients(model, "auto", **given)
    assert len(taken) == SIZES["n_layers"]
    loss_and_gradients(model, "auto", tokens=given["tokens"])  # nothing is masked
    with torch.no_grad():
        model(**given)
    assert len(taken) == SIZES["n_layers"]
    wide = build(window_size=LENGTH)  # a window that hides nothing
    loss_and_gradients(wide, "flex", tokens=given["tokens"])
    assert len(taken) == SIZES["n_layers"]


FALLS_BACK = {
    "length of part of a block": ({}, {"length": 200}),
    "narrow heads": ({"d_model": 32}, {}),
    "head width no power of two": ({"d_model": 96}, {}),
}


@pytest.mark.parametrize("case", FALLS_BACK)
def test_what_the_kernel_may_not_support_is_fused(case, taken):
    changes, shape = FALLS_BACK[case]
    model, given = build(**changes), batch(**shape)
    expected, gradients = loss_and_gradients(model, "fused", **given)
    found, mine = loss_and_gradients(model, "flex", **given)
    assert not taken
    assert torch.equal(found, expected)
    assert all(torch.equal(mine[name], gradient) for name, gradient in gradients.items())


def test_hooked_scores_are_shown(taken):
    """Scores do not exist in the kernel; other hooks leave it in place."""
    model, given = build(), batch()
    seen = []
    look = ReadOnly(lambda pattern, hook: seen.append(pattern.shape))
    with torch.no_grad(), satlens.attention("flex"):
        expected = model(**given)
        before = len(taken)
        hooked = model.run_with_hooks(**given, fwd_hooks=[("blocks.1.attn.hook_pattern", look)])
        assert len(taken) == before and seen == [(ROWS, 4, LENGTH, LENGTH)]
        model.run_with_hooks(**given, fwd_hooks=[("blocks.1.attn.hook_z", look)])
    assert len(taken) == 2 * before
    assert (hooked - expected).abs().max() < 1e-4


def test_a_cache_is_fused(taken):
    model, given = build(window_size=100), batch(documents=False)
    tokens = given["tokens"]
    with torch.no_grad():
        expected = model(tokens)
        past = KVCache()
        with satlens.attention("flex"):
            parts = [model(tokens[:, :128], past=past), model(tokens[:, 128:], past=past)]
    assert not taken
    assert (torch.cat(parts, 1) - expected).abs().max() < 1e-4


def test_checkpointed_blocks_share_the_mask(taken):
    model, given = build("satformer"), batch()
    expected, gradients = loss_and_gradients(model, "fused", **given)
    model.gradient_checkpointing = True
    found, mine = loss_and_gradients(model, "flex", **given)
    assert len(taken) == 2 * SIZES["n_layers"]
    assert len({id(args[3]) for args in taken}) == 1
    assert (found - expected).abs() <= 1e-5
    for name, gradient in gradients.items():
        assert (mine[name] - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max()), name


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["kept", "run again"])
def test_a_compiled_model_takes_it_too(again, taken, monkeypatch):
    """One graph for all documents: the masks come from outside."""
    monkeypatch.setattr("satlens.models.attention.flex", flex.flex)  # a count would be a guard
    model, given = build(n_key_value_heads=2), batch()
    expected, gradients = loss_and_gradients(model, "fused", **given)
    reference = build(n_key_value_heads=2)
    model.gradient_checkpointing = again
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    graphs = torch._dynamo.utils.counters["stats"]
    graphs.clear()
    for _ in range(2):
        found, mine = loss_and_gradients(model, "flex", **given)
        assert (found - expected).abs() <= 1e-5
        for name, gradient in gradients.items():
            assert (mine[name] - gradient).abs().max() <= 1e-5 * max(1, gradient.abs().max()), name
        given = batch(padding=True)
        expected, gradients = loss_and_gradients(reference, "fused", **given)
    assert graphs["unique_graphs"] == 1


def test_without_a_gpu_flex_is_fused():
    model, given = build(), batch()
    with torch.no_grad(), satlens.attention("fused"):
        expected = model(**given)
    with torch.no_grad(), satlens.attention("flex"):
        assert torch.equal(model(**given), expected)


@pytest.mark.parametrize(
    ("length", "d_head", "dtype", "device", "supported"),
    [
        (1024, 64, torch.bfloat16, "cuda", True),
        (1024, 64, torch.float16, "cuda", True),
        (1024, 64, torch.float32, "cuda", False),
        (1024, 80, torch.bfloat16, "cuda", False),
        (1024, 256, torch.bfloat16, "cuda", False),
        (1000, 64, torch.bfloat16, "cuda", False),
        (1024, 64, torch.bfloat16, "cpu", False),
        (1024, 64, torch.bfloat16, "mps", False),
    ],
)
def test_what_is_certainly_supported(monkeypatch, length, d_head, dtype, device, supported):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flex, "find_spec", lambda name: name == "triton")
    flex._has_kernels.cache_clear()
    try:
        assert flex.supports(length, d_head, dtype, torch.device(device)) is supported
    finally:
        flex._has_kernels.cache_clear()


@pytest.mark.parametrize(("capability", "triton"), [((7, 5), True), ((8, 0), False)])
def test_old_gpus_and_no_triton_are_not(monkeypatch, capability, triton):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flex, "find_spec", lambda name: object() if triton else None)
    flex._has_kernels.cache_clear()
    try:
        assert not flex.supports(1024, 64, torch.bfloat16, torch.device("cuda"))
    finally:
        flex._has_kernels.cache_clear()
