"""The loss against torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from satlens.models import loss
from satlens.models.loss import IGNORED, negative_log_likelihood

N, V = 7, 11


def example(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(N, V, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[[1, 5]] = IGNORED
    return logits.to(dtype).requires_grad_(), targets


@pytest.fixture(autouse=True, params=[V, 3 * V, 2**18])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, a last chunk that is short, one chunk."""
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", request.param)


@pytest.mark.parametrize("per_token", [False, True])
def test_value_and_gradient_are_those_of_cross_entropy(per_token: bool) -> None:
    logits, targets = example()
    weight = torch.linspace(0.5, 2, N).double() if per_token else torch.tensor(3.0).double()
    expected = F.cross_entropy(
        logits, targets, ignore_index=IGNORED, reduction="none" if per_token else "mean"
    )
    found = negative_log_likelihood(logits, targets, per_token)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((weight * x).sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)
    assert gradcheck(lambda x: negative_log_likelihood(x, targets, per_token), (logits,))


def test_a_huge_gap_between_logits_stays_finite() -> None:
    logits = torch.tensor([[300.0, -300.0], [-1e4, 1e4]], requires_grad=True)
    found = negative_log_likelihood(logits, torch.tensor([1, 1]), True)
    assert found.tolist() == [600.0, 0.0]


def test_half_precision_logits_are_scored_in_fp32() -> None:
    logits, targets = example(torch.bfloat16)
    found = negative_log_likelihood(logits, targets, False)
    expected = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    grads = [torch.autograd.grad(x, logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=2**-7, atol=1e-6)
