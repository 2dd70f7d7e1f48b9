"""Row arithmetic of route reducers against numpy loops and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import entr, xlogy

from satlens.analysis.engine import rows
from satlens.analysis.engine.rows import Ownership, as_rows, some_positions, summed, times_log

WIDTHS = (3, 1, 4)
OWNER_OF = np.repeat(np.arange(len(WIDTHS)), WIDTHS)


@pytest.fixture
def weights():
    """(n, B, t) with a zero, a NaN in the first site, a negative one in the last."""
    found = torch.rand(8, 2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found[0, 0, 0] = 0.0
    found[1, 1, 2] = float("nan")
    found[5, 0, 4] = -0.5
    return found


@pytest.mark.parametrize("device", ["cpu", "as elsewhere"])
def test_sums_of_sites(weights, device, monkeypatch):
    if device != "cpu":  # the way of other devices, on this one
        monkeypatch.setattr(Ownership, "_fast", lambda self, found: False)
    total = Ownership(OWNER_OF).total(weights).numpy()
    for site in range(3):
        expected = weights.numpy()[site == OWNER_OF].sum(0)
        np.testing.assert_allclose(total[site], expected, rtol=1e-15)
    assert np.isnan(total).sum() == 1
    negative = Ownership(OWNER_OF).any_negative(weights)
    assert negative.nonzero().tolist() == [[2, 0, 4]]


def test_shares_and_effective_numbers(weights):
    of_site = Ownership(OWNER_OF)
    total = of_site.total(weights)
    counted = total.isfinite() & ~of_site.any_negative(weights)
    shares = of_site.shares(weights, total, counted)
    effective = of_site.effective(shares, counted)
    for site in range(3):
        own = weights.numpy()[site == OWNER_OF]
        expected = np.where(counted[site], own / own.sum(0), 0.0)
        np.testing.assert_allclose(shares.numpy()[site == OWNER_OF], expected, rtol=1e-14)
        number = np.where(counted[site], np.exp(entr(expected).sum(0)), 0.0)
        np.testing.assert_allclose(effective.numpy()[site], number, rtol=1e-14)
    masked = of_site.masked(weights, counted).numpy()
    keep = counted.numpy()[OWNER_OF]
    assert np.array_equal(masked, np.where(keep, weights.numpy(), 0.0))


def test_products_with_logarithms():
    p = np.array([0.0, 0.0, 1e-310, 0.3, 1.0, 2.0])
    q = np.array([0.0, 0.5, 1.0, 1.7, 1.0, 0.25])
    found = times_log(torch.from_numpy(p), torch.from_numpy(q)).numpy()
    np.testing.assert_allclose(found, xlogy(p, q), rtol=1e-15)


def test_rows_are_whole_and_in_order():
    parts = [torch.rand(2, 5, 3), torch.rand(2, 5, 1, dtype=torch.float64)]
    found = as_rows(parts)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((4, 2, 5), torch.float64, True)
    assert torch.equal(found[1], parts[0][..., 1].double())
    assert torch.equal(found[3], parts[1][..., 0])
    assert as_rows(parts[1:]).is_contiguous()


@pytest.mark.parametrize("most", [1, 8 * 30 * 2 * 7, 2**24])
def test_every_position_is_taken_once(most, monkeypatch):
    monkeypatch.setattr(rows, "SOME_BYTES", most)
    taken = list(some_positions((2, 40), 30))
    assert [i for at in taken for i in range(at.start, at.stop)] == list(range(40))
    assert len(taken) == {1: 40, 8 * 30 * 2 * 7: 6, 2**24: 1}[most]
    x = torch.arange(80.0).view(2, 40)
    found = summed({"x": x[:, at].sum(1)} for at in taken)
    assert torch.equal(found["x"], x.sum(1))
    assert list(some_positions((2, 0), 30)) == []
