"""Weights as rows, some positions at a time: the arithmetic that reducers of routes share.

Weights of all sites lie below each other, positions along the row: what is added up over the
weights of a site, and what is spread from a site over its weights, are then whole rows. Only so
many positions are taken at once that all that is made of them stays in a processor's cache.

Shapes: B rows of a batch, T positions, t positions at once, S sites (or reads, or pairs), n weights
of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

SOME_BYTES = 2**24
"""Roughly how much memory what is made of the positions taken at once may take."""


def some_positions(shape: Sequence[int], n_numbers: int) -> Iterator[slice]:
    """Positions to take at once, in order.

    Args:
        shape: (B, T) of the batch.
        n_numbers: float64 numbers that are made of a token.
    """
    n_rows, length = shape
    size = max(1, SOME_BYTES // (8 * max(1, n_numbers * n_rows)))
    for start in range(0, length, size):
        yield slice(start, min(start + size, length))


def summed(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Sums over all positions from those over some, by name."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, values in part.items():
            total[name] = total[name] + values if name in total else values
    return total


def as_rows(weights: Sequence[Tensor]) -> Tensor:
    """(B, t, n) each -> (n of all, B, t) in float64."""
    return torch.cat([each.movedim(-1, 0) for each in weights]).double()


def over_positions(rows: Tensor) -> Tensor:
    """Sums over positions, (n, B, t) -> (B, n)."""
    return rows.sum(-1).t()


def times_log(p: Tensor, q: Tensor) -> Tensor:
    """p log q for p, q >= 0; 0 where p or q is."""
    # Twice as fast as torch.xlogy and torch.special.entr, which branch.
    return q.clamp_min(torch.finfo(q.dtype).tiny).log_().mul_(p)


class Ownership:
    """Which site each row belongs to; the rows of a site are together.

    Args:
        owner_of: (n,) numbers of sites, ascending.
    """

    def __init__(self, owner_of: np.ndarray) -> None:
        self._widths = np.bincount(owner_of).tolist()
        self._owner_of = torch.from_numpy(owner_of)

    def total(self, rows: Tensor) -> Tensor:
        """Sums over the rows of each site, (n, ...) -> (S, ...); no site reads another's rows."""
        if not self._fast(rows):
            return torch.stack([part.sum(0) for part in rows.split(self._widths)])
        flat = rows.flatten(1)  # several axes would be added number by number
        out = flat.new_zeros(len(self._widths), flat.shape[1])
        return out.index_add_(0, self._owner_of, flat).view(-1, *rows.shape[1:])

    def _fast(self, rows: Tensor) -> bool:
        """Whether adding to an index has a fixed order, as it has on CPUs alone."""
        return rows.device.type == "cpu"

    def any_negative(self, rows: Tensor) -> Tensor:
        """Whether a row of each site is below 0, (n, ...) -> (S, ...); nothing of NaN."""
        return self.total(rows.clamp_max(0.0)) < 0

    def spread(self, of_sites: Tensor) -> Tensor:
        """What a site has, for each of its rows: (S, ...) -> (n, ...)."""
        return of_sites.index_select(0, self._owner_of.to(of_sites.device))

    def shares(self, sizes: Tensor, total: Tensor, counted: Tensor) -> Tensor:
        """(n, B, t) what part of its site's total each row is; 0 where a site is not counted.

        Args:
            sizes: (n, B, t), not negative where they are counted.
            total: (S, B, t) of them.
            counted: (S, B, t) bool.
        """
        inverse = torch.where(counted, total.reciprocal(), 0.0)
        return (sizes * self.spread(inverse)).nan_to_num_(0.0, 0.0, 0.0)

    def masked(self, rows: Tensor, counted: Tensor) -> Tensor:
        """The rows of sites that are counted, (S, B, t) bool; 0 elsewhere."""
        return (rows * self.spread(counted.double())).nan_to_num_(0.0, 0.0, 0.0)

    def effective(self, shares: Tensor, counted: Tensor) -> Tensor:
        """exp(entropy) of the shares of each site, (S, B, t); 0 where a site is not counted."""
        return self.total(times_log(shares, shares)).neg_().exp_() * counted
