"""Signed routes by what they bring: |w_j| ||X_j||, a distribution where weights alone are none.

A weight says little without the size of the state that it multiplies, and signed weights have no
entropy. What each source brings, by its norm, is a distribution over the sources; the sign of the
weight is kept beside it.

Shapes: B rows, T positions, S sites, n sources of all sites side by side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from satlens.analysis.accumulators import Accumulator, GroupSums
from satlens.analysis.inputs import concatenated
from satlens.analysis.reducers import membership
from satlens.analysis.stream import Observed, Transform, kept_tokens
from satlens.models.decoder import Decoder
from satlens.models.sites import AccessSite


def rectified_points(model: Decoder, sites: Sequence[AccessSite]) -> list[str]:
    """Hook points that :func:`rectified` reads."""
    return list(dict.fromkeys([*(s.hook for s in sites), *model.stream.measured_from(model.cfg)]))


def rectified(
    model: Decoder, captured: Mapping[str, Tensor], sites: Sequence[AccessSite]
) -> dict[str, Tensor]:
    """Hook point of each site -> w_j ||X_j||, (B, T, n) float64, with the sign of the weight."""
    wanted = {site.hook for site in sites}
    return {
        hook: captured[hook].double() * norms
        for hook, norms in model.stream.source_norms(model, captured)
        if hook in wanted
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
        found = rectified(self.model, seen.captured, self.sites)
        brought = concatenated(found, self.routes)
        member = torch.from_numpy(membership(self.site_of)).to(brought)
        column = torch.from_numpy(self.site_of).to(brought.device)
        total = brought.abs() @ member
        kept = kept_tokens(seen.batch)[..., None]
        defined = (total > 0) & total.isfinite()
        counted = defined & kept
        signed = torch.where(counted[..., column], brought / total[..., column], 0.0)
        share = signed.abs()
        entropy = torch.special.entr(share) @ member
        self.sums.add(
            seen.groups,
            n=counted.sum(1),
            undefined=(kept & ~defined).sum(1),
            effective=(entropy.exp() * counted).sum(1),
            negative=((share * (signed < 0)) @ member).sum(1),
            share=share.sum(1),
            signed_share=signed.sum(1),
        )
