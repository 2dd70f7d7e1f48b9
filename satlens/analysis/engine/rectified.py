"""Signed routes by what they bring: |w_j| ||X_j||, a distribution where weights alone are none.

A weight says little without the size of the state that it multiplies, and signed weights have no
entropy. What each source brings, by its norm, is a distribution over the sources; the sign of the
weight is kept beside it.

Shapes: B rows, T positions, t positions at once, S sites, n sources of all sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from satlens.analysis.engine.accumulators import Accumulator, GroupSums
from satlens.analysis.engine.rows import Ownership, as_rows, over_positions, some_positions, summed
from satlens.analysis.engine.stream import Observed, Transform, kept_tokens
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


def rectified_points(model: Decoder, sites: Sequence[AccessSite]) -> list[str]:
    """Hook points that :func:`rectified` reads."""
    return list(dict.fromkeys([*(s.hook for s in sites), *model.stream.measured_from(model.cfg)]))


def rectified(
    model: Decoder, seen: Observed, sites: Sequence[AccessSite], at: slice
) -> dict[str, Tensor]:
    """Hook point of each site -> w_j ||X_j|| of some positions, (B, t, n) float64."""
    norms = seen.once("source norms", lambda: dict(model.stream.source_norms(model, seen.captured)))
    return {
        site.hook: seen.captured[site.hook][:, at].double() * norms[site.hook][:, at]
        for site in sites
    }


class RectifiedRoutes:
    """Shares of |w_j| ||X_j|| in their sum over the sources of a site, with and without sign.

    A token is undefined at a site where one is not finite or all are zero.

    Args:
        model: the model that is run.
        sites: route sites.
        n_groups: document groups.
    """

    needs_nll = False

    def __init__(self, model: Decoder, sites: Sequence[AccessSite], n_groups: int) -> None:
        self.model, self.sites = model, list(sites)
        self.routes = [site.hook for site in sites]
        self.hooks: dict[str, Transform | None] = dict.fromkeys(rectified_points(model, sites))
        widths = [len(site.sources) for site in sites]
        self.site_of = np.repeat(np.arange(len(sites)), widths)
        self._ownership = Ownership(self.site_of)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
            ("n", "undefined", "effective", "negative"), (len(widths),)
        )
        shapes |= dict.fromkeys(("share", "signed_share"), (sum(widths),))
        self.sums = GroupSums(n_groups, shapes)
        self.accumulators: Mapping[str, Accumulator] = {"sums": self.sums}
        self.identity: dict[str, Any] = {
            "reducer": "rectified routes",
            "hooks": list(self.hooks),
            "routes": self.routes,
            "groups": n_groups,
        }

    def update(self, seen: Observed) -> None:
        """Add one batch."""
        kept = kept_tokens(seen.batch)
        parts = some_positions(kept.shape, 8 * len(self.site_of))
        self.sums.add(seen.groups, **summed(self._terms(seen, kept, at) for at in parts))

    def _terms(self, seen: Observed, kept: Tensor, at: slice) -> dict[str, Tensor]:
        """Sums over some positions, (B, S) or (B, n)."""
        found, of_site = rectified(self.model, seen, self.sites, at), self._ownership
        brought = as_rows([found[hook] for hook in self.routes])
        size, kept = brought.abs(), kept[:, at]
        total = of_site.total(size)
        defined = (total > 0) & total.isfinite()
        counted = defined & kept
        share = of_site.shares(size, total, counted)
        by_source = over_positions(share)
        signed = over_positions(share * brought.sign().nan_to_num_())
        return {
            "n": over_positions(counted),
            "undefined": over_positions(kept & ~defined),
            "effective": over_positions(of_site.effective(share, counted)),
            "negative": of_site.total((by_source - signed).t()).t() / 2,
            "share": by_source,
            "signed_share": signed,
        }
