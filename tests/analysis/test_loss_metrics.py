"""KL, dNLL and top-1 change of edited logits against float64 log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr

from satlens.analysis.sweeps.loss_metrics import CleanLosses

IGNORED = -100


def tokens(n=300, width=700, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, width, generator=generator)
    targets = torch.randint(0, width, (n,), generator=generator)
    targets[::7] = IGNORED
    noise = torch.randn(n, width, generator=generator)
    return logits, targets, noise


def in_double(clean, edited, targets):
    """dNLL, KL and top-1 change by their definitions, in float64."""
    clean, edited = (log_softmax(x.double().numpy(), axis=-1) for x in (clean, edited))
    scored = targets.numpy() != IGNORED
    at = np.where(scored, targets.numpy(), 0)[:, None]
    dnll = np.take_along_axis(clean - edited, at, -1)[:, 0]
    kl = rel_entr(np.exp(clean), np.exp(edited)).sum(-1)
    top1 = clean.argmax(-1) != edited.argmax(-1)
    return (np.where(scored, value, 0.0) for value in (dnll, kl, top1))


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 30.0])
def test_changes_of_any_size(size):
    """Small changes keep relative precision, large ones do not overflow."""
    logits, targets, noise = tokens()
    edited = logits + size * noise
    found = CleanLosses(logits, targets).change(edited)
    dnll, kl, top1 = in_double(logits, edited, targets)
    # What fp32 makes of l + d, not this arithmetic, limits changes that are tiny beside l.
    rounding = 3e-7 * 10
    np.testing.assert_allclose(found.dnll, dnll, rtol=1e-4, atol=rounding)
    np.testing.assert_allclose(found.kl, kl, rtol=2e-3, atol=1e-10)
    np.testing.assert_array_equal(found.top1, top1)


def test_losses_are_the_models():
    logits, targets, _ = tokens()
    expected = torch.nn.functional.cross_entropy(
        logits.double(), targets, ignore_index=IGNORED, reduction="none"
    )
    torch.testing.assert_close(
        CleanLosses(logits, targets).nll.double(), expected, atol=2e-6, rtol=0
    )


def test_no_change_is_exactly_nothing():
    logits, targets, _ = tokens()
    found = CleanLosses(logits, targets).change(logits.clone())
    assert not any(values.any() for values in found)


def test_a_shift_of_all_logits_changes_nothing():
    logits, targets, _ = tokens()
    found = CleanLosses(logits.double(), targets).change(logits.double() + 5.0)
    assert found.kl.abs().max() < 1e-12
    assert found.dnll.abs().max() < 1e-12
    assert not found.top1.any()


def test_kl_is_never_negative():
    logits, targets, noise = tokens()
    assert (CleanLosses(logits, targets).change(logits + 1e-6 * noise).kl >= 0).all()


def test_a_token_that_was_impossible_in_fp32():
    """p of the new favourite is below the smallest fp32: the change is still finite and right."""
    logits = torch.zeros(2, 5)
    logits[:, 0] = 150.0
    edited = logits.clone()
    edited[0, 3] = 300.0
    targets = torch.tensor([3, 0])
    found = CleanLosses(logits, targets).change(edited)
    dnll, kl, top1 = in_double(logits, edited, targets)
    np.testing.assert_allclose(found.dnll, dnll, rtol=1e-6)
    np.testing.assert_allclose(found.kl, kl, rtol=1e-6)
    assert found.top1.tolist() == list(top1) == [1, 0]


def test_what_is_not_finite_is_not_a_number():
    logits, targets, _ = tokens(8)
    edited = logits.clone()
    edited[1] = float("nan")
    found = CleanLosses(logits, targets).change(edited)
    assert [torch.isnan(values).nonzero().tolist() for values in found] == [[[1]]] * 3
