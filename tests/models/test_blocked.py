"""Attention by blocks of queries and gated values: exact, with the gradients of plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import satlens
from satlens.models import blocked
from satlens.models.attention import additive_bias, allowed_keys
from satlens.models.values import add_gated

BATCH, KV, E = 2, 2, 4


def tensors(group: int, length: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(length)
    n = BATCH * KV
    shapes = [(n, group, length, E), (n, length, E), (n, length, E)]
    return tuple(
        torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes
    )


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_equals_attention_over_all_keys(
    group: int, length: int, documents: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 4)
    q, k, v = tensors(group, length)
    ids = torch.arange(length)[None].expand(BATCH, -1) // 3 if documents else None
    allowed = allowed_keys(length, window, ids, q.device)
    bias = additive_bias(allowed, length, KV, group, q)
    found = blocked.blocked_attention(q, k, v, bias, 0.5)
    scores = 0.5 * q @ k.transpose(1, 2)[:, None] + bias.unflatten(1, (group, length))
    expected = scores.softmax(-1) @ v[:, None]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    grads = [torch.autograd.grad((weight * z).sum(), (q, k, v)) for z in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "QUERY_BLOCK", 2)
    q, k, v = tensors(2, 5)
    bias = additive_bias(None, 5, KV, 2, q)
    assert gradcheck(lambda *x: blocked.blocked_attention(*x, bias, 0.5), (q, k, v))


def test_add_gated() -> None:
    v, v_first = torch.randn(2, 2, 5, KV, E, dtype=torch.float64).unbind()
    gate = torch.rand(2, 5, KV, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (v.detach(), gate, v_first.detach())]
    assert torch.equal(add_gated(*inputs), torch.addcmul(v, gate[..., None], v_first))
    assert gradcheck(add_gated, inputs)


@pytest.mark.parametrize("name", ["transformer", "satformer", "attnres", "rd-attnres"])
def test_hooks_change_no_bit_in_bf16(name: str) -> None:
    """Scores and pattern excepted: asking for them takes another path through the same numbers."""
    model = satlens.build(name, n_layers=3, d_model=32, d_vocab=50, n_ctx=150)
    tokens = torch.randint(0, 50, (2, 150), generator=torch.Generator().manual_seed(0))
    names = [n for n in model.hook_dict if not n.endswith(("hook_attn_scores", "hook_pattern"))]
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain = model(tokens)
        with model.hooks(fwd_hooks=[(names, lambda tensor, hook: None)]):
            hooked = model(tokens)
    assert torch.equal(plain, hooked)
